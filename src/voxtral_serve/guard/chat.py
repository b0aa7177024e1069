"""Read the JSON of a chat (https://platform.openai.com/docs/api-reference/chat): an allow-list of typed fields.

vLLM gets these fields only, with every clip as a WAV file in base64, and only URLs of the hosts that the server allows.
"""

import base64
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from voxtral_serve.audio.decode import Bounds, Clip, wav
from voxtral_serve.guard import json_body
from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.fields import INT32, NAME_LENGTH, Sampling, base64_of, from_base64
from voxtral_serve.guard.limits import FIELDS_BYTES, SEQUENCES, Rules
from voxtral_serve.guard.typed import checked, named

AUDIO = {"audio_url": "url", "input_audio": "data"}  # parts with audio, and the field that has its text
PARTS = 100  # of a message
MESSAGES = 1000
CLIPS = 100  # of a chat
CONTENT_TYPE = b"application/json"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class AudioUrl(Strict):
    url: str


class InputAudio(Strict):
    data: str
    format: str | None = Field(None, max_length=64)


class Part(Strict):
    type: Literal["text", "audio_url", "input_audio"] | None = None
    text: str | None = None
    audio_url: str | AudioUrl | None = None
    input_audio: str | InputAudio | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[str | Part], Field(max_length=PARTS, fail_fast=True)]


Stop = Annotated[str, Field(max_length=256)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatFields(Sampling):
    """The fields of a chat that have an effect."""

    model_config = ConfigDict(strict=True)

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MESSAGES,
        fail_fast=True,
        description="each with `role` (`system`, `user`, `assistant`) and `content`: text, or a list of parts with "
        "`type` and `text`, `audio_url` or `input_audio`",
    )
    model: str | None = Field(None, max_length=NAME_LENGTH, description="a name of `GET /v1/models`")
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="the same as `max_completion_tokens`")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="texts before which an answer ends"
    )
    n: int = Field(1, ge=1, le=SEQUENCES, description="number of answers")
    stream: bool = Field(False, description="sends events as the text is made")
    stream_options: StreamOptions | None = Field(None, description="`include_usage`, `continuous_usage_stats`")
    logprobs: bool = Field(False, description="of the tokens")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens at each position")


class ChatAudio(NamedTuple):
    """A file of audio in a chat: its bytes, the path of the field that has it, and the part whose field it is."""

    data: bytes
    where: str
    part: dict[str, Any]


class ChatRequest(NamedTuple):
    """A chat without its audio, the files of audio that it had, in order, and the names of fields without effect."""

    content: dict[str, Any]
    audio: tuple[ChatAudio, ...]
    ignored: tuple[str, ...]


def read(body: bytes, rules: Rules) -> ChatRequest:
    """The chat in a request's body. Raises RefusedError. For a thread: it takes milliseconds."""
    given = json_body.parsed(body)
    fields = checked(ChatFields, given)
    ignored = named(name for name in given if name not in ChatFields.model_fields)
    content = fields.model_dump(exclude_unset=True, exclude_none=True)
    audio = tuple(_audio(content["messages"], rules))
    if len(audio) > CLIPS:
        raise RefusedError(
            400, f"the chat has {len(audio)} clips: expected at most {CLIPS}", "invalid_value", "messages"
        )
    if (size := len(json_body.written(content))) > FIELDS_BYTES:
        raise RefusedError(
            413, f"the chat has {size} bytes besides its audio: expected at most {FIELDS_BYTES}", "chat_too_large"
        )
    return ChatRequest(content, audio, ignored)


def bounds(rules: Rules, before_s: Fraction) -> Bounds:
    """The limits for a clip of a chat after clips of `before_s` seconds: all clips share one limit."""
    whole = rules.chat_bounds
    left = max(Fraction(0), whole.seconds - before_s)
    return whole._replace(seconds=left, because=f"of {float(whole.seconds):.2f} s per chat") if before_s else whole


def written(request: ChatRequest, clips: Sequence[Clip]) -> bytes:
    """The JSON for vLLM, with the clips of the request's audio as WAV files. For a thread."""
    for audio, samples in zip(request.audio, clips, strict=True):
        clean = base64.b64encode(wav(samples)).decode()
        name = audio.where.rpartition(".")[2]
        audio.part[name] = (
            {"url": f"data:audio/wav;base64,{clean}"} if name == "audio_url" else {"data": clean, "format": "wav"}
        )
    return json_body.written(request.content)


def _audio(messages: Sequence[dict[str, Any]], rules: Rules) -> Iterator[ChatAudio]:
    """The audio in messages. Its parts have nothing in its place."""
    parts = (
        (f"messages[{number}].content[{index}]", part)
        for number, message in enumerate(messages)
        for index, part in enumerate(message["content"])
        if isinstance(part, dict)
    )
    for where, part in parts:
        kind = part.get("type")
        if kind is not None and kind not in part:
            raise RefusedError(400, f"{where} is of type {kind} and has no {kind}", "invalid_value", f"{where}.{kind}")
        for name in (name for name in AUDIO if name in part):
            data = _bytes(part[name], name, f"{where}.{name}", rules)
            if data is not None:
                part[name] = None
                yield ChatAudio(data, f"{where}.{name}", part)


def _bytes(media: str | dict[str, str], name: str, where: str, rules: Rules) -> bytes | None:
    """The audio file in base64 in the field `name` of a part. None for a URL that vLLM may fetch."""
    text: str | None = media if isinstance(media, str) else media[AUDIO[name]]
    if name == "audio_url" and (text := from_data_url(str(text), where, rules.hosts)) is None:
        return None
    data = from_base64(str(text), where)
    if len(data) > rules.file_bytes:
        raise too_large(where, len(data), rules.file_bytes)
    return data


def from_data_url(url: str, where: str, hosts: frozenset[str]) -> str | None:
    """The base64 text of a data: URL; None for a URL whose host (with its port, if it has one) is in `hosts`.

    Raises RefusedError for any other URL.
    """
    if url[:5].lower() == "data:":
        return base64_of(url, where)
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
