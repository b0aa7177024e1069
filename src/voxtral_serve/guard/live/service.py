"""The live sessions of an API process: what they share, and what ends them from outside.

Every SWEEP_S the sockets are looked at: a client that has gone, one that sends nothing and awaits nothing, one that
does not read its text, one that has been here for too long, and an engine that does not answer or has died end a
session. Nothing of that costs anything per event.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Detector
from voxtral_serve.engine.keywords import PhraseTokens
from voxtral_serve.engine.session import SessionShape
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.labeller import Labeller
from voxtral_serve.guard.live.codec import CodecContext
from voxtral_serve.guard.live.cuts import CutPoints
from voxtral_serve.guard.live.endings import DEAD, FAILED, IDLE, LATER, POLICY, REFUSED, REVOKED, STOPPING, Ending
from voxtral_serve.guard.live.link import Engine, EngineLink
from voxtral_serve.guard.live.metrics import Metrics, metrics
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.live.speakers import KeptAudio
from voxtral_serve.guard.live.voices import VoicePool
from voxtral_serve.patches.live_server import Wire
from voxtral_serve.transcript.words import TokenStream
from voxtral_serve.units import MIB

SWEEP_S = 0.5
LEAST_SOCKETS, SOCKETS_A_SESSION = 64, 4  # of a process, whether they have audio or not
# Bytes of messages that wait for the engine, of one socket and of all of a process; and of those that are not whole.
SOCKET_BYTES, PROCESS_BYTES, ARRIVING_BYTES = 32 * MIB, 256 * MIB, 256 * MIB
SILENT_S = 50.0  # in which nothing comes from a client, no pong either: uvicorn sends a ping each 20 s
UNREAD_S = 30.0  # in which a client takes none of its text, with the socket's buffers full
STALLED_S = 60.0  # in which the engine does not answer a session
PAUSE_S = 0.2  # of PAUSE frames: the detector says a little late that speech has ended
STALLED = Ending("stalled", FAILED, f"the engine has not answered for {STALLED_S:.0f} s", "engine_stalled")
VANISHED = Ending("vanished", POLICY, f"nothing, and no pong, has come from the client for {SILENT_S:.0f} s")
SWAMPED = Ending(REFUSED, LATER, "too many large messages are arriving: send less audio at once", "overloaded")
UNREAD = Ending("unread", POLICY, f"the client has not read its text for {UNREAD_S:.0f} s", "unread")


class Socket(Protocol):
    """A client's connection, whatever its protocol."""

    listening_since: float | None  # since when it waits for the client's next event
    sending_since: float | None  # since when an event waits for the client to read
    opened: float  # when it was accepted
    wire: Wire | None  # None if the server does not tell of it
    valid: Callable[[], bool] | None  # whether its key is; None for a socket without one
    waiting_bytes: int  # of messages that were read and whose turn has not come
    paused: bool  # whether the socket is not read, because too many bytes wait

    @property
    def session(self) -> LiveSession | None:
        """The one that is open."""

    @property
    def ending(self) -> Ending | None:
        """Why it is being closed from this side."""

    @property
    def had_audio(self) -> bool:
        """Whether there was a session, or audio waits for one."""

    @property
    def awaits_text(self) -> bool:
        """Whether the client waits for text, and not the server for the client."""

    def leave(self) -> None:
        """The client has gone."""

    def stop(self, ending: Ending) -> None:
        """End it now."""

    def drain(self, ending: Ending) -> None:
        """End it with the text of the audio that has arrived."""


def most_sockets(sessions: int) -> int:
    """Of a process, on a server with so many live sessions. A socket without audio costs some 25 KB."""
    return max(LEAST_SOCKETS, SOCKETS_A_SESSION * sessions)


