"""OpenAI's Realtime transcription, in its GA form, around a live session.

The audio of a connection is one session. A turn of it is an item of the conversation: it ends where speech ends
(`turn_detection`) or with the client's input_audio_buffer.commit, and its text comes as it is spoken, before that.
An event that is wrong gets an `error` with its `event_id`, and nothing else does: clients take any as fatal.
"""

import asyncio
import contextlib
import functools
import time
import uuid
from typing import Any

from voxtral_serve.audio.stream import StreamDecoder
from voxtral_serve.guard.live.items import TurnText, timed_segments
from voxtral_serve.guard.live.openai_settings import OpenAiSettings
from voxtral_serve.guard.live.service import POLICY, STOPPING, Ending
from voxtral_serve.guard.live.session import LiveSession, TurnEnd
from voxtral_serve.guard.live.socket import Dialect, EventError, LiveSocket, decoded
from voxtral_serve.guard.live.turn_audio import TurnAudio
from voxtral_serve.guard.live.turns import IdleTimeout, SpeechEnd, SpeechStart, TurnFinder

APPEND, COMMIT, CLEAR = (f"input_audio_buffer.{name}" for name in ("append", "commit", "clear"))
UPDATE = "session.update"
BETA_UPDATE = "transcription_session.update"
BETA = EventError(
    "this is the beta form of the Realtime API, which OpenAI has ended: connect without the header OpenAI-Beta, and "
    "send session.update with session.type 'transcription'",
    "beta_api_shape_disabled",
)
TEXT = "conversation.item.input_audio_transcription"
SERVER_ERRORS = ("processing_error", "engine_dead", "engine_stalled", "stopping")


class Item(TurnText):
    """A turn's item. `dropped`: the client has cleared its audio."""

    def __init__(self, begin: int, dialect: "OpenAiDialect") -> None:
        super().__init__(begin, dialect.service.stream)
        self.id = f"item_{uuid.uuid4().hex[:24]}"
        self.previous: str | None = None
        self.committed = self.dropped = False

    def described(self) -> dict[str, Any]:
        """As the conversation has it."""
        content = {"type": "input_audio", "transcript": self.text or None}
        status = "in_progress" if self.end is None else "completed"
        head = {"id": self.id, "object": "realtime.item", "type": "message"}
        return {**head, "status": status, "role": "user", "content": [content]}


