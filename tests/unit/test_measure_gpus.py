"""Whose memory and energy is measured, and what is said when it cannot be."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fakeserver import FakeServer

from bench.measure import gpus as measured

BALLAST = 80 * 2**20
# A server with a child that holds the memory, as vLLM's API server has its engine.
SERVER = f"""
import socket, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "b = b'x' * {BALLAST}; print(flush=True); input()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
input()
"""


@pytest.fixture
def server_url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdin
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()  # ends the server's input(), and with it the child's
        process.wait(10)


class FakeGpus:
    """Stands in for Gpus: `held` bytes by process, `used` bytes on each device that is in `opened`."""

    def __init__(self, held: int | None = None, used: int = 0, opened: tuple[int, ...] = (), count: int = 1) -> None:
        self.handles = dict.fromkeys(range(count), None)
        self.held, self.used, self.opened = held, used, opened

    def of_processes(self, pids: set[int]) -> int | None:
        assert os.getpid() in pids
        return self.held

    def in_use(self, minors: set[int]) -> int | None:
        return self.used * len(minors) or None

    def opened_by(self, pids: set[int]) -> set[int]:
        return set(self.opened)


def sample(url: str) -> dict[str, Any]:
    sampler = measured.MemorySampler(url)
    sampler.start()
    sampler.gpus()  # after the first sample
    return sampler.stop()


def test_resident_memory_includes_the_servers_children(server_url: str) -> None:
    result = sample(server_url)
    assert (result["source"], result["reason"]) == ("rss_process_tree", None)
    assert BALLAST < result["peak_bytes"] < BALLAST + 100 * 2**20


def test_a_remote_server_has_no_number_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "Gpus", lambda: FakeGpus(used=5))  # this machine's GPU is not the server's
    result = sample("http://192.0.2.1:8000")
    assert result.pop("reason") == "192.0.2.1 is another machine"
    assert result == dict.fromkeys(("peak_bytes", "end_bytes", "source", "device_peak_bytes", "host_rss_peak_bytes"))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (FakeGpus(held=7, used=9, opened=(0,)), ("nvml_process_tree", 7)),
        (FakeGpus(used=9, opened=(0, 1), count=2), ("nvml_device", 18)),
        (FakeGpus(used=9, opened=()), ("rss_process_tree", None)),  # a server on the CPU beside a GPU
    ],
)
def test_the_best_source_wins(monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus, expected: tuple[str, Any]) -> None:
    monkeypatch.setattr(measured, "Gpus", lambda: gpus)
    with FakeServer() as server:
        result = sample(server.url)
    assert result["source"] == expected[0]
    if expected[1] is not None:
        assert result["peak_bytes"] == expected[1]
    assert (result["reason"] is not None) == (result["source"] == "nvml_device")


@pytest.mark.parametrize(("count", "source"), [(0, None), (1, "nvml_device"), (2, None)])
def test_a_server_behind_a_forwarder(monkeypatch: pytest.MonkeyPatch, count: int, source: str | None) -> None:
    """docker-proxy's own memory is not the server's; the one GPU of the machine can still be read."""
    with FakeServer() as server:
        name = measured.find_server(server.url)[0][0].name()
        monkeypatch.setattr(measured, "FORWARDERS", {name: True})
        monkeypatch.setattr(measured, "Gpus", lambda: FakeGpus(used=9, count=count))
        result = sample(server.url)
        assert result["source"] == source
        if source is None:
            assert name in result["reason"]
        monkeypatch.setattr(measured, "FORWARDERS", {name: False})  # a tunnel: the server has another GPU
        assert sample(server.url)["source"] is None


def test_nobody_listens() -> None:
    with FakeServer() as server:
        url = server.url
    result = sample(url)
    assert result["peak_bytes"] is None
    assert "this user or container cannot see the process" in result["reason"]


class FakeNvml:
    """NVML with two GPUs; the server is process 7 on the second. Each reading of its energy is 3 J more.

    Functions that are in `fails` raise.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *fails: str) -> None:
        self.fails, self.users, self.millijoules = fails, [SimpleNamespace(pid=7, usedGpuMemory=5)], 1000

    def __getattr__(self, name: str) -> Any:
        if name in self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda name: {"GPU-b": 1}[name],
            "nvmlDeviceGetMinorNumber": lambda handle: handle,
            "nvmlDeviceGetName": lambda handle: "H200",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=9 + handle, total=80),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: self.users if handle == 1 else [],
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
        }
        return answers[name]

    def energy(self, handle: int) -> int:
        assert handle == 1
        self.millijoules += 3000 if self.millijoules else 0
        return self.millijoules


