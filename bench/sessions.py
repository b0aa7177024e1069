"""Hundreds of live sessions in one process: an event loop in place of a thread for each.

What the client itself costs is measured as well, so that a slow client is not taken for a slow server: its CPU time for
each second of a session, and how much later than due it sent its pieces.
"""

import asyncio
import random
import threading
import time
from array import array
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from bench.measure import spread

START_S = 0.1  # from the moment at which all sessions are ready until the first may start
SPREAD_S = 1.0  # within which sessions start that are measured together

Meter = Callable[[], dict[str, Any]]


class Together:
    """Sessions that are measured at the same time.

    They start when all of them are ready, each at a time of its own within a second. `meter` is called then; and what
    it returns, when the last one has ended: that gives `took`.
    """

    def __init__(self, sessions: int, seed: int, meter: Callable[[], Meter]) -> None:
        self._not_ready = self._not_ended = sessions
        self._seed, self._meter = seed, meter
        self._started, self._over = asyncio.Event(), asyncio.Event()
        self._begun = 0.0
        self._read: Meter | None = None
        self.took: dict[str, Any] | None = None

    def place(self, name: str) -> "Place":
        return Place(self, random.Random(f"{self._seed} {name}").uniform(0, SPREAD_S))

    async def start(self) -> float:
        """One more is ready. Returns when all are, with that time on the clock of time.perf_counter."""
        self.count_ready()
        await self._started.wait()
        return self._begun + START_S

    def count_ready(self) -> None:
        self._not_ready -= 1
        if not self._not_ready:
            self._read = self._meter()
            self._begun = time.perf_counter()
            self._started.set()

    async def end(self) -> None:
        """One more has ended. Returns when all have."""
        self._not_ended -= 1
        if not self._not_ended:
            self.took = self._read() if self._read else None
            self._over.set()
        await self._over.wait()


class Place:
    """One session's part in it: a bench.realtime.Place."""

    def __init__(self, together: Together, offset_s: float) -> None:
        self._together, self._offset_s = together, offset_s
        self._was_ready = False

    async def ready(self) -> float:
        """When the session is to start, once all are ready."""
        self._was_ready = True
        return await self._together.start() + self._offset_s

    async def ended(self) -> None:
        """Returns when all have ended. A session that failed before it was ready holds up nobody."""
        if not self._was_ready:
            self._together.count_ready()
        await self._together.end()


class Sessions(Executor):
    """Runs coroutine functions in an event loop of its own thread, `most` at a time; null for any number."""

    def __init__(self, most: int | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._turn = asyncio.Semaphore(most) if most else None
        self._futures: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="live-sessions")
        self._thread.start()
        self.late: array[float] = array("d")  # s by which each piece was sent later than due

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """`fn` is a coroutine function."""
        future = asyncio.run_coroutine_threadsafe(self._in_turn(fn(*args, **kwargs)), self._loop)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    async def _in_turn(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._turn is None:
            return await work
        async with self._turn:
            return await work

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the loop; what still runs is cancelled."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(asyncio.ensure_future, self._end())
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()

    def lateness(self) -> dict[str, float] | None:
        """P50, P99 and the longest, in ms, of all pieces since the last call; null where none was sent."""
        late = 1000 * np.array(self.late)
        del self.late[:]
        if not len(late):
            return None
        return {**(spread.percentiles(late, (50, 99)) or {}), "max": float(late.max())}
