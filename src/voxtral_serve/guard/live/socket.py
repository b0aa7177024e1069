"""A client's WebSocket, whatever protocol it speaks: its reader, its writer, and the ways it ends.

How an event travels: the reader task takes a message off the connection (`_read`) and has it wait, bounded in bytes.
The task of `serve` takes one message after the other (`_work`). It is read as an Event (events.py), which the codec of
the protocol turns into commands (codec.py). An answer or a close is the socket's own; any other command goes to the
Conversation, which has the session: it decodes audio, finds turns, feeds and ends the session (session.py). The session
hands audio to the engine, all sessions of the process in one call (link.py). Tokens come back through the session to
`Conversation.write`, in the writer task. What it tells of them and of turns are outputs: `_say` has the codec encode
each of them as events, and sends these.

While too many bytes wait (LiveService.has_room), the connection is not read, and LiveService.sweep asks the `Wire`
under it whether the client has gone.
"""

import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.keyring import KeyAudio
from voxtral_serve.guard.live import commands, outputs
from voxtral_serve.guard.live.codec import Become, Codec, CodecContext, Command
from voxtral_serve.guard.live.conversation import Conversation, Texts, Turns
from voxtral_serve.guard.live.endings import DEAD, FAILED, LATER, REFUSED, STOPPING, Ending, failed
from voxtral_serve.guard.live.events import Event, EventError, parsed
from voxtral_serve.guard.live.link import EngineGoneError, LinkError
from voxtral_serve.guard.live.outputs import Output
from voxtral_serve.guard.live.service import LiveService
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.metrics import code_counted
from voxtral_serve.logs import SERVED
from voxtral_serve.patches.live_server import Wire, log

