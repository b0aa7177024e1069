"""What goes on beside live sessions: uploads in flight, and the energy and host memory over time."""

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.gpu.readings import joules, processes
from bench.memory import Gpus

INTERVAL_S = 0.5  # between two samples


class Sample(NamedTuple):
    """At the unix time `at`: joules since the driver was loaded, null without a counter; resident bytes, summed over
    the server's processes, in each of which the pages that they share count."""

    at: float
    joules: float | None
    host_bytes: int


class Samples(threading.Thread):
    """Samples the GPUs' energy and the memory of a process and all that come of it, until `stop`."""

    def __init__(self, gpus: Gpus, pid: int) -> None:
        super().__init__(daemon=True, name="samples")
        self._gpus, self._pid, self._done = gpus, pid, threading.Event()
        self._samples: list[Sample] = []

    def run(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error):  # it ended: its requests will say so
                resident = 0
                for pid in processes(self._pid):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        resident += psutil.Process(pid).memory_info().rss
                self._samples.append(Sample(time.time(), joules(self._gpus), resident))
            if self._done.wait(INTERVAL_S):
                return

    def stop(self) -> None:
        self._done.set()
        self.join()

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two unix times, linearly between samples; null where it is not counted or not known then."""
        known = [(sample.at, sample.joules) for sample in self._samples if sample.joules is not None]
        first, last = _at(known, begin), _at(known, end)
        return None if first is None or last is None else last - first

    def host_bytes(self, begin: float, end: float) -> tuple[int | None, int | None]:
        """Memory at the beginning and at the end of this time; null where there is no sample in it."""
        found = [sample.host_bytes for sample in self._samples if begin <= sample.at <= end]
        return (found[0], found[-1]) if found else (None, None)


def _at(known: Sequence[tuple[float, float]], at: float) -> float | None:
    for (before, low), (after, high) in itertools.pairwise(known):
        if before <= at <= after:
            return low + (high - low) * (at - before) / (after - before)
    return None


class Uploads:
    """Keeps so many clips in flight until `stop`, over and over in their order."""

    def __init__(self, client: Client, clips: Sequence[Clip], in_flight: int) -> None:
        """`clips` are those of bench.gpu.tasks.decode."""
        self._client, self._clips = client, itertools.cycle(clips)
        self._lock, self._done = threading.Lock(), threading.Event()
        self.rows: list[Row] = []
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(in_flight)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while not self._done.is_set():
            with self._lock:
                clip = next(self._clips)
            row = self._client.transcribe(clip, part=1, max_completion_tokens=str(clip.extra["tokens"]))
            with self._lock:
                self.rows.append(row)
            if row.error is not None:
                self._done.wait(1)  # a server that is down is not asked thousands of times

    def stop(self) -> None:
        """Wait for what is in flight."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def done(self, begin: float, end: float) -> list[Row]:
        """The rows that ended between two unix times."""
        return [row for row in self.rows if begin <= row.end <= end]
