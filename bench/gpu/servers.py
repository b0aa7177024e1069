"""Start one `vllm serve` per configuration, and measure the time that it takes."""

import contextlib
import functools
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, prometheus
from bench.client import Client
from bench.gpu import rows
from bench.gpu.clock import Clock
from bench.gpu.plan import StartPlan
from bench.gpu.readings import MemoryWatch, in_use, processes
from bench.measure import engine
from bench.measure.gpus import Gpus

# Caches that speed up a start: vLLM's compiled graphs, kernels of Triton, PyTorch, FlashInfer and the CUDA driver
CACHES = (
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
)
COUNTERS = (rows.GENERATED, rows.DRAFTED, rows.DRAFTS, rows.ACCEPTED)
BY_POSITION = f"{rows.ACCEPTED}_per_pos"
STEPS = "VOXTRAL_SERVE_STEPS"  # of voxtral-serve: the file that bench/gpu/steps.py reads
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1024",  # an hour of WAV has 115 MB; vLLM's default limit is 25
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": "3601",  # the default limit of vLLM 0.32.0 is 600
}
# Variables of this process that the servers have too, and that are in the file if they are set
PASSED_ON = (
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_WORKER_MULTIPROC_METHOD",
)


@dataclass
class Server:
    """One `vllm serve`.

    `held`: growth of the used GPU memory during its start and its measurements, in bytes; null if another server
    started at the same time. `peak`: peak GPU memory of its start, according to NVML or else from this growth. `steps`:
    the file in which it may write the steps of its engine; null without `--steps`.
    """

    name: str
    config: dict[str, Any]
    url: str
    pid: int
    cache: str
    start_s: float = 0.0
    held: int | None = None
    peak: int = 0
    steps: Path | None = None
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.url, timeout_s=1800)
        self.client.model = self.config["served_model_name"]

    def counters(self) -> dict[str, float]:
        """The counters of vLLM's /metrics that a row needs, by their names without prefix; those that are missing are
        not in it. Those of drafts by position have names such as `accepted 0`."""
        try:
            text = engine.get(f"{self.url}/metrics", timeout_s=10).text
        except OSError:  # the base class of all errors of requests
            return {}
        found: dict[str, float] = {}
        for name in COUNTERS:
            if (value := prometheus.total(text, f"vllm:{name}", f"vllm:{name}_total")) is not None:
                found[name] = value
        for sample in prometheus.samples(text, f"vllm:{BY_POSITION}_total"):
            name = f"{rows.ACCEPTED} {sample.labels['position']}"
            found[name] = found.get(name, 0.0) + sample.value
        return found


@dataclass(frozen=True)
class Launch:
    """What to start: the config, the directory of the checkpoint, and the name of the caches."""

    config: dict[str, Any]
    model: Path
    cache: str


@dataclass(frozen=True)
class _Started:
    """A server that may not be ready yet. `begun` is the time of its start, from time.monotonic."""

    server: Server
    running: engine.Engine
    watch: MemoryWatch
    begun: float


def variables() -> dict[str, str]:
    """The environment variables of the servers. Variables that are already set keep their values."""
    settings = dict(SETTINGS)
    if importlib.util.find_spec("flashinfer") is None:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM 0.32.0 assumes that it is installed
    settings |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def _plain(name: str) -> str:
    """The name as one of a file: a colon separates the paths of a list."""
    return re.sub(r"[^\w.-]", "_", name)


def filled(cache: Path, name: str) -> bool:
    """Whether an earlier start has filled the caches of this name in `cache`."""
    own = cache / _plain(name)
    return own.exists() and any(own.iterdir())


def start(
    launches: Mapping[str, Launch], plan: StartPlan, places: Path, up: contextlib.ExitStack, clock: Clock
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start servers, all at once. Returns (servers that are up, reasons of the failed ones), by name.

    `places` is a directory for temporary files. Closing `up` ends the servers."""
    gpus = Gpus()
    waiting: dict[str, tuple[Server, Future[str | None]]] = {}
    servers, failures = {}, {}
    # After Ctrl-C the servers end first: the pool waits until they are up, or have ended.
    with ThreadPoolExecutor(len(launches)) as pool, contextlib.ExitStack() as starting:
        for name, launch in launches.items():
            started = _start(name, launch, plan, places, starting, gpus)
            waiting[name] = started.server, pool.submit(_wait, started, gpus, len(launches) == 1, clock)
        for name, (server, future) in waiting.items():
            if error := future.result():
                failures[name] = error
                clock.say(f"{name} did not start: {error}")
            else:
                servers[name] = server
        up.enter_context(starting.pop_all())
    return servers, failures


def _start(name: str, launch: Launch, plan: StartPlan, places: Path, up: contextlib.ExitStack, gpus: Gpus) -> _Started:
    plain = _plain(name)
    cache = (plan.cache or places / "cache").resolve() / _plain(launch.cache)
    caches = {variable: str(cache / variable.lower()) for variable in CACHES}
    port, log = engine.free_port(), (plan.logs or places) / f"{plain}.log"
    state = "warm" if filled(cache.parent, launch.cache) else "cold"
    file = places / f"{plain}.yaml"
    file.write_text(yaml.safe_dump(launch.config, sort_keys=False), encoding="utf-8")
    begun = time.monotonic()
    environment = variables() | caches
    steps = (plan.logs or places).resolve() / f"{plain}.steps.jsonl" if plan.steps else None
    if steps is not None:
        steps.unlink(missing_ok=True)
        environment[STEPS] = str(steps)
    running = up.enter_context(
        engine.served(file, launch.model, port, log, command=plan.command, environment=environment, wait=False)
    )
    server = Server(name, launch.config, running.url, running.pid, state, steps=steps)
    watch = MemoryWatch(gpus, functools.partial(processes, running.pid))
    watch.start()
    return _Started(server, running, watch, begun)


def _wait(started: _Started, gpus: Gpus, apart: bool, clock: Clock) -> str | None:
    """Wait until the server is ready; set its start-up time and memory. Returns the reason of a failure, else null.

    `apart`: no other server starts at the same time, so the growth of the used GPU memory belongs to this one.
    """
    server, watch = started.server, started.watch
    try:
        started.running.wait_until_up(show=False)
    except BenchError as error:
        return str(error)
    finally:
        watch.stop()
    server.start_s = time.monotonic() - started.begun
    server.held = in_use(gpus) - watch.before if apart else None
    server.peak = watch.theirs or (0 if server.held is None else watch.whole - watch.before)
    clock.say(f"{server.name} is up after {server.start_s:.1f} s, {server.cache} caches")
    return None
