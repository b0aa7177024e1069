"""NVIDIA GPUs by NVML, and the memory and energy of a server. What is not measured is None with a reason, never 0.

There are three sources of the memory. The first one that returns a value is reported:
1. `nvml_process_tree`: GPU memory that NVML attributes to the server's processes, summed over the GPUs.
2. `nvml_device`: all memory in use on the GPUs that the server has open, including that of other processes. It is
   used if NVML gives no number per process, as in many containers.
3. `rss_process_tree`: resident memory of the process that listens on the URL's port and of its descendants.
   Shared pages, such as mapped weights and libraries, count in each process.
A peak between two samples is missed. vLLM allocates its memory at the start and keeps it, so the error is small.
The peaks of the second and third source are always reported as well.
"""

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import psutil
import pynvml  # type: ignore[import-untyped,unused-ignore]

SOURCES = ("nvml_process_tree", "nvml_device", "rss_process_tree")
INTERVAL_S = 0.5
NO_GPU = "this machine has no NVIDIA GPU"
# Programs that listen for a container or a tunnel: their memory is not that of the server.
# True if the server behind them is on this machine.
FORWARDERS = {"docker-proxy": True, "rootlessport": True, "slirp4netns": True, "ssh": False, "kubectl": False}


class Gpus:
    """The NVIDIA GPUs of this machine by their minor number (N of /dev/nvidiaN); none without a driver.

    With CUDA_VISIBLE_DEVICES, as indices or UUIDs, only those: another program may work on the others.
    """

    def __init__(self) -> None:
        self.handles: dict[int, Any] = {}
        try:
            pynvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = map(str, range(pynvml.nvmlDeviceGetCount())) if visible is None else visible.split(",")
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
                if name
            ]
            self.handles = {pynvml.nvmlDeviceGetMinorNumber(handle): handle for handle in handles}
        except pynvml.NVMLError:
            pass

    def of_processes(self, pids: set[int]) -> int | None:
        """Bytes that NVML attributes to these processes; None if it does not know them or has no number."""
        users = [user for gpu in self.handles.values() for user in _users(gpu)]
        return sum(user.usedGpuMemory or 0 for user in users if user.pid in pids) or None

    def in_use(self, minors: Iterable[int]) -> int | None:
        """Bytes in use on these GPUs, by all processes; None without a GPU. Raises pynvml.NVMLError."""
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(self.handles[minor]).used) for minor in minors) or None

    def joules(self, minors: Iterable[int]) -> float | None:
        """Energy of these GPUs since their driver was loaded; None if there are none or one does not measure it.

        NVML measures millijoules since Volta: nvmlDeviceGetTotalEnergyConsumption.
        """
        try:
            amounts = [pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handles[minor]) for minor in minors]
        except pynvml.NVMLError:
            return None
        return sum(amounts) / 1000 if amounts and all(amounts) else None

    def opened_by(self, pids: set[int]) -> set[int]:
        """The GPUs that these processes have open, from their file descriptors (Linux) and from NVML."""
        links = set()
        for pid in pids:
            try:
                links |= {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
            except OSError:
                continue  # ended or closed meanwhile, or not readable by this user
        return {
            minor
            for minor, gpu in self.handles.items()
            if f"/dev/nvidia{minor}" in links or any(user.pid in pids for user in _users(gpu))
        }

    def facts(self) -> list[dict[str, Any]]:
        """Name and memory of each GPU; None for memory that NVML does not tell."""
        return [
            {"name": str(pynvml.nvmlDeviceGetName(gpu)), "memory_bytes": _total(gpu)} for gpu in self.handles.values()
        ]

    def driver(self) -> str | None:
        """The version of the driver, None without a GPU."""
        return str(pynvml.nvmlSystemGetDriverVersion()) if self.handles else None


def _users(gpu: Any) -> list[Any]:
    """The processes on a GPU; none if NVML may not list them, as with MIG."""
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    except pynvml.NVMLError:
        return []


def _total(gpu: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total)
    except pynvml.NVMLError:
        return None  # no memory of its own: CPU and GPU share one chip


class MemorySampler(threading.Thread):
    """Samples from `start()` until `stop()`, which returns the memory in bytes; None if it could not be measured.

    {peak_bytes, end_bytes, source, reason, device_peak_bytes, host_rss_peak_bytes}: peak and last sample of `source`,
    and the peaks of `nvml_device` and `rss_process_tree`. If `source` is None, `reason` says why.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True, name="memory-sampler")
        self._url = url
        self._done, self._sampled = threading.Event(), threading.Event()
        self._peaks: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._servers: list[psutil.Process] = []
        self._reason: str | None = None
        self._gpus = Gpus()
        self._opened: set[int] = set()

    def run(self) -> None:
        while not self._done.is_set():
            try:
                self._sample()
            except (psutil.Error, pynvml.NVMLError, OSError) as error:
                self._reason = f"a sample failed: {error}"  # usually a process that has just ended
            self._sampled.set()
            self._done.wait(INTERVAL_S)

    def gpus(self) -> int:
        """The number of GPUs that the server is known to use."""
        self._sampled.wait()
        return len(self._opened)

    def meter(self) -> Callable[[], tuple[float | None, str | None]]:
        """Start to measure energy. The result returns the joules since then, or None and the reason."""
        self._sampled.wait()
        opened = set(self._opened)
        before = self._gpus.joules(opened)

        def read() -> tuple[float | None, str | None]:
            after = self._gpus.joules(opened)
            if before is not None and after is not None:
                return after - before, None
            return None, self._no_gpu() or "NVML does not measure the energy of the server's GPU"

        return read

    def _no_gpu(self) -> str | None:
        """Why no GPU of the server is known; None if one is."""
        if not self._gpus.handles:
            return NO_GPU
        return None if self._opened else self._reason or "the server has no GPU open, or this user may not see it"

    def device_reason(self) -> str | None:
        """Why `device_peak_bytes` is None; None if it is not."""
        return None if "nvml_device" in self._peaks else self._no_gpu() or self._reason or "no sample was taken"

    def stop(self) -> dict[str, Any]:
        self._done.set()
        self.join()
        source = next((source for source in SOURCES if source in self._peaks), None)
        whole_gpu = "all memory in use on the GPU, because NVML does not list the server's processes here"
        reason = {None: self._reason or "no sample was taken", "nvml_device": whole_gpu}.get(source)
        return {
            "peak_bytes": self._peaks[source] if source else None,
            "end_bytes": self._last[source] if source else None,
            "source": source,
            "reason": reason,
            "device_peak_bytes": self._peaks.get("nvml_device"),
            "host_rss_peak_bytes": self._peaks.get("rss_process_tree"),
        }

    def _sample(self) -> None:
        if not any(server.is_running() for server in self._servers):
            self._servers, self._reason, on_this_machine = find_server(self._url)
            # With several GPUs it is unknown which ones the server uses.
            alone = not self._servers and on_this_machine and len(self._gpus.handles) == 1
            self._opened = set(self._gpus.handles) if alone else set()
        tree = {child for server in self._servers for child in (server, *server.children(recursive=True))}
        pids = {process.pid for process in tree}
        if tree:
            self._keep("rss_process_tree", sum(process.memory_info().rss for process in tree))
            self._opened = self._gpus.opened_by(pids)
            self._keep("nvml_process_tree", self._gpus.of_processes(pids))
        self._keep("nvml_device", self._gpus.in_use(self._opened))

    def _keep(self, source: str, amount: int | None) -> None:
        if amount is not None:
            self._last[source] = amount
            self._peaks[source] = max(amount, self._peaks.get(source, 0))


def find_server(url: str) -> tuple[list[psutil.Process], str | None, bool]:
    """Find the processes that listen on the URL's port.

    Returns them, or the reason why there are none, and whether the server is on this machine.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    hosts = {str(info[4][0]) for info in socket.getaddrinfo(parts.hostname, port)}
    own = {address.address for card in psutil.net_if_addrs().values() for address in card}
    if not any(address in own or ipaddress.ip_address(address).is_loopback for address in hosts):
        return [], f"{parts.hostname} is another machine", False
    try:
        addresses = {(address, port) for address in (*hosts, "0.0.0.0", "::")}
        listeners = [link for link in psutil.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
        pids = {listener.pid for listener in listeners if tuple(listener.laddr) in addresses}
        servers = [psutil.Process(pid) for pid in pids if pid is not None]
    except psutil.Error:
        servers = []  # macOS lists sockets of other processes only for root
    for name in {server.name() for server in servers} & set(FORWARDERS):
        return [], f"{name} listens on port {port}, not the server itself", FORWARDERS[name]
    if not servers:
        return [], f"this user or container cannot see the process that listens on port {port}", True
    return servers, None, True
