"""Start `vllm serve`, wait until it responds, and end all its processes afterwards, however this process ends.

The command `vllm` is taken from this Python's environment or from PATH; nothing of vLLM is imported.
"""

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from . import leash
from . import log as logs
from .errors import MeasureError

START_TIMEOUT_S = 1800  # a first start on a GPU compiles for minutes
STOP_S = 20  # between SIGTERM and SIGKILL
POLL_S = 0.3
# Beside a key of the launcher's own, they would give the server other keys, or another way to ask for them.
OTHER_KEYS = ("VLLM_API_KEY_FILE", "VOXTRAL_SERVE_KEYS")


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def vllm() -> str:
    """The command `vllm` beside this Python, or on PATH. Raises MeasureError without one."""
    path = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        raise MeasureError(f"no `vllm` command beside {sys.executable} or on PATH: install vLLM, or use --url")
    return path


def get(url: str, timeout_s: float) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False  # a proxy would connect to its own 127.0.0.1
        return session.get(url, timeout=timeout_s)


class Engine:
    """One `vllm serve --config CONFIG` in `directory`, where the config's `model: .` points; on 127.0.0.1 only.

    `pid` is vLLM's first process. `phases` has (name, seconds) of its start. It ends at `stop`, or with this process.
    """

    def __init__(
        self,
        config: Path,
        directory: Path,
        port: int,
        log: Path,
        *flags: str,
        key: str | None = None,
        command: Sequence[str] = (),
        model: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its output goes to `log`. `flags` are further options of `vllm serve`.

        `key` is the only API key that it takes. `command` replaces `vllm`. `model` is for a config that does not name
        it. `environment` is added to this process's environment. Raises MeasureError.
        """
        program = list(command) or [vllm()]
        for path, kind in ((config, "a vLLM config file"), (directory, "the checkpoint's directory")):
            if not path.exists():
                raise MeasureError(f"{path} does not exist: expected {kind}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise MeasureError(
                    f"port {port} of 127.0.0.1 is in use: stop the process that listens on it, or choose another port"
                )
        self.url, self.key, self.log = f"http://127.0.0.1:{port}", key, log
        self.phases: list[tuple[str, float]] = []
        positional = [] if model is None else [model]  # vLLM takes it from this place only, if there is a config
        arguments = [*program, "serve", *positional, "--config", str(config.resolve())]
        variables = {**os.environ, **(environment or {})}
        if key is not None:  # not as an option, which vLLM logs
            variables = {name: value for name, value in variables.items() if name not in OTHER_KEYS}
            variables["VLLM_API_KEY"] = key
        self._start([*arguments, "--host", "127.0.0.1", "--port", str(port), *flags], directory, variables)

    def _start(self, arguments: Sequence[str], directory: Path, variables: Mapping[str, str]) -> None:
        read, write = os.pipe()
        with self.log.open("wb") as output:
            # In a session of its own: Ctrl-C reaches only this process, and the leash finds the server's processes.
            self._leash = subprocess.Popen(
                [sys.executable, "-P", leash.__file__, str(write), str(STOP_S), *arguments],
                cwd=directory,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(write,),
            )
        try:
            os.close(write)
            self._leash.wait()  # it has put itself into the background
            self._reports = os.fdopen(read)
            self._status: int | None = None
            self._ended, self._gone = threading.Event(), threading.Event()
            pid = self._reports.readline()
            if not pid:
                raise self.error(f"{arguments[0]} cannot be started.")
            self.pid = int(pid)
            threading.Thread(target=self._listen, daemon=True, name="vllm-serve").start()
        except BaseException:  # Ctrl-C too: the caller has nothing yet that it could stop
            assert self._leash.stdin is not None
            self._leash.stdin.close()
            raise

    def _listen(self) -> None:
        """Wait for the server's end, and for that of all its processes."""
        with self._reports:
            status = self._reports.readline()
            if not status:  # somebody killed the leash
                self._kill()
            self._status = int(status or -signal.SIGKILL)
            self._ended.set()
            self._reports.read()
        self._gone.set()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit status, negative for a signal; None if the server has not ended within that time."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # In steps: a signal that another thread receives does not wake the main thread, which handles it.
        while not self._ended.wait(max(0, min(POLL_S, deadline - time.monotonic()))) and time.monotonic() < deadline:
            pass
        return self._status

    def poll(self) -> int | None:
        """The exit status, None while the server runs."""
        return self.wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal to the first process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """End all processes of the server: SIGTERM, and SIGKILL after STOP_S."""
        assert self._leash.stdin is not None
        self._leash.stdin.close()
        if not self._gone.wait(STOP_S + 2 * leash.KILLED_S):
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._leash.pid, signal.SIGKILL)

    def healthy(self, timeout_s: float = 2) -> bool:
        """Whether GET /health returns 200."""
        with contextlib.suppress(requests.RequestException):
            return get(f"{self.url}/health", timeout_s).status_code == 200
        return False

    def wait_until_up(self, show: bool = True) -> None:
        """Poll GET /health until it returns 200. Raises MeasureError if the server ends or is too slow.

        With `show`, print the phase of the start on stderr and, at its end, the seconds of each phase.
        """
        start = time.monotonic()
        begun: dict[str, float] = {}
        with tqdm(desc="starting vLLM", bar_format="{desc}: {elapsed}", leave=False, disable=not show) as bar:
            while True:
                phase = logs.phase(logs.read(self.log))
                begun.setdefault(phase, time.monotonic())
                bar.set_description_str(phase, refresh=False)
                if self.healthy():
                    break
                if self.poll() is not None:
                    raise self.error(f"vllm serve exited with status {self.poll()} during its start.")
                if time.monotonic() - start > START_TIMEOUT_S:
                    raise self.error(f"vllm serve did not respond at {self.url} within {START_TIMEOUT_S} s.")
                time.sleep(POLL_S)
                if sys.stderr.isatty():
                    bar.refresh()
        times = [*begun.values(), time.monotonic()]
        self.phases = [(name, after - at) for name, at, after in zip(begun, times, times[1:], strict=False)]
        if show:
            print(f"vLLM is ready after {spent(self.phases)}", file=sys.stderr)

    def error(self, what: str) -> MeasureError:
        """An error with the end of the log and the cause."""
        return MeasureError(f"{what}\n{logs.end(self.log)}")


def spent(phases: Sequence[tuple[str, float]]) -> str:
    """The seconds of a start: the sum, and those of each phase."""
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in phases)
    return f"{sum(seconds for _, seconds in phases):.0f} s: {parts}"


@contextlib.contextmanager
def served(
    config: Path,
    directory: Path,
    port: int,
    log: Path,
    *flags: str,
    wait: bool = True,
    show: bool = True,
    **options: Any,
) -> Iterator[Engine]:
    """An Engine with these arguments that is up, stopped at the end, also by SIGTERM. Only in the main thread.

    Without `wait`, the caller waits for the server. Raises MeasureError if it does not start.
    """
    with terminable():  # around everything, so that no signal leaves the server running
        engine = Engine(config, directory, port, log, *flags, **options)
        try:
            if wait:
                engine.wait_until_up(show)
            yield engine
        finally:
            with handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a second Ctrl-C
                engine.stop()


def terminable() -> contextlib.AbstractContextManager[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that what has to be closed is closed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    return handled(interrupt, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals so, but those that are ignored, as SIGHUP is under nohup."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, old in before.items():
            if old != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
