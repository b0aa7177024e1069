"""OpenAI's Realtime transcription, in its GA form, around a live session.

The audio of a connection is one session. A turn of it is an item of the conversation: it ends where speech ends
(`turn_detection`) or with the client's input_audio_buffer.commit, and its text comes as it is spoken, before that.
An event that is wrong gets an `error` with its `event_id`, and nothing else does: clients take any as fatal.
"""

import time
import uuid
from typing import Any

from voxtral_serve.guard.live.events import Event, EventError, settings, text
from voxtral_serve.guard.live.items import TurnText
from voxtral_serve.guard.live.openai_settings import OpenAiSettings
from voxtral_serve.guard.live.service import POLICY, REFUSED, Ending
from voxtral_serve.guard.live.socket import LiveSocket
from voxtral_serve.guard.live.turn_audio import TurnAudio
from voxtral_serve.guard.live.turn_dialect import NO_ERRORS, TurnDialect
from voxtral_serve.guard.live.turns import IdleTimeout, SpeechEnd, SpeechStart, TurnFinder
from voxtral_serve.transcript.turns import TimedSegment

APPEND, COMMIT, CLEAR = (f"input_audio_buffer.{name}" for name in ("append", "commit", "clear"))
UPDATE = "session.update"
BETA_UPDATE = "transcription_session.update"
BETA_CODE = "beta_api_shape_disabled"
BETA_WORDS = (
    "this is the beta form of the Realtime API, which OpenAI has ended: connect without the header OpenAI-Beta, and "
    "send session.update with session.type 'transcription'"
)
LONGEST_ID = 512  # characters of an event_id that an error repeats
TEXT = "conversation.item.input_audio_transcription"
SERVER_ERROR, REQUEST_ERROR = "server_error", "invalid_request_error"
SERVER_ERRORS = ("processing_error", "engine_dead", "engine_stalled", "stopping")


class Item(TurnText):
    """A turn's item. `dropped`: the client has cleared its audio."""

    def __init__(self, begin: int, dialect: "OpenAiDialect") -> None:
        super().__init__(begin, dialect.service.stream, dialect.rate_hz)
        self.id = f"item_{uuid.uuid4().hex[:24]}"
        self.previous: str | None = None
        self.committed = self.dropped = False

    def described(self) -> dict[str, Any]:
        """As the conversation has it."""
        content = {"type": "input_audio", "transcript": self.text or None}
        status = "in_progress" if self.end is None else "completed"
        head = {"id": self.id, "object": "realtime.item", "type": "message"}
        return {**head, "status": status, "role": "user", "content": [content]}


