"""Start a `vllm serve`, wait until it answers, and leave no process behind.

The benchmark needs nothing of vLLM but its command; which one is a matter of the environment that runs this.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import requests
from tqdm import tqdm

from bench import BenchError

START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 20
KILL_TIMEOUT_S = 5
SHOWN_LINES = 25
SAMPLE = "bench/data/clips/001.opus"  # relative to the repository, where one stands after `make serve`
# What vLLM 0.20.0 and 0.32.0 log of their memory, in GiB; on a CPU no weights (v1/worker/gpu_worker.py, cpu_worker.py).
MEMORY = {
    "weights_bytes": re.compile(r"Model loading took ([\d.]+) GiB"),
    "kv_cache_bytes": re.compile(
        r"Available KV cache memory: ([\d.]+) GiB"
        r"|reserved ([\d.]+) GiB memory for KV Cache"  # with kv_cache_memory_bytes
        r"|set \(([\d.]+)/[\d.]+\) GiB for KV cache"  # on a CPU
    ),
}
# The phases of a start, and the text of vLLM's log (0.20.0 and 0.32.0) with which each begins.
PHASES = (
    ("importing vLLM", ""),
    ("starting the engine", "Resolved architecture"),  # one or two more processes, which import vLLM too
    ("loading the weights", "Starting to load model"),
    ("compiling and warming up", "Loading weights took"),
    ("starting the API", "init engine"),
)
PATCHES = re.compile(r"voxtral-serve patches: (.+)$", re.MULTILINE)
LIBRARIES = ("vllm", "torch", "transformers", "mistral-common", "voxtral-serve")
# The line of a Python traceback that names the exception, wherever vLLM's process prefix puts it
CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+)$", re.MULTILINE)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened at a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def server(
    config: Path,
    directory: Path,
    port: int,
    log: Path,
    *flags: str,
    command: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `vllm serve --config CONFIG` in `directory`, where the config's `model: .` points; yields when it answers.

    Listens on 127.0.0.1 alone. Output goes to `log`. Raises BenchError when it does not come up, with the log's last
    lines and the exception that they name. On the way out every process of it is ended. `command` stands in for
    `vllm`, `environment` is added to this process's, and without `wait` the caller does the waiting.
    """
    vllm = list(command) or _command()
    for path, kind in ((config, "a vLLM config file"), (directory, "the checkpoint's directory")):
        if not path.exists():
            raise BenchError(f"{path} does not exist: expected {kind}")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BenchError(f"port {port} of 127.0.0.1 is taken: stop what listens there, or choose another port")
    arguments = [
        *vllm,
        "serve",
        "--config",
        str(config.resolve()),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *flags,
    ]
    with _terminable():  # around all of it: no moment is left in which a signal would leave the server behind
        process = None
        try:
            with log.open("wb") as output:
                # A session of its own: Ctrl-C in the terminal reaches only us, and its processes can be told apart.
                process = subprocess.Popen(
                    arguments,
                    cwd=directory,
                    env={**os.environ, **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            if wait:
                wait_until_up(process, f"http://127.0.0.1:{port}", log)
            yield process
        finally:
            if process is not None:
                _stop(process)


def _command() -> list[str]:
    vllm = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if vllm is None:
        raise BenchError(f"no `vllm` command beside {sys.executable} or on PATH: install vLLM, or give --url")
    return [vllm]


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path, show: bool = True) -> None:
    """Return when GET /health answers 200, looked at every 0.3 s; raise BenchError when it never will.

    With `show`, stderr has the phase of the start and, at its end, the seconds that each phase took.
    """
    start = time.monotonic()
    begun: dict[str, float] = {}
    with tqdm(desc="starting vLLM", bar_format="{desc}: {elapsed}", leave=False, disable=not show) as bar:
        while True:
            reached = phase(log)
            begun.setdefault(reached, time.monotonic())
            bar.set_description_str(reached, refresh=False)
            with contextlib.suppress(requests.RequestException):
                if get(f"{url}/health", timeout_s=2).status_code == 200:
                    break
            if process.poll() is not None:
                raise BenchError(f"vllm serve ended with status {process.returncode} before it answered.\n{_tail(log)}")
            if time.monotonic() - start > START_TIMEOUT_S:
                raise BenchError(f"vllm serve did not answer at {url} within {START_TIMEOUT_S} s.\n{_tail(log)}")
            time.sleep(0.3)
            if sys.stderr.isatty():
                bar.refresh()
    if show:
        print(took(begun, time.monotonic()), file=sys.stderr)


def phase(log: Path) -> str:
    """The last phase of PHASES that the log has reached."""
    text = log.read_text(errors="replace")
    return [name for name, line in PHASES if line in text][-1]


def took(begun: Mapping[str, float], end: float) -> str:
    """One line about a start: the seconds from the beginning of each phase to that of the next one, or to `end`."""
    times = [*begun.values(), end]
    parts = ", ".join(f"{name} {after - at:.0f} s" for name, at, after in zip(begun, times, times[1:], strict=False))
    return f"vLLM is up after {end - times[0]:.0f} s: {parts}"


def get(url: str, timeout_s: float) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False  # a proxy of the environment would not reach our 127.0.0.1
        return session.get(url, timeout=timeout_s)


def logged_memory(log: Path) -> dict[str, int | None]:
    """How many bytes the server's weights and its KV cache take, as its log has it; null where it has not one number.

    Of several, as with one process per GPU, none is the server's.
    """
    text = log.read_text(errors="replace")
    amounts: dict[str, int | None] = {}
    for name, pattern in MEMORY.items():
        found = {number for match in pattern.finditer(text) for number in match.groups() if number}
        amounts[name] = round(float(found.pop()) * 2**30) if len(found) == 1 else None
    return amounts


def logged_patches(log: Path) -> dict[str, str] | None:
    """What became of each of voxtral-serve's patches, as the server's first process logged it; null without them."""
    found = PATCHES.search(log.read_text(errors="replace"))
    return dict(outcome.split(" ", 1) for outcome in found[1].strip().split(", ")) if found else None


def is_own(command: Sequence[str] = ()) -> bool:
    """Whether the `vllm` that serves, or the command in its place, is of this Python's environment."""
    return Path((list(command) or _command())[0]).parent == Path(sys.executable).parent


def _tail(log: Path) -> str:
    """The last lines of the log, then the first exception in it: later ones tend to follow from it."""
    text = log.read_text(errors="replace")
    causes = CAUSE.findall(text)
    last = "\n".join(f"  {line}" for line in text.splitlines()[-SHOWN_LINES:])
    cause = f"cause: {causes[0]}" if causes else "It names no exception."
    return f"The last lines of {log}:\n{last}\n{cause}"


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal unwind as Ctrl-C does, so that they too end the server."""

    def interrupt(signum: int, frame: object) -> None:
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


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole session: politely, then by force. A second Ctrl-C does not cut it short."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        for number, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
            told: set[int] = set()
            deadline = time.monotonic() + patience_s
            while (left := _running(process)) and time.monotonic() < deadline:
                for pid in left - told:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                told |= left
                time.sleep(0.1)
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)


def _running(process: subprocess.Popen[bytes]) -> set[int]:
    """The processes of the session that have not ended.

    Zombies have: a container whose first process is no init keeps those of them that lost their parent for good.
    """
    process.poll()
    running = set()
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(each.pid) == process.pid and each.status() != psutil.STATUS_ZOMBIE:
                running.add(each.pid)
    return running


def stay_up(config: Path, directory: Path, port: int, flags: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C, with more flags of `vllm serve`, and print a request to paste."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "vllm.log")
        with contextlib.suppress(KeyboardInterrupt), server(config, directory, port, log, *flags) as process:
            url = f"http://127.0.0.1:{port}"
            model = get(f"{url}/v1/models", timeout_s=10).json()["data"][0]["id"]
            print(f"Serving {model} at {url}, for this machine alone. Ctrl-C stops it. In another terminal:\n")
            print(f"  curl {url}/v1/audio/transcriptions -F model={model} -F file=@{SAMPLE}\n", flush=True)
            raise BenchError(f"vllm serve ended with status {process.wait()}.\n{_tail(log)}")
