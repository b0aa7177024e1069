"""Read the fields of an upload's form: which are allowed, what they mean, and which are passed to vLLM.

The fields are those of OpenAI's POST /v1/audio/transcriptions and /v1/audio/translations, and vLLM's own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.form import FIELDS, Part
from voxtral_serve.guard.limits import FIELDS_BYTES, Rules, check_sequences
from voxtral_serve.transcript.formats import FORMATS, GRANULARITIES, AnswerFormat

FIELD_NAME = re.compile(rb"[\w.\[\]-]{1,64}")
OFF = ("", "0", "f", "false", "n", "no", "off")  # values that pydantic parses as false, and the empty one
# Fields that vLLM accepts and ignores, for every model
UNUSED = ("known_speaker_names", "known_speaker_references", "hotwords", "to_language")
# Fields that the guard handles itself, because it writes the answer in the requested format from vLLM's JSON.
HANDLED = ("response_format", "timestamp_granularities", "stream_include_usage", "stream_continuous_usage_stats")
SUBTITLES = ("srt", "vtt")  # files, which are not streamed
GRANULARITIES_FIELD = "timestamp_granularities[]"
LOGPROBS = "logprobs"  # of `include[]`


class TranscriptRequest(NamedTuple):
    """The request in an upload.

    form      how to write the answer
    streamed  whether to send it as events
    kept      the fields that vLLM gets with each piece of the clip
    ignored   names of the fields without effect for this model, and "logprobs" if they are not available
    logprobs  whether the answer has the logprobs of the tokens: `include[]=logprobs`
    """

    form: AnswerFormat
    streamed: bool
    kept: tuple[Part, ...]
    ignored: tuple[str, ...]
    logprobs: bool = False


def check_task(task: str, can: frozenset[str]) -> None:
    """Raises RefusedError for a translation by a model that cannot translate: vLLM would answer with a transcript."""
    if task == "translate" and "translate" not in can:
        raise RefusedError(
            400, "this model does not translate: send audio to /v1/audio/transcriptions", "no_translation", "model"
        )


def read(parts: Iterable[Part], task: str, rules: Rules) -> tuple[TranscriptRequest, memoryview]:
    """(request, audio file) in a form. `task` is "transcribe" or "translate". Raises RefusedError."""
    fields = _by_name(parts)
    file = _file(fields.pop(b"file", None), fields, rules.file_bytes)
    texts = _texts(fields)
    name = _response_format(texts)
    granularities = _granularities(fields.values(), name, rules.timed)
    streamed = _streamed(texts, name, rules.timed)
    if b"n" in texts:
        check_sequences(texts[b"n"])
    form = AnswerFormat(name, frozenset(granularities or ("segment",)), texts.get(b"language"), task)
    kept = [part for part in fields.values() if not any(_is_called(part, name) for name in HANDLED)]
    if streamed:
        kept.append(Part(b"stream_include_usage", None, b"true"))
    included = {part.data.decode() for part in fields.values() if _is_called(part, "include") and part.data}
    logprobs = LOGPROBS in included and name == "json" and rules.timed
    ignored = _ignored(fields.values(), texts, rules.can)
    ignored += (LOGPROBS,) * (LOGPROBS in included and not logprobs) + ("include",) * bool(included - {LOGPROBS})
    return TranscriptRequest(form, streamed, tuple(kept), ignored, logprobs), file


def _by_name(parts: Iterable[Part]) -> dict[bytes, Part]:
    """The last field of each name, and all fields whose name ends with [], each under a unique key."""
    fields: dict[bytes, Part] = {}
    for part in parts:
        if not FIELD_NAME.fullmatch(part.name):
            name = part.name.decode(errors="replace")
            raise RefusedError(
                400, f"the form has a field called {ascii(name)[:80]}: expected a plain name", "invalid_form"
            )
        if part.name == b"file" and part.name in fields:
            raise RefusedError(
                400, "the form has two fields called `file`: send one clip per request", "invalid_form", "file"
            )
        fields[part.name if not part.name.endswith(b"[]") else part.name + b"%d" % len(fields)] = part
    return fields


def _file(file: Part | None, others: Mapping[bytes, Part], most_bytes: int) -> memoryview:
    if file is None:
        found = ", ".join(sorted(part.name.decode() for part in others.values())) or "none"
        raise RefusedError(
            400,
            f"the form has no field called `file` (its fields: {found}): send the audio as `file`",
            "no_file",
            "file",
        )
    if file.filename is None:
        raise RefusedError(
            400,
            "`file` was sent as text: send it as a file, with a filename (curl: -F file=@clip.wav, with the @)",
            "invalid_form",
            "file",
        )
    if len(file.view) > most_bytes:
        raise too_large("`file`", len(file.view), most_bytes)
    return file.view


def _texts(fields: Mapping[bytes, Part]) -> dict[bytes, str]:
    """The values of the fields without the file, by name; the last one of a list."""
    if sum(len(part.data) for part in fields.values()) > FIELDS_BYTES or len(fields) > FIELDS:
        raise RefusedError(
            413, f"the form has more than {FIELDS} fields or {FIELDS_BYTES} bytes besides `file`", "form_too_large"
        )
    texts = {}
    for part in fields.values():
        name = part.name.decode()
        if part.filename is not None:
            raise RefusedError(
                400,
                f"`{name}` was sent as a file: send the audio as `file`, other fields as text",
                "invalid_form",
                name,
            )
        try:
            texts[part.name] = part.data.decode()
        except UnicodeDecodeError as error:
            raise RefusedError(400, f"`{name}` is not UTF-8: {error.reason}", "invalid_form", name) from error
    return texts


def _response_format(texts: Mapping[bytes, str]) -> str:
    name = texts.get(b"response_format", "json")
    if name not in FORMATS:
        raise RefusedError(
            400,
            f"response_format is {ascii(name)[:40]}: expected one of {', '.join(FORMATS)}",
            "invalid_value",
            "response_format",
        )
    return name


def _granularities(fields: Iterable[Part], response_format: str, timed: bool) -> list[str]:
    found = [part.data.decode() for part in fields if part.name.startswith(b"timestamp_granularities")]
    problem = None
    if other := sorted(set(found) - set(GRANULARITIES)):
        problem = f"{GRANULARITIES_FIELD} has {ascii(other[0])[:40]}: expected word or segment"
    elif "word" in found and not timed:
        problem = f"{GRANULARITIES_FIELD} has word, but this model gives no word times"
    elif found and response_format != "verbose_json":
        problem = f"{GRANULARITIES_FIELD} needs response_format verbose_json, found {response_format}"
    if problem:
        raise RefusedError(400, problem, "invalid_value", GRANULARITIES_FIELD)
    return found


def _streamed(texts: Mapping[bytes, str], response_format: str, timed: bool) -> bool:
    streamed, beams = (texts.get(name, "").lower() not in OFF for name in (b"stream", b"use_beam_search"))
    if beams and timed:
        # With the encode-once model, vLLM 0.32.0 answers with status 200 and an empty text.
        raise RefusedError(
            400, "use_beam_search is not supported: this model decodes greedily", "invalid_value", "use_beam_search"
        )
    if streamed and response_format in SUBTITLES:
        raise RefusedError(
            400, f"response_format {response_format} is not available with stream", "invalid_value", "response_format"
        )
    return streamed


def _ignored(fields: Iterable[Part], texts: Mapping[bytes, str], can: frozenset[str]) -> tuple[str, ...]:
    given = [part for part in fields if part.data]
    without_effect = [name for name in ("language", "prompt") if name not in can] + [*UNUSED]
    ignored = [name for name in without_effect if any(_is_called(part, name) for part in given)]
    if texts.get(b"chunking_strategy", "auto") != "auto":  # long clips are always cut, as with "auto"
        ignored.append("chunking_strategy")
    return tuple(ignored)


def _is_called(part: Part, name: str) -> bool:
    return part.name.removesuffix(b"[]").decode() == name
