"""A live session over a server's `/v1/realtime`, as a microphone would hold it, with the times of what comes back.

The protocol is vLLM's own (events.py). A piece of audio is sent when its last sample would have been spoken: the n-th,
from 1, n * 80 ms after the speech began, whatever became of those before it.

A session is a coroutine, so that one process holds hundreds.
"""

import asyncio
import contextlib
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from . import events, lag
from .errors import MeasureError
from .events import Event
from .sound import RATE_HZ, TOKEN, TOKEN_S, Pcm, Sound
from .upload import Server, shown


class LiveError(MeasureError):
    """A session ended otherwise than with a transcript.

    `status` is that of the handshake: 101 if the WebSocket was open, None without a response.
    """

    def __init__(self, message: str, status: int | None = 101) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether the server has answered the handshake, and has no session to give."""
        return self.status not in (None, 101)


@dataclass
class Timeline:
    """What was sent and received in a session. Times are in seconds on the clock of time.perf_counter.

    started   when the audio at the pace of speech began to be sent
    sent      when each 80 ms were sent
    samples   how many samples were sent
    late_s    by how much later than due, for each piece that was sent at the pace of speech
    ended     when the client said that the audio has ended
    arrivals  when each delta came, with text or not
    pieces    (arrival, text) of each delta with text
    done      when the final text came
    tokens    the number of tokens by the server's `usage`; None if it does not say
    """

    started: float = 0.0
    sent: "array[float]" = field(default_factory=lambda: array("d"))
    samples: int = 0
    late_s: "array[float]" = field(default_factory=lambda: array("d"))
    ended: float | None = None
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    pieces: list[tuple[float, str]] = field(default_factory=list)
    done: float | None = None
    text: str = ""
    tokens: int | None = None

    @property
    def final_s(self) -> float | None:
        """Seconds from the end of the audio to the final text."""
        return None if self.done is None or self.ended is None else self.done - self.ended

    def lags(self, delay: int = lag.DELAY, skipped: int = 0) -> list[lag.Lag] | None:
        """The lag of each token that needs more than `skipped` samples; None if the deltas are not the tokens."""
        if self.ended is None or not lag.is_one_delta_a_token(len(self.arrivals), self.tokens, self.samples, delay):
            return None
        return lag.token_lags(self.arrivals, self.sent, self.ended, self.samples, skipped, delay)


class Session:
    """A session whose events a task reads. All methods raise LiveError once the session has ended without its text."""

    def __init__(self, socket: ClientConnection, timeout_s: float, delay: int, line: Timeline) -> None:
        self.timeline = line
        self._socket, self._timeout_s, self._delay = socket, timeout_s, delay
        self._heard = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def opened(self, model: str) -> AsyncIterator["Session"]:
        """Begin a transcription, and listen until the `async with` ends."""
        async with asyncio.timeout(self._timeout_s):
            created = _read(await self._socket.recv())
        if created.get("type") != events.CREATED:
            raise LiveError(f"expected session.created, received {json.dumps(created)[:300]}")
        for event in events.opening(model):
            await self._send(json.dumps(event))
        self._listener = asyncio.create_task(self._listen())
        try:
            yield self
        finally:
            self._listener.cancel()
            await asyncio.wait({self._listener})
            if not self._listener.cancelled():
                self._listener.exception()  # the session has raised it, or something else before it

    # ---- Sending

    async def hurry(self, pieces: Iterable[Pcm], ahead: int, go_on: Callable[[], bool] = lambda: True) -> None:
        """Send as fast as the server takes it, at most `ahead` tokens before its text, while `go_on` says so.

        All pieces but the last must have whole multiples of 1,280 samples.
        """
        for piece in pieces:
            await self.catch_up(ahead)
            if not go_on():
                return
            await self._append(piece)

    async def catch_up(self, missing: int = 0) -> None:
        """Wait until at most so many tokens are missing of those for which enough audio was sent."""
        line = self.timeline
        while lag.complete_tokens(line.samples, self._delay) - len(line.arrivals) > missing:
            try:
                await self._next()
            except TimeoutError:
                raise LiveError(
                    f"no transcription.delta for {self._timeout_s:g} s, {len(line.arrivals)} after "
                    f"{line.samples / RATE_HZ:.1f} s of audio: expected one for each 80 ms"
                ) from None

    async def speak(self, sound: Sound, begin: int = 0, due: float | None = None) -> None:
        """Send the sound from sample `begin` on at the pace of speech, at once or from the time `due` on."""
        await self._until(due)
        first = self.timeline.started = time.perf_counter()
        first = due if due is not None and first - due < TOKEN_S else first
        length = sound.samples - begin
        for number, at in enumerate(range(begin, sound.samples, TOKEN)):
            # The last piece is shorter, and so is the time that it takes to say it.
            scheduled = first + (min(number * TOKEN, length - TOKEN) / RATE_HZ if number else 0)
            await self._until(scheduled)
            self.timeline.late_s.append(time.perf_counter() - scheduled)
            await self._append(sound.read(at, TOKEN))

    async def finish(self) -> None:
        """End the audio, and wait for the text."""
        self.timeline.ended = time.perf_counter()
        for event in events.closing():
            await self._send(json.dumps(event))
        while self.timeline.done is None:
            await self._next()

    async def _until(self, due: float | None) -> None:
        """Sleep until this time, and raise what ended the session meanwhile."""
        await asyncio.sleep(max(0.0, (due or 0.0) - time.perf_counter()))
        self._check()

    async def _append(self, piece: Pcm) -> None:
        message = events.append(piece.tobytes())
        self.timeline.sent.extend([time.perf_counter()] * -(-len(piece) // TOKEN))
        self.timeline.samples += len(piece)
        await self._send(message)

    async def _send(self, message: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):  # a server that reads no more would hold it for ever
                await self._socket.send(message)
        except TimeoutError:
            self._socket.transport.abort()  # as it would hold a close
            raise

    # ---- Receiving

    async def _next(self) -> None:
        """Wait for the next event. Raises TimeoutError, and what ended the session."""
        self._heard.clear()
        self._check()
        async with asyncio.timeout(self._timeout_s):
            await self._heard.wait()
        self._check()

    def _check(self) -> None:
        if self._listener is not None and self._listener.done() and self.timeline.done is None:
            self._listener.result()

    async def _listen(self) -> None:
        try:
            while self.timeline.done is None:
                self._take(await self._socket.recv())
                self._heard.set()
        finally:
            self._heard.set()

    def _take(self, message: str | bytes) -> None:
        at, line = time.perf_counter(), self.timeline
        event = _read(message)
        if event.get("type") == events.DONE:
            line.text = _text(event, "text")
            if line.ended is None:
                raise LiveError(f"transcription.done before the audio's end: {line.text[:300]!r}")
            usage = event.get("usage")
            counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
            line.tokens = counted if isinstance(counted, int) else None
            line.done = at
        elif event.get("type") == events.DELTA:
            text = _text(event, "delta")
            line.arrivals.append(at)
            if text:
                line.pieces.append((at, text))


@contextlib.asynccontextmanager
async def session(
    server: Server,
    model: str,
    *,
    open_timeout_s: float,
    timeout_s: float,
    delay: int = lag.DELAY,
    timeline: Timeline | None = None,
) -> AsyncIterator[Session]:
    """A session that has been opened. `timeout_s` is the longest wait for an event, `delay` the model's, in tokens.

    `timeline` is filled in, for a caller who needs it after an error. Raises LiveError, also within the `async with`.
    """
    begun, status = time.perf_counter(), None
    try:
        # Base64 of sound hardly shrinks, and a ping that a busy server leaves unanswered would end the session.
        async with connect(
            events.address(server.url),
            additional_headers=server.headers,
            compression=None,
            open_timeout=open_timeout_s,
            close_timeout=1,
            ping_interval=None,
            proxy=True if server.proxied else None,
        ) as socket:
            status = 101
            line = Timeline() if timeline is None else timeline
            async with Session(socket, timeout_s, delay, line).opened(model) as opened:
                yield opened
    except InvalidStatus as problem:
        told = shown(bytes(problem.response.body or b""))
        status = problem.response.status_code
        raise LiveError(f"HTTP {status} instead of a WebSocket: {told}", status) from None
    except ConnectionClosed as problem:
        raise LiveError(f"the connection was closed before transcription.done: {problem}", status) from None
    except (OSError, WebSocketException) as problem:  # TimeoutError is an OSError
        spent_s = time.perf_counter() - begun
        raise LiveError(f"{type(problem).__name__} after {spent_s:.3f} s: {problem}", status) from None


def _text(event: Event, name: str) -> str:
    text = event.get(name)
    if not isinstance(text, str):
        raise LiveError(f"{event['type']} has no string {name!r}: {json.dumps(event)[:300]}")
    return text


def _read(message: str | bytes) -> Event:
    event = events.read(message)
    if event is None:
        raise LiveError(f"a message is no JSON object: {message[:300]!r}")
    if event.get("type") == events.ERROR:
        raise LiveError(f"the server says: {json.dumps(event, ensure_ascii=False)[:300]}")
    return event
