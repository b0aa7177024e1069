"""The vLLM servers that a session of tests starts: which configurations, and how long each took to answer.

`make test` has a limit on them (tests/conftest.py checks it); on two cores each costs 20 to 60 s.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.measure import engine

PYTHON = sys.executable  # which tests of the launcher replace, to have it find a fake `vllm`

# In a session without slow tests: the contest's configuration and profiles/fast.yaml. A new capability may add one,
# with 60 s of `make test`.
MOST = 2


@dataclass
class Start:
    what: str  # config, directory and flags
    seconds: float | None = None  # until GET /health answered; None where `engine.served` did not wait for that

    def __str__(self) -> str:
        return self.what if self.seconds is None else f"{self.what}: up in {self.seconds:.1f} s"


STARTED: list[Start] = []


def record(config: object, directory: object, *flags: str) -> Start:
    STARTED.append(Start(" ".join([f"{config} in {directory}", *flags])))
    return STARTED[-1]


def count_servers() -> None:
    """Record each `engine.served` from now on, but those of a fake in place of this environment's `vllm`."""
    real = engine.served

    @contextlib.contextmanager
    def server(config: Any, directory: Any, port: int, log: Any, *flags: str, **options: Any) -> Iterator[Any]:
        begin, start = time.monotonic(), None
        if sys.executable == PYTHON and not options.get("command"):
            start = record(config, directory, *flags)
        with real(config, directory, port, log, *flags, **options) as process:
            if start and options.get("wait", True):
                start.seconds = time.monotonic() - begin
            yield process

    engine.served = server