UPDATE = "session.update"  # how the types of events end that are decoded in a thread: custom words take up to 20 ms
LARGE = 256 * 1024  # characters of an event that is decoded in a thread: more takes over a millisecond
FULL = "too_many_sessions"  # the error's code
LAST_WORD_S = 1.0  # for the error event and the close of a socket whose client may not read
MESSAGE_BYTES = 128  # that a waiting message takes beside its content
ROOM_S = 0.5  # between looks of a socket that is not read at the bytes that others have
TURN_S = 0.002  # of a socket's events without a turn for others


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
        codec: Callable[[CodecContext], Codec],
        subprotocol: str | None = None,
        wire: Wire | None = None,
        valid: Callable[[], bool] | None = None,
    ) -> None:
        self.service, self.receive, self.client, self.id = service, receive, send, id
        self.subprotocol, self.wire, self.valid = subprotocol, wire, valid
        self.listening_since: float | None = None
        self.sending_since: float | None = None
        self.opened = time.monotonic()
        expires_at = None if service.session_s is None else int(time.time() + service.session_s)
        self.codec = codec(service.context(id, expires_at))
        self.conversation = self._conversation()
        self.audio: KeyAudio | None = None
        self.refusal: Ending | None = None  # of a client that is told so after the handshake
        self.reason = ""
        self.ending: Ending | None = None
        self.draining: Ending | None = None  # of the socket, once the text of the audio so far is complete
        self._last_ending: Ending | None = None  # the same, where the client has ended its audio
        self.waiting_bytes, self.paused = 0, False
        self._waiting: deque[tuple[str | bytes | None, int]] = deque()  # messages, with their bytes
        self._news, self._room = asyncio.Event(), asyncio.Event()  # a message has come; one has had its turn
        self._left = False
        self._task: asyncio.Task[Any] | None = None  # of `serve`, while it may be cancelled
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    @property
    def session(self) -> LiveSession | None:
        return self.conversation.session

    @property
    def awaits_text(self) -> bool:
        return self.conversation.awaits_text

    @property
    def had_audio(self) -> bool:
        return self.conversation.had_audio

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
        return self.conversation.unfinished or bool(self._waiting)

    @property
    def _is_writing(self) -> bool:
        """Whether a session's text, or its speakers, are not complete."""
        return self._writer is not None and not self._writer.done()

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
        if self.session is None and self.awaits_text:
            return  # its speakers are being labelled, and an end follows
        if self.draining is None:
            self.draining = ending
            if self.session is None:
                self.stop(ending)
            else:
                self.session.end()

    def fields(self) -> dict[str, Any]:
        """What the line in the log says of it, as fields of JSON."""
        sums = self.conversation
        return {
            "audio_s": round(sums.samples / self.service.link.shape.rate_hz, 3),
            "tokens": sums.tokens,
            "texts": sums.texts,
            "worst_lag_ms": round(1000 * sums.worst_lag_s),
            "rollovers": sums.rollovers,
            "ended": self.reason,
        }

    def report(self) -> str:
        """The same as text."""
        return (
            "{audio_s:.2f} s of audio, {tokens} tokens, {texts} texts, worst lag {worst_lag_ms} ms, "
            "{rollovers} rollovers, ended: {ended}"
        ).format(**self.fields())

    def failed(self, why: str) -> None:
        self.stop(failed(why))

    async def _open(self) -> None:
        await self.receive()  # the handshake's `websocket.connect`
        accept: Message = {"type": "websocket.accept"}
        if self.subprotocol is not None:
            accept["subprotocol"] = self.subprotocol
        await self.client(accept)
        for command in self.codec.open():
            await self._run(command)
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
        """Do what the messages ask for, one after the other."""
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
            is_large = len(content) > LARGE
            event = await asyncio.to_thread(parsed, content) if is_large else parsed(content)
            decode, begun = self.codec.decode, self.session is not None
            is_long = is_large or event.type.endswith(UPDATE)
            for command in await asyncio.to_thread(decode, event, begun) if is_long else decode(event, begun):
                if isinstance(command, Become):
                    await self._become(command, event)
                else:
                    await self._run(command)
        except EventError as error:
            await self._refuse(error, event)

    async def _refuse(self, error: EventError, event: Event | None) -> None:
        self.service.metrics.errors.labels(error.code).inc()
        await self.send(self.codec.refuse(error, event))

    async def _run(self, command: Command) -> None:
        if isinstance(command, commands.Answer):
            await self.send(command.event)
            return
        if isinstance(command, commands.Close):
            self.stop(command.ending)
            await asyncio.sleep(0)  # the task is cancelled here: no other command is run
            return
        early_bytes = self.conversation.early_bytes
        if isinstance(command, commands.End):
            self._last_ending = command.ending
        try:
            await self.conversation.run(command)
        finally:
            self.hold(self.conversation.early_bytes - early_bytes)
        if isinstance(command, commands.End) and command.ending is not None and not self._is_writing:
            self.stop(command.ending)

    async def _become(self, become: Become, event: Event) -> None:
        """Go on in another protocol, with the audio that has waited for its text to begin."""
        before = self.conversation
        assert isinstance(before, Texts)
        self.codec = become.codec
        self.conversation = turns = self._conversation()
        assert isinstance(turns, Turns)
        try:
            first = self.codec.open if become.opens else partial(self.codec.decode, event, begun=False)
            for command in await asyncio.to_thread(first):
                await self._run(command)
        except EventError as error:
            await self._refuse(error, event)
        try:
            await turns.append(before.take_early())
        finally:
            self.hold(-before.early_bytes)

    def _conversation(self) -> Conversation:
        parts = self.service, self._say, self._begin, self.failed
        options = self.codec.options
        return Texts(*parts) if options is None else Turns(*parts, options=options)

    async def _begin(self, session: LiveSession) -> bool:
        """Whether the engine takes the session; if it does not, the socket ends."""
        if (served := SERVED.get()) is not None:
            served["session_id"] = session.id
        session.allowed = self._allowed
        try:
            await session.begin()
        except LinkError as error:
            retry_s = self.service.link.retry_s()
            words = f"{error}: no place for another live session, try again in {retry_s} s"
            self.stop(DEAD if isinstance(error, EngineGoneError) else Ending(REFUSED, LATER, words, FULL, retry_s))
            await asyncio.sleep(0)  # the task is cancelled here: no other session is begun for the rest of the audio
            return False
        self._writer = asyncio.get_running_loop().create_task(self._write(session))
        return True

    async def _allowed(self, samples: int) -> bool:
        if self.audio is not None:
            try:
                await self.audio.add(samples / self.service.link.shape.rate_hz)
            except RefusedError as error:
                self.drain(Ending("rate_limited", LATER, str(error), error.code))
                return False
        return True

    async def _write(self, session: LiveSession) -> None:
        try:
            await self.conversation.write(session)
            if (ending := self.draining or self._last_ending) is not None:
                self.stop(ending)
        except OSError:  # the client has left: the reader sees it, too
            pass
        except Exception as error:
            if self.service.link.engine.dead():
                self.stop(DEAD)
            else:
                log.exception("a live session failed, id %s", self.id)
                self.failed(str(error))

    async def _say(self, output: Output) -> None:
        for event in self.codec.encode(output):
            await self.send(event)
        if isinstance(output, (outputs.TextDone, outputs.TurnDone)) and self.listening_since is not None:
            self.listening_since = time.monotonic()  # the client has what it waited for: it is idle from now on

    async def send(self, event: str) -> None:
        self.sending_since = time.monotonic()
        await self.client({"type": "websocket.send", "text": event})
        self.sending_since = None

    async def _release(self) -> None:
        for task in (self._reader, self._writer):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        self._waiting.clear()
        self.hold(-self.waiting_bytes)
        self.conversation.close()
        if self.audio is not None:
            self.audio.close()

    async def _last_word(self, ending: Ending) -> None:
        if ending.code is not None:
            for event in self.codec.last_words(ending):
                await self.send(event)
        reason = ending.words.encode()[:120].decode(errors="ignore")  # a close frame has room for 123 bytes
        await self.client({"type": "websocket.close", "code": ending.close, "reason": reason})
