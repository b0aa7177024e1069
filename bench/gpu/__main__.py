"""The command line: `python -m bench.gpu run --out FILE` and `python -m bench.gpu merge FILE... --out FILE`.

Exit status: 0 all rows measured without a failed request; 1 a server did not start or a request failed; 2 a mistake in
the usage. The file is written after every row, so a machine that is taken away leaves what was measured until then.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import random
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped,unused-ignore]
import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, dataset, environment, memory, prometheus, results, serve
from bench.client import Client
from bench.dataset import Clip
from bench.gpu import checkpoint, rows
from bench.memory import Gpus
from mistral_layout.audio import SAMPLE_RATE

LIBRARIES = ("vllm", "torch", "transformers", "mistral-common", "triton", "nvidia-ml-py", "requests")
SEED = 0
INTERVAL_S = 0.1
IDLE_S = 3
WARM_UPS = 3
SETTLE_S = 0.2  # the server's counters follow its answers
# Each cache that a start can find filled: vLLM's graphs, Triton's and PyTorch's kernels, what the driver compiled.
CACHES = (
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
)
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1024",  # an hour of WAV is 115 MB, and vLLM takes 25 by default
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": "3601",  # 0.32.0 takes 600 by default
}
STARTED = {False: "started one after the other", True: "started together"}
RANDOM = "Weights are random, so no text is right, and no draft is refused unless the config gives an acceptance."
NOTES = (
    "Clips were decoded from Opus to 16 kHz WAV before: 11 ms for 12 s that no row has in it.",
    "Every clip is sent to a server once: none is answered from a cache.",
    "joules_per_audio_second has in it what the GPU takes when idle, with all servers that are up at that time.",
    "start_s: until /health answers, looked at every 0.3 s; random weights are read from a file that was just written.",
)


class Clock:
    """Prints what happens, and when."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)


def joules(gpus: Gpus) -> float | None:
    """Energy that the machine's GPUs took since their driver was loaded; null without one that counts it."""
    return memory.joules(gpus.handles.values())


def watts(gpus: Gpus) -> float | None:
    before, start = joules(gpus), time.monotonic()
    time.sleep(IDLE_S if before is not None else 0)
    after = joules(gpus)
    return None if before is None or after is None else (after - before) / (time.monotonic() - start)


class Watch(threading.Thread):
    """The highest GPU memory, in bytes, of some processes (`theirs`; 0 where NVML names none) and of all (`whole`)."""

    def __init__(self, gpus: Gpus, pids: Callable[[], set[int]]) -> None:
        super().__init__(daemon=True, name="gpu-memory")
        self._gpus, self._pids, self._done = gpus, pids, threading.Event()
        self.theirs, self.before, self.whole = 0, in_use(gpus), 0

    def run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._sample()

    def stop(self) -> None:
        self._done.set()
        self.join()
        self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(psutil.Error, pynvml.NVMLError):
            self.theirs = max(self.theirs, self._gpus.of_processes(self._pids()))
            self.whole = max(self.whole, in_use(self._gpus))


def in_use(gpus: Gpus) -> int:
    return gpus.in_use(set(gpus.handles))


def processes(pid: int) -> set[int]:
    parent = psutil.Process(pid)
    return {pid, *(child.pid for child in parent.children(recursive=True))}


@dataclass
class Server:
    """One `vllm serve`. `held` is the GPU memory that came with its start and its own measurements, where it started
    alone; `peak` is the most that its start took, by NVML's count of its processes and else in that way."""

    name: str
    config: dict[str, Any]
    url: str
    pid: int
    cache: str
    start_s: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)
    held: int | None = None
    peak: int = 0
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = Client(self.url, timeout_s=1800)
        self.client.model = self.config["served_model_name"]

    @property
    def text(self) -> str:
        text: str = yaml.safe_dump(self.config, sort_keys=False)
        return text

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def counter(self, name: str) -> float | None:
        """A counter of vLLM's /metrics; null where there is none."""
        try:
            text = serve.get(f"{self.url}/metrics", timeout_s=10).text
        except OSError:  # as all of requests' are
            return None
        return prometheus.total(text, f"vllm:{name}", f"vllm:{name}_total")


# ---- Clips


