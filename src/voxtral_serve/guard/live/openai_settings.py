"""The `session` object of OpenAI's Realtime transcription: what a client may set, and what it means here.

A field that an update leaves out stays as it was, and null switches off. A field that is unknown, or whose value is
not valid, is refused with its path. `language`, `languages`, `prompt` and `noise_reduction` are kept and have no
effect: Voxtral Realtime has no such input. `keywords` has an effect where the engine can prefer phrases.
"""

import copy
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from voxtral_serve.audio.stream import StreamFormat
from voxtral_serve.engine.keywords import KeywordError
from voxtral_serve.guard.live import commands
from voxtral_serve.guard.live.codec import CodecContext
from voxtral_serve.guard.live.events import Name, Names, Settings, read
from voxtral_serve.guard.live.turns import TurnRule
from voxtral_serve.transcript.language import TELLING

Logprobs = Literal["item.input_audio_transcription.logprobs"]
(LOGPROBS,) = get_args(Logprobs)
DELAYS_MS = {"minimal": 160, "low": 240, "medium": 480, "high": 960, "xhigh": 2400}
# Formats, with the rates in Hz that they may have; the first is the default.
FORMATS = {"audio/pcm": (24000, 16000), "audio/pcmu": (8000,), "audio/pcma": (8000,)}
ENCODINGS = {"audio/pcm": "pcm_s16le", "audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
SILENCE_S = {"low": 8.0, "medium": 4.0, "auto": 4.0, "high": 2.0}  # OpenAI's limits of its semantic_vad
# A sentence's end stands in the text this long after the model's delay: the token of the word, and the one after it.
SENTENCE_S = 0.32
THRESHOLD, PREFIX_MS = 0.5, 300
TRANSCRIPTION = "session.audio.input.transcription"  # its path
DELAY = f"{TRANSCRIPTION}.delay"
Prompt = Annotated[str, StringConstraints(max_length=4096)]
Time = Annotated[int, Field(ge=0, le=60_000)]  # ms


def _context(info: ValidationInfo) -> CodecContext:
    assert isinstance(info.context, CodecContext)
    return info.context


class Format(Settings):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("type") == "audio/pcm" and content.get("rate") is None:
            return {**content, "rate": FORMATS["audio/pcm"][0]}
        return content

    @field_validator("rate")
    @classmethod
    def _rate(cls, rate: int | None, info: ValidationInfo) -> int | None:
        if (kind := info.data.get("type")) is None:  # which is refused
            return rate
        rates = FORMATS[kind]
        if rate is not None and rate not in rates:
            words = f"{' or '.join(map(str, rates))} Hz for {kind}"
            raise PydanticCustomError("invalid_value", f"session.audio.input.format.rate is {rate}: expected {words}")
        return rate


class Transcription(Settings):
    model: Name | None = None
    language: Name | None = None
    languages: Names | None = None
    prompt: Prompt | None = None
    keywords: Names | None = None
    delay: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, content: Any, info: ValidationInfo) -> Any:
        if isinstance(content, dict) and content.get("model") is None:
            return {**content, "model": _context(info).model}
        return content

    @field_validator("model")
    @classmethod
    def _served(cls, model: str, info: ValidationInfo) -> str:
        if not _context(info).serves(model):
            words = f"a model of this server, such as {_context(info).model}"
            name = f"{TRANSCRIPTION}.model is {ascii(model)[:60]}"
            raise PydanticCustomError("model_not_found", "{words}", {"words": f"{name}: expected {words}"})
        return model

    @field_validator("delay")
    @classmethod
    def _possible(cls, delay: str | None, info: ValidationInfo) -> str | None:
        if delay is not None:
            try:
                _context(info).check_delay(DELAYS_MS[delay])
            except ValueError as error:
                words = f"{DELAY} is {delay!r}, {error}"
                raise PydanticCustomError("invalid_value", "{words}", {"words": words}) from None
        return delay

    @field_validator("keywords")
    @classmethod
    def _preferable(cls, keywords: list[str] | None, info: ValidationInfo) -> list[str] | None:
        try:
            _context(info).keywords(keywords or ())
        except KeywordError as error:
            words = f"{TRANSCRIPTION}.keywords: {error}"
            raise PydanticCustomError("invalid_value", "{words}", {"words": words}) from None
        return keywords


