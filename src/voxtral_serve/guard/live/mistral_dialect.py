"""Mistral's realtime transcription, as its Python client speaks it, around a live session.

input_audio.append has the audio. input_audio.flush has the text of the audio so far come at once, with its segments and
transcription.done; input_audio.end does so, too, and ends the connection. An `error` has a message and the number of an
HTTP status. `diarize`, `speaker_references`, `context_bias` and `language` have no effect: session.updated says so.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from voxtral_serve.audio.stream import RATES_HZ, StreamFormat
from voxtral_serve.guard.live.events import Event, EventError, Name, Names, Settings, read, settings
from voxtral_serve.guard.live.items import TurnText
from voxtral_serve.guard.live.service import POLICY, REFUSED, Ending
from voxtral_serve.guard.live.socket import LiveSocket
from voxtral_serve.guard.live.turn_audio import TurnAudio
from voxtral_serve.guard.live.turn_dialect import NO_ERRORS, TurnDialect
from voxtral_serve.transcript.turns import TimedSegment

APPEND, FLUSH, END, UPDATE = "input_audio.append", "input_audio.flush", "input_audio.end", "session.update"
ENDED = Ending("done", 1000, "the text is complete")
STATUSES = {
    **{
        "model_not_found": 404,
        "too_many_sessions": 429,
        "rate_limit_exceeded": 429,
        "idle_timeout": 408,
        "unread": 408,
    },
    "session_expired": 408,
    **{"processing_error": 500, "engine_dead": 503, "engine_stalled": 504, "stopping": 503},
}
BAD_REQUEST = 400
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


class Update(Settings):
    """The `session` of an update. The last four are without effect."""

    audio_format: AudioFormat | None = None
    target_streaming_delay_ms: Time | None = None
    turn_detection: TurnDetection | None = None
    diarize: bool | None = None
    language: Name | None = None
    context_bias: Names | None = None
    speaker_references: Any = None


class TurnSign(NamedTuple):
    """An event of the protocol: `kind` without "turn.", the sample that it is about, and why a turn has ended."""

    kind: str
    at: int
    reason: str | None = None


class TurnSigns:
    """Tells of turns by Silero VAD's probability of speech, and ends none.

    A turn starts with a frame of `start_threshold`. After half of `min_silence_ms` below `eager_end_threshold` it may
    be over, and goes on with a frame of `start_threshold`. It is over after `min_silence_ms` below `end_threshold`, or
    `end_timeout_ms` after it may be over.
    """

    def __init__(self, settings: TurnDetection, rate_hz: int) -> None:
        self._settings = settings
        self._silence = settings.min_silence_ms * rate_hz // 1000
        timeout = settings.end_timeout_ms
        self._timeout = None if timeout is None else timeout * rate_hz // 1000
        self.reset(0)

    def reset(self, at: int) -> None:
        """A flush ends a text and no turn."""
        if not at:
            self._state, self._voice, self._loud, self._eager_at = "silent", 0, 0, 0

    def step(self, probability: float, start: int, end: int) -> TurnSign | None:
        settings = self._settings
        if probability >= settings.eager_end_threshold:
            self._loud = end
        if probability >= settings.end_threshold:
            self._voice = end
        if self._state == "speaking":
            if end - self._loud >= self._silence / 2:
                self._state, self._eager_at = "eager", end
                return TurnSign("eager_end", end)
        elif self._state == "eager":
            if probability >= settings.start_threshold:
                self._state = "speaking"
                return TurnSign("resume", start)
            if end - self._voice >= self._silence:
                self._state = "silent"
                return TurnSign("end", end, "threshold")
            if self._timeout is not None and end - self._eager_at >= self._timeout:
                self._state = "silent"
                return TurnSign("end", end, "timeout")
        elif probability >= settings.start_threshold:
            self._state, self._loud, self._voice = "speaking", end, end
            return TurnSign("start", start)
        return None


class FlushText(TurnText):
    """The text up to a flush, and its segments as they were sent."""

    def __init__(self, begin: int, dialect: "MistralDialect") -> None:
        super().__init__(begin, dialect.service.stream, dialect.rate_hz)
        self.segments: list[dict[str, Any]] = []


class MistralDialect(TurnDialect):
    """`model`: that of the URL."""

    def __init__(self, socket: LiveSocket, model: str | None) -> None:
        super().__init__(socket, StreamFormat("pcm_s16le", socket.service.link.shape.rate_hz))
        self._model = model if model is not None else self.service.model
        self._turns: TurnDetection | None = None
        self._delay_ms: int | None = None
        self._ended = False

    async def greet(self) -> None:
        if not self.service.serves(self._model):
            words = f"the model {ascii(self._model)[:80]} does not exist: expected {self.service.model}"
            self.socket.stop(Ending(REFUSED, POLICY, words, "model_not_found"))
            return
        await self.socket.say("session.created", session=self._described())

    async def event(self, event: Event, large: bool) -> None:
        kind = event.type
        if kind == UPDATE:
            await self._update(read(Update, settings(event.session)))
        elif kind not in (APPEND, FLUSH, END):
            expected = ", ".join((UPDATE, APPEND, FLUSH, END))
            raise EventError(f"type is {ascii(kind)[:80]}: expected one of {expected}", "invalid_value", "type")
        elif self._ended:
            if kind == APPEND:
                raise EventError(f"{APPEND} after {END}: expected a new connection", "invalid_event")
        elif kind == APPEND:
            await self.append(event, large)
        else:
            await self._flush()
            if kind == END:
                await self._end()

    async def refuse(self, error: EventError, event: Event | None) -> None:
        await self._error(str(error), BAD_REQUEST)

    async def last_error(self, ending: Ending) -> None:
        if ending.reason not in NO_ERRORS:
            await self._error(ending.words, STATUSES.get(ending.code or "", BAD_REQUEST))

    @property
    def awaits_text(self) -> bool:
        return self._ended or any(turn.end is not None for turn in self.turns.values())

    @property
    def unfinished(self) -> bool:
        return self.awaits_text or self.uncut > 0

    async def _error(self, words: str, status: int) -> None:
        await self.socket.say("error", error={"message": words, "code": status})

    # ---- Settings

    async def _update(self, new: Update) -> None:
        form = self._format(new.audio_format)
        delay_ms = self._delay(new.target_streaming_delay_ms)
        if "target_streaming_delay_ms" in new.model_fields_set:
            self._delay_ms = delay_ms
        if form != self.decoder.form:
            self.set_format(form)
        if "turn_detection" in new.model_fields_set:
            self._turns = new.turn_detection
            self.find()
        await self.socket.say("session.updated", session=self._described())

    def _format(self, given: AudioFormat | None) -> StreamFormat:
        if given is None:
            return self.decoder.form
        form = StreamFormat(given.encoding or "pcm_s16le", given.sample_rate or self.rate_hz)
        if self.audio is not None and form != self.decoder.form:
            path = "session.audio_format"
            raise EventError(f"{path} cannot change once there is audio", "invalid_value", path)
        return form

    def _delay(self, delay_ms: int | None) -> int | None:
        if delay_ms is None:
            return None
        path = "session.target_streaming_delay_ms"
        try:
            self.service.check_delay(delay_ms)
        except ValueError as error:
            raise EventError(f"{path} is {error}", "invalid_value", path) from None
        if self.audio is not None and delay_ms != (self._delay_ms or self.service.delay_ms):
            raise EventError(f"{path} cannot change once there is audio", "invalid_value", path)
        return delay_ms

    def _described(self) -> dict[str, Any]:
        form = self.decoder.form
        return {
            "request_id": self.socket.id,
            "model": self._model,
            "audio_format": {"encoding": form.encoding, "sample_rate": form.rate},
            "target_streaming_delay_ms": self._delay_ms or self.service.delay_ms,
            "diarize": False,
            "turn_detection": self._turns and self._turns.model_dump(),
        }

    def options(self) -> tuple[int | None, bool]:
        return self._delay_ms, False

    # ---- Audio

    def finder(self) -> TurnSigns | None:
        return None if self._turns is None else TurnSigns(self._turns, self.rate_hz)

    async def found(self, audio: TurnAudio, event: Any) -> None:
        reason = {} if event.reason is None else {"end_reason": event.reason}
        await self.socket.say(f"turn.{event.kind}", time_s=round(event.at / self.rate_hz, 3), **reason)

    async def _flush(self) -> None:
        await self.hear(self.decoder.flush())
        if self.audio is not None and self.uncut:
            self.current(self.audio).end = self.audio.fed
            self.service.metrics.turns.labels("client").inc()
            self.audio.cut()

    async def _end(self) -> None:
        self._ended = True
        if self.session is not None:
            self.session.end()
        else:
            await self._done(FlushText(0, self))
            self.socket.stop(ENDED)

    # ---- Text

    def new_turn(self, begin: int) -> FlushText:
        return FlushText(begin, self)

    async def delta(self, turn: TurnText, text: str, logprobs: list[dict[str, Any]]) -> None:
        await self.socket.say("transcription.text.delta", text=text)

    async def segment(self, turn: TurnText, segment: TimedSegment) -> None:
        assert isinstance(turn, FlushText)
        (text, start, end), _ = segment
        turn.segments.append({"text": text, "start": round(start, 3), "end": round(end, 3)})
        await self.socket.say("transcription.segment", **turn.segments[-1])

    async def complete(self, turn: TurnText) -> None:
        assert isinstance(turn, FlushText) and self.audio is not None
        if turn.end is None:
            turn.end = self.audio.fed
        if turn.end > turn.begin:
            await self._done(turn)

    async def finished(self) -> None:
        await super().finished()
        if self._ended:
            self.socket.stop(ENDED)

    async def _done(self, turn: FlushText) -> None:
        self.socket.texts += 1
        if self.audio is not None:
            for segment in turn.last_segments(self.audio.power):
                await self.segment(turn, segment)
        prompt = turn.requests * (self.session or self.service.link).shape.prompt
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": turn.tokens,
            "total_tokens": prompt + turn.tokens,
            "prompt_audio_seconds": round(self.heard(turn)),
        }
        await self.socket.say(
            "transcription.done",
            model=self._model,
            text=turn.text,
            language=None,  # which the model does not say
            segments=[{"type": "transcription_segment", **segment} for segment in turn.segments],
            usage=usage,
        )