class OpenAiDialect(Dialect):
    """`beta`: the client has asked for the API's beta form. `model`: that of the URL, if it names one."""

    def __init__(self, socket: LiveSocket, beta: bool = False, model: str | None = None) -> None:
        super().__init__(socket)
        self.settings = OpenAiSettings(self.service)
        self._beta, self._model = beta, model
        self._decoder = self._new_decoder()
        self._audio: TurnAudio | None = None
        self._items: dict[int, Item] = {}  # by turn: those whose text is not complete
        self._last: str | None = None  # the item that was committed last

    async def greet(self) -> None:
        await self.say("session.created", **created(self.socket, self.settings))
        if self._beta:
            self.socket.stop(Ending("refused", POLICY, str(BETA), BETA.code))
        elif self._model is not None and not self.service.serves(self._model):
            words = f"the model {ascii(self._model)[:80]} does not exist: expected {self.service.model}"
            self.socket.stop(Ending("refused", POLICY, words, "model_not_found"))

    async def event(self, event: dict[str, Any], large: bool) -> None:
        kind = event.get("type")
        if kind == APPEND:
            audio = event.get("audio")
            content = await asyncio.to_thread(decoded, audio, APPEND) if large else decoded(audio, APPEND)
            if not content and audio:
                raise EventError("audio is not base64 of at most 15 MiB", "invalid_audio", "audio")
            await self.append(content, large)
        elif kind == COMMIT:
            await self._commit()
        elif kind == CLEAR:
            await self._clear()
        elif kind == UPDATE:
            await self._update(event.get("session"))
        elif kind == BETA_UPDATE:
            raise BETA
        else:
            expected = ", ".join((UPDATE, APPEND, COMMIT, CLEAR))
            raise EventError(f"type is {ascii(kind)[:80]}: expected one of {expected}", "invalid_value", "type")

    async def refuse(self, error: EventError, event: dict[str, Any] | None) -> None:
        caused = (event or {}).get("event_id")
        await self._error(str(error), error.code, error.param, caused if isinstance(caused, str) else None)

    async def last_error(self, ending: Ending) -> None:
        content = {"type": "server_error", "code": ending.code, "message": ending.words, "param": None}
        for item in self._items.values():
            if item.committed and not item.dropped:
                await self.say(f"{TEXT}.failed", item_id=item.id, content_index=0, error=content)
        await self._error(ending.words, ending.code or "", None, None)

    def drain(self) -> None:
        assert self.session is not None
        self.session.end()

    @property
    def awaits_text(self) -> bool:
        return any(item.committed and not item.dropped for item in self._items.values())

    @property
    def unfinished(self) -> bool:
        return self.awaits_text or (self._audio is not None and self._audio.fed > self._audio.begin)

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.say(kind, event_id=f"event_{uuid.uuid4().hex[:24]}", **fields)

    async def _error(self, words: str, code: str, param: str | None, event_id: str | None) -> None:
        kind = "server_error" if code in SERVER_ERRORS else "invalid_request_error"
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
            await self._hear(self._decoder.flush())
            self._decoder = self._new_decoder()
        if self._audio is not None:
            if new.input["turn_detection"] != old.input["turn_detection"]:
                self._find(self._audio)
            self._audio.session.logprobs = new.logprobs
        await self.say("session.updated", session=described(self.socket, new))

    def _new_decoder(self) -> StreamDecoder:
        return StreamDecoder(self.settings.form, self.service.link.shape.rate_hz)

    def _find(self, audio: TurnAudio) -> None:
        rule = self.settings.turn_rule(self.service.link.shape.rate_hz)
        audio.find(None if rule is None else TurnFinder(rule, audio.begin, self._sentence_over))

    # ---- Audio

    async def append(self, content: bytes, large: bool = False) -> None:
        """Bytes of the session's format."""
        pcm = await asyncio.to_thread(self._decoder.take, content) if large else self._decoder.take(content)
        await self._hear(pcm)

    async def _hear(self, pcm: bytes) -> None:
        if not pcm or (self._audio is None and not await self._begin()):
            return
        assert self._audio is not None
        async for event in self._audio.feed(pcm):
            await self._turn(self._audio, event)

    async def _begin(self) -> bool:
        session = self.service.session(self.socket.failed, delay_ms=self.settings.delay_ms)
        session.logprobs = self.settings.logprobs
        self.session = session
        if not await self.socket.begin(session):
            return False
        self._audio = TurnAudio(session, self.service.voices)
        self._find(self._audio)
        self.socket.write(functools.partial(self._write, session, self._audio))
        if self.draining:
            session.end()
        return True

    async def _turn(self, audio: TurnAudio, event: Any) -> None:
        item, rate = self._item(audio.session.turn, audio.begin), self.service.link.shape.rate_hz

        def ms(samples: int) -> int:
            return samples * 1000 // rate

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
        await self._hear(self._decoder.flush())
        if self._audio is None or self._audio.fed == self._audio.begin:
            raise EventError(
                "the input audio buffer is empty: expected audio before a commit", "input_audio_buffer_commit_empty"
            )
        await self._end_turn(self._audio, "client")

    async def _clear(self) -> None:
        self._decoder = self._new_decoder()
        if self._audio is not None and self._audio.fed > self._audio.begin:
            self._item(self._audio.session.turn, self._audio.begin).dropped = True
            self._audio.cut()
        await self.say("input_audio_buffer.cleared")

    async def _end_turn(self, audio: TurnAudio, by: str) -> None:
        item = self._item(audio.session.turn, audio.begin)
        await self._announce(item, audio.fed)
        self.service.metrics.turns.labels(by).inc()
        audio.cut()

    async def _announce(self, item: Item, end: int) -> None:
        """The item is in the conversation; its text is not complete."""
        item.committed, item.end, item.previous, self._last = True, end, self._last, item.id
        self.socket.texts += 1
        await self.say("input_audio_buffer.committed", item_id=item.id, previous_item_id=item.previous)
        await self.say("conversation.item.added", previous_item_id=item.previous, item=item.described())

    def _item(self, turn: int, begin: int) -> Item:
        if turn not in self._items:
            self._items[turn] = Item(begin, self)
        return self._items[turn]

    def _sentence_over(self, voice: int) -> bool:
        """Whether the text up to this sample has come, and ends a sentence."""
        session = self.session
        if session is None or (item := self._items.get(session.turn)) is None:
            return False
        shape = session.shape
        heard = session.samples - session.backlog
        return heard >= voice + (shape.delay + 2) * shape.samples and item.ends_sentence

    # ---- Text

    async def _write(self, session: LiveSession, audio: TurnAudio) -> None:
        async with contextlib.aclosing(session.outputs()) as outputs:
            async for output in outputs:
                if isinstance(output, TurnEnd):
                    await self._complete(self._items.get(output.turn), output.turn, audio)
                    continue
                item = self._item(output.turn, output.start)
                delta, logprobs = item.add(output)
                if delta and not item.dropped and self.settings.transcribes:
                    more = {"logprobs": logprobs} if self.settings.logprobs else {}
                    await self.say(f"{TEXT}.delta", item_id=item.id, content_index=0, delta=delta, **more)
        if self.draining:
            self.socket.stop(STOPPING)

    async def _complete(self, item: Item | None, turn: int, audio: TurnAudio) -> None:
        """The text of a turn is complete. The last turn of a session that was ended may have no commit."""
        if item is not None and not item.committed and not item.dropped and audio.fed > item.begin:
            await self._announce(item, audio.fed)
        self._items.pop(turn, None)
        if item is None or item.dropped or not item.committed or not self.settings.transcribes:
            return
        rate = self.service.link.shape.rate_hz
        for segment in timed_segments(item.words(audio.power, rate), _segment):
            await self.say(f"{TEXT}.segment", item_id=item.id, content_index=0, **segment)
        more = {}
        if self.settings.logprobs and item.logprobs is not None:
            more["logprobs"] = item.logprobs.finish()
        usage = {"type": "duration", "seconds": round(((item.end or 0) - item.begin) / rate, 3)}
        await self.say(f"{TEXT}.completed", item_id=item.id, content_index=0, transcript=item.text, usage=usage, **more)
        await self.say("conversation.item.done", previous_item_id=item.previous, item=item.described())
        self.socket.heed()


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
    return {"id": f"sess_{socket.id}", "object": "realtime.transcription_session", **settings.session}


def created(socket: LiveSocket, settings: OpenAiSettings) -> dict[str, Any]:
    """Of session.created: OpenAI's `session`, and the `id` and `created` of vLLM's."""
    session = described(socket, settings)
    return {"id": f"sess-{socket.id}", "created": int(time.time()), "session": session}
