"""Fake replicas, to put behind a real nginx (local_nginx.py)."""

import subprocess
import sys
from typing import Self

import requests
from local_nginx import wait_for_port
from places import ROOT

from bench.measure import engine


class FakeReplica:
    """The process of fakereplica.py, which keeps its port when it is started again."""

    def __init__(self, *options: object) -> None:
        self.port = engine.free_port()
        self.options = options
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *options: object) -> Self:
        words = [str(each) for each in (self.port, *(options or self.options))]
        self.process = subprocess.Popen([sys.executable, str(ROOT / "tests/support/fakereplica.py"), *words])
        wait_for_port(self.port, self.process)
        return self

    def end(self, signal: int) -> None:
        self.process.send_signal(signal)
        self.process.wait(timeout=60)


def answered_by(url: str) -> int:
    """The process that answers one small request."""
    return int(requests.get(f"{url}/v1/models", timeout=10).json()["pid"])
