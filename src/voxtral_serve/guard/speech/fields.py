"""Read the JSON of a request for speech: which fields are allowed, and which are passed to vLLM-Omni.

The fields are those of OpenAI's POST /v1/audio/speech (https://platform.openai.com/docs/api-reference/audio), and of
vLLM-Omni's own `stream`, which is the same as stream_format sse, and `max_new_tokens`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from voxtral_serve.guard import json_body
from voxtral_serve.guard.errors import RefusedError

CHARACTERS = 4096  # of one input, as OpenAI has it
FORMATS = ("mp3", "opus", "flac", "wav", "pcm")  # vLLM-Omni's (protocol/audio.py); the first is OpenAI's default
# What vLLM-Omni sends while it makes it. A WAV needs the rate with the first audio, which Voxtral TTS does not give.
STREAMED = "pcm"
STREAM_FORMATS = ("audio", "sse")
SPEEDS = (0.25, 4.0)
NEW_TOKENS = 4096  # the most that vLLM-Omni takes: 80 ms each with Voxtral TTS, 160 ms with VoxCPM2
FIELDS = 100  # of one request
FIELD_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
# A server speaks with the voices that it has. vLLM-Omni fetches the first ones from URLs and files.
REFERENCES = (
    *("ref_audio", "ref_audio_2", "references", "reference_audio", "speaker_audio", "voice_prompt"),
    *("ref_audio_codes", "ref_text", "speaker_embedding", "x_vector_only_mode"),
)
REFUSED = {
    "extra_params": "the server sets how the model samples",
    "sample_rate": "the audio has the model's rate",
    "speaker": "send the voice's name as `voice`",
    "word_timestamps": "this server has no aligner",
}
USED = ("model", "input", "voice", "response_format", "speed", "stream_format", "stream", "max_new_tokens")


class SpeechParameters(NamedTuple):
    """A request for speech that is ready for vLLM-Omni.

    content     its JSON
    characters  of the text
    voice       in lower case
    format      one of FORMATS
    events      whether the answer is a stream of events
    streamed    whether the answer is audio that is sent while it is made
    ignored     names of the fields that had no effect
    """

    content: bytes
    characters: int
    voice: str
    format: str
    events: bool
    streamed: bool
    ignored: tuple[str, ...]


def read(body: bytes, voices: Sequence[str], models: Sequence[str]) -> SpeechParameters:
    """The request in a body; `voices` and `models` are the names that the server has. Raises RefusedError."""
    given = _given(json_body.parsed(body))
    text, voice = _input(given), _voice(given, voices)
    form = _one_of(given, "response_format", FORMATS) or FORMATS[0]
    stream_format, speed = _stream_format(given), _speed(given)
    events = stream_format == "sse"
    if events and form != STREAMED:
        raise _invalid("response_format", f"response_format is {form}, and stream_format is sse: expected {STREAMED}")
    if events and speed != 1:
        raise _invalid("speed", f"speed is {speed:g}, and stream_format is sse: expected 1")
    # A body of audio is the same whether it is sent while it is made or not.
    streamed = speed == 1 and form == STREAMED
    content: dict[str, Any] = {"input": text, "voice": voice, "response_format": form, "speed": speed}
    if events or streamed:
        content["stream_format"] = "sse" if events else "audio"
    if (model := _text(given, "model")) is not None:
        if model not in models:
            raise RefusedError(
                404,
                f"the model {ascii(model)[:80]} does not exist: this server has {', '.join(models)}",
                "model_not_found",
                "model",
            )
        content["model"] = model
    if "max_new_tokens" in given:
        content["max_new_tokens"] = _new_tokens(given["max_new_tokens"])
    ignored = tuple(name for name, value in given.items() if name not in USED and not _off(value))
    return SpeechParameters(json_body.written(content), len(text), voice, form, events, streamed, ignored)


def _invalid(name: str, message: str) -> RefusedError:
    return RefusedError(400, message, "invalid_value", name)


def _given(content: Any) -> dict[str, Any]:
    """The fields that have a value. Raises RefusedError for one that this server never takes."""
    if not isinstance(content, dict):
        raise RefusedError(400, "the body must be a JSON object with `input` and `voice`", "invalid_json")
    if len(content) > FIELDS:
        raise RefusedError(400, f"the body has {len(content)} fields: expected at most {FIELDS}", "invalid_json")
    given = {name: value for name, value in content.items() if value is not None}
    for name, value in given.items():
        if not FIELD_NAME.fullmatch(name):
            raise RefusedError(
                400, f"the body has a field called {ascii(name)[:80]}: expected a plain name", "invalid_json"
            )
        if name in REFERENCES and not _off(value):
            raise RefusedError(
                400,
                f"`{name}` is not supported: this server takes no reference voices, neither from the request nor from "
                "URLs and files. Name one of its own as `voice`",
                "reference_not_allowed",
                name,
            )
        if name in REFUSED and not _off(value):
            raise _invalid(name, f"`{name}` is not supported: {REFUSED[name]}")
    return given


def _off(value: Any) -> bool:
    return value is False or value == ""


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise _invalid(name, f"`{name}` is {ascii(value)[:40]}: expected text")
    return value


def _input(given: Mapping[str, Any]) -> str:
    text = _text(given, "input")
    if text is None or not text.strip():
        raise _invalid("input", "`input` is missing or blank: expected the text to speak")
    if len(text) > CHARACTERS:
        raise RefusedError(
            400,
            f"`input` has {len(text)} characters: expected at most {CHARACTERS}. Send the text in parts",
            "input_too_long",
            "input",
        )
    return text


def _voice(given: Mapping[str, Any], voices: Sequence[str]) -> str:
    value = given.get("voice")
    if isinstance(value, dict):  # OpenAI has {"id": NAME} for voices of a customer's own
        value = value.get("id")
    found = "missing" if value is None else ascii(value)[:40]
    if not isinstance(value, str) or value.lower() not in voices:
        raise RefusedError(400, f"`voice` is {found}: expected one of {', '.join(voices)}", "voice_not_found", "voice")
    return value.lower()


def _one_of(given: Mapping[str, Any], name: str, names: Sequence[str]) -> str | None:
    value = given.get(name)
    if value is not None and value not in names:
        raise _invalid(name, f"{name} is {ascii(value)[:40]}: expected one of {', '.join(names)}")
    return value


def _stream_format(given: Mapping[str, Any]) -> str | None:
    found = _one_of(given, "stream_format", STREAM_FORMATS)
    if not isinstance(stream := given.get("stream", False), bool):
        raise _invalid("stream", f"stream is {ascii(stream)[:40]}: expected true or false")
    return "sse" if stream and found is None else found


def _speed(given: Mapping[str, Any]) -> float:
    speed = given.get("speed", 1)
    least, most = SPEEDS
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not least <= speed <= most:
        raise _invalid("speed", f"speed is {ascii(speed)[:40]}: expected a number from {least:g} to {most:g}")
    return float(speed)


def _new_tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= NEW_TOKENS:
        raise _invalid("max_new_tokens", f"max_new_tokens is {ascii(value)[:40]}: expected 1 to {NEW_TOKENS}")
    return value
