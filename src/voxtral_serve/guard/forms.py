"""Read the body of a request, refuse what is wrong with it by name, and write the one that vLLM gets in its place.

An upload's form is taken apart, its audio decoded to plain samples (audio.py), raised where it is quiet and cut where
it is long (speech.py), and vLLM gets a form for each piece; a chat's JSON is made anew likewise, and no URL of it
reaches vLLM but to a host that was allowed. Both are for a thread: they take milliseconds.
"""

import base64
import binascii
import json
import re
import secrets
from fractions import Fraction
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from voxtral_serve.audio import decode as audio
from voxtral_serve.audio import level, speech
from voxtral_serve.transcript import formats

MIB = 1 << 20
FIELDS_BYTES = MIB  # of a form's fields but the file, and of what else a chat's JSON has beside its audio
FIELDS = 100
FIELD_NAME = re.compile(rb"[\w.\[\]-]{1,64}")
TIMED = ("verbose_json", "srt", "vtt")
FORMATS = ("json", "text", *TIMED)
GRANULARITIES = ("word", "segment")
OFF = ("", "0", "f", "false", "n", "no", "off")  # as pydantic reads a form's field
SEQUENCES = 16  # of `n`: each takes a place in the queue
PARTS = {"type", "text", "audio_url", "input_audio"}
PROCESSING = ("media_io_kwargs", "mm_processor_kwargs")
PIECE_S = Fraction(30)  # of a clip that is longer than the model takes; Whisper takes no more at once
SEGMENT_S = Fraction(8)  # of a model whose tokens have no times: a segment is what is sent at a time
# Without speech, the model is asked for this much of the clip, so that the rest of the request is answered as ever.
SILENT_S = 0.1
# Of OpenAI's fields, and of vLLM's own, what vLLM takes and does nothing with, whatever the model
IGNORED = ("include", "known_speaker_names", "known_speaker_references", "hotwords", "to_language")


