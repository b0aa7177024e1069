"""The live sessions of an API process: what they share, and what ends them from outside.

Every SWEEP_S the sockets are looked at: a client that sends nothing and awaits nothing, one that does not read its
text, one that has been here for too long, and an engine that does not answer or has died end a session. Nothing of that
costs anything per event.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Detector
from voxtral_serve.engine.session import SessionShape
from voxtral_serve.guard.live.cuts import CutPoints
from voxtral_serve.guard.live.link import Engine, EngineLink
from voxtral_serve.guard.live.metrics import Metrics, metrics
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.live.voices import VoicePool
from voxtral_serve.transcript.words import TokenStream

SWEEP_S = 1.0
UNREAD_S = 30.0  # in which a client takes none of its text, with the socket's buffers full
STALLED_S = 60.0  # in which the engine does not answer a session
PAUSE_S = 0.2  # of PAUSE frames: the detector says a little late that speech has ended
POLICY, FAILED, RESTART, LATER = 1008, 1011, 1012, 1013  # close codes (RFC 6455, and IANA's registry)


class Ending(NamedTuple):
    """Why a socket is closed from this side.

    reason    a label of the metric and a word in the log
    close     the close code; its reason is `words`
    code      of the error event; None for an ending that is no error
    """

    reason: str
    close: int
    words: str
    code: str | None = None


REFUSED = "refused"  # the reason of an ending for a client that the server does not serve
STOPPING = Ending("stopping", RESTART, "the server is stopping")
DEAD = Ending("engine", FAILED, "the engine has died", "engine_dead")
STALLED = Ending("stalled", FAILED, f"the engine has not answered for {STALLED_S:.0f} s", "engine_stalled")
UNREAD = Ending("unread", POLICY, f"the client has not read its text for {UNREAD_S:.0f} s", "unread")


class Socket(Protocol):
    """A client's connection, whatever its dialect."""

    listening_since: float | None  # since when it waits for the client's next event
    sending_since: float | None  # since when an event waits for the client to read
    opened: float  # when it was accepted

    @property
    def session(self) -> LiveSession | None:
        """The one that is open."""

    @property
    def awaits_text(self) -> bool:
        """Whether the client waits for text, and not the server for the client."""

    def stop(self, ending: Ending) -> None:
        """End it now."""

    def drain(self, ending: Ending) -> None:
        """End it with the text of the audio that has arrived."""


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
    ) -> None:
        """`serves` says whether a model of this name is served, `model` is the first such name, and `stream` says how
        to read the model's tokens. The times are VOXTRAL_SERVE_LIVE_*; `session_s` is None for no such limit."""
        self.model, self.stream = model, stream
        self.voices = VoicePool()
        self.link, self.detector, self.serves = EngineLink(engine, shape), detector, serves
        self._points: dict[SessionShape, CutPoints] = {}
        self._points_of(shape)  # raises ContextError now, not in the first session
        self.idle_s, self.backlog_s, self.session_s = idle_s, backlog_s, session_s
        self.metrics: Metrics = metrics()
        self.sockets: dict[Socket, asyncio.Task[None]] = {}
        self.stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pauses")
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def delay_ms(self) -> int:
        """The checkpoint's."""
        return self.link.shape.delay_ms

    def check_delay(self, delay_ms: int) -> None:
        """Raises ValueError for a delay that is not valid, or that the engine's context is too short for."""
        self._points_of(self.link.shape.with_delay_ms(delay_ms))

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

    def add(self, socket: Socket, task: asyncio.Task[None]) -> None:
        """`task` ends with the socket."""
        self.sockets[socket] = task
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def remove(self, socket: Socket, reason: str) -> None:
        del self.sockets[socket]
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
        dead, backlog = self.link.engine.dead(), 0
        for socket in list(self.sockets):
            session = socket.session
            if session is not None:
                backlog += session.backlog
                session.count()
            if dead:
                socket.stop(DEAD)
            elif socket.sending_since is not None and now - socket.sending_since > UNREAD_S:
                socket.stop(UNREAD)
            elif session is not None and session.stalled_s(now) > STALLED_S:
                socket.stop(STALLED)
            elif self.session_s is not None and now - socket.opened > self.session_s:
                words = f"the session has had its {self.session_s:g} s (VOXTRAL_SERVE_LIVE_SESSION_S): connect again"
                socket.drain(Ending("expired", POLICY, words, "session_expired"))
            elif (
                socket.listening_since is not None
                and now - socket.listening_since > self.idle_s
                and not socket.awaits_text
            ):
                words = f"no audio and no event for {self.idle_s:g} s"
                socket.stop(Ending("idle", POLICY, words, "idle_timeout"))
        self.metrics.backlog.set(backlog / self.link.shape.rate_hz)

    def _is_pause(self, pcm: bytes) -> Awaitable[bool]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._ends_in_pause, pcm)

    def _ends_in_pause(self, pcm: bytes) -> bool:
        samples = np.frombuffer(pcm, np.int16).astype(np.float32) / 2**15
        return self.detector.silent_s(Clip(samples, self.link.shape.rate_hz)) >= PAUSE_S
