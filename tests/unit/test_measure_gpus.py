"""Whose memory is measured, and what is said when it cannot be."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakeserver import FakeServer

from bench import memory

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
    """Stands in for memory.Gpus: `held` bytes by process, `used` bytes on each device that is in `opened`."""

    def __init__(self, held: int = 0, used: int = 0, opened: tuple[int, ...] = (), count: int = 1) -> None:
        self.handles = dict.fromkeys(range(count), None)
        self.held, self.used, self.opened = held, used, opened

    def of_processes(self, pids: set[int]) -> int:
        assert os.getpid() in pids
        return self.held

    def in_use(self, minors: set[int]) -> int:
        return self.used * len(minors)

    def opened_by(self, pids: set[int]) -> set[int]:
        return set(self.opened)


def sample(url: str) -> dict[str, Any]:
    sampler = memory.MemorySampler(url)
    sampler.start()
    time.sleep(0.2)
    return sampler.stop()


def test_resident_memory_includes_the_servers_children(server_url: str) -> None:
    result = sample(server_url)
    assert (result["source"], result["reason"]) == ("rss_process_tree", None)
    assert BALLAST < result["peak_bytes"] < BALLAST + 100 * 2**20


def test_a_remote_server_has_no_number_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Gpus", lambda: FakeGpus(used=5))  # this machine's GPU is not the server's
    result = sample("http://192.0.2.1:8000")
    assert result.pop("reason") == "192.0.2.1 is another machine"
    assert result == dict.fromkeys(("peak_bytes", "end_bytes", "source", "device_peak_bytes", "host_rss_peak_bytes"))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (FakeGpus(held=7, used=9, opened=(0,)), ("nvml_process_tree", 7)),
        (FakeGpus(held=0, used=9, opened=(0, 1), count=2), ("nvml_device", 18)),
        (FakeGpus(held=0, used=9, opened=()), ("rss_process_tree", None)),  # a server on the CPU beside a GPU
    ],
)
def test_the_best_source_wins(monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus, expected: tuple[str, Any]) -> None:
    monkeypatch.setattr(memory, "Gpus", lambda: gpus)
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
        name = memory.find_server(server.url)[0][0].name()
        monkeypatch.setattr(memory, "FORWARDERS", {name: True})
        monkeypatch.setattr(memory, "Gpus", lambda: FakeGpus(used=9, count=count))
        result = sample(server.url)
        assert result["source"] == source
        if source is None:
            assert name in result["reason"]
        monkeypatch.setattr(memory, "FORWARDERS", {name: False})  # a tunnel: the server has another GPU
        assert sample(server.url)["source"] is None


def test_nobody_listens() -> None:
    with FakeServer() as server:
        url = server.url
    result = sample(url)
    assert result["peak_bytes"] is None
    assert "this user or container cannot see the process" in result["reason"]