class OpenAiDialect(TurnDialect):
    """`beta`: the client has asked for the API's beta form. `model`: that of the URL, if it names one."""

    def __init__(self, socket: LiveSocket, beta: bool = False, model: str | None = None) -> None:
        self.settings = OpenAiSettings(socket.service)
        super().__init__(socket, self.settings.form)
        self._beta, self._model = beta, model
        self._last: str | None = None  # the item that was committed last

    async def greet(self) -> None:
        await self.say("session.created", **created(self.socket, self.settings))
        if self._beta:
            self.socket.stop(Ending(REFUSED, POLICY, BETA_WORDS, BETA_CODE))
        elif self._model is not None and not self.service.serves(self._model):
            words = f"the model {ascii(self._model)[:80]} does not exist: expected {self.service.model}"
            self.socket.stop(Ending(REFUSED, POLICY, words, "model_not_found"))

    async def event(self, event: Event, large: bool) -> None:
        kind = event.type
        if kind == APPEND:
            await self.append(event, large)
        elif kind == COMMIT:
            await self._commit()
        elif kind == CLEAR:
            await self._clear()
        elif kind == UPDATE:
            await self._update(settings(event.session))
        elif kind == BETA_UPDATE:
            raise EventError(BETA_WORDS, BETA_CODE)
        else:
            expected = ", ".join((UPDATE, APPEND, COMMIT, CLEAR))
            raise EventError(f"type is {ascii(kind)[:80]}: expected one of {expected}", "invalid_value", "type")

    async def refuse(self, error: EventError, event: Event | None) -> None:
        caused = None if event is None else text(event.event_id)
        known = caused is not None and len(caused) <= LONGEST_ID
        await self._error(str(error), error.code, error.param, caused if known else None, REQUEST_ERROR)

    async def last_error(self, ending: Ending) -> None:
        if ending.reason in NO_ERRORS:
            return
        content = {"type": SERVER_ERROR, "code": ending.code, "message": ending.words, "param": None}
        for item in self._pending():
            await self.say(f"{TEXT}.failed", item_id=item.id, content_index=0, error=content)
        kind = SERVER_ERROR if ending.code in SERVER_ERRORS else REQUEST_ERROR
        await self._error(ending.words, ending.code or "", None, None, kind)

    @property
    def awaits_text(self) -> bool:
        return bool(self._pending())

    @property
    def unfinished(self) -> bool:
        return self.awaits_text or self.uncut > 0

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.say(kind, event_id=f"event_{uuid.uuid4().hex[:24]}", **fields)

    async def _error(self, words: str, code: str, param: str | None, event_id: str | None, kind: str) -> None:
        content = {"type": kind, "code": code, "message": words, "param": param, "event_id": event_id}
        await self.say("error", error=content)

    # ---- Settings

    async def _update(self, given: Any) -> None:
        new = self.settings.updated(given)
        if self.session is not None and (new.delay_ms or self.service.delay_ms) != (
            self.settings.delay_ms or self.service.delay_ms
        ):
            where = "session.audio.input.transcription.delay"
            raise EventError(f"{where} cannot change once there is audio", "invalid_value", where)
        old, self.settings = self.settings, new
        if new.form != old.form:
            await self.hear(self.decoder.flush())
            self.set_format(new.form)
        if self.audio is not None:
            if new.input.turn_detection != old.input.turn_detection:
                self.find()
            self.audio.session.logprobs = new.logprobs
        await self.say("session.updated", session=described(self.socket, new))

    def options(self) -> tuple[int | None, bool]:
        return self.settings.delay_ms, self.settings.logprobs

    def finder(self) -> TurnFinder | None:
        rule = self.settings.turn_rule(self.rate_hz)
        begin = self.audio.begin if self.audio is not None else 0
        return None if rule is None else TurnFinder(rule, begin, self._sentence_over)

    # ---- Audio

    async def found(self, audio: TurnAudio, event: Any) -> None:
        item = self._item(audio)

        def ms(samples: int) -> int:
            return samples * 1000 // self.rate_hz

        match event:
            case SpeechStart(at):
                await self.say("input_audio_buffer.speech_started", audio_start_ms=ms(at), item_id=item.id)
            case SpeechEnd(at):
                await self.say("input_audio_buffer.speech_stopped", audio_end_ms=ms(at), item_id=item.id)
                await self._end_turn(audio, "silence")
            case IdleTimeout(start, end):
                span = {"audio_start_ms": ms(start), "audio_end_ms": ms(end)}
                await self.say("input_audio_buffer.timeout_triggered", **span, item_id=item.id)
                await self._end_turn(audio, "timeout")

    async def _commit(self) -> None:
        await self.hear(self.decoder.flush())
        if self.audio is None or not self.uncut:
            raise EventError(
                "the input audio buffer is empty: expected audio before a commit", "input_audio_buffer_commit_empty"
            )
        await self._end_turn(self.audio, "client")

    async def _clear(self) -> None:
        self.set_format(self.settings.form)
        if self.audio is not None and self.uncut:
            self._item(self.audio).dropped = True
            self.audio.cut()
        await self.say("input_audio_buffer.cleared")

    async def _end_turn(self, audio: TurnAudio, by: str) -> None:
        item = self._item(audio)
        await self._announce(item, audio.fed)
        self.service.metrics.turns.labels(by).inc()
        audio.cut()

    async def _announce(self, item: Item, end: int) -> None:
        """The item is in the conversation; its text is not complete."""
        item.committed, item.end, item.previous, self._last = True, end, self._last, item.id
        self.socket.texts += 1
        await self.say("input_audio_buffer.committed", item_id=item.id, previous_item_id=item.previous)
        await self.say("conversation.item.added", previous_item_id=item.previous, item=item.described())

    def new_turn(self, begin: int) -> "Item":
        return Item(begin, self)

    def _item(self, audio: TurnAudio) -> "Item":
        item = self.current(audio)
        assert isinstance(item, Item)
        return item

    def _pending(self) -> list["Item"]:
        """Items whose text the client waits for."""
        return [each for each in self.turns.values() if isinstance(each, Item) and each.committed and not each.dropped]

    def _sentence_over(self, voice: int) -> bool:
        """Whether the text up to this sample has come, and ends a sentence."""
        session = self.session
        if session is None or (turn := self.turns.get(session.turn)) is None:
            return False
        shape = session.shape
        heard = session.samples - session.backlog
        return heard >= voice + (shape.delay + 2) * shape.samples and turn.ends_sentence

    # ---- Text

    async def delta(self, turn: TurnText, text: str, logprobs: list[dict[str, Any]]) -> None:
        assert isinstance(turn, Item)
        if not turn.dropped and self.settings.transcribes:
            more = {"logprobs": logprobs} if self.settings.logprobs else {}
            await self.say(f"{TEXT}.delta", item_id=turn.id, content_index=0, delta=text, **more)

    async def segment(self, turn: TurnText, segment: TimedSegment) -> None:
        assert isinstance(turn, Item)
        if not turn.dropped and self.settings.transcribes:
            await self.say(f"{TEXT}.segment", item_id=turn.id, content_index=0, **_segment(*segment))

    async def complete(self, turn: TurnText) -> None:
        assert isinstance(turn, Item) and self.audio is not None
        if not turn.committed and not turn.dropped and self.audio.fed > turn.begin:
            await self._announce(turn, self.audio.fed)
        if turn.dropped or not turn.committed or not self.settings.transcribes:
            return
        for segment in turn.last_segments(self.audio.power):
            await self.segment(turn, segment)
        more = {}
        if self.settings.logprobs and turn.logprobs is not None:
            more["logprobs"] = turn.logprobs.finish()
        usage = {"type": "duration", "seconds": self.heard(turn)}
        head = {"item_id": turn.id, "content_index": 0}
        await self.say(f"{TEXT}.completed", **head, transcript=turn.text, usage=usage, **more)
        await self.say("conversation.item.done", previous_item_id=turn.previous, item=turn.described())


def _segment(segment: Any, words: list[Any]) -> dict[str, Any]:
    """OpenAI's segment without `speaker`, and with the times of its words."""
    return {
        "id": f"seg_{uuid.uuid4().hex[:24]}",
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "words": [{"word": w.text, "start": round(w.start, 3), "end": round(w.end, 3)} for w in words],
    }


def described(socket: LiveSocket, settings: OpenAiSettings) -> dict[str, Any]:
    """The session, as OpenAI's events have it."""
    end = {} if socket.expires_at is None else {"expires_at": socket.expires_at}
    return {"id": f"sess_{socket.id}", "object": "realtime.transcription_session", **end, **settings.session}


def created(socket: LiveSocket, settings: OpenAiSettings) -> dict[str, Any]:
    """Of session.created: OpenAI's `session`, and the `id` and `created` of vLLM's."""
    session = described(socket, settings)
    return {"id": f"sess-{socket.id}", "created": int(time.time()), "session": session}