class RefusedError(Exception):
    """The request is not taken. The message is meant for the client; `param` names the field that it is about."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Rules(NamedTuple):
    """What bodies are held to: bytes of one audio file, its decoded length, that of all clips in a chat, the model's
    rate in Hz, allowed hosts; the most seconds that a transcription takes at once; whether the model's tokens have
    times; which of `language`, `prompt` and translations it can do; what finds speech."""

    file_bytes: int
    bounds: audio.Bounds
    chat_bounds: audio.Bounds
    rate: int
    hosts: frozenset[str]
    piece_s: Fraction
    timed: bool
    can: frozenset[str]
    detector: speech.Detector

    @property
    def upload_bytes(self) -> int:
        return self.file_bytes + FIELDS_BYTES

    @property
    def chat_bytes(self) -> int:
        return self.file_bytes * 4 // 3 + FIELDS_BYTES


class Body(NamedTuple):
    """What vLLM gets, and how many seconds of audio are in it."""

    content_type: str
    content: bytes
    seconds: float


class Upload(NamedTuple):
    """A clip to transcribe, in pieces; the fields that vLLM gets beside each; how the answer is written, with the names
    of the fields that have no part in it. `loud` says for each piece where it is, if words are to have times."""

    clip: audio.Clip
    pieces: list[speech.Piece]
    loud: list[np.ndarray | None]
    silent: bool
    fields: list["Part"]
    asked: formats.AnswerFormat
    streamed: bool
    ignored: list[str]

    @property
    def seconds(self) -> float:
        return self.clip.seconds

    def form(self, number: int) -> tuple[bytes, bytes]:
        """(content type, form) of a piece."""
        return _form_of(self.fields, level.raised(within(self.clip, self.pieces[number])))


class Part(NamedTuple):
    name: bytes
    filename: bytes | None
    data: bytes


def too_large(what: str, size: int | str, most: int) -> RefusedError:
    return RefusedError(
        413,
        f"{what} has {size} bytes and this server takes at most {most} ({most / MIB:.0f} MiB, its "
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB). Send a compressed format such as FLAC or Opus, or a shorter clip",
        "file_too_large",
        "file",
    )


def within(clip: audio.Clip, piece: speech.Piece) -> audio.Clip:
    return clip._replace(samples=clip.samples[round(piece.start * clip.rate) : round(piece.end * clip.rate)])


def translation(body: bytes, content_type: str, rules: Rules) -> Upload:
    if "translate" not in rules.can:
        # vLLM would answer 200, with a transcript.
        raise RefusedError(
            400, "this model does not translate: send audio to /v1/audio/transcriptions", "no_translation", "model"
        )
    return upload(body, content_type, rules, "translate")


def upload(body: bytes, content_type: str, rules: Rules, task: str = "transcribe") -> Upload:
    """The form of a transcription or translation. Raises RefusedError."""
    fields: dict[bytes, Part] = {}
    for part in _form(body, content_type):
        if not FIELD_NAME.fullmatch(part.name):
            name = part.name.decode(errors="replace")
            raise RefusedError(
                400, f"the form has a field called {ascii(name)[:80]}: expected a plain name", "invalid_form"
            )
        if part.name == b"file" and part.name in fields:
            raise RefusedError(
                400, "the form has two fields called `file`: send one clip a request", "invalid_form", "file"
            )
        fields[part.name if not part.name.endswith(b"[]") else part.name + b"%d" % len(fields)] = part
    file = fields.pop(b"file", None)
    if file is None:
        found = ", ".join(sorted(part.name.decode() for part in fields.values())) or "none"
        raise RefusedError(
            400, f"the form has no field called `file` (its fields: {found}): send the audio in it", "no_file", "file"
        )
    if file.filename is None:
        raise RefusedError(
            400,
            "`file` was sent as text: send it as a file, with a filename (curl: -F file=@clip.wav, with the @)",
            "invalid_form",
            "file",
        )
    if len(file.data) > rules.file_bytes:
        raise too_large("`file`", len(file.data), rules.file_bytes)
    if sum(len(part.data) for part in fields.values()) > FIELDS_BYTES or len(fields) > FIELDS:
        raise RefusedError(
            413, f"the form has more than {FIELDS} fields, or {FIELDS_BYTES} bytes beside `file`", "form_too_large"
        )
    for part in fields.values():
        if part.filename is not None:
            name = part.name.decode()
            raise RefusedError(400, f"`{name}` was sent as a file: the audio's field is `file`", "invalid_form", name)
        try:
            part.data.decode()
        except UnicodeDecodeError as error:
            name = part.name.decode()
            raise RefusedError(400, f"`{name}` is not UTF-8: {error.reason}", "invalid_form", name) from error
    texts = {part.name: part.data.decode() for part in fields.values()}
    form = texts.get(b"response_format", "json")
    if form not in FORMATS:
        raise RefusedError(
            400,
            f"response_format is {ascii(form)[:40]}: expected one of {', '.join(FORMATS)}",
            "invalid_value",
            "response_format",
        )
    granularities = [part.data.decode() for part in fields.values() if part.name.startswith(b"timestamp_granularities")]
    if other := sorted(set(granularities) - set(GRANULARITIES)):
        name = "timestamp_granularities[]"
        raise RefusedError(400, f"{name} has {ascii(other[0])[:40]}: expected word or segment", "invalid_value", name)
    if "word" in granularities and not rules.timed:
        name = "timestamp_granularities[]"
        raise RefusedError(400, f"{name} has word: this model's words have no times", "invalid_value", name)
    if granularities and form != "verbose_json":
        raise RefusedError(
            400,
            f"timestamp_granularities[] is for verbose_json, and response_format is {form}",
            "invalid_value",
            "timestamp_granularities[]",
        )
    streamed, beams = (texts.get(name, "").lower() not in OFF for name in (b"stream", b"use_beam_search"))
    if beams and rules.timed:
        # With the encode-once model, vLLM 0.32.0 answered 200 and an empty text.
        raise RefusedError(
            400, "use_beam_search is not served: this model decodes greedily", "invalid_value", "use_beam_search"
        )
    if streamed and form in TIMED:
        raise RefusedError(400, f"{form} cannot be had with stream", "invalid_value", "response_format")
    if b"n" in fields:
        _sequences(fields[b"n"].data.decode())
    clip = _decoded(file.data, rules, rules.bounds, "file")
    pieces, silent = _pieces(clip, rules, form)
    loud = [
        level.voiced(within(clip, piece).samples, clip.rate) if form in TIMED and rules.timed else None
        for piece in pieces
    ]
    unused = [name for name in ("language", "prompt") if name not in rules.can]
    ignored = [
        name for name in (*unused, *IGNORED) if any(_named(each, name) and each.data for each in fields.values())
    ]
    if texts.get(b"chunking_strategy", "auto") != "auto":  # which is what is done
        ignored.append("chunking_strategy")
    # vLLM writes its JSON, whose text then gets the form.
    ours = ("response_format", "timestamp_granularities", "stream_include_usage", "stream_continuous_usage_stats")
    kept = [part for part in fields.values() if not any(_named(part, name) for name in ours)]
    if streamed:
        kept.append(Part(b"stream_include_usage", None, b"true"))
    asked = formats.AnswerFormat(form, frozenset(granularities or ("segment",)), texts.get(b"language"), task)
    return Upload(clip, pieces, loud, silent, kept, asked, streamed, ignored)


def _named(part: Part, name: str) -> bool:
    return part.name.removesuffix(b"[]").decode() == name


def _pieces(clip: audio.Clip, rules: Rules, form: str) -> tuple[list[speech.Piece], bool]:
    """(what goes to the model, whether there is no speech in it)."""
    whole = speech.Piece(0.0, clip.seconds, (0.0, clip.seconds))
    silent = [speech.Piece(0.0, min(clip.seconds, SILENT_S), (0.0, 0.0))]
    by_segment = form in TIMED and not rules.timed
    if len(clip.samples) <= rules.piece_s * clip.rate and not by_segment:
        return ([whole], False) if rules.detector.speaks(clip) else (silent, True)
    most = min(rules.piece_s, SEGMENT_S if by_segment else PIECE_S)
    pieces = rules.detector.pieces(clip, float(most))
    return (pieces, False) if pieces else (silent, True)


def _form(body: bytes, content_type: str) -> list[Part]:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise RefusedError(
            415,
            f"the body's type is {ascii(content_type)[:80]}: expected multipart/form-data, with the audio as `file`",
            "invalid_form",
        )
    if not options.get(b"boundary"):
        raise RefusedError(
            400, "the Content-Type has no boundary: expected multipart/form-data; boundary=…", "invalid_form"
        )
    parts: list[Part] = []
    header, value, disposition = bytearray(), bytearray(), bytearray()
    pieces: list[bytes] = []
    ended = False

    def on_part_begin() -> None:
        if len(parts) > FIELDS:
            raise RefusedError(413, f"the form has more than {FIELDS} fields", "form_too_large")
        disposition.clear()
        pieces.clear()

    def on_header_field(data: bytes, start: int, end: int) -> None:
        header.extend(data[start:end])

    def on_header_value(data: bytes, start: int, end: int) -> None:
        value.extend(data[start:end])

    def on_header_end() -> None:
        if header.lower() == b"content-disposition":
            disposition[:] = value
        header.clear()
        value.clear()

    def on_part_data(data: bytes, start: int, end: int) -> None:
        pieces.append(data[start:end])

    def on_part_end() -> None:
        _, named = parse_options_header(bytes(disposition))
        parts.append(Part(named.get(b"name", b""), named.get(b"filename"), b"".join(pieces)))

    def on_end() -> None:
        nonlocal ended
        ended = True

    callbacks: Any = {call.__name__: call for call in (on_part_begin, on_header_field, on_header_value, on_header_end)}
    callbacks |= {call.__name__: call for call in (on_part_data, on_part_end, on_end)}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(400, f"the body is no multipart form: {error}", "invalid_form") from error
    if not ended:
        raise RefusedError(400, "the form is cut short: its last boundary is missing", "invalid_form")
    return parts


def _form_of(fields: list[Part], clip: audio.Clip) -> tuple[bytes, bytes]:
    boundary = secrets.token_hex(16).encode()
    pieces = []
    for field in fields:
        pieces += [b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (boundary, field.name)]
        pieces += [field.data, b"\r\n"]
    pieces += [b'--%b\r\nContent-Disposition: form-data; name="file"; filename="clip.wav"\r\n' % boundary]
    pieces += [b"Content-Type: audio/wav\r\n\r\n", audio.wav(clip), b"\r\n--%b--\r\n" % boundary]
    return b"multipart/form-data; boundary=" + boundary, b"".join(pieces)


def _decoded(data: bytes, rules: Rules, bounds: audio.Bounds, param: str) -> audio.Clip:
    try:
        return audio.decode(data, bounds, rules.rate)
    except audio.AudioError as error:
        raise RefusedError(400, f"{param}: {error}", error.code, param) from error


def _sequences(given: Any) -> None:
    try:
        wrong = given is not None and not 1 <= int(given) <= SEQUENCES
    except (TypeError, ValueError):
        wrong = True
    if wrong:
        raise RefusedError(400, f"n is {ascii(given)[:40]}: expected 1 to {SEQUENCES}", "invalid_value", "n")


def chat(body: bytes, content_type: str, rules: Rules) -> Body:
    """The JSON of a chat. Raises RefusedError."""

    def constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        asked = json.loads(body.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is no JSON: {ascii(str(error))[1:-1][:120]}", "invalid_json") from error
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list) or not asked["messages"]:
        raise RefusedError(400, "the body has no list `messages`, or an empty one: expected a chat", "invalid_json")
    for name in PROCESSING:
        if asked.get(name) is not None:
            raise RefusedError(
                400, f"`{name}` is not taken: how audio is read is this server's choice", "invalid_value", name
            )
    _sequences(asked.get("n"))
    seconds = Fraction(0)
    for index, message in enumerate(asked["messages"]):
        content = message.get("content") if isinstance(message, dict) else message
        if content is not None and not isinstance(content, str | list):
            raise RefusedError(
                400, f"messages[{index}].content is no text and no list", "invalid_json", f"messages[{index}].content"
            )
        for part in content if isinstance(content, list) else ():
            seconds += _chat_part(part, f"messages[{index}].content", rules, seconds)
    try:
        written = json.dumps(asked, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # half of a surrogate pair, for one
        raise RefusedError(400, "the body has text that is no Unicode", "invalid_json") from error
    return Body("application/json", written, float(seconds))


def _chat_part(part: Any, where: str, rules: Rules, before: Fraction) -> Fraction:
    """Check one part of a message and put clean audio into it. Returns its seconds."""
    if isinstance(part, str):
        return Fraction(0)
    if not isinstance(part, dict):
        raise RefusedError(400, f"{where} has a part that is no object", "invalid_json", where)
    if other := sorted(part.keys() - PARTS):
        raise RefusedError(
            400,
            f"{where} has {ascii(other[0])[1:-1][:40]}: this server takes {', '.join(sorted(PARTS - {'type'}))}",
            "invalid_value",
            where,
        )
    seconds = Fraction(0)
    for name in ("audio_url", "input_audio"):
        media = part.get(name)
        if media is None:
            if part.get("type") == name:
                raise RefusedError(400, f"{where} is of type {name} and has none", "invalid_value", f"{where}.{name}")
            continue
        key = "url" if name == "audio_url" else "data"
        text = media.get(key) if isinstance(media, dict) else media
        if not isinstance(text, str):
            raise RefusedError(400, f"{where}.{name} has no text called {key}", "invalid_value", f"{where}.{name}")
        if name == "audio_url" and (text := from_data_url(text, f"{where}.{name}", rules.hosts)) is None:
            continue
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RefusedError(
                400, f"{where}.{name} is no base64: {error}", "invalid_value", f"{where}.{name}"
            ) from error
        if len(data) > rules.file_bytes:
            raise too_large(f"{where}.{name}", len(data), rules.file_bytes)
        left = rules.chat_bounds
        if before + seconds:
            left = audio.Bounds(
                max(Fraction(0), left.seconds - before - seconds),
                f"of {float(left.seconds):.2f} s a chat",
                left.most_bytes,
            )
        clip = _decoded(data, rules, left, f"{where}.{name}")
        seconds += Fraction(len(clip.samples), clip.rate)
        clean = base64.b64encode(audio.wav(clip)).decode()
        part[name] = {"url": f"data:audio/wav;base64,{clean}"} if key == "url" else {"data": clean, "format": "wav"}
    return seconds


def from_data_url(url: str, where: str, hosts: frozenset[str]) -> str | None:
    """The base64 text of a data: URL; None for a URL whose host (with its port, where it has one) is in `hosts`."""
    if url[:5].lower() == "data:":
        form, comma, text = url[5:].partition(",")
        if not comma or not form.lower().endswith(";base64"):
            raise RefusedError(
                400, f"{where} is no data: URL in base64: expected data:audio/wav;base64,…", "invalid_url", where
            )
        return text
    # What parsers read differently, or not at all, has no host that could be told.
    plain = all("!" <= letter <= "~" and letter not in "\\@" for letter in url)
    try:
        parts = urlsplit(url)
        scheme, host = parts.scheme, parts.netloc.lower()
    except ValueError:
        plain = False
    if plain and scheme in ("http", "https") and host in hosts:
        return None
    allowed = f"or URLs of {', '.join(sorted(hosts))}" if hosts else "and fetches none (its VOXTRAL_SERVE_MEDIA_HOSTS)"
    said = f"the URL {url[:60]!a}" if plain else "no URL that can be read"
    raise RefusedError(400, f"{where} is {said}: this server takes data: URLs {allowed}", "url_not_allowed", where)
