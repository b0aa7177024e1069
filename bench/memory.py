"""The memory of the server, sampled during the run, and the energy of its GPUs.

There are three sources. The first one that returns a value is reported:
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
# Processes that listen for a container or a tunnel: their memory is not that of the server.
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
            named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = [name for name in named if name] or [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
            found = [
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdecimal()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
            ]
            self.handles = {pynvml.nvmlDeviceGetMinorNumber(handle): handle for handle in found}
        except pynvml.NVMLError:
            pass

    def of_processes(self, pids: set[int]) -> int:
        """Bytes that NVML attributes to these processes; 0 if NVML does not know them or has no number."""
        list_users = pynvml.nvmlDeviceGetComputeRunningProcesses
        try:
            users = [user for gpu in self.handles.values() for user in list_users(gpu)]
        except pynvml.NVMLError:
            return 0  # not permitted, as with MIG
        return sum(user.usedGpuMemory or 0 for user in users if user.pid in pids)

    def in_use(self, minors: set[int]) -> int:
        """Bytes in use on these GPUs, by all processes."""
        return sum(pynvml.nvmlDeviceGetMemoryInfo(self.handles[minor]).used for minor in minors)

    def opened_by(self, pids: set[int]) -> set[int]:
        """The GPUs that these processes have open, from their file descriptors (Linux)."""
        links = set()
        for pid in pids:
            try:
                links |= {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}
            except OSError:
                continue  # ended or closed meanwhile, or not readable by this user
        return {minor for minor in self.handles if f"/dev/nvidia{minor}" in links}


def joules(handles: Iterable[Any]) -> float | None:
    """Energy of these GPUs since their driver was loaded; null if there are none or one does not measure it.

    NVML measures millijoules since Volta: nvmlDeviceGetTotalEnergyConsumption.
    """
    try:
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000 or None
    except pynvml.NVMLError:
        return None


class MemorySampler(threading.Thread):
    """Samples from `start()` until `stop()`, which returns the memory in bytes; null if it could not be measured.

    {peak_bytes, end_bytes, source, reason, device_peak_bytes, host_rss_peak_bytes}: peak and last sample of `source`,
    and the peaks of `nvml_device` and `rss_process_tree`. If `source` is null, `reason` says why.
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
        """Start to measure energy. The result returns the joules since then, or null and the reason."""
        self._sampled.wait()
        opened = [self._gpus.handles[minor] for minor in self._opened]
        before = joules(opened)

        def read() -> tuple[float | None, str | None]:
            after = joules(opened)
            if before is not None and after is not None:
                return after - before, None
            if not self._gpus.handles:
                return None, "this machine has no NVIDIA GPU"
            if not opened:
                return None, self._reason or "the server has no GPU open, or this user may not see it"
            return None, "NVML does not measure the energy of the server's GPU"

        return read

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
        if attributed := self._gpus.of_processes(pids) if tree else 0:
            self._keep("nvml_process_tree", attributed)
        if self._opened:
            self._keep("nvml_device", self._gpus.in_use(self._opened))

    def _keep(self, source: str, amount: int) -> None:
        self._last[source] = amount
        self._peaks[source] = max(amount, self._peaks.get(source, 0))


def find_server(url: str) -> tuple[list[psutil.Process], str | None, bool]:
    """Find the processes that listen on the URL's port.

    Returns them, or the reason why there are none, and whether the server is on this machine.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = {str(info[4][0]) for info in socket.getaddrinfo(parts.hostname, port)}
    own = {address.address for card in psutil.net_if_addrs().values() for address in card}
    if not any(address in own or ipaddress.ip_address(address).is_loopback for address in found):
        return [], f"{parts.hostname} is another machine", False
    try:
        listeners = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        addresses = {(address, port) for address in (*found, "0.0.0.0", "::")}
        pids = {each.pid for each in listeners if tuple(each.laddr) in addresses}
        servers = [psutil.Process(pid) for pid in pids if pid is not None]
    except psutil.Error:
        servers = []  # macOS lists sockets of other processes only for root
    for name in {server.name() for server in servers} & set(FORWARDERS):
        return [], f"{name} listens on port {port}, not the server itself", FORWARDERS[name]
    if not servers:
        return [], f"this user or container cannot see the process that listens on port {port}", True
    return servers, None, True
