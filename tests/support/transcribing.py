"""`voxtral-serve transcribe` as a user runs it: in a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# With SIGINT on, as in a terminal; who runs the tests may have it off, as under nohup.
CODE = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('voxtral_serve.cli', run_name='__main__')"
)
COMMAND = [sys.executable, "-c", CODE, "transcribe"]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"} | more


def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `more` are environment variables."""
    words = [*COMMAND, *map(str, arguments)]
    return subprocess.run(words, env=environment(**more), capture_output=True, text=True, timeout=120)


def start(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], text=True, **{**pipes, **settings})


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
