"""The sending of one load's clips, in threads or, live, in an event loop, and what that took."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from bench import loads
from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.loads import Load
from bench.measure.gpus import MemorySampler
from bench.sessions import Sessions, Together

Meter = Callable[[], dict[str, Any]]


def load_meter(sampler: MemorySampler) -> Meter:
    """Start to count the energy of the GPUs and the CPU time of this process. Return a function to read both."""
    joules, cpu_s = sampler.meter(), time.process_time()

    def read() -> dict[str, Any]:
        energy, reason = joules()
        now = round(time.process_time() - cpu_s, 3)
        return {"joules": energy, "joules_reason": reason, "harness_cpu_s": now}

    return read


class Sending:
    """Sends clips at a load through a pool of bench.loads. `meter` begins to count, and what it returns reads it.

    It counts from the load's first request to its last answer. Of live sessions that are measured together it counts
    from when all of them are ready, whatever they did to reach their age.
    """

    def __init__(
        self, pool: Executor, client: Client, part: int, load: Load, seed: int, meter: Callable[[], Meter]
    ) -> None:
        self._pool, self._client, self._part, self._load, self._seed = pool, client, part, load, seed
        self._meter = meter
        self._read: Meter | None = None
        self._together: Together | None = None
        if isinstance(pool, Sessions):
            pool.lateness()  # of the warm-up

    def rows(self, clips: Sequence[Clip]) -> Iterator[Row]:
        """Each as it ends."""
        if self._load.sessions:
            self._together = Together(len(clips), self._seed, self._meter)
        else:
            self._read = self._meter()
        one = self._live if isinstance(self._pool, Sessions) else self._whole
        return loads.send(self._load, self._pool, clips, one, self._seed)

    def took(self) -> dict[str, Any]:
        """What the meter says and, of live audio, how late its pieces were sent; nothing of sessions that were cut."""
        found = self._read() if self._read else (self._together.took if self._together else None) or {}
        return found | ({"late_sends_ms": self._pool.lateness()} if isinstance(self._pool, Sessions) else {})

    def _whole(self, clip: Clip, due: float | None) -> Row:
        return self._client.transcribe(clip, self._part, self._load.name, due)

    def _live(self, clip: Clip, due: float | None) -> Any:
        assert isinstance(self._pool, Sessions)
        place = self._together.place(clip.id) if self._together else None
        return self._client.live(clip, self._part, self._load.name, due, place, self._pool.late)
