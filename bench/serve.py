"""Start `vllm serve`, wait until it responds, and end all its processes afterwards.

The benchmark needs only the command `vllm`, which it takes from its own environment or from PATH.
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
SAMPLE = "bench/data/clips/001.opus"  # relative to the repository, the current directory after `make serve`
# vLLM 0.20.0 and 0.32.0 log their memory in GiB, on a CPU without the weights (v1/worker/gpu_worker.py, cpu_worker.py).
MEMORY = {
    "weights_bytes": re.compile(r"Model loading took ([\d.]+) GiB"),
    "kv_cache_bytes": re.compile(
        r"Available KV cache memory: ([\d.]+) GiB"
        r"|reserved ([\d.]+) GiB memory for KV Cache"  # with kv_cache_memory_bytes
        r"|set \(([\d.]+)/[\d.]+\) GiB for KV cache"  # on a CPU
    ),
}
# The phases of a start, and the text in vLLM's log (0.20.0 and 0.32.0) that begins each.
PHASES = (
    ("importing vLLM", ""),
    ("starting the engine", "Resolved architecture"),  # one or two more processes, which also import vLLM
    ("loading the weights", "Starting to load model"),
    ("compiling and warming up", "Loading weights took"),
    ("starting the API", "init engine"),
)
PATCHES = re.compile(r'voxtral-serve patches: ([^"\n]+)')  # up to the quote, where the log is JSON
LIBRARIES = ("vllm", "torch", "transformers", "mistral-common", "voxtral-serve")
# A line with an exception: the last of a Python traceback, behind vLLM's process and what its logger adds at `ERROR`. A
# warning that quotes an exception is none.
EXCEPTION = re.compile(
    r"^(?:\((\w+) pid=\d+\) )?(?:ERROR:? +(?:\d\d-\d\d [\d:]+ \[[^\]]+\] )?)?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .+)$",
    re.MULTILINE,
)
ENGINE = ("EngineCore", "Worker")  # how the names of the engine's processes begin
POINTER = "root cause"  # in exceptions that say no more than that the log has another one


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
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
    model: str | None = None,
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `vllm serve --config CONFIG` in `directory`, where the config's `model: .` points; yields when it responds.

    The server listens on 127.0.0.1 only; its output goes to `log`. At the end, all its processes are stopped. Raises
    BenchError if the server does not start, with the last lines of the log and the exception that ended it. `command`
    replaces `vllm`. `model` is for a config that does not name it. `environment` is added to this process's
    environment. Without `wait`, the caller waits for the server.
    """
    vllm = list(command) or _command()
    for path, kind in ((config, "a vLLM config file"), (directory, "the checkpoint's directory")):
        if not path.exists():
            raise BenchError(f"{path} does not exist: expected {kind}")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BenchError(
                f"port {port} of 127.0.0.1 is in use: stop the process that listens on it, or choose another port"
            )
    arguments = [
        *vllm,
        "serve",
        *([] if model is None else [model]),  # vLLM takes it from this place only, if there is a config
        "--config",
        str(config.resolve()),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *flags,
    ]
    with _terminable():  # around everything, so that no signal leaves the server running
        process = None
        try:
            with log.open("wb") as output:
                # In its own session: Ctrl-C reaches only this process, and the server's processes can be found.
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
        raise BenchError(f"no `vllm` command beside {sys.executable} or on PATH: install vLLM, or use --url")
    return [vllm]


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path, show: bool = True) -> None:
    """Poll GET /health every 0.3 s until it returns 200. Raises BenchError if the server ends or is too slow.

    With `show`, print the phase of the start on stderr and, at its end, the seconds of each phase.
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
                raise BenchError(f"vllm serve exited with status {process.returncode} during its start.\n{_tail(log)}")
            if time.monotonic() - start > START_TIMEOUT_S:
                raise BenchError(f"vllm serve did not respond at {url} within {START_TIMEOUT_S} s.\n{_tail(log)}")
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
    """One line with the seconds of each phase of a start. `begun` has the start time of each phase."""
    times = [*begun.values(), end]
    parts = ", ".join(f"{name} {after - at:.0f} s" for name, at, after in zip(begun, times, times[1:], strict=False))
    return f"vLLM is ready after {end - times[0]:.0f} s: {parts}"


def get(url: str, timeout_s: float) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False  # a proxy would connect to its own 127.0.0.1
        return session.get(url, timeout=timeout_s)


def logged_memory(log: Path) -> dict[str, int | None]:
    """Bytes of the server's weights and of its KV cache, from its log.

    Null if the log has no number, or several different ones, as with one process per GPU.
    """
    text = log.read_text(errors="replace")
    amounts: dict[str, int | None] = {}
    for name, pattern in MEMORY.items():
        found = {number for match in pattern.finditer(text) for number in match.groups() if number}
        amounts[name] = round(float(found.pop()) * 2**30) if len(found) == 1 else None
    return amounts


def logged_patches(log: Path) -> dict[str, str] | None:
    """The outcome of each patch of voxtral-serve, from the log of the server's first process; null without patches."""
    found = PATCHES.search(log.read_text(errors="replace"))
    return dict(outcome.split(" ", 1) for outcome in found[1].strip().split(", ")) if found else None