class LiveService:
    """The only one of a process.

    Raises ContextError if the engine's context is too short, AttributeError if vLLM is not as expected.
    """

    def __init__(
        self,
        engine: Engine,
        shape: SessionShape,
        detector: Detector,
        serves: Callable[[object], bool],
        idle_s: float,
        backlog_s: float,
        model: str = "",
        stream: TokenStream | None = None,
        session_s: float | None = None,
        most: int = LEAST_SOCKETS,
        labeller: Labeller | None = None,
        unlabelled: str | None = None,
        phrases: PhraseTokens | None = None,
    ) -> None:
        """`serves` says whether a model of this name is served, `model` is the first such name, and `stream` says how
        to read the model's tokens. The times are VOXTRAL_SERVE_LIVE_*; `session_s` is None for no such limit. `most`
        bounds the sockets. `labeller` is of speakers; None for the reason `unlabelled`. `phrases` is that of
        CodecContext."""
        self.model, self.stream = model, stream
        self.voices = VoicePool()
        self.kept = None if labeller is None else KeptAudio(labeller, detector)
        self._unlabelled, self._phrases = unlabelled, phrases
        self.link, self.detector, self.serves = EngineLink(engine, shape), detector, serves
        self._points: dict[SessionShape, CutPoints] = {}
        self._points_of(shape)  # raises ContextError now, not in the first session
        self.idle_s, self.backlog_s, self.session_s = idle_s, backlog_s, session_s
        self.metrics: Metrics = metrics()
        self.sockets: dict[Socket, asyncio.Task[None]] = {}
        self.most = most
        self.waiting_bytes = 0  # those of all sockets
        self.stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pauses")
        self._sweeper: asyncio.Task[None] | None = None

    def check_delay(self, delay_ms: int) -> None:
        """Raises ValueError for a delay that is not valid, or that the engine's context is too short for."""
        self._points_of(self.link.shape.with_delay_ms(delay_ms))

    def context(self, id: str, expires_at: int | None) -> CodecContext:
        """What the codec of a connection knows."""
        shape = self.link.shape
        delays = shape.delay_ms, self.check_delay
        abilities = self._unlabelled, self._phrases
        return CodecContext(id, expires_at, self.model, self.serves, *delays, shape.rate_hz, *abilities)

    def session(self, failed: Callable[[str], None], *, delay_ms: int | None = None) -> LiveSession:
        """
        failed     is told what the engine refused once the session had begun
        delay_ms   of the text behind the audio; None is the checkpoint's

        Raises ValueError for a delay that is not valid, or that the engine's context is too short for.
        """
        shape = self.link.shape.with_delay_ms(delay_ms)
        points = self._points_of(shape)
        return LiveSession(self.link, shape, points, self.metrics, self._is_pause, failed, self.backlog_s)

    def _points_of(self, shape: SessionShape) -> CutPoints:
        if shape not in self._points:
            self._points[shape] = CutPoints.of(shape, self.link.engine.positions)
        return self._points[shape]

    def make_room(self) -> None:
        """For another socket: if there are `most`, the one that has been idle for the longest ends, and one that had
        audio after all others. One whose client does not read what it is sent is idle, too. Raises RefusedError if
        none is idle."""
        staying = [socket for socket in self.sockets if socket.ending is None]
        if len(staying) < self.most:
            return
        idle = [
            (socket.had_audio, since, socket)
            for socket in staying
            if socket.session is None
            and not socket.awaits_text
            and (since := socket.listening_since or socket.sending_since) is not None
        ]
        if not idle:
            raise RefusedError(
                429,
                f"{self.most} live connections are open and none is idle, as many as this server takes: try again soon",
                "too_many_connections",
            )
        *_, longest = min(idle, key=lambda place: place[:2])
        longest.stop(Ending(IDLE, POLICY, "idle, and another connection needs the place", "idle_timeout"))

    def has_room(self, waiting_bytes: int) -> bool:
        """Whether a socket of which so many bytes wait is to be read: each has its share, however many others want."""
        share = PROCESS_BYTES // max(1, len(self.sockets))
        return waiting_bytes < SOCKET_BYTES and (self.waiting_bytes < PROCESS_BYTES or waiting_bytes < share)

    def add(self, socket: Socket, task: asyncio.Task[None]) -> None:
        """`task` ends with the socket."""
        self.sockets[socket] = task
        self.metrics.connections.inc()
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def remove(self, socket: Socket, reason: str) -> None:
        del self.sockets[socket]
        self.metrics.connections.dec()
        self.metrics.ended.labels(reason).inc()

    async def drain(self, grace_s: float) -> None:
        """End all sessions with the text of their audio so far; those that take longer than `grace_s` without."""
        self.stopping = True
        for socket in list(self.sockets):
            socket.drain(STOPPING)
        if tasks := list(self.sockets.values()):
            _, late = await asyncio.wait(tasks, timeout=max(0.0, grace_s - 2 * SWEEP_S))
            for socket, task in list(self.sockets.items()):
                if task in late:
                    socket.stop(STOPPING._replace(code="stopping"))
            if late:
                await asyncio.wait(late, timeout=SWEEP_S)
        self._thread.shutdown(wait=False)
        self.voices.close()

    async def _sweep(self) -> None:
        while self.sockets:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())
        self.metrics.backlog.set(0)

    def sweep(self, now: float) -> None:
        """End the sockets that are to be ended at this time.monotonic()."""
        backlog = arriving = 0
        for socket in list(self.sockets):
            if (session := socket.session) is not None:
                backlog += session.backlog
                session.count()
            if socket.wire is not None:
                arriving += socket.wire.arriving
                if socket.paused and socket.wire.gone():
                    socket.leave()
                elif socket.paused:
                    socket.wire.beat()
            if (ending := self._due(socket, now)) is not None:
                socket.stop(ending)
            elif self.session_s is not None and now - socket.opened > self.session_s:
                words = f"the session has had its {self.session_s:g} s (VOXTRAL_SERVE_LIVE_SESSION_S): connect again"
                socket.drain(Ending("expired", POLICY, words, "session_expired"))
        if arriving > ARRIVING_BYTES:
            for socket in list(self.sockets):
                if socket.wire is not None and socket.wire.arriving > ARRIVING_BYTES // len(self.sockets):
                    socket.stop(SWAMPED)
        self.metrics.backlog.set(backlog / self.link.shape.rate_hz)

    def _due(self, socket: Socket, now: float) -> Ending | None:
        """Why a socket is to be ended at once."""
        session, wire = socket.session, socket.wire
        if self.link.engine.dead():
            return DEAD
        if socket.valid is not None and not socket.valid():
            return REVOKED
        if socket.sending_since is not None and now - socket.sending_since > UNREAD_S:
            return UNREAD
        if session is not None and session.stalled_s(now) > STALLED_S:
            return STALLED
        if wire is not None and not socket.paused and now - wire.heard > SILENT_S:
            return VANISHED
        since = socket.listening_since
        if since is not None and now - since > self.idle_s and not socket.awaits_text:
            return Ending(IDLE, POLICY, f"no audio and no event for {self.idle_s:g} s", "idle_timeout")
        return None

    def _is_pause(self, pcm: bytes) -> Awaitable[bool]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._ends_in_pause, pcm)

    def _ends_in_pause(self, pcm: bytes) -> bool:
        samples = np.frombuffer(pcm, np.int16).astype(np.float32) / 2**15
        return self.detector.silent_s(Clip(samples, self.link.shape.rate_hz)) >= PAUSE_S