@dataclass(frozen=True)
class Task:
    """One measurement: the clips that it sends, after those that warm the server up."""

    row: str
    server: str
    concurrency: int
    warm_up: list[Clip]
    clips: list[Clip]


def plan(names: Sequence[str], counts: dict[int, int], configs: dict[str, dict[str, Any]]) -> list[Task]:
    """Every measurement in order: a concurrency for all servers in turn, then the next; long clips last.

    A config is not measured with more requests in flight than it takes sequences: the others would only wait.
    """
    everything = dataset.load(rows.ROOT / "bench/data").clips
    warming = {concurrency: max(WARM_UPS, concurrency) for concurrency in counts}
    if (needed := sum(counts.values()) + sum(warming.values())) > len(everything):
        raise BenchError(f"--clips: {needed} clips with the warm-ups, and the dataset has {len(everything)}")
    order = random.Random(SEED).sample(everything, len(everything))
    chosen: dict[int, list[Clip]] = {}
    for concurrency, count in counts.items():
        chosen[concurrency], order = order[:count], order[count:]
    # The shortest of the rest: a warm-up is there for code and caches, not for a figure.
    order.sort(key=lambda clip: clip.duration_s, reverse=True)
    warm = {concurrency: [order.pop() for _ in range(count)] for concurrency, count in warming.items()}
    tasks, long = [], []
    for name in names:
        server, minutes = rows.server_of(name)
        if minutes is not None:
            first = min(counts)
            clip = Clip(f"{minutes}min", Path(f"{minutes}min.wav"), "", 60.0 * minutes, {})
            long.append(Task(name, server, 1, warm[first], [clip]))
            continue
        most = configs[server].get("max_num_seqs", max(counts))
        tasks += [Task(name, server, n, warm[n], chosen[n]) for n in counts if n <= most]
    return sorted(tasks, key=lambda task: task.concurrency) + long


def decode(clip: Clip, directory: Path, sources: Sequence[Clip]) -> Clip:
    """The clip as 16 kHz 16-bit WAV in `directory`; one without a file is made of the sources, over and over."""
    import numpy as np
    import soundfile

    def read(path: Path) -> Any:
        samples, rate = soundfile.read(path, dtype="int16")
        if rate != SAMPLE_RATE or samples.ndim != 1:
            raise BenchError(f"{path.name} has {rate} Hz: expected mono of {SAMPLE_RATE} Hz")
        return samples

    if clip.path.is_absolute():
        samples = read(clip.path)
    else:
        wanted = round(clip.duration_s * SAMPLE_RATE)
        parts: list[Any] = []
        while sum(part.size for part in parts) < wanted:
            parts.append(read(sources[len(parts) % len(sources)].path))
        samples = np.concatenate(parts)[:wanted]
    path = directory / f"{clip.id}.wav"
    soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")
    return Clip(clip.id, path, clip.text, len(samples) / SAMPLE_RATE, {"tokens": rows.tokens(len(samples))})


# ---- Starting


