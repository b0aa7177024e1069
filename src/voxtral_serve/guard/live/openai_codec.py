"""The events of OpenAI's Realtime transcription, in its GA form.

A turn is an item of the conversation: it ends where speech ends (`turn_detection`) or with the client's
input_audio_buffer.commit, and its text comes as it is spoken, before that. An event that is wrong gets an `error` with
its `event_id`, and nothing else does: clients take any as fatal.
"""

import time
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from voxtral_serve.guard.live import commands, outputs
from voxtral_serve.guard.live.codec import Codec, CodecContext, Command, appended, retry_after, written
from voxtral_serve.guard.live.endings import IDLE, POLICY, REFUSED, Ending
from voxtral_serve.guard.live.events import Event, EventError, settings, text
from voxtral_serve.guard.live.items import TurnText
from voxtral_serve.guard.live.openai_settings import DELAY, OpenAiSettings
from voxtral_serve.guard.live.outputs import Output
from voxtral_serve.guard.live.turns import IdleTimeout, SpeechEnd, SpeechEvent, SpeechStart
from voxtral_serve.transcript.language import listed
from voxtral_serve.transcript.turns import TimedSegment

BUFFER = "input_audio_buffer"
APPEND, COMMIT, CLEAR = f"{BUFFER}.append", f"{BUFFER}.commit", f"{BUFFER}.clear"
UPDATE = "session.update"
BETA_UPDATE = "transcription_session.update"
BETA_CODE = "beta_api_shape_disabled"
BETA_WORDS = (
    "this is the beta form of the Realtime API, which OpenAI has ended: connect without the header OpenAI-Beta, and "
    "send session.update with session.type 'transcription'"
)
EMPTY_WORDS, EMPTY_CODE = "the input audio buffer is empty: expected audio before a commit", f"{BUFFER}_commit_empty"
LONGEST_ID = 512  # characters of an event_id that an error repeats
TEXT = "conversation.item.input_audio_transcription"
SERVER_ERROR, REQUEST_ERROR = "server_error", "invalid_request_error"
SERVER_ERRORS = ("processing_error", "engine_dead", "engine_stalled", "stopping")


class Item:
    """A turn as an item of the conversation. `previous`: the id of the item that was committed before."""

    def __init__(self, turn: TurnText) -> None:
        self.turn, self.id = turn, f"item_{uuid.uuid4().hex[:24]}"
        self.previous: str | None = None

    def described(self) -> dict[str, Any]:
        """As the conversation has it."""
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": "in_progress" if self.turn.end is None else "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": self.turn.text or None}],
        }


