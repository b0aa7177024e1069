"""`vllm serve` as a process of the run: its command, its start by phases, its end."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import requests

from voxtral_serve.client.cause import cause
from voxtral_serve.client.errors import RequestError, UsageError

START_S = 1800  # a first start compiles for minutes
STOP_S = 40  # between SIGTERM and SIGKILL: profiles have a shutdown_timeout of 30 s
POLL_S = 0.3
# The phases of a start, and the text in vLLM's log (0.20.0 and 0.32.0) that begins each; those of bench/serve.py
PHASES = (
    ("importing vLLM", ""),
    ("starting the engine", "Resolved architecture"),
    ("loading the weights", "Starting to load model"),
    ("compiling and warming up", "Loading weights took"),
    ("starting the API", "init engine"),
)
PATCHES = re.compile(r'voxtral-serve patches: ([^"\n]+)')  # up to the quote, where the log is JSON
# They would give the server other keys than the run's, or another way to ask for them.
OTHER_KEYS = ("VLLM_API_KEY_FILE", "VOXTRAL_SERVE_KEYS")


class StartError(RequestError):
    """vllm serve did not start. The message is one line, with the exception that ended it."""


class Engine:
    """One `vllm serve` on a free port of 127.0.0.1, with a key of its own. `phases` has (name, seconds)."""

    def __init__(self, profile: Path, directory: Path, arguments: Sequence[str], folder: Path) -> None:
        """Its log goes to `folder`."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url, self.key = f"http://127.0.0.1:{port}", secrets.token_hex(16)
        self.phases: list[tuple[str, float]] = []
        self._log = folder / f"{profile.stem}-{port}.log"
        kept = {name: value for name, value in os.environ.items() if name not in OTHER_KEYS}
        command = [vllm(), "serve", "--config", str(profile.resolve()), "--host", "127.0.0.1", "--port", str(port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                cwd=directory,  # where the profile's `model: .` points
                env={**kept, "VLLM_API_KEY": self.key},  # vLLM logs its options, so the key is none of them
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        """Raises StartError if it ends, or does not answer within START_S."""
        begun = {PHASES[0][0]: time.monotonic()}
        started = time.monotonic()
        while not self._healthy():
            begun.setdefault(phase(self._text()), time.monotonic())
            if self._process.poll() is not None:
                raise StartError(f"vllm serve exited with status {self._process.returncode}: {self.cause()}")
            if time.monotonic() - started > START_S:
                raise StartError(f"vllm serve did not answer within {START_S} s: {self.cause()}")
            time.sleep(POLL_S)
        times = [*begun.values(), time.monotonic()]
        self.phases = [(name, after - at) for name, at, after in zip(begun, times, times[1:], strict=False)]

    def patches(self) -> str | None:
        """The outcomes of this project's patches, from the log; None without."""
        found = PATCHES.search(self._text())
        return found[1].strip() if found else None

    def cause(self) -> str:
        return cause(self._text()) or "its log has no exception"

    def tell_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def status(self, within_s: float) -> int | None:
        """The exit status, None if it has not ended within that time."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        if self._process.poll() is None:
            self.tell_to_stop()
            self.status(STOP_S)
        self.kill()

    def kill(self) -> None:
        """End what is left of it and of its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _healthy(self) -> bool:
        with contextlib.suppress(requests.RequestException), requests.Session() as session:
            session.trust_env = False  # a proxy would connect to its own 127.0.0.1
            return session.get(f"{self.url}/health", timeout=2).status_code == 200
        return False

    def _text(self) -> str:
        return self._log.read_text(errors="replace")


def vllm() -> str:
    """The command beside this Python, or on PATH. Raises UsageError without one."""
    found = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise UsageError(f"no `vllm` command beside {sys.executable} or on PATH: install vLLM, or use --url")
    return found


def phase(log: str) -> str:
    """The last phase of PHASES that the log has reached."""
    return [name for name, line in PHASES if line in log][-1]


@contextlib.contextmanager
def started(profile: Path, directory: Path, arguments: Sequence[str]) -> Iterator[Engine]:
    """One that is up, stopped at the end. Raises StartError."""
    with tempfile.TemporaryDirectory(prefix="voxtral-prove-") as folder:
        engine = Engine(profile, directory, arguments, Path(folder))
        try:
            engine.wait_until_up()
            yield engine
        finally:
            engine.stop()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP are like Ctrl-C meanwhile, so that they stop the server, too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as under nohup
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
