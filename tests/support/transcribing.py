"""`voxtral-serve transcribe` as a user runs it: in this process, or in one of its own that can be interrupted."""

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from voxtral_serve import cli

# With SIGINT on, as in a terminal; who runs the tests may have it off, as under nohup.
CODE = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('voxtral_serve.cli', run_name='__main__')"
)
COMMAND = [sys.executable, "-c", CODE, "transcribe"]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"} | more


def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `more` are environment variables, which a process of its own has if Python reads them."""
    words = [*map(str, arguments)]
    if "PYTHONPATH" in more:
        return subprocess.run([*COMMAND, *words], env=environment(**more), capture_output=True, text=True, timeout=120)
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", "\n") for _ in range(2))
    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patches.delenv("OPENAI_API_KEY", raising=False)
        for name, value in more.items():
            patches.setenv(name, value)
        try:
            status = cli.run(["transcribe", *words])
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    for stream in (out, err):
        stream.flush()
    said, problems = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, status, said, problems)


def start(*arguments: object, **settings: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], text=True, **{**pipes, **settings})


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
