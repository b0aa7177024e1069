"""The events of Mistral's realtime transcription, as its Python client speaks it.

input_audio.append has the audio. input_audio.flush has the text of the audio so far come at once, with its segments and
transcription.done; input_audio.end does so, too, and ends the connection. An `error` has a message and the number of an
HTTP status. transcription.language comes once the text's language is clear, and when it changes. With `diarize`, the
segments come at the session's end, each with its `speaker_id`, and are those of all texts. `speaker_references` and
`language` have no effect: session.updated says so, and whether `context_bias` has one.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from voxtral_serve.audio.stream import RATES_HZ, StreamFormat
from voxtral_serve.engine.keywords import KeywordError
from voxtral_serve.guard.fields import bias_phrases
from voxtral_serve.guard.live import commands, outputs
from voxtral_serve.guard.live.codec import Codec, CodecContext, Command, appended, written
from voxtral_serve.guard.live.endings import IDLE, NORMAL, POLICY, REFUSED, Ending
from voxtral_serve.guard.live.events import Event, EventError, Name, Names, Settings, read, settings
from voxtral_serve.guard.live.outputs import Output
from voxtral_serve.guard.live.turns import SignRule, TurnSign
from voxtral_serve.transcript.turns import TimedSegment

APPEND, FLUSH, END, UPDATE = "input_audio.append", "input_audio.flush", "input_audio.end", "session.update"
ENDED = Ending("done", NORMAL, "the text is complete")
BAD_REQUEST, UNLABELLED = 400, 503
STATUSES = {  # by code of an ending; the others are BAD_REQUEST
    "model_not_found": 404,
    "idle_timeout": 408,
    "session_expired": 408,
    "unread": 408,
    "rate_limit_exceeded": 429,
    "too_many_sessions": 429,
    "processing_error": 500,
    "engine_dead": 503,
    "stopping": 503,
    "engine_stalled": 504,
}
# Paths of settings
FORMAT, DELAY, DIARIZE = "session.audio_format", "session.target_streaming_delay_ms", "session.diarize"
CONTEXT_BIAS = "session.context_bias"
Probability = Annotated[float, Field(ge=0, le=1)]
Time = Annotated[int, Field(ge=0, le=60_000)]  # ms


class AudioFormat(Settings):
    encoding: Literal["pcm_s16le", "pcm_s32le", "pcm_f16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"] | None = None
    sample_rate: Annotated[int, Field(ge=RATES_HZ[0], le=RATES_HZ[1])] | None = None


class TurnDetection(Settings):
    """The defaults are those of Mistral's client."""

    start_threshold: Probability = 0.5
    eager_end_threshold: Probability = 0.5
    end_threshold: Probability = 0.33
    min_silence_ms: Time = 500
    end_timeout_ms: Time | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None or name not in cls.model_fields}

    def rule(self, rate_hz: int) -> SignRule:
        timeout = None if self.end_timeout_ms is None else self.end_timeout_ms * rate_hz // 1000
        silence = self.min_silence_ms * rate_hz // 1000
        return SignRule(self.start_threshold, self.eager_end_threshold, self.end_threshold, silence, timeout)


class Update(Settings):
    """The `session` of an update. `language` and `speaker_references` are without effect."""

    audio_format: AudioFormat | None = None
    target_streaming_delay_ms: Time | None = None
    turn_detection: TurnDetection | None = None
    diarize: bool | None = None
    language: Name | None = None
    context_bias: Names | None = None
    speaker_references: Any = None


