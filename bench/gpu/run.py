"""The command `bench.gpu run`: start the servers, measure the rows in turn, write the file after each row."""

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import BenchError, environment, results
from bench.gpu import checkpoint, rows, servers, steps
from bench.gpu.clock import Clock
from bench.gpu.measure import measure
from bench.gpu.plan import GpuPlan
from bench.gpu.readings import watts
from bench.gpu.servers import Server
from bench.gpu.tasks import Task, decoded, tasks_of
from bench.measure.gpus import Gpus
from mistral_layout.audio import SAMPLE_RATE

LIBRARIES = ("vllm", "torch", "transformers", "mistral-common", "triton", "nvidia-ml-py", "requests")
STARTED = {False: "started one after the other", True: "started together"}
RANDOM = "The weights are random: all texts are wrong, and all drafts are accepted unless the config sets a rate."
NOTES = (
    "Clips are decoded from Opus to 16 kHz WAV before the run. The rows do not include this: 11 ms for a clip of 12 s.",
    "Every clip is sent to a server once, so no answer comes from a cache.",
    "joules_per_audio_second includes the idle power of the GPU with all servers that are up at that time.",
    "start_s: time until /health answers, polled every 0.3 s. Random weights are read from a file just written.",
)


class Outcome:
    """The file that a run writes: its earlier content and the rows of this run."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        """`record` describes this run in the file. It may be extended until the last `save`."""
        self._path = path
        self._earlier = json.loads(path.read_bytes()) if path.exists() else rows.merge()
        self._own: dict[str, Any] = {"runs": [record], "configs": {}, "rows": []}

    def add(self, row: dict[str, Any], server: Server) -> None:
        self._own["rows"].append(row)
        self._own["configs"][server.sha256] = server.text

    def save(self) -> dict[str, Any]:
        """Write the file. Returns its content."""
        whole = rows.merge(self._earlier, self._own)
        results.write_json(self._path, whole)
        return whole


def run(plan: GpuPlan) -> dict[str, Any]:
    """Measure every row. Returns the content of the file, which is empty if the plan is only printed.

    Raises BenchError for an invalid plan.
    """
    clock, gpus = Clock(), Gpus()
    configs = configs_of(plan)
    tasks = tasks_of(plan.rows, plan.clips, configs)
    _print_plan(tasks, configs)
    if plan.only_plan:
        return rows.merge()
    record = _record(plan, gpus)
    outcome = Outcome(plan.out, record)
    with tempfile.TemporaryDirectory() as scratch:
        places = Path(scratch)
        model = plan.model
        if model is None:
            model = places / "checkpoint"
            checkpoint.write(model)
        for directory in (plan.logs, plan.out.parent):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        clock.say("decoding the clips")
        tasks = decoded(tasks, places / "clips")
        # Servers that are up at the same time
        groups = [{name: content} for name, content in configs.items()] if plan.alone else [configs]
        for group in groups:
            with contextlib.ExitStack() as up:
                ready = _start(group, plan, model, places, up, clock, record)
                if not plan.alone:
                    record["idle_watts_all_resident"] = watts(gpus)
                outcome.save()
                for task in tasks:
                    if task.server in ready:
                        _measure(task, ready[task.server], outcome, record["vllm"], gpus, clock)
    clock.say("done")
    return outcome.save()


def configs_of(plan: GpuPlan) -> dict[str, dict[str, Any]]:
    """The vLLM config of each server that the plan's rows need, by its name. Raises BenchError."""
    names = dict.fromkeys(rows.server_of(name)[0] for name in plan.rows)
    if unknown := set(plan.kv_gib) - set(names):
        raise BenchError(f"--kv: {min(unknown)!r} is not a server of --rows: expected one of {', '.join(names)}")
    if not plan.alone and (shares := list(filter(rows.needs_alone, names))):
        raise BenchError(f"--rows: {shares[0]!r} takes a share of the GPU, so no other server may be up: add --alone")
    return {name: rows.config(name, kv_gib=plan.kv_gib.get(name), acceptance=plan.acceptance) for name in names}


def _record(plan: GpuPlan, gpus: Gpus) -> dict[str, Any]:
    """The description of this run for the file: machine, versions, settings."""
    return {
        **environment.describe(None, LIBRARIES),
        "vllm": None,
        "command": _command(plan),
        "servers": "one up at a time" if plan.alone else STARTED[plan.together],
        "idle_watts": watts(gpus),
        "idle_watts_all_resident": None,
        "settings": servers.variables(),
        "notes": [*([RANDOM] if plan.model is None else []), *NOTES],
        "not_measured": {},
    }


def _start(
    configs: Mapping[str, dict[str, Any]],
    plan: GpuPlan,
    model: Path,
    places: Path,
    up: contextlib.ExitStack,
    clock: Clock,
    record: dict[str, Any],
) -> dict[str, Server]:
    """Start the servers, twice with `restart`. Adds their vLLM version and failed starts to `record`."""
    colds: dict[str, float] = {}
    if plan.restart:
        with contextlib.ExitStack() as first:
            ready, _ = servers.start(configs, plan, model, places, first, clock)
            colds = {name: server.start_s for name, server in ready.items() if server.cache == "cold"}
    ready, failures = servers.start(configs, plan, model, places, up, clock)
    record["not_measured"] |= failures
    for name, server in ready.items():
        server.starts = {"cold": colds[name]} if name in colds else {}
        server.starts[server.cache] = server.start_s
    said = [server.client.get("/version")["version"] for server in ready.values()]
    record["vllm"] = record["server_version"] = next(iter(said), record["vllm"] or record["libraries"]["vllm"])
    return ready


def _measure(task: Task, server: Server, outcome: Outcome, vllm: str, gpus: Gpus, clock: Clock) -> None:
    clock.say(f"{task.row} at concurrency {task.concurrency}: {len(task.clips)} clips")
    row = measure(server, task, gpus, vllm)
    outcome.add(row, server)
    outcome.save()
    figures = ("failed", "p50_ms", "ms_per_token", "rtfx")
    clock.say("  ".join(f"{name} {row[name]}" for name in figures))
    if server.steps is not None:
        print(steps.table(row["steps"]), file=sys.stderr)


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


def _command(plan: GpuPlan) -> str:
    """The command line. Absolute paths are shortened to names, so that results contain no local directories."""
    words = list(plan.arguments)
    for path in (plan.out, plan.cache, plan.logs, plan.model):
        if path is not None and path.is_absolute():
            words = [word.replace(str(path), path.name) for word in words]
    return shlex.join(["python", "-m", "bench.gpu", *words])
