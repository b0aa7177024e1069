"""A fake `vllm` command, which starts at once and does what a test tells it, and the commands that start it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from places import ROOT

from bench.measure import engine

PYTHON = sys.executable
TEXTS = {f"c{number:02}": f"alpha beta number {number}" for number in range(6)}
WAIT_S = 60  # for what happens at once on a machine that is not busy

# Where it runs, behaviour.json says what it does and calls.jsonl what became of it. Like the real one it has a child
# that ends only when it is told to, and that holds no port. It leaves when there is a file `leave`.
FAKE_VLLM = """\
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})

config = json.loads(Path("behaviour.json").read_text())
port = int(sys.argv[sys.argv.index("--port") + 1])
print("vLLM starts", flush=True)
print(config.get("says", ""), flush=True)
if config.get("deaf") == "child":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = subprocess.Popen(["/bin/sleep", "300"], process_group=0 if config.get("own group") else None)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if config.get("deaf") == "both":
    signal.signal(signal.SIGTERM, lambda *_: Path("told").touch())
with open("calls.jsonl", "a") as calls:
    own = dict(pid=os.getpid(), child=sleeper.pid, leash=os.getppid(), session=os.getsid(0), port=port)
    keys = {{name: value for name, value in os.environ.items() if "KEY" in name}}
    calls.write(json.dumps(own | dict(arguments=sys.argv[1:], keys=keys)) + "\\n")
if "dies" in config:
    print(config["dies"], file=sys.stderr)
    sys.exit(3)
if config.get("hangs"):
    time.sleep(300)

import fakeserver
from fakeserver import Answer, FakeServer

get = fakeserver._Handler.do_GET
def do_get(self):
    if self.path == "/health":
        self._send(config.get("health", 200), b"")
        if config.get("leaves") == "once it is up":
            os._exit(7)
    elif config.get("keyed") and self.path == "/v1/models":
        self._send(401, b"")
    elif config.get("keyed") and self.path == "/":
        self._send(200, b"", headers=[("Content-Type", "text/html; charset=utf-8")])
    else:
        get(self)
fakeserver._Handler.do_GET = do_get
fake = FakeServer({{name: Answer(**answer) for name, answer in config.get("answers", {{}}).items()}})
fake._lock = threading.Lock()
def leave():
    while not Path("leave").exists():
        time.sleep(0.02)
    os._exit(7)
threading.Thread(target=leave, daemon=True).start()
fakeserver._Server(("127.0.0.1", port), fake).serve_forever(0.02)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


DEATH = """\
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "core.py", line 1, in <module>
(EngineCore pid=7)     raise error
(EngineCore pid=7) torch.OutOfMemoryError: 3 GiB are missing
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above."""


class Vllm:
    """A fake `vllm` command, its config, and the directory that it serves."""

    def __init__(self, root: Path) -> None:
        self.config, self.directory, self.log = root / "vllm.yaml", root / "checkpoint", root / "vllm.log"
        self.python = root / "bin/python"  # as whose neighbour the launcher finds `vllm`
        self.data, self.out = root / "data", root / "out"
        self.port = engine.free_port()
        self.directory.mkdir()
        self.config.write_text("model: .")
        self.python.parent.mkdir()
        command = self.python.with_name("vllm")
        command.write_text(f"#!{PYTHON}\n" + FAKE_VLLM.format(tests=str(ROOT / "tests/support")))
        self.python.write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n')
        for path in (command, self.python):
            path.chmod(0o755)
        self.does()

    def does(self, **config: Any) -> None:
        (self.directory / "behaviour.json").write_text(json.dumps(config))

    def transcribes(self, **changes: Any) -> None:
        """Answer perfectly, but for the changed clips."""
        answers = {f"{clip}.wav": {"text": text} for clip, text in TEXTS.items()}
        self.does(answers=answers | {f"{clip}.wav": answer for clip, answer in changes.items()})

    def server(self, *flags: str, **options: Any) -> contextlib.AbstractContextManager[engine.Engine]:
        return engine.served(self.config, self.directory, self.port, self.log, *flags, **options)

    def calls(self) -> list[dict[str, Any]]:
        path = self.directory / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self) -> set[int]:
        """The processes that it ever started and that still run: found by their pids, and by their session.

        The leash is none of them.
        """
        pids = {call[name] for call in self.calls() for name in ("pid", "child")}
        sessions, leashes = ({call[name] for call in self.calls()} for name in ("session", "leash"))
        left = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                known = process.pid in pids or os.getsid(process.pid) in sessions
                if known and process.status() != psutil.STATUS_ZOMBIE and process.pid not in leashes:
                    left.add(process.pid)
        return left

    def kill(self) -> None:
        """End what a test that failed has left."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run_flags(self, *more: str) -> list[str]:
        paths = ["--serve", str(self.config), "--dir", str(self.directory), "--dataset", str(self.data)]
        return ["run", *paths, "--out", str(self.out), "--warmup", "1", *more]

    def serve_flags(self) -> list[str]:
        paths = ["--config", str(self.config), "--dir", str(self.directory)]
        return ["serve", *paths, "--port", str(self.port)]

    def start(self, flags: list[str], stop_s: float = 10) -> subprocess.Popen[str]:
        """`python -m bench FLAGS` as a process that finds the fake, with SIGINT on as it is in a terminal."""
        code = f"""if True:
            import runpy, signal, sys
            sys.executable = {str(self.python)!r}
            signal.signal(signal.SIGINT, signal.default_int_handler)
            from bench.measure import engine
            engine.STOP_S = {stop_s}
            runpy.run_module("bench", run_name="__main__")"""
        command = [PYTHON, "-c", code, *flags]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
