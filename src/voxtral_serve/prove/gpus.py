"""Memory and energy of the server's GPUs, by NVML. What cannot be measured has a reason, and is never 0."""

import os
import threading
from typing import Any

import pynvml  # type: ignore[import-untyped,unused-ignore]

INTERVAL_S = 0.5
GROWTH_BYTES = 100 << 20  # by which a server's start raises the memory in use of a GPU that it uses


class Gpus:
    """The NVIDIA GPUs of this machine, those of CUDA_VISIBLE_DEVICES where it is set; `why` there are none."""

    def __init__(self, local: bool) -> None:
        self.handles: list[Any] = []
        self.why: str | None = None
        if not local:
            self.why = "the server is on another machine"
            return
        try:
            pynvml.nvmlInit()
            named = os.environ.get("CUDA_VISIBLE_DEVICES")
            numbers = map(str, range(pynvml.nvmlDeviceGetCount()))
            names = list(numbers) if named is None else [name for name in named.split(",") if name]
            self.handles = [
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
        except pynvml.NVMLError as error:
            self.why = f"no NVIDIA GPU on this machine (NVML: {error})"
        else:
            if not self.handles:
                self.why = "no NVIDIA GPU on this machine, or CUDA_VISIBLE_DEVICES hides all"

    def in_use(self) -> list[int] | None:
        """Bytes in use on each GPU, by all processes; None if NVML does not tell."""
        try:
            return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self.handles]
        except pynvml.NVMLError:
            return None

    def facts(self) -> list[dict[str, Any]]:
        """Name and memory of each; None for memory that NVML does not tell."""
        return [
            {"name": str(pynvml.nvmlDeviceGetName(handle)), "memory_bytes": _total(handle)} for handle in self.handles
        ]

    def driver(self) -> str | None:
        return str(pynvml.nvmlSystemGetDriverVersion()) if self.handles else None


def _total(handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return None


class Meter(threading.Thread):
    """Samples the memory of the server's GPUs until `stop`, and reads their energy."""

    def __init__(self, gpus: Gpus, before: list[int] | None) -> None:
        """`before` has the bytes in use on each GPU before the server's start; None for a server that was up."""
        super().__init__(daemon=True)
        self.why = gpus.why
        self._handles: list[Any] = []
        self._peak: int | None = None
        self._done = threading.Event()
        if self.why is None:
            self._handles = self._of_server(gpus, before)
        self.start()

    def _of_server(self, gpus: Gpus, before: list[int] | None) -> list[Any]:
        if len(gpus.handles) == 1:
            return gpus.handles
        now = gpus.in_use()
        if before is None or now is None:
            self.why = (
                f"this machine has {len(gpus.handles)} GPUs, and which of them the server uses is not known: name "
                "it in CUDA_VISIBLE_DEVICES"
            )
            return []
        pairs = zip(gpus.handles, before, now, strict=True)
        found = [handle for handle, was, used in pairs if used - was > GROWTH_BYTES]
        if not found:
            self.why = "the server's start changed the memory of no GPU"
        return found

    def run(self) -> None:
        while self._handles and not self._done.is_set():
            try:
                used = sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)
            except pynvml.NVMLError as error:
                self.why = f"NVML does not tell the memory of a GPU ({error})"
                return
            self._peak = max(used, self._peak or 0)
            self._done.wait(INTERVAL_S)

    def joules(self) -> float | None:
        """Energy of the server's GPUs since their driver was loaded; None if it is not measured. NVML has millijoules
        since Volta."""
        try:
            read = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles]
        except pynvml.NVMLError:
            return None
        return sum(read) / 1000 if read and all(read) else None

    def stop(self) -> int | None:
        """The most bytes in use on the server's GPUs, by all processes; None if not measured."""
        self._done.set()
        self.join()
        return self._peak or None