def gpus_of(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, visible: str | None = None) -> measured.Gpus:
    monkeypatch.setattr(measured, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return measured.Gpus()


@pytest.mark.parametrize(
    ("visible", "minors"), [(None, [0, 1]), ("1,0", [1, 0]), ("GPU-b", [1]), ("1,", [1]), ("", [])]
)
def test_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch, visible: str | None, minors: list[int]) -> None:
    gpus = gpus_of(monkeypatch, FakeNvml(), visible)
    assert list(gpus.handles) == minors
    assert gpus.facts() == [{"name": "H200", "memory_bytes": 80}] * len(minors)
    assert gpus.driver() == ("580.1" if minors else None)


def test_what_nvml_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = gpus_of(monkeypatch, FakeNvml())
    assert (gpus.of_processes({6, 7}), gpus.in_use([0, 1]), gpus.opened_by({6, 7})) == (5, 19, {1})
    assert [gpus.joules([1]), gpus.joules([1])] == [4.0, 7.0]


def test_what_nvml_does_not_measure_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    gpus = gpus_of(monkeypatch, nvml)
    nothing: set[int] = set()
    assert (gpus.of_processes({6}), gpus.in_use(nothing), gpus.joules(nothing), gpus.opened_by({6})) == (
        *(None, None, None),
        nothing,
    )
    nvml.users, nvml.millijoules = [SimpleNamespace(pid=7, usedGpuMemory=None)], 0
    assert (gpus.of_processes({7}), gpus.joules([1])) == (None, None)
    nvml.fails = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetTotalEnergyConsumption")
    assert (gpus.of_processes({7}), gpus.joules([1]), gpus.opened_by({7})) == (None, None, nothing)
    nvml.fails = ("nvmlDeviceGetMemoryInfo",)
    assert gpus.facts() == [{"name": "H200", "memory_bytes": None}] * 2
    gpus = gpus_of(monkeypatch, FakeNvml("nvmlInit"))
    assert (gpus.handles, gpus.facts(), gpus.driver()) == ({}, [], None)


def sampler_of(monkeypatch: pytest.MonkeyPatch, url: str, *fails: str) -> measured.MemorySampler:
    """After a first sample of a server that is on the second of two GPUs."""
    nvml = FakeNvml(*fails)
    nvml.users = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)]
    gpus_of(monkeypatch, nvml)
    sampler = measured.MemorySampler(url)
    sampler.start()
    sampler.gpus()
    return sampler


def test_memory_and_energy_of_the_gpu_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer() as server:
        sampler = sampler_of(monkeypatch, server.url)
        assert sampler.gpus() == 1
        assert sampler.meter()() == (3.0, None)
        assert (sampler.stop()["device_peak_bytes"], sampler.device_reason()) == (10, None)


@pytest.mark.parametrize(
    ("fails", "memory", "energy"),
    [
        (["nvmlInit"], measured.NO_GPU, measured.NO_GPU),
        (["nvmlDeviceGetComputeRunningProcesses"], "the server has no GPU open, or this user may not see it", None),
        (["nvmlDeviceGetMemoryInfo"], "a sample failed: Insufficient Permissions", ""),
        (["nvmlDeviceGetTotalEnergyConsumption"], None, "NVML does not measure the energy of the server's GPU"),
    ],
)
def test_the_reason_of_what_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, fails: list[str], memory: str | None, energy: str | None
) -> None:
    """`energy` is None if the reason is that of the memory, and empty if it is measured."""
    with FakeServer() as server:
        sampler = sampler_of(monkeypatch, server.url, *fails)
        joules, reason = sampler.meter()()
        peak = sampler.stop()["device_peak_bytes"]
    assert (peak, sampler.device_reason()) == ((10, None) if memory is None else (None, memory))
    assert (joules, reason) == ((3.0, None) if energy == "" else (None, energy or memory))