class MistralCodec(Codec):
    """`model`: that of the URL."""

    options: commands.Options

    def __init__(self, context: CodecContext, model: str | None) -> None:
        super().__init__(context)
        self._model = model if model is not None else context.model
        form = StreamFormat("pcm_s16le", context.rate_hz)
        self.options = commands.Options(form, segment_languages=True, languages=True)
        self._turn_detection: TurnDetection | None = None
        self._has_ended = False
        self._context_bias: list[str] = []  # that has an effect
        self._segments: list[dict[str, Any]] = []  # of the text that goes on, as they were sent
        self._language: str | None = None  # that was said last

    def open(self) -> list[Command]:
        if self.context.serves(self._model):
            return [commands.Answer(written("session.created", session=self._described()))]
        words = f"the model {ascii(self._model)[:80]} does not exist: expected {self.context.model}"
        return [commands.Close(Ending(REFUSED, POLICY, words, "model_not_found"))]

    def decode(self, event: Event, begun: bool) -> list[Command]:
        kind = event.type
        if kind == UPDATE:
            return self._update(read(Update, settings(event.session)), begun)
        if kind not in (APPEND, FLUSH, END):
            expected = ", ".join((UPDATE, APPEND, FLUSH, END))
            raise EventError(f"type is {ascii(kind)[:80]}: expected one of {expected}", "invalid_value", "type")
        if self._has_ended:
            if kind == APPEND:
                raise EventError(f"{APPEND} after {END}: expected a new connection", "invalid_event")
            return []
        if kind == APPEND:
            return [appended(event)]
        if kind == FLUSH:
            return [commands.Cut()]
        self._has_ended = True
        return [commands.Cut(), commands.End(ENDED)]

    def encode(self, output: Output) -> list[str]:
        match output:
            case TurnSign(kind, at, reason):
                fields = {} if reason is None else {"end_reason": reason}
                return [written(f"turn.{kind}", time_s=round(at / self.context.rate_hz, 3), **fields)]
            case outputs.TurnCut():
                return []
            case outputs.TurnDelta(_, text):
                return [written("transcription.text.delta", text=text)]
            case outputs.TurnSegment(_, segment, language):
                return [*self._said(language), self._segment(segment)]
            case outputs.TurnDone():
                return self._done(output)
        raise TypeError(f"{output!r:.80} has no event in Mistral's protocol")

    def refuse(self, error: EventError, event: Event | None) -> str:
        return _error(str(error), BAD_REQUEST)

    def last_words(self, ending: Ending) -> list[str]:
        # Clients that take any error as fatal connect again after a close without one.
        return [] if ending.reason == IDLE else [_error(ending.words, STATUSES.get(ending.code or "", BAD_REQUEST))]

    def _update(self, update: Update, begun: bool) -> list[Command]:
        options = replace(self.options, form=self._form(update.audio_format, begun))
        if "target_streaming_delay_ms" in update.model_fields_set:
            options = replace(options, delay_ms=self._delay_ms(update.target_streaming_delay_ms, begun))
        find = "turn_detection" in update.model_fields_set
        if find:
            rule = None if update.turn_detection is None else update.turn_detection.rule(self.context.rate_hz)
            options = replace(options, rule=rule)
        if update.diarize is not None:
            options = replace(options, speakers=self._speakers(update.diarize, begun))
        if "context_bias" in update.model_fields_set:
            options = replace(options, keywords=self._keywords(update.context_bias or []))
        self.options = options
        if find:
            self._turn_detection = update.turn_detection
        return [
            commands.Configure(options, find),
            commands.Answer(written("session.updated", session=self._described())),
        ]

    def _form(self, audio_format: AudioFormat | None, begun: bool) -> StreamFormat:
        if audio_format is None:
            return self.options.form
        rate_hz = audio_format.sample_rate or self.context.rate_hz
        form = StreamFormat(audio_format.encoding or "pcm_s16le", rate_hz)
        if begun and form != self.options.form:
            raise EventError(f"{FORMAT} cannot change once there is audio", "invalid_value", FORMAT)
        return form

    def _delay_ms(self, delay_ms: int | None, begun: bool) -> int | None:
        if delay_ms is None:
            return None
        try:
            self.context.check_delay(delay_ms)
        except ValueError as error:
            raise EventError(f"{DELAY} is {error}", "invalid_value", DELAY) from None
        if begun and delay_ms != (self.options.delay_ms or self.context.delay_ms):
            raise EventError(f"{DELAY} cannot change once there is audio", "invalid_value", DELAY)
        return delay_ms

    def _speakers(self, diarize: bool, begun: bool) -> bool:
        if diarize and self.context.unlabelled is not None:
            raise EventError(f"{DIARIZE} is true: {self.context.unlabelled}", "no_speaker_labels", DIARIZE)
        if begun and diarize != self.options.speakers:
            raise EventError(f"{DIARIZE} cannot change once there is audio", "invalid_value", DIARIZE)
        return diarize

    def _keywords(self, context_bias: list[str]) -> bytes | None:
        try:
            table = self.context.keywords(phrase for entry in context_bias for phrase in bias_phrases(entry))
        except KeywordError as error:
            raise EventError(f"{CONTEXT_BIAS}: {error}", "invalid_value", CONTEXT_BIAS) from None
        self._context_bias = [] if table is None else context_bias
        return table

    def _described(self) -> dict[str, Any]:
        form = self.options.form
        return {
            "request_id": self.context.id,
            "model": self._model,
            "audio_format": {"encoding": form.encoding, "sample_rate": form.rate},
            "target_streaming_delay_ms": self.options.delay_ms or self.context.delay_ms,
            "diarize": self.options.speakers,
            **({"context_bias": self._context_bias} if self._context_bias else {}),
            "turn_detection": self._turn_detection and self._turn_detection.model_dump(),
        }

    def _said(self, language: str | None) -> list[str]:
        """The event for a language that is clear and was not said last."""
        if language is None or language == self._language:
            return []
        self._language = language
        return [written("transcription.language", audio_language=language)]

    def _segment(self, timed: TimedSegment) -> str:
        found = timed.segment
        segment: dict[str, Any] = {"text": found.text, "start": round(found.start, 3), "end": round(found.end, 3)}
        if found.speaker is not None:
            segment["speaker_id"] = found.speaker
        self._segments.append({"type": "transcription_segment", **segment})
        return written("transcription.segment", **segment)

    def _done(self, done: outputs.TurnDone) -> list[str]:
        if done.turn.end is None:
            return []
        events = [*self._said(done.language), *(self._segment(segment) for segment in done.segments)]
        segments, self._segments = self._segments, []
        usage = {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.turn.tokens,
            "total_tokens": done.prompt_tokens + done.turn.tokens,
            "prompt_audio_seconds": round(done.turn.seconds),
        }
        fields: dict[str, Any] = {"model": self._model, "text": done.turn.text, "language": done.language}
        fields |= {"segments": segments, "usage": usage}
        if done.unlabelled is not None:  # an event `error` would end clients before this one
            fields["error"] = {"message": f"no speaker labels: {done.unlabelled}", "code": UNLABELLED}
        return [*events, written("transcription.done", **fields)]


def _error(message: str, status: int) -> str:
    return written("error", error={"message": message, "code": status})
