"""A client's WebSocket, whatever protocol it speaks: its reader, its writer, and the ways it ends.

`LiveSocket` accepts the connection, reads events, and closes it with a reason. A `Dialect` gives the events their
meaning and has the live session; several of them may follow each other before the first audio (dialects).
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pybase64

from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.keyring import KeyAudio
from voxtral_serve.guard.live.link import EngineGoneError, LinkError
from voxtral_serve.guard.live.service import DEAD, FAILED, LATER, REFUSED, STOPPING, Ending, LiveService
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.metrics import code_counted
from voxtral_serve.logs import SERVED
from voxtral_serve.patches.live_server import log
from voxtral_serve.units import MIB

MOST_APPEND = 15 * MIB  # bytes of one append's base64, as OpenAI has it; uvicorn takes messages of 16 MiB
LARGE = 256 * 1024  # characters of an event that is decoded in a thread: more takes over a millisecond
FULL = "too_many_sessions"  # the error's code
LAST_WORD_S = 1.0  # for the error event and the close of a socket whose client may not read
_decode = msgspec.json.Decoder().decode


class EventError(Exception):
    """An event is answered with an error event. `param` names the field that it is about."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class Dialect:
    """The events of one protocol on one socket."""

    def __init__(self, socket: "LiveSocket") -> None:
        self.socket, self.service = socket, socket.service
        self.session: LiveSession | None = None
        self.draining: Ending | None = None  # of the socket, once the text of the audio so far is complete

    async def greet(self) -> None:
        """The first events of a connection."""
        raise NotImplementedError

    async def event(self, event: dict[str, Any], large: bool) -> None:
        """One event of the client's; `large` ones are decoded in a thread. Raises EventError."""
        raise NotImplementedError

    async def refuse(self, error: EventError, event: dict[str, Any] | None) -> None:
        """Answer an event that was wrong; None for one that could not be read."""
        raise NotImplementedError

    async def last_error(self, ending: Ending) -> None:
        """The error event before a close."""
        raise NotImplementedError

    def drain(self) -> None:
        """End the text of the audio so far, and then the socket."""
        raise NotImplementedError

    @property
    def awaits_text(self) -> bool:
        """Whether the client has ended its audio and waits for text: it is not idle then."""
        return self.session is not None and self.session.ended

    @property
    def unfinished(self) -> bool:
        """Whether a client that leaves now leaves within a text."""
        return self.session is not None


