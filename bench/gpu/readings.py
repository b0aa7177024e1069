"""NVML's readings of the GPUs of the machine: energy, power, and memory over time."""

import contextlib
import threading
import time
from collections.abc import Callable

import psutil
import pynvml  # type: ignore[import-untyped,unused-ignore]

from bench.measure.gpus import Gpus

INTERVAL_S = 0.1  # between two samples of the memory
IDLE_S = 3  # duration of the measurement of idle power


def joules(gpus: Gpus) -> float | None:
    """Energy of the machine's GPUs since their driver was loaded; null if there are none or one does not measure it."""
    return gpus.joules(gpus.handles)


def watts(gpus: Gpus) -> float | None:
    """Mean power of the GPUs over the next IDLE_S seconds; null if `joules` is null."""
    before, start = joules(gpus), time.monotonic()
    time.sleep(IDLE_S if before is not None else 0)
    after = joules(gpus)
    return None if before is None or after is None else (after - before) / (time.monotonic() - start)


class MemoryWatch(threading.Thread):
    """Peak GPU memory in bytes: `theirs` of some processes (0 if NVML reports none), `whole` of all processes."""

    def __init__(self, gpus: Gpus, pids: Callable[[], set[int]]) -> None:
        super().__init__(daemon=True, name="gpu-memory")
        self._gpus, self._pids, self._done = gpus, pids, threading.Event()
        self.theirs, self.before, self.whole = 0, in_use(gpus), 0

    def run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._sample()

    def stop(self) -> None:
        self._done.set()
        self.join()
        self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(psutil.Error, pynvml.NVMLError):
            self.theirs = max(self.theirs, self._gpus.of_processes(self._pids()) or 0)
            self.whole = max(self.whole, in_use(self._gpus))


def in_use(gpus: Gpus) -> int:
    """Bytes in use on all GPUs, by any process; 0 without a GPU."""
    return gpus.in_use(gpus.handles) or 0


def processes(pid: int) -> set[int]:
    """The process and its descendants. Raises psutil.Error if the process has ended."""
    parent = psutil.Process(pid)
    return {pid, *(child.pid for child in parent.children(recursive=True))}
