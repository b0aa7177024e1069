"""Parallel to live sessions: uploads in flight, and samples of energy and host memory."""

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
from bench.measure.gpus import Gpus

INTERVAL_S = 0.5  # between two samples


class Sample(NamedTuple):
    """A sample at the Unix time `at`.

    `joules` since the driver was loaded, null without a counter. `host_bytes`: sum of the resident bytes of the
    server's processes; a shared page counts in each process.
    """

    at: float
    joules: float | None
    host_bytes: int


class Samples(threading.Thread):
    """Samples the energy of the GPUs and the memory of a process and its descendants, until `stop`."""

    def __init__(self, gpus: Gpus, pid: int) -> None:
        super().__init__(daemon=True, name="samples")
        self._gpus, self._pid, self._done = gpus, pid, threading.Event()
        self._samples: list[Sample] = []

    def run(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error):  # it has ended, so its requests fail
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
        """Energy between two Unix times, interpolated linearly between samples; null if it is not known."""
        known = [(sample.at, sample.joules) for sample in self._samples if sample.joules is not None]
        first, last = _at(known, begin), _at(known, end)
        return None if first is None or last is None else last - first

    def host_bytes(self, begin: float, end: float) -> tuple[int | None, int | None]:
        """Memory in the first and in the last sample between two Unix times; null without a sample."""
        found = [sample.host_bytes for sample in self._samples if begin <= sample.at <= end]
        return (found[0], found[-1]) if found else (None, None)


def _at(known: Sequence[tuple[float, float]], at: float) -> float | None:
    for (before, low), (after, high) in itertools.pairwise(known):
        if before <= at <= after:
            return low + (high - low) * (at - before) / (after - before)
    return None


class Uploads:
    """Keeps `in_flight` clips in flight until `stop`. The clips are sent in their order, repeatedly."""

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
                self._done.wait(1)  # do not send thousands of requests to a server that is down

    def stop(self) -> None:
        """Send no further clips, and wait for those in flight."""
        self._done.set()
        for thread in self._threads:
            thread.join()
