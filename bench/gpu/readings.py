"""What NVML tells of the machine's GPUs: energy, power when idle, and memory while a server starts or works."""

import contextlib
import threading
import time
from collections.abc import Callable

import psutil
import pynvml  # type: ignore[import-untyped,unused-ignore]

from bench import memory
from bench.memory import Gpus

INTERVAL_S = 0.1  # between two looks at the memory
IDLE_S = 3  # over which the power of idle GPUs is taken


def joules(gpus: Gpus) -> float | None:
    """Energy that the machine's GPUs took since their driver was loaded; null without one that counts it."""
    return memory.joules(gpus.handles.values())


def watts(gpus: Gpus) -> float | None:
    """Power that the GPUs take now, over IDLE_S seconds; null where `joules` is."""
    before, start = joules(gpus), time.monotonic()
    time.sleep(IDLE_S if before is not None else 0)
    after = joules(gpus)
    return None if before is None or after is None else (after - before) / (time.monotonic() - start)


class MemoryWatch(threading.Thread):
    """The highest GPU memory, in bytes, of some processes (`theirs`; 0 where NVML names none) and of all (`whole`)."""

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
            self.theirs = max(self.theirs, self._gpus.of_processes(self._pids()))
            self.whole = max(self.whole, in_use(self._gpus))


def in_use(gpus: Gpus) -> int:
    """Bytes in use on all GPUs, by whomever."""
    return gpus.in_use(set(gpus.handles))


def processes(pid: int) -> set[int]:
    """The process and all that come of it. Raises psutil.Error where it has ended."""
    parent = psutil.Process(pid)
    return {pid, *(child.pid for child in parent.children(recursive=True))}
