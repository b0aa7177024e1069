"""Check the JSON of a chat (https://platform.openai.com/docs/api-reference/chat), decode its audio and check its URLs.

vLLM gets every clip as a WAV file in base64, and only URLs of the hosts that the server allows.
"""

import base64
import binascii
from fractions import Fraction
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from voxtral_serve.audio.decode import wav
from voxtral_serve.guard import json_body
from voxtral_serve.guard.clip import decoded
from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.limits import Rules, check_sequences

PARTS = {"type", "text", "audio_url", "input_audio"}
PROCESSING = ("media_io_kwargs", "mm_processor_kwargs")
CONTENT_TYPE = b"application/json"


class ChatRequest(NamedTuple):
    """The JSON for vLLM, and the seconds of audio in it."""

    content: bytes
    seconds: float


def read(body: bytes, rules: Rules) -> ChatRequest:
    """The chat in a request's body. Raises RefusedError. For a thread: it takes milliseconds."""
    chat = _parsed(body)
    for name in PROCESSING:
        if chat.get(name) is not None:
            raise RefusedError(
                400, f"`{name}` is not supported: the server sets how audio is processed", "invalid_value", name
            )
    check_sequences(chat.get("n"))
    seconds = Fraction(0)
    for index, message in enumerate(chat["messages"]):
        content = message.get("content") if isinstance(message, dict) else message
        if content is not None and not isinstance(content, str | list):
            raise RefusedError(
                400, f"messages[{index}].content must be text or a list", "invalid_json", f"messages[{index}].content"
            )
        for part in content if isinstance(content, list) else ():
            seconds += _clean_part(part, f"messages[{index}].content", rules, seconds)
    return ChatRequest(json_body.written(chat), float(seconds))


def _parsed(body: bytes) -> dict[str, Any]:
    """A JSON object with a list `messages` that is not empty."""
    chat = json_body.parsed(body)
    if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list) or not chat["messages"]:
        raise RefusedError(400, "the body must be a chat with a non-empty list `messages`", "invalid_json")
    return chat


def _clean_part(part: Any, where: str, rules: Rules, before: Fraction) -> Fraction:
    """Check one part of a message at `where` and replace its audio in place; return the seconds of this audio.

    `before` is the seconds of audio in the parts before.
    """
    if isinstance(part, str):
        return Fraction(0)
    if not isinstance(part, dict):
        raise RefusedError(400, f"{where} has a part that is not an object", "invalid_json", where)
    if other := sorted(part.keys() - PARTS):
        raise RefusedError(
            400,
            f"{where} has {ascii(other[0])[1:-1][:40]}: this server accepts {', '.join(sorted(PARTS - {'type'}))}",
            "invalid_value",
            where,
        )
    seconds = Fraction(0)
    for name, key in (("audio_url", "url"), ("input_audio", "data")):
        if part.get(name) is None:
            if part.get("type") == name:
                raise RefusedError(
                    400, f"{where} has a part of type {name} without {name}", "invalid_value", f"{where}.{name}"
                )
            continue
        data = _audio_bytes(part[name], name, key, where, rules)
        if data is None:
            continue
        bounds = rules.chat_bounds
        if before + seconds:
            left = max(Fraction(0), bounds.seconds - before - seconds)
            bounds = bounds._replace(seconds=left, because=f"of {float(bounds.seconds):.2f} s per chat")
        clip = decoded(data, bounds, rules.rate, f"{where}.{name}")
        seconds += Fraction(len(clip.samples), clip.rate)
        clean = base64.b64encode(wav(clip)).decode()
        part[name] = {"url": f"data:audio/wav;base64,{clean}"} if key == "url" else {"data": clean, "format": "wav"}
    return seconds


def _audio_bytes(media: Any, name: str, key: str, where: str, rules: Rules) -> bytes | None:
    """The audio file in the field `name` of a part, from the base64 in `key`. None for a URL that vLLM may fetch."""
    field = f"{where}.{name}"
    text = media.get(key) if isinstance(media, dict) else media
    if not isinstance(text, str):
        raise RefusedError(400, f"{field} must have text in `{key}`", "invalid_value", field)
    if key == "url" and (text := from_data_url(text, field, rules.hosts)) is None:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(400, f"{field} is not valid base64: {error}", "invalid_value", field) from error
    if len(data) > rules.file_bytes:
        raise too_large(field, len(data), rules.file_bytes)
    return data


def from_data_url(url: str, where: str, hosts: frozenset[str]) -> str | None:
    """The base64 text of a data: URL; None for a URL whose host (with its port, if it has one) is in `hosts`.

    Raises RefusedError for any other URL.
    """
    if url[:5].lower() == "data:":
        form, comma, text = url[5:].partition(",")
        if not comma or not form.lower().endswith(";base64"):
            raise RefusedError(
                400, f"{where} is not a data: URL in base64: expected data:audio/wav;base64,…", "invalid_url", where
            )
        return text
    # URL parsers disagree about the host if a URL has other characters.
    plain = all("!" <= letter <= "~" and letter not in "\\@" for letter in url)
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme, parts.netloc.lower()
    except ValueError:
        plain = False
    if plain and scheme in ("http", "https") and host in hosts:
        return None
    allowed = f"and URLs of {', '.join(sorted(hosts))}" if hosts else "only (its VOXTRAL_SERVE_MEDIA_HOSTS is not set)"
    said = f"the URL {url[:60]!a}" if plain else "not a valid URL"
    raise RefusedError(400, f"{where} is {said}: this server accepts data: URLs {allowed}", "url_not_allowed", where)
