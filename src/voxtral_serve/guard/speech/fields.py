"""Read the JSON of a request for speech: which fields are allowed, and which are passed to vLLM-Omni.

The fields are those of OpenAI's POST /v1/audio/speech (https://platform.openai.com/docs/api-reference/audio), and of
vLLM-Omni's own `stream`, which is the same as stream_format sse, and `max_new_tokens`. docs/pages/speech-api.md has a
table of the model.
"""

from collections.abc import Iterable, Sequence, Sized
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from voxtral_serve.guard import json_body
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.typed import FIELD_NAME, checked, named, shown

CHARACTERS = 4096  # of one input, as OpenAI has it
NEW_TOKENS = 4096  # the most that vLLM-Omni takes: 80 ms each with Voxtral TTS, 160 ms with VoxCPM2
Format = Literal["mp3", "opus", "flac", "wav", "pcm"]  # vLLM-Omni's (protocol/audio.py); OpenAI's default is the first
FORMATS: tuple[str, ...] = get_args(Format)
# What vLLM-Omni sends while it makes it. A WAV needs the rate with the first audio, which Voxtral TTS does not give.
STREAMED = "pcm"
FIELDS = 100  # of one request
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


def _spoken(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("invalid_value", "input is missing or blank: expected the text to speak")
    if len(text) > CHARACTERS:
        raise PydanticCustomError(
            "input_too_long",
            f"input has {len(text)} characters: expected at most {CHARACTERS}. Send the text in parts",
        )
    return text


def _voice(value: Any, info: ValidationInfo) -> str:
    """A name in lower case. The context has those of the server."""
    voices: Sequence[str] = info.context or ()
    name = value.get("id") if isinstance(value, dict) else value  # OpenAI has {"id": NAME} for a customer's own voices
    if not isinstance(name, str) or name.lower() not in voices:
        there = "missing" if name in (None, "") else shown(name)
        raise PydanticCustomError("voice_not_found", f"voice is {there}: expected one of {', '.join(voices)}")
    return name.lower()


class SpeechFields(BaseModel):
    """The fields of a request for speech that have an effect."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, validate_default=True)

    input: Annotated[str, AfterValidator(_spoken)] = Field(
        "", description="the text to speak", json_schema_extra={"minLength": 1, "maxLength": CHARACTERS}
    )
    voice: Annotated[str, BeforeValidator(_voice)] = Field(
        "", description='a name of `GET /v1/audio/voices`, in upper or lower case, or `{"id": NAME}`'
    )
    model: str | None = Field(None, max_length=256, description="a name of `GET /v1/models`")
    response_format: Format = Field("mp3", description="`mp3` is the default, as OpenAI has it. vLLM-Omni has no `aac`")
    speed: float = Field(1, ge=0.25, le=4, description="other than 1: the audio is stretched once it is complete")
    stream_format: Literal["audio", "sse"] | None = Field(
        None,
        description="`sse`: OpenAI's events `speech.audio.delta` and `speech.audio.done`, with `pcm` and speed 1",
    )
    stream: bool = Field(False, description="vLLM-Omni's; `true` is `stream_format` `sse`")
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        le=NEW_TOKENS,
        description="vLLM-Omni's; tokens of speech, of 80 ms with Voxtral TTS and 160 ms with VoxCPM2",
    )


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
    given = json_body.parsed(body)
    on = [name for name, value in given.items() if value is not False and value != ""]
    others = [name for name in on if name not in SpeechFields.model_fields]
    _check_names(given, others)
    fields = checked(SpeechFields, given, voices)
    if fields.model is not None and fields.model not in models:
        raise RefusedError(
            404,
            f"the model {ascii(fields.model)[:80]} does not exist: this server has {', '.join(models)}",
            "model_not_found",
            "model",
        )
    form, speed = fields.response_format, fields.speed
    events = fields.stream_format == "sse" or (fields.stream and fields.stream_format is None)
    if events and form != STREAMED:
        raise _invalid("response_format", f"response_format is {form}, and stream_format is sse: expected {STREAMED}")
    if events and speed != 1:
        raise _invalid("speed", f"speed is {speed:g}, and stream_format is sse: expected 1")
    # A body of audio is the same whether it is sent while it is made or not.
    streamed = speed == 1 and form == STREAMED
    content = fields.model_dump(include={"model", "max_new_tokens"}, exclude_none=True)
    content |= {"input": fields.input, "voice": fields.voice, "response_format": form, "speed": speed}
    if streamed:
        content["stream_format"] = "sse" if events else "audio"
    written = json_body.written(content)
    return SpeechParameters(written, len(fields.input), fields.voice, form, events, streamed, named(others))


def _invalid(name: str, message: str) -> RefusedError:
    return RefusedError(400, message, "invalid_value", name)


def _check_names(given: Sized, others: Iterable[str]) -> None:
    """Raises RefusedError for a field that this server never takes. `others` are those that the model has not."""
    if len(given) > FIELDS:
        raise RefusedError(400, f"the body has {len(given)} fields: expected at most {FIELDS}", "invalid_json")
    for name in others:
        if not FIELD_NAME.fullmatch(name):
            raise RefusedError(
                400, f"the body has a field called {ascii(name)[:80]}: expected a plain name", "invalid_json"
            )
        if name in REFERENCES:
            raise RefusedError(
                400,
                f"`{name}` is not supported: this server takes no reference voices, neither from the request nor from "
                "URLs and files. Name one of its own as `voice`",
                "reference_not_allowed",
                name,
            )
        if name in REFUSED:
            raise _invalid(name, f"`{name}` is not supported: {REFUSED[name]}")
