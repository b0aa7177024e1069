"""The events of vLLM's `/v1/realtime`, as its own server has them, around live sessions.

session.update names the model, input_audio_buffer.commit begins a text, input_audio_buffer.append has its audio, a
commit that is `final` ends it. The answers are one transcription.delta for each token, most of them empty, and
transcription.done; then another text may begin. An event that is wrong gets an error event, and the socket stays.
What vLLM's server does not have: the socket is closed with an error event and a reason where it cannot go on.
"""

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Iterator
from typing import Any

from voxtral_serve.guard.asgi import Message
from voxtral_serve.guard.live.cuts import SAMPLE_BYTES
from voxtral_serve.guard.live.events import Event, EventError, value
from voxtral_serve.guard.live.service import Ending
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.live.socket import Dialect, LiveSocket, decoded, text_message
from voxtral_serve.units import MIB

MOST_EARLY = 16 * MIB  # bytes of audio that wait for the commit that begins their text
LONGEST_NAME = 200  # characters that an error repeats
EMPTY: Message = {"type": "websocket.send", "text": '{"type":"transcription.delta","delta":""}'}
NOT_VALIDATED = "Model not validated. Make sure to validate the model by sending a session.update event."


class VllmDialect(Dialect):
    """One text after the other."""

    def __init__(self, socket: LiveSocket) -> None:
        super().__init__(socket)
        self._model_known = False
        self.early: list[bytes] = []  # audio before its text begins
        self._early_bytes = 0
        self._early_end = False

    async def greet(self) -> None:
        await self.socket.say("session.created", id=f"sess-{self.socket.id}", created=int(time.time()))

    async def event(self, event: Event, large: bool) -> None:
        kind = event.type
        if kind == "input_audio_buffer.append":
            await self._append(await asyncio.to_thread(pcm16, event) if large else pcm16(event))
        elif kind == "session.update":
            self._update(value(event.model))
        elif kind == "input_audio_buffer.commit":
            if not self._model_known:
                raise EventError(NOT_VALIDATED, "model_not_validated")
            await self._commit(str(value(event.final)).lower() in ("true", "1"))
        else:
            raise EventError(f"Unknown event type: {kind[:LONGEST_NAME]}", "unknown_event")

    async def refuse(self, error: EventError, event: Event | None) -> None:
        await self.socket.say("error", error=str(error), code=error.code)

    async def last_error(self, ending: Ending) -> None:
        await self.socket.say("error", error=ending.words, code=ending.code)

    @property
    def had_audio(self) -> bool:
        return super().had_audio or bool(self.early)

    def drain(self) -> None:
        assert self.session is not None
        self.session.end()

    def _update(self, model: Any) -> None:
        if model is None:
            raise EventError("Missing required field: model", "invalid_event")
        if not self.service.serves(model):
            raise EventError(f"The model `{str(model)[:LONGEST_NAME]}` does not exist.", "model_not_found")
        self._model_known = True

    async def _append(self, pcm: bytes) -> None:
        if self.session is not None:
            await self.session.feed(pcm)  # which drops what comes after the text's end, as vLLM does
        elif self._early_bytes + len(pcm) > MOST_EARLY or not self.service.has_room(self._early_bytes):
            raise EventError(
                f"{self._early_bytes} bytes of audio wait for input_audio_buffer.commit, and this append is too much: "
                f"expected at most {MOST_EARLY}, and fewer on a busy server",
                "invalid_audio",
            )
        else:
            self.early.append(pcm)
            self._early_bytes += len(pcm)
            self.socket.hold(len(pcm))

    @contextlib.contextmanager
    def taken_early(self) -> Iterator[bytes]:
        """The audio that has waited for its text to begin; it counts as waiting until the end."""
        early, size = b"".join(self.early), self._early_bytes
        self.early, self._early_bytes = [], 0
        try:
            yield early
        finally:
            self.socket.hold(-size)

    async def _commit(self, final: bool) -> None:
        if final:
            if self.session is not None:
                self.session.end()
            else:
                self._early_end = True  # of the next text, as in vLLM
            return
        if self.session is not None:
            return  # vLLM ignores it as well
        session = self.session = self.service.session(self.socket.failed)
        if not await self.socket.begin(session):
            return
        self.socket.texts += 1
        self.socket.write(functools.partial(self._write, session))
        ends, self._early_end = self._early_end, False
        with self.taken_early() as early:
            await session.feed(early)
        if ends or self.draining is not None:
            session.end()

    async def _write(self, session: LiveSession) -> None:
        """The text of a session, and what ends the socket with it."""
        socket, pieces, tokens = self.socket, list[str](), 0
        async with contextlib.aclosing(session.deltas()) as deltas:
            async for text, count in deltas:
                tokens += count
                for _ in range(count - 1 if text else count):
                    await socket.send(EMPTY)
                if text:
                    pieces.append(text)
                    delta = json.dumps(text, ensure_ascii=False)
                    await socket.send(text_message('{"type":"transcription.delta","delta":' + delta + "}"))
        usage = {
            "prompt_tokens": session.prompt_tokens,
            "total_tokens": session.prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": None,
        }
        socket.count(session)
        await socket.say("transcription.done", text="".join(pieces), usage=usage)
        if self.draining is not None:
            socket.stop(self.draining)
        socket.heed()


def pcm16(event: Event) -> bytes:
    """PCM16 of an append's base64. Raises EventError."""
    pcm = decoded(event)
    if not pcm or len(pcm) % SAMPLE_BYTES:
        raise EventError("Invalid audio data", "invalid_audio")
    return pcm