class OpenAiCodec(Codec):
    """`is_beta`: the client has asked for the API's beta form. `model`: that of the URL, if it names one."""

    options: commands.Options

    def __init__(self, context: CodecContext, is_beta: bool = False, model: str | None = None) -> None:
        super().__init__(context)
        self.settings = OpenAiSettings(context)
        self.options = self.settings.options
        self._is_beta, self._model = is_beta, model
        self._items: dict[int, Item] = {}  # those whose text is not complete, by number of their turn
        self._last: str | None = None  # id of the item that was committed last

    def open(self) -> list[Command]:
        created = commands.Answer(self._say("session.created", **opened(self.context, self.settings)))
        if self._is_beta:
            return [created, commands.Close(Ending(REFUSED, POLICY, BETA_WORDS, BETA_CODE))]
        if self._model is not None and not self.context.serves(self._model):
            words = f"the model {ascii(self._model)[:80]} does not exist: expected {self.context.model}"
            return [created, commands.Close(Ending(REFUSED, POLICY, words, "model_not_found"))]
        return [created]

    def decode(self, event: Event, begun: bool) -> list[Command]:
        kind = event.type
        if kind == APPEND:
            return [appended(event)]
        if kind == COMMIT:
            return [commands.Cut(EventError(EMPTY_WORDS, EMPTY_CODE))]
        if kind == CLEAR:
            return [commands.Clear(), commands.Answer(self._say(f"{BUFFER}.cleared"))]
        if kind == UPDATE:
            return self._update(settings(event.session), begun)
        if kind == BETA_UPDATE:
            raise EventError(BETA_WORDS, BETA_CODE)
        expected = ", ".join((UPDATE, APPEND, COMMIT, CLEAR))
        raise EventError(f"type is {ascii(kind)[:80]}: expected one of {expected}", "invalid_value", "type")

    def encode(self, output: Output) -> list[str]:
        if isinstance(output, (outputs.TurnDelta, outputs.TurnSegment)) and not self.settings.transcribes:
            return []
        match output:
            case outputs.TurnHeard(turn, event):
                return [self._heard(self._item(turn), event)]
            case outputs.TurnCut(turn):
                return self._committed(self._item(turn))
            case outputs.TurnDelta(turn, delta, logprobs):
                fields = {"logprobs": logprobs} if self.options.logprobs else {}
                return [self._text("delta", self._item(turn), delta=delta, **fields)]
            case outputs.TurnSegment(turn, segment):
                return [self._segment(self._item(turn), segment)]
            case outputs.TurnDone():
                return self._done(output)
        raise TypeError(f"{output!r:.80} has no event in OpenAI's protocol")

    def refuse(self, error: EventError, event: Event | None) -> str:
        event_id = None if event is None else text(event.event_id)
        if event_id is not None and len(event_id) > LONGEST_ID:
            event_id = None
        return self._error(str(error), error.code, REQUEST_ERROR, error.param, event_id)

    def last_words(self, ending: Ending) -> list[str]:
        if ending.reason == IDLE:  # clients that take any error as fatal connect again after a close without one
            return []
        error = {"type": SERVER_ERROR, "code": ending.code, "message": ending.words, "param": None}
        committed = [item for item in self._items.values() if item.turn.end is not None]
        failed = [self._text("failed", item, error=error) for item in committed]
        kind = SERVER_ERROR if ending.code in SERVER_ERRORS else REQUEST_ERROR
        return [*failed, self._error(ending.words, ending.code or "", kind, more=retry_after(ending))]

    def _update(self, update: Any, begun: bool) -> list[Command]:
        new, old = self.settings.updated(update), self.settings
        if begun and new.delay_ms != old.delay_ms:
            raise EventError(f"{DELAY} cannot change once there is audio", "invalid_value", DELAY)
        self.settings, self.options = new, new.options
        return [
            commands.Configure(new.options, find=new.input.turn_detection != old.input.turn_detection),
            commands.Answer(self._say("session.updated", session=described(self.context, new))),
        ]

    def _item(self, turn: TurnText) -> Item:
        if turn.number not in self._items:
            self._items[turn.number] = Item(turn)
        return self._items[turn.number]

    def _heard(self, item: Item, event: SpeechEvent) -> str:
        def ms(samples: int) -> int:
            return samples * 1000 // self.context.rate_hz

        match event:
            case SpeechStart(at):
                return self._say(f"{BUFFER}.speech_started", audio_start_ms=ms(at), item_id=item.id)
            case SpeechEnd(at):
                return self._say(f"{BUFFER}.speech_stopped", audio_end_ms=ms(at), item_id=item.id)
            case IdleTimeout(start, end):
                span = {"audio_start_ms": ms(start), "audio_end_ms": ms(end)}
                return self._say(f"{BUFFER}.timeout_triggered", **span, item_id=item.id)

    def _committed(self, item: Item) -> list[str]:
        """The item is in the conversation; its text is not complete."""
        item.previous, self._last = self._last, item.id
        return [
            self._say(f"{BUFFER}.committed", item_id=item.id, previous_item_id=item.previous),
            self._say("conversation.item.added", previous_item_id=item.previous, item=item.described()),
        ]

    def _done(self, done: outputs.TurnDone) -> list[str]:
        item = self._items.pop(done.turn.number, None)
        if item is None or done.turn.end is None or not self.settings.transcribes:
            return []
        fields: dict[str, Any] = {
            "transcript": done.turn.text,
            "usage": {"type": "duration", "seconds": done.turn.seconds},
        }
        if self.options.logprobs and done.turn.logprobs is not None:
            fields["logprobs"] = done.turn.logprobs.finish()
        if self.options.languages:
            fields["languages"] = listed(done.language)
        return [
            *(self._segment(item, segment) for segment in done.segments),
            self._text("completed", item, **fields),
            self._say("conversation.item.done", previous_item_id=item.previous, item=item.described()),
        ]

    def _segment(self, item: Item, timed: TimedSegment) -> str:
        """OpenAI's segment without `speaker`, and with the times of its words."""
        segment, words = timed
        return self._text(
            "segment",
            item,
            id=f"seg_{uuid.uuid4().hex[:24]}",
            start=round(segment.start, 3),
            end=round(segment.end, 3),
            text=segment.text,
            words=[{"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)} for word in words],
        )

    def _text(self, kind: str, item: Item, **fields: Any) -> str:
        return self._say(f"{TEXT}.{kind}", item_id=item.id, content_index=0, **fields)

    def _error(
        self,
        words: str,
        code: str,
        kind: str,
        param: str | None = None,
        event_id: str | None = None,
        more: Mapping[str, int] = MappingProxyType({}),
    ) -> str:
        error = {"type": kind, "code": code, "message": words, "param": param, "event_id": event_id, **more}
        return self._say("error", error=error)

    @staticmethod
    def _say(kind: str, **fields: Any) -> str:
        return written(kind, event_id=f"event_{uuid.uuid4().hex[:24]}", **fields)


def described(context: CodecContext, settings: OpenAiSettings) -> dict[str, Any]:
    """The session, as OpenAI's events have it."""
    end = {} if context.expires_at is None else {"expires_at": context.expires_at}
    return {"id": f"sess_{context.id}", "object": "realtime.transcription_session", **end, **settings.session}


def opened(context: CodecContext, settings: OpenAiSettings) -> dict[str, Any]:
    """The fields of session.created: OpenAI's `session`, and the `id` and `created` of vLLM's."""
    return {"id": f"sess-{context.id}", "created": int(time.time()), "session": described(context, settings)}