class NoiseReduction(Settings):
    type: Literal["near_field", "far_field"] | None = None
    strength: float | None = Field(None, ge=0, le=1)


class TurnDetection(Settings):
    """`create_response` and `interrupt_response` are of conversations: without effect on a transcription."""

    create_response: bool | None = None
    interrupt_response: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        own = {name: field for name, field in cls.model_fields.items() if name not in TurnDetection.model_fields}
        defaults = {name: field.default for name, field in own.items() if not field.is_required()}
        return content | {name: value for name, value in defaults.items() if content.get(name) is None}


class ServerVad(TurnDetection):
    type: Literal["server_vad"]
    threshold: float = Field(THRESHOLD, ge=0, le=1)
    prefix_padding_ms: Time = PREFIX_MS
    silence_duration_ms: Time = 500
    idle_timeout_ms: int | None = Field(None, ge=1, le=60_000)


class SemanticVad(TurnDetection):
    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "auto", "high"] = "auto"


class Input(Settings):
    format: Format
    transcription: Transcription | None
    noise_reduction: NoiseReduction | None
    turn_detection: Annotated[ServerVad | SemanticVad, Field(discriminator="type")] | None


class Audio(Settings):
    input: Input


class Session(Settings):
    type: Literal["transcription"]
    audio: Audio
    include: Annotated[list[Logprobs], Field(max_length=10)] | None


def merged(old: Any, new: Any) -> Any:
    """`old` with the fields of `new`; an object of another `type` replaces the old one."""
    if not (isinstance(old, dict) and isinstance(new, dict)) or new.get("type", old.get("type")) != old.get("type"):
        return new
    return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}


class OpenAiSettings:
    """The settings of one session. `session` is as OpenAI's object has it, without its id."""

    def __init__(self, context: CodecContext) -> None:
        self._context = context
        audio = {
            "format": {"type": "audio/pcm"},
            "transcription": {},
            "noise_reduction": None,
            "turn_detection": {"type": "server_vad"},
        }
        self._take({"type": "transcription", "audio": {"input": audio}, "include": None})

    def updated(self, update: Any) -> "OpenAiSettings":
        """New settings, with the fields of an update. Raises EventError."""
        new = copy.copy(self)
        new._take(merged(self.session, update))
        return new

    def _take(self, session: Any) -> None:
        self.typed = read(Session, session, self._context)
        self.session: dict[str, Any] = self.typed.model_dump(exclude_unset=True)

    @property
    def input(self) -> Input:
        return self.typed.audio.input

    @property
    def transcribes(self) -> bool:
        return self.input.transcription is not None

    @property
    def delay_ms(self) -> int:
        """The delay that is in effect."""
        return self._delay_ms or self._context.delay_ms

    @property
    def options(self) -> commands.Options:
        form = self.input.format
        stream = StreamFormat(ENCODINGS[form.type], form.rate or FORMATS[form.type][0])
        logprobs = LOGPROBS in (self.typed.include or ())
        transcription = self.input.transcription
        languages = transcription is not None and transcription.model in TELLING
        keywords = self._context.keywords(transcription.keywords or ()) if transcription is not None else None
        return commands.Options(stream, self._delay_ms, logprobs, self._rule(), languages=languages, keywords=keywords)

    @property
    def _delay_ms(self) -> int | None:
        """None for the checkpoint's."""
        transcription = self.input.transcription
        return DELAYS_MS[transcription.delay] if transcription is not None and transcription.delay else None

    def _rule(self) -> TurnRule | None:
        """None where the client ends its turns."""
        if (detection := self.input.turn_detection) is None:
            return None
        rate_hz = self._context.rate_hz
        per_ms = rate_hz // 1000
        if isinstance(detection, SemanticVad):
            short = round(self.delay_ms * per_ms + SENTENCE_S * rate_hz)
            silence = round(SILENCE_S[detection.eagerness] * rate_hz)
            return TurnRule(THRESHOLD, silence, PREFIX_MS * per_ms, None, short)
        idle = detection.idle_timeout_ms
        return TurnRule(
            detection.threshold,
            detection.silence_duration_ms * per_ms,
            detection.prefix_padding_ms * per_ms,
            None if idle is None else idle * per_ms,
        )