def is_own(command: Sequence[str] = ()) -> bool:
    """Whether `vllm`, or the command that replaces it, belongs to this Python's environment."""
    return Path((list(command) or _command())[0]).parent == Path(sys.executable).parent


def _tail(log: Path) -> str:
    """The last lines of the log, and the exception that ended the server."""
    text = log.read_text(errors="replace")
    last = "\n".join(f"  {line}" for line in text.splitlines()[-SHOWN_LINES:])
    told = cause(text)
    return f"The last lines of {log}:\n{last}\n{'The log has no exception.' if told is None else f'cause: {told}'}"


def cause(log: str) -> str | None:
    """The exception that ended a `vllm serve`, from its log, in one line; None if there is none.

    It is the last one of the engine's processes: they end at it. Without one it is the first, because the API server's
    later exceptions follow from it.
    """
    found = [match for match in EXCEPTION.finditer(log) if POINTER not in match[2]]
    engine = [match for match in found if (match[1] or "").startswith(ENGINE)]
    if not found:
        return None
    last = engine[-1] if engine else found[0]
    told = last[2]
    if "validation error" in told:  # pydantic's: the next line says what is wrong, and then all arguments
        line = log[last.end() :].split("\n", 2)[1:2]
        told += ": " + re.sub(r"^\(\w+ pid=\d+\) (?:ERROR .*?\] )?", "", "".join(line)).partition(" [type=")[0]
    return " ".join(told.split())


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that they also stop the server."""

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
    """End all processes of the session: SIGTERM, then SIGKILL. A second Ctrl-C is ignored meanwhile."""
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

    Zombies are not counted: a container without an init process keeps them.
    """
    process.poll()
    running = set()
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(each.pid) == process.pid and each.status() != psutil.STATUS_ZOMBIE:
                running.add(each.pid)
    return running


def stay_up(config: Path, directory: Path, port: int, flags: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C, and print an example request. `flags` are further options of `vllm serve`."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "vllm.log")
        with contextlib.suppress(KeyboardInterrupt), server(config, directory, port, log, *flags) as process:
            url = f"http://127.0.0.1:{port}"
            models = get(f"{url}/v1/models", timeout_s=10)
            keyed = models.status_code == 401  # with --api-key, which is not told here
            model = "MODEL" if keyed else models.json()["data"][0]["id"]
            key = ' -H "Authorization: Bearer KEY"' if keyed else ""
            print(f"Serving {'with a key' if keyed else model} at {url} (this machine only). Press Ctrl-C to stop.")
            if get(url, timeout_s=10).headers.get("content-type", "").startswith("text/html"):
                print(f"To try it in a browser: {url}")
            print("In another terminal:\n")
            print(f"  curl {url}/v1/audio/transcriptions{key} -F model={model} -F file=@{SAMPLE}\n", flush=True)
            raise BenchError(f"vllm serve exited with status {process.wait()}.\n{_tail(log)}")
