"""A client's WebSocket, whatever protocol it speaks: its reader, its writer, and the ways it ends.

`LiveSocket` accepts the connection, reads events, and closes it with a reason. A `Dialect` gives the events their
meaning and has the live session; several of them may follow each other before the first audio (dialects).

Three tasks: the reader takes messages off the connection, so that a close is seen at once; the one of `serve` gives
them to the dialect, one after the other, and waits for the session's room; the writer sends text. Messages that wait
are bounded in bytes (LiveService.has_room). At the bound the connection is not read, and LiveService.sweep asks the
`Wire` under it whether the client has gone.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pybase64

from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.keyring import KeyAudio
from voxtral_serve.guard.live.events import Event, EventError, parsed
from voxtral_serve.guard.live.link import EngineGoneError, LinkError
from voxtral_serve.guard.live.service import DEAD, FAILED, LATER, REFUSED, STOPPING, Ending, LiveService
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.metrics import code_counted
from voxtral_serve.logs import SERVED
from voxtral_serve.patches.live_server import Wire, log
from voxtral_serve.units import MIB

MOST_APPEND = 15 * MIB  # bytes of one append's base64, as OpenAI has it; uvicorn takes messages of 16 MiB
LARGE = 256 * 1024  # characters of an event that is decoded in a thread: more takes over a millisecond
FULL = "too_many_sessions"  # the error's code
LAST_WORD_S = 1.0  # for the error event and the close of a socket whose client may not read
MESSAGE_BYTES = 128  # that a waiting message takes beside its content
ROOM_S = 0.5  # between looks of a socket that is not read at the bytes that others have
TURN_S = 0.002  # of a socket's events without a turn for others


class Dialect:
    """The events of one protocol on one socket."""

    def __init__(self, socket: "LiveSocket") -> None:
        self.socket, self.service = socket, socket.service
        self.session: LiveSession | None = None
        self.draining: Ending | None = None  # of the socket, once the text of the audio so far is complete

    async def greet(self) -> None:
        """The first events of a connection."""
        raise NotImplementedError

    async def event(self, event: Event, large: bool) -> None:
        """One event of the client's; `large` ones are decoded in a thread. Raises EventError."""
        raise NotImplementedError

    async def refuse(self, error: EventError, event: Event | None) -> None:
        """Answer an event that was wrong; None for one that could not be read."""
        raise NotImplementedError

    async def last_error(self, ending: Ending) -> None:
        """The error event before a close."""
        raise NotImplementedError

    def drain(self) -> None:
        """End the text of the audio so far, and then the socket."""
        raise NotImplementedError

    @property
    def had_audio(self) -> bool:
        """Whether there was a session, or audio waits for one."""
        return self.session is not None

    @property
    def awaits_text(self) -> bool:
        """Whether the client has ended its audio and waits for text: it is not idle then."""
        return self.session is not None and self.session.ended

    @property
    def unfinished(self) -> bool:
        """Whether a client that leaves now leaves within a text."""
        return self.session is not None