def _settings() -> dict[str, str]:
    """The servers' environment variables; what is set already stays."""
    settings = dict(SETTINGS)
    if importlib.util.find_spec("flashinfer") is None:
        settings["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM 0.32.0 takes it for granted
    settings |= {name: os.environ[name] for name in ("PYTORCH_CUDA_ALLOC_CONF",) if name in os.environ}
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def start(
    configs: dict[str, dict[str, Any]], flags: argparse.Namespace, places: Path, up: contextlib.ExitStack, clock: Clock
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start a server for each config; returns those that are up, and why the others are not."""
    gpus, servers, failures = Gpus(), {}, {}

    def wait(server: Server, process: Any, log: Path, watch: Watch, begun: float) -> str | None:
        try:
            serve.wait_until_up(process, server.url, log, show=False)
        except BenchError as error:
            return str(error)
        finally:
            watch.stop()
        server.start_s = time.monotonic() - begun
        server.held = None if flags.together and len(configs) > 1 else in_use(gpus) - watch.before
        server.peak = watch.theirs or (0 if server.held is None else watch.whole - watch.before)
        clock.say(f"{server.name} is up after {server.start_s:.1f} s, {server.cache} caches")
        return None

    waiting = {}
    with ThreadPoolExecutor(len(configs)) as pool:
        for name, content in configs.items():
            plain = re.sub(r"[^\w.-]", "_", name)  # a colon would part it in two in a list of paths
            cache = (flags.cache or places / "cache").resolve() / plain
            caches = {variable: str(cache / variable.lower()) for variable in CACHES}
            port, log = serve.free_port(), (flags.logs or places) / f"{plain}.log"
            state = "warm" if cache.exists() and any(cache.iterdir()) else "cold"
            file = places / f"{plain}.yaml"
            file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
            begun = time.monotonic()
            process = up.enter_context(
                serve.server(
                    file,
                    flags.model,
                    port,
                    log,
                    command=shlex.split(flags.command),
                    environment=_settings() | caches,
                    wait=False,
                )
            )
            server = Server(name, content, f"http://127.0.0.1:{port}", process.pid, state)
            watch = Watch(gpus, functools.partial(processes, process.pid))
            watch.start()
            waiting[name] = server, pool.submit(wait, server, process, log, watch, begun)
            if not flags.together:
                waiting[name][1].result()
        for name, (server, future) in waiting.items():
            if error := future.result():
                failures[name] = error
                clock.say(f"{name} did not start: {error}")
            else:
                servers[name] = server
    return servers, failures


# ---- Measuring


def measure(server: Server, task: Task, gpus: Gpus, vllm: str) -> dict[str, Any]:
    """Warm up, send the clips with `task.concurrency` in flight, and return the row."""

    def send(clip: Clip) -> Any:
        return server.client.transcribe(clip, part=1, max_completion_tokens=str(clip.extra["tokens"]))

    drafts = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    pids: set[int] = set()
    with contextlib.suppress(psutil.Error):  # it ended: its requests will say so
        pids = processes(server.pid)
    watch = Watch(gpus, lambda: pids)
    watch.start()
    with ThreadPoolExecutor(task.concurrency) as pool:
        for answer in pool.map(send, task.warm_up):
            if answer.error:
                print(f"warm-up of {task.row} failed: {answer.error}", file=sys.stderr)
        time.sleep(SETTLE_S)
        counters = {name: server.counter(name) for name in ("generation_tokens", *drafts)}
        energy = joules(gpus)
        answers = list(pool.map(send, task.clips))
        after = joules(gpus)
    time.sleep(SETTLE_S)
    made = {name: _difference(before, server.counter(name)) for name, before in counters.items()}
    watch.stop()
    proposed, accepted = (made[name] for name in drafts)
    clip_tokens = {clip.id: clip.extra["tokens"] for clip in task.clips}
    return {
        "name": task.row,
        "vllm": vllm,
        "concurrency": task.concurrency,
        **rows.figures(answers, clip_tokens, made["generation_tokens"], _difference(energy, after)),
        **_memory(server, watch),
        "start_s": server.start_s,
        "start_caches": server.cache,
        "start_cold_s": server.starts.get("cold"),
        "start_warm_s": server.starts.get("warm"),
        "acceptance": rows.acceptance_of(server.config),
        "accepted_drafts": accepted / proposed if proposed and accepted is not None else None,
        "config_sha256": server.sha256,
        "run": 0,
    }


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _memory(server: Server, watch: Watch) -> dict[str, Any]:
    """`peak_vram_bytes`, from the server's start on, and where it is from.

    `nvml_process_tree`: what NVML counts for the server's processes. Where it names none, as in many containers,
    `nvml_growth`: by how much the memory in use grew when the server started, alone, and while it was measured;
    `nvml_device`, where servers started together: all that is in use, theirs included.
    """
    if not watch.whole:
        return {"peak_vram_bytes": None, "peak_vram_source": None}
    if watch.theirs:
        return {"peak_vram_bytes": max(watch.theirs, server.peak), "peak_vram_source": "nvml_process_tree"}
    if server.held is None:
        return {"peak_vram_bytes": watch.whole, "peak_vram_source": "nvml_device"}
    server.peak = max(server.peak, server.held + watch.whole - watch.before)
    server.held += in_use(watch._gpus) - watch.before
    return {"peak_vram_bytes": server.peak, "peak_vram_source": "nvml_growth"}


def run(flags: argparse.Namespace) -> dict[str, Any]:
    clock, gpus = Clock(), Gpus()
    configs = _configs(flags)
    tasks = plan(flags.rows, dict(zip(flags.concurrency, flags.clips, strict=True)), configs)
    _print_plan(tasks, configs)
    if flags.plan:
        return rows.merge()
    earlier = json.loads(flags.out.read_bytes()) if flags.out.exists() else rows.merge()
    record: dict[str, Any] = {
        **environment.describe(None, LIBRARIES),
        "vllm": None,
        "command": _command(flags),
        "servers": "one up at a time" if flags.alone else STARTED[flags.together],
        "idle_watts": watts(gpus),
        "idle_watts_all_resident": None,
        "settings": _settings(),
        "notes": [*([RANDOM] if flags.model is None else []), *NOTES],
        "not_measured": {},
    }
    outcome: dict[str, Any] = {"runs": [record], "configs": {}, "rows": []}

    def save() -> dict[str, Any]:
        whole = rows.merge(earlier, outcome)
        results.write_json(flags.out, whole)
        return whole

    with tempfile.TemporaryDirectory() as scratch:
        places = Path(scratch)
        if flags.model is None:
            flags.model = places / "checkpoint"
            checkpoint.write(flags.model)
        for directory in (flags.logs, flags.out.parent):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        clock.say("decoding the clips")
        (places / "clips").mkdir()
        needed = {clip.id: clip for task in tasks for clip in (*task.warm_up, *task.clips)}
        sources = [clip for clip in needed.values() if clip.path.is_absolute()]
        decoded = {name: decode(clip, places / "clips", sources) for name, clip in needed.items()}
        # Servers that are up at the same time
        groups = [{name: content} for name, content in configs.items()] if flags.alone else [configs]
        for group in groups:
            with contextlib.ExitStack() as up:
                colds: dict[str, float] = {}
                if flags.restart:
                    with contextlib.ExitStack() as first:
                        servers, _ = start(group, flags, places, first, clock)
                        colds = {name: server.start_s for name, server in servers.items() if server.cache == "cold"}
                servers, failures = start(group, flags, places, up, clock)
                record["not_measured"] |= failures
                for name, server in servers.items():
                    server.starts = {"cold": colds[name]} if name in colds else {}
                    server.starts[server.cache] = server.start_s
                said = [server.client.get("/version")["version"] for server in servers.values()]
                record["vllm"] = record["server_version"] = next(
                    iter(said), record["vllm"] or record["libraries"]["vllm"]
                )
                if not flags.alone:
                    record["idle_watts_all_resident"] = watts(gpus)
                whole = save()
                for task in tasks:
                    if task.server not in servers:
                        continue
                    clock.say(f"{task.row} at concurrency {task.concurrency}: {len(task.clips)} clips")
                    ready = Task(
                        task.row,
                        task.server,
                        task.concurrency,
                        [decoded[clip.id] for clip in task.warm_up],
                        [decoded[clip.id] for clip in task.clips],
                    )
                    server = servers[task.server]
                    row = measure(server, ready, gpus, record["vllm"])
                    outcome["rows"].append(row)
                    outcome["configs"][server.sha256] = server.text
                    whole = save()
                    figures = ("failed", "p50_ms", "ms_per_token", "rtfx")
                    clock.say("  ".join(f"{name} {row[name]}" for name in figures))
    clock.say("done")
    return whole


# ---- Flags


def _configs(flags: argparse.Namespace) -> dict[str, dict[str, Any]]:
    servers = dict.fromkeys(rows.server_of(name)[0] for name in flags.rows)
    if unknown := set(flags.kv) - set(servers):
        raise BenchError(f"--kv: {min(unknown)!r} is no server of --rows: expected one of {', '.join(servers)}")
    if not flags.alone and (shares := list(filter(rows.needs_alone, servers))):
        raise BenchError(f"--rows: {shares[0]!r} takes a share of the GPU that no other server holds: add --alone")
    return {name: rows.config(name, kv_gib=flags.kv.get(name), acceptance=flags.acceptance) for name in servers}


def _print_plan(tasks: Sequence[Task], configs: dict[str, dict[str, Any]]) -> None:
    requests = 0
    for task in tasks:
        audio_s = sum(clip.duration_s for clip in task.clips)
        made = sum(rows.tokens(round(clip.duration_s * SAMPLE_RATE)) for clip in task.clips)
        requests += len(task.warm_up) + len(task.clips)
        print(
            f"{task.row:>24} at {task.concurrency:>3}: {len(task.warm_up):>3} to warm up, {len(task.clips):>4} to "
            f"measure, {audio_s:>6.0f} s of audio, {made:>6} tokens",
            file=sys.stderr,
        )
    cache = sum(content.get("kv_cache_memory_bytes", 0) for content in configs.values()) / 2**30
    print(f"{requests} requests; {len(configs)} servers with {cache:.1f} GiB of KV cache", file=sys.stderr)


def _command(flags: argparse.Namespace) -> str:
    """The command line, its files by their names: where they lie is this machine's own affair."""
    words = list(flags.arguments)
    for path in (flags.out, flags.cache, flags.logs, flags.model):
        if path is not None and path.is_absolute():
            words = [word.replace(str(path), path.name) for word in words]
    return shlex.join(["python", "-m", "bench.gpu", *words])


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure configurations on a GPU.")
    commands = parser.add_subparsers(dest="command_name", required=True)
    run = commands.add_parser("run", help="serve and measure", formatter_class=argparse.RawDescriptionHelpFormatter)
    run.description = "Rows:\n\n" + (rows.__doc__ or "").partition("\n\n")[2]
    add = run.add_argument
    add("--out", type=Path, required=True, help="JSON file to write; rows that it has already are kept")
    add("--rows", type=_words, default=["stock-eager", "stock-piecewise", "fast"], metavar="NAME,...", help="see above")
    add("--concurrency", type=_whole, default=[1, 16, 64], metavar="N,...", help="requests in flight (1,16,64)")
    add("--clips", type=_whole, default=[12, 48, 128], metavar="N,...", help="clips at each of these (12,48,128)")
    add("--together", action="store_true", help="start all servers at once: faster, but then start_s says less")
    add("--alone", action="store_true", help="stop each server before the next one starts")
    add("--restart", action="store_true", help="start each server twice, to time empty and filled caches")
    add("--cache", type=Path, metavar="DIR", help="keep the servers' caches (default: empty ones, removed at the end)")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs")
    add("--model", type=Path, metavar="DIR", help="checkpoint (default: of full size, with random weights)")
    add("--kv", type=_sizes, default={}, metavar="NAME=GIB,...", help="KV cache of a server")
    rates = "rates at which drafts are accepted, by position, for fast-spec (0.8,0.6)"
    add("--acceptance", type=lambda text: [float(rate) for rate in _words(text)], metavar="RATE,...", help=rates)
    engine = shlex.join([sys.executable, "-m", "vllm.entrypoints.cli.main"])
    add("--command", default=engine, help="what stands for `vllm` (default: this Python's)")
    add("--plan", action="store_true", help="only say what would be sent")
    merge = commands.add_parser("merge", help="one file of several; the last one's rows count").add_argument
    merge("files", type=Path, nargs="+", metavar="FILE")
    merge("--out", type=Path, required=True)
    flags = parser.parse_args(arguments)
    flags.arguments = arguments
    if flags.command_name == "run" and len(flags.clips) != len(flags.concurrency):
        if len(flags.clips) != 1:
            parser.error(
                f"--clips has {len(flags.clips)} numbers: expected 1, or {len(flags.concurrency)} as --concurrency"
            )
        flags.clips *= len(flags.concurrency)
    return flags


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _whole(text: str) -> list[int]:
    numbers = [int(word) for word in _words(text)]
    if min(numbers, default=0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from 1")
    return numbers


def _sizes(text: str) -> dict[str, float]:
    pairs = (word.rpartition("=") for word in _words(text))
    return {name: float(size) for name, _, size in pairs}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parse(sys.argv[1:] if arguments is None else list(arguments))
    try:
        if flags.command_name == "merge":
            outcome = rows.merge(*(json.loads(path.read_bytes()) for path in flags.files))
            results.write_json(flags.out, outcome)
        else:
            outcome = run(flags)
            if flags.plan:
                return 0
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(rows.table(outcome))
    return int(any(row["failed"] for row in outcome["rows"]) or any(run["not_measured"] for run in outcome["runs"]))


if __name__ == "__main__":
    sys.exit(main())