class LiveSocket:
    """One WebSocket, from its acceptance to its close. `subprotocol` is the one to accept."""

    def __init__(
        self,
        service: LiveService,
        receive: Receive,
        send: Send,
        id: str,
        dialect: Callable[["LiveSocket"], Dialect],
        subprotocol: str | None = None,
    ) -> None:
        self.service, self.receive, self.client, self.id = service, receive, send, id
        self.subprotocol = subprotocol
        self.dialect = dialect(self)
        self.listening_since: float | None = None
        self.sending_since: float | None = None
        self.opened = time.monotonic()
        # Seconds since 1970; None for a session without an end of its own
        self.expires_at = None if service.session_s is None else int(time.time() + service.session_s)
        self.audio: KeyAudio | None = None
        self.refusal: Ending | None = None  # of a client that is told so after the handshake
        self.reason = ""
        # Of all texts of the socket, for its line in the log
        self.texts = self.samples = self.tokens = self.rollovers = 0
        self.worst_lag_s = 0.0
        self._ending: Ending | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def session(self) -> LiveSession | None:
        return self.dialect.session

    @property
    def awaits_text(self) -> bool:
        return self.dialect.awaits_text

    async def serve(self) -> None:
        """Until the client leaves or is told to."""
        task = self._reader = asyncio.current_task()
        assert task is not None
        self.service.add(self, task)
        try:
            with contextlib.suppress(OSError):  # uvicorn's ClientDisconnected
                await self._read()
            self.reason = "client" if self.dialect.unfinished else "done"
        except asyncio.CancelledError:
            if self._ending is None:  # uvicorn's, once the grace period is over
                self._ending = STOPPING
                raise
            task.uncancel()
        except Exception:
            log.exception("a live session failed, id %s", self.id)
            self._ending = Ending("error", FAILED, "the session failed", "processing_error")
        finally:
            self._reader = None
            self.reason = self._ending.reason if self._ending else self.reason or "error"
            await self._release()
            self.service.remove(self, self.reason)
            if self._ending is not None and self._ending.reason == REFUSED and self._ending.code is not None:
                code_counted(True, self._ending.code)
        if self._ending is not None:
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                await asyncio.wait_for(self._last_word(self._ending), LAST_WORD_S)

    def stop(self, ending: Ending) -> None:
        if self._ending is None and self._reader is not None:
            self._ending = ending
            self._reader.cancel()

    def drain(self, ending: Ending) -> None:
        """End the text of the audio so far, and then the socket."""
        if self.dialect.draining is None:
            self.dialect.draining = ending
            if self.session is None:
                self.stop(ending)
            else:
                self.dialect.drain()

    def report(self) -> str:
        """What the line in the log says of it."""
        return (
            f"{self.samples / self.service.link.shape.rate_hz:.2f} s of audio, {self.tokens} tokens, "
            f"{self.texts} texts, worst lag {1000 * self.worst_lag_s:.0f} ms, {self.rollovers} rollovers, "
            f"ended: {self.reason}"
        )

    def fields(self) -> dict[str, Any]:
        """The same as fields of a line of JSON."""
        return {
            "audio_s": round(self.samples / self.service.link.shape.rate_hz, 3),
            "tokens": self.tokens,
            "texts": self.texts,
            "worst_lag_ms": round(1000 * self.worst_lag_s),
            "rollovers": self.rollovers,
            "ended": self.reason,
        }

    async def begin(self, session: LiveSession) -> bool:
        """Whether the engine takes the session; if it does not, the socket ends."""
        if (served := SERVED.get()) is not None:
            served["session_id"] = session.id
        session.allowed = self._allowed
        try:
            await session.begin()
        except EngineGoneError:
            self.stop(DEAD)
            return False
        except LinkError as error:
            words = f"{error}: this server has no place for another live session, try again later"
            self.stop(Ending(REFUSED, LATER, words, FULL))
            return False
        return True

    async def _allowed(self, samples: int) -> bool:
        if self.audio is not None:
            try:
                await self.audio.add(samples / self.service.link.shape.rate_hz)
            except RefusedError as error:
                self.drain(Ending("rate_limited", LATER, str(error), error.code))
                return False
        return True

    def write(self, events: Callable[[], Awaitable[None]]) -> None:
        """Have the text of the session written by a task of its own."""
        self._writer = asyncio.get_running_loop().create_task(self._written(events))

    def failed(self, why: str) -> None:
        self.stop(Ending("error", FAILED, f"the session failed: {why}", "processing_error"))

    def count(self, session: LiveSession) -> None:
        """The session is over or given up: free it."""
        session.close()
        self.dialect.session = None
        self.samples += session.samples
        self.tokens += session.tokens
        self.rollovers += session.rollovers
        self.worst_lag_s = max(self.worst_lag_s, session.worst_lag_s)

    def heed(self) -> None:
        """The client has got what it waited for: count its idle time from now."""
        self.listening_since = time.monotonic() if self.listening_since is not None else None

    async def say(self, kind: str, **fields: Any) -> None:
        content = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
        await self.send(text_message(content))

    async def send(self, message: Message) -> None:
        self.sending_since = time.monotonic()
        await self.client(message)
        self.sending_since = None

    async def _read(self) -> None:
        await self.receive()  # the handshake's `websocket.connect`
        accept: Message = {"type": "websocket.accept"}
        if self.subprotocol is not None:
            accept["subprotocol"] = self.subprotocol
        await self.client(accept)
        await self.dialect.greet()
        if self.service.stopping or self.refusal is not None:
            self.stop(self.refusal or STOPPING)
        while True:
            self.listening_since = time.monotonic()
            message = await self.receive()
            if message["type"] != "websocket.receive":
                return
            self.listening_since = None
            await self._take(message.get("text"))

    async def _take(self, text: str | None) -> None:
        event = None
        try:
            if text is None:
                raise EventError("a binary message: expected events as JSON text", "invalid_event")
            large = len(text) > LARGE
            event = await asyncio.to_thread(parsed, text) if large else parsed(text)
            await self.dialect.event(event, large)
        except EventError as error:
            self.service.metrics.errors.labels(error.code).inc()
            await self.dialect.refuse(error, event)

    async def _written(self, events: Callable[[], Awaitable[None]]) -> None:
        try:
            await events()
        except OSError:  # the client has left: the reader sees it, too
            pass
        except Exception as error:
            if self.service.link.engine.dead():
                self.stop(DEAD)
            else:
                log.exception("a live session failed, id %s", self.id)
                self.failed(str(error))

    async def _release(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._writer
        if self.session is not None:
            self.count(self.session)
        if self.audio is not None:
            self.audio.close()

    async def _last_word(self, ending: Ending) -> None:
        if ending.code is not None:
            await self.dialect.last_error(ending)
        reason = ending.words.encode()[:120].decode(errors="ignore")  # a close frame has room for 123 bytes
        await self.client({"type": "websocket.close", "code": ending.close, "reason": reason})


def text_message(text: str) -> Message:
    return {"type": "websocket.send", "text": text}


def parsed(text: str) -> dict[str, Any]:
    """Raises EventError for what is no event."""
    try:
        event = _decode(text)
    except (ValueError, RecursionError):  # msgspec's errors are of the first kind; too many levels of the second
        raise EventError("Invalid JSON", "invalid_json") from None
    if not isinstance(event, dict):
        raise EventError("an event is a JSON object with `type`", "processing_error")
    return event


def decoded(audio: Any, kind: str) -> bytes:
    """The bytes of base64 in an event of this kind; b"" for what is none, or too long. Raises EventError."""
    if not isinstance(audio, str):
        raise EventError(f"{kind} has no `audio`: expected base64 of PCM16", "processing_error", "audio")
    try:
        content: bytes = pybase64.b64decode(audio) if len(audio) <= MOST_APPEND else b""
    except ValueError:
        content = b""
    return content