class LiveSocket:
    """One WebSocket, from its acceptance to its close.

    subprotocol  that is accepted
    wire         the connection under it; None if the server does not tell of it
    valid        whether its key is; None for a socket without one
    """

    def __init__(
        self,
        service: LiveService,
        receive: Receive,
        send: Send,
        id: str,
        dialect: Callable[["LiveSocket"], Dialect],
        subprotocol: str | None = None,
        wire: Wire | None = None,
        valid: Callable[[], bool] | None = None,
    ) -> None:
        self.service, self.receive, self.client, self.id = service, receive, send, id
        self.subprotocol, self.wire, self.valid = subprotocol, wire, valid
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
        self.ending: Ending | None = None
        self.waiting_bytes, self.paused = 0, False
        self._waiting: deque[tuple[str | bytes | None, int]] = deque()  # messages, with their bytes
        self._news, self._room = asyncio.Event(), asyncio.Event()  # a message has come; one has had its turn
        self._left = False
        self._task: asyncio.Task[Any] | None = None  # of `serve`, while it may be cancelled
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def session(self) -> LiveSession | None:
        return self.dialect.session

    @property
    def awaits_text(self) -> bool:
        return self.dialect.awaits_text

    @property
    def had_audio(self) -> bool:
        return self.texts > 0 or self.dialect.had_audio

    async def serve(self) -> None:
        """Until the client leaves or is told to."""
        task = self._task = asyncio.current_task()
        assert task is not None
        self.service.add(self, task)
        try:
            with contextlib.suppress(OSError):  # uvicorn's ClientDisconnected
                await self._open()
                self._reader = asyncio.get_running_loop().create_task(self._read())
                await self._work()
        except asyncio.CancelledError:
            if self.ending is None and not self._left:  # uvicorn's, once the grace period is over
                self.ending = STOPPING
                raise
            task.uncancel()
        except Exception:
            log.exception("a live session failed, id %s", self.id)
            self.ending = Ending("error", FAILED, "the session failed", "processing_error")
        finally:
            self._task = None
            self.reason = self.ending.reason if self.ending else "client" if self._is_within_text else "done"
            await self._release()
            self.service.remove(self, self.reason)
            if self.ending is not None and self.ending.reason == REFUSED and self.ending.code is not None:
                code_counted(True, self.ending.code)
        if self.ending is not None:
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                await asyncio.wait_for(self._last_word(self.ending), LAST_WORD_S)

    @property
    def _is_within_text(self) -> bool:
        return self.dialect.unfinished or bool(self._waiting)

    def leave(self) -> None:
        """The client has gone: what waits has nobody to answer to."""
        if self.ending is None and self._task is not None:
            self._left = True
            self._task.cancel()

    def stop(self, ending: Ending) -> None:
        if self.ending is None and self._task is not None:
            self.ending = ending
            self._task.cancel()

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

    async def _open(self) -> None:
        await self.receive()  # the handshake's `websocket.connect`
        accept: Message = {"type": "websocket.accept"}
        if self.subprotocol is not None:
            accept["subprotocol"] = self.subprotocol
        await self.client(accept)
        await self.dialect.greet()
        if self.service.stopping or self.refusal is not None:
            self.stop(self.refusal or STOPPING)

    async def _read(self) -> None:
        """Take messages off the connection until it is closed, whatever the session does."""
        try:
            while (message := await self.receive())["type"] == "websocket.receive":
                self._keep(message.get("text"))
                if not self.service.has_room(self.waiting_bytes):
                    await self._until_room()
            self.leave()
        except Exception as error:
            log.exception("a live connection cannot be read, id %s", self.id)
            self.failed(str(error))

    def _keep(self, text: str | None) -> None:
        if self.wire is not None:
            self.wire.arriving = 0
        # In Python, text with a single character beyond ASCII may take four bytes for each.
        content = text if text is None or text.isascii() else text.encode()
        size = sys.getsizeof(content) + MESSAGE_BYTES
        self._waiting.append((content, size))
        self.hold(size)
        self._news.set()

    def hold(self, size: int) -> None:
        """Count bytes that wait; fewer than none for those that have had their turn."""
        self.waiting_bytes += size
        self.service.waiting_bytes += size
        if size < 0:
            self._room.set()

    async def _until_room(self) -> None:
        self.paused = True
        while not self.service.has_room(self.waiting_bytes):
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), ROOM_S)
        self.paused = False
        if self.wire is not None:
            self.wire.heard = time.monotonic()  # what has come meanwhile is about to be read

    async def _work(self) -> None:
        """Give the messages to the dialect, one after the other."""
        turn = time.monotonic()
        while True:
            while not self._waiting:
                self.listening_since = turn = time.monotonic()
                self._news.clear()
                await self._news.wait()
            self.listening_since = None
            content, size = self._waiting[0]
            await self._take(content)
            self._waiting.popleft()
            self.hold(-size)
            if time.monotonic() - turn > TURN_S:  # neither receiving nor sending waits for others
                await asyncio.sleep(0)
                turn = time.monotonic()

    async def _take(self, content: str | bytes | None) -> None:
        event = None
        try:
            if content is None:
                raise EventError("a binary message: expected events as JSON text", "invalid_event")
            large = len(content) > LARGE
            event = await asyncio.to_thread(parsed, content) if large else parsed(content)
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
        for task in (self._reader, self._writer):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        self._waiting.clear()
        self.hold(-self.waiting_bytes)
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


def decoded(event: Event) -> bytes:
    """The bytes of an event's base64; b"" for what is none, or too long. Raises EventError."""
    if event.audio is None:
        raise EventError(f"{event.type} has no `audio`: expected base64 of PCM16", "processing_error", "audio")
    try:
        content: bytes = pybase64.b64decode(event.audio) if len(event.audio) <= MOST_APPEND else b""
    except ValueError:
        content = b""
    return content
