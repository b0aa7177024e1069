"""The measuring stage: for each load, warm up and send the clips; write run.json and requests.jsonl.

Ctrl-C or a kill loses only the requests in flight. --resume sends them, and all that failed or are missing.
"""

import dataclasses
import functools
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped,unused-ignore]
from tqdm import tqdm

from bench import BenchError, dataset, environment, live, loads, prometheus, results
from bench.answers import Row
from bench.client import Client, clean_url, mime
from bench.dataset import Clip, Dataset
from bench.loads import Load
from bench.measure import engine
from bench.measure import log as logs
from bench.measure.lag import DELAY_MS
from bench.measuring import Measurement
from bench.plan import LivePlan, RunPlan, SearchPlan
from bench.search import search
from bench.sending import Meter, Sending, load_meter

# Settings that must be equal in all parts of a resumed run.
SAME = (
    *("url", "serve", "config_sha256", "dir", "model", "manifest_sha256", "server_version"),
    *("api", "mode", "language", "prompt", "loads", "seed", "live"),
)
QUEUE = "vllm:request_queue_time_seconds"  # vLLM's histogram
SETTLE_S = 0.2  # the server updates its counters after its responses
KILLED = {
    "joules": None,
    "joules_reason": "a part of this load was killed",
    "queued": None,
    "queue_threshold_s": None,
    "harness_cpu_s": None,
    "late_sends_ms": None,
}


class Selection(NamedTuple):
    """What a run sends: `clips` are the selected clips in the order of the dataset, or the sessions made from them.

    `picked` are the selected clips in both cases.
    """

    data: Dataset
    clips: list[Clip]
    picked: list[Clip]

    def of(self, load: Load) -> list[Clip]:
        """The clips or sessions of this load."""
        return self.clips[: load.sessions] if load.sessions else self.clips


def execute(plan: RunPlan) -> bool:
    """Carry out the plan; start a server if it names a config. Returns whether Ctrl-C stopped it.

    Raises BenchError for invalid data or settings, another run in `out`, and a server that does not respond.
    """
    selection = check(plan)  # before the start of vLLM, which takes half a minute
    server = plan.server
    if isinstance(server, str):
        url = clean_url(server)
        claim(plan.out, plan.resume)
        return measure(plan, selection, url)
    claim(plan.out, plan.resume)
    port, begun = engine.free_port(), time.monotonic()
    log, command, variables = plan.out / results.LOG, server.command, server.environment
    with engine.served(server.config, server.directory, port, log, command=command, environment=variables):
        return measure(plan, selection, f"http://127.0.0.1:{port}", startup_s=round(time.monotonic() - begun, 3))


def check(plan: RunPlan) -> Selection:
    """Read the dataset and make all checks that need no server. Raises BenchError."""
    if plan.api_key_env and not os.environ.get(plan.api_key_env):
        raise BenchError(f"--api-key-env: the environment variable {plan.api_key_env} is empty or not set")
    data = dataset.load(plan.dataset)
    picked = dataset.select(data.clips, plan.samples, plan.seed)
    selection = Selection(data, picked, picked)
    # Otherwise these errors would appear only when the clip is sent.
    if plan.api == "chat":
        for clip in selection.clips:
            mime(clip)
    if plan.mode == "realtime":
        from bench import sound  # needs libraries that the other modes do not need

        for clip in picked:
            sound.check(clip)
        if plan.live:
            selection = selection._replace(clips=_sessions(plan, plan.live, picked))
    if plan.resume and (plan.out / results.ROWS).exists():
        _refuse_differences(plan.out, results.read_run(plan.out), _settings(plan, selection))
    if not plan.language and not data.language and data.format != "manifest":
        print(
            f"--dataset {plan.dataset} does not name its language: scoring as English (see --language)", file=sys.stderr
        )
    return selection


def _sessions(plan: RunPlan, made_of: LivePlan, clips: Sequence[Clip]) -> list[Clip]:
    """The largest number of sessions that the run can need. The length of each is a multiple of a piece of audio."""
    from bench import sound

    most = made_of.search.most if made_of.search else max(load.sessions or 0 for load in plan.loads)
    age_s, least_s = sound.whole_pieces(made_of.age_s), made_of.least_seconds or made_of.seconds
    draw = random.Random(plan.seed)
    lengths = [sound.whole_pieces(draw.uniform(least_s, made_of.seconds)) for _ in range(most)]
    return [sound.session(number, clips, length, age_s, plan.seed) for number, length in enumerate(lengths, 1)]


def claim(out: Path, resume: bool) -> None:
    """Create the run's directory. Raises BenchError if it has another run, or cannot be created."""
    rows_path = out / results.ROWS
    if rows_path.exists() and not resume:
        raise BenchError(f"{rows_path} exists: continue that run with --resume, or choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot create the directory --out {out} ({error.strerror})") from None


def _sha256(config: Path) -> str:
    try:
        return hashlib.sha256(config.read_bytes()).hexdigest()
    except OSError as error:
        raise BenchError(f"--serve: cannot read {config} ({error.strerror})") from None


def _settings(plan: RunPlan, selection: Selection) -> dict[str, Any]:
    """The `run` section of run.json without the model's name, which may come from the server."""
    served = plan.served
    return {
        # a server that bench starts gets a new port each time
        "url": clean_url(plan.server) if isinstance(plan.server, str) else None,
        "serve": str(served.config) if served else None,
        "config_sha256": _sha256(served.config) if served else None,
        "dir": str(served.directory) if served else None,
        "dataset": plan.dataset,
        "dataset_format": selection.data.format,
        "manifest_sha256": selection.data.manifest_sha256,
        "api": plan.api,
        "mode": plan.mode,
        # Texts are scored in the dataset's language unless --language is set.
        "language": plan.language or selection.data.language,
        "prompt": plan.prompt if plan.api == "chat" else None,
        "loads": [load.name for load in plan.loads],
        "seed": plan.seed,
        "warmup": plan.warmup,
        "timeout_s": plan.timeout_s,
        "ids": [clip.id for clip in selection.clips],
        "live": dataclasses.asdict(plan.live) if plan.live else None,
    }


def measure(plan: RunPlan, selection: Selection, url: str, startup_s: float | None = None) -> bool:
    """Send every clip that has no completed row yet, load by load. Returns whether Ctrl-C stopped it.

    `url` is the server's base URL. `startup_s` is the start-up time of a server that bench has started, whose log is
    server.log in `plan.out`. Raises BenchError for a server with which no request can succeed.
    """
    key = os.environ[plan.api_key_env] if plan.api_key_env else None
    client = Client(
        url,
        plan.timeout_s,
        key,
        api=plan.api,
        mode=plan.mode,
        language=plan.language,
        prompt=plan.prompt,
        delay_ms=plan.live.delay_ms if plan.live else DELAY_MS,
    )
    version = client.get("/version")
    client.model = plan.model or first_model(client)
    record = _record(plan, selection, client.model, version, startup_s)
    rows_path, attempts = plan.out / results.ROWS, list[Row]()
    if rows_path.exists():
        before = results.read_run(plan.out)
        _refuse_differences(plan.out, before, record["run"] | record["environment"])
        record = before
        attempts = results.read_rows(rows_path)
        # Written again without a truncated last line, so that the next row starts on a new line.
        results.write(rows_path, "".join(map(results.row_line, attempts)))
    finished = {(row.id, row.load) for row in attempts if row.error is None}
    part = 1 + max((row.part for row in attempts), default=0)
    del attempts
    pending = {}
    for load in plan.loads:
        left = [clip for clip in selection.of(load) if (clip.id, load.name) not in finished]
        # Sessions are measured together or not at all.
        pending[load] = selection.of(load) if left and load.sessions else left
    if not any(pending.values()):
        return False
    with _Measurement(plan, selection, client, record, part, done=len(finished)) as measurement:
        try:
            if plan.live and plan.live.search:
                measurement.search(plan.loads[0], plan.live.search)
                return False
            for load, left in pending.items():
                if left:
                    measurement.run(load, left)
        except KeyboardInterrupt:
            if not rows_path.exists():
                raise  # during the warm-up
            return True
    return False


def _record(plan: RunPlan, selection: Selection, model: str, version: Any, startup_s: float | None) -> dict[str, Any]:
    """The content of run.json before the first load; `version` is the server's response to GET /version."""
    return {
        "schema_version": results.SCHEMA_VERSION,
        "run": {**_settings(plan, selection), "model": model},
        "loads": {},
        "environment": {
            **environment.describe(version.get("version") if isinstance(version, dict) else None),
            "server": _server(plan, startup_s, version),
        },
        "memory": None,
    }


class _Measurement(Measurement):
    """Sends one part of a run."""

    killed = KILLED

    def __init__(
        self, plan: RunPlan, selection: Selection, client: Client, record: dict[str, Any], part: int, done: int
    ) -> None:
        """`done` is the number of rows from earlier parts."""
        self._plan, self._part, self._selection = plan, part, selection
        self.mode = plan.mode
        warm_ups = [selection.picked[number % len(selection.picked)] for number in range(plan.warmup)]
        total = sum(len(selection.of(load)) for load in plan.loads)
        super().__init__(plan.out, client, record, warm_ups, "clip", total, done)

    def memory(self, gpus: int, memory: dict[str, Any]) -> dict[str, Any]:
        # With several GPUs, each process logs its own share, or one process logs for all.
        text = logs.read(self._plan.out / results.LOG) if self._plan.served and gpus <= 1 else ""
        return _memory(self._record["memory"], memory, logs.memory(text))

    def warm(self, load: Load) -> Callable[[Any], Any]:
        return functools.partial(self._client.live if self.mode == "realtime" else self._client.transcribe, part=0)

    def send(self, pool: Executor, load: Load, items: Sequence[Clip]) -> tuple[Iterator[Row], Meter]:
        waits = _queue(self._client)
        meter = functools.partial(load_meter, self._sampler)
        sending = Sending(pool, self._client, self._part, load, self._plan.seed, meter)
        return sending.rows(items), lambda: sending.took() | _queued(waits, _queue(self._client) if waits else None)

    def search(self, first: Load, plan: SearchPlan) -> None:
        """Search the largest number of sessions that the server holds. Each number that is tried is a separate load."""
        trials, load = search(first.sessions or 1, plan.most), first
        self._record["run"]["loads"] = []
        try:
            number = next(trials)
            while True:
                (load,) = loads.live(str(number))
                self._record["run"]["loads"].append(load.name)
                self._bar.total = self._bar.n + number
                rows = self.run(load, self._selection.of(load))
                figures = live.of_load(number, rows, rows, {}, 0.0)
                failed = sum(row.error is not None for row in rows)
                held = live.holds(figures, failed, plan.lag_ms)
                p99 = f"{figures['lag_ms']['p99']:.1f} ms" if figures["lag_ms"] else "unknown"
                outcome = f"lag P99 {p99}, {figures['fell_behind']} fell behind, {failed} failed"
                tqdm.write(f"{number} sessions: {outcome}: {'held' if held else 'not held'}", file=sys.stderr)
                number = trials.send(held)
        except StopIteration:
            pass


def _server(plan: RunPlan, startup_s: float | None, version: Any) -> dict[str, Any]:
    """The facts that are known about the server; unknown ones are null."""
    known: dict[str, Any] = {"startup_s": startup_s, "patches": None, "versions": None, "config": None}
    if isinstance(version, dict) and "version" in version:  # not the JSON of a 404 error
        known["versions"] = {name: value for name, value in version.items() if isinstance(value, str)}
    if plan.served is not None:
        known["versions"] = environment.of_server(plan.served.command) or known["versions"]
        patches = logs.patches(logs.read(plan.out / results.LOG))
        known["patches"] = dict(patch.split(" ", 1) for patch in patches.split(", ")) if patches else None
        known["config"] = yaml.safe_load(plan.served.config.read_bytes())
    return known


def _queue(client: Client) -> dict[float, float] | None:
    """vLLM's histogram of queue times so far: seconds -> requests that waited at most this long. Null without one."""
    if f"{QUEUE}_bucket" not in (client.get_text("/metrics") or ""):
        return None
    time.sleep(SETTLE_S)
    return prometheus.buckets(client.get_text("/metrics") or "", QUEUE)


def _queued(before: dict[float, float] | None, after: dict[float, float] | None) -> dict[str, Any]:
    """The number of requests that waited longer than the lowest edge of the histogram."""
    if not before or not after or before.keys() != after.keys() or float("inf") not in after:
        return {"queued": None, "queue_threshold_s": None}
    grown = {edge: after[edge] - before[edge] for edge in after}
    return {"queued": round(grown[float("inf")] - grown[min(grown)]), "queue_threshold_s": min(grown)}


def first_model(client: Client) -> str:
    models = client.get("/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError):
        raise client.hopeless(f"GET /v1/models lists no model: {str(models)[:200]}") from None


def _refuse_differences(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("schema_version") != results.SCHEMA_VERSION:
        raise BenchError(
            f"--resume: {out / results.RUN} has schema version {before.get('schema_version')!r}, this bench writes "
            f"{results.SCHEMA_VERSION}: choose another --out"
        )
    then = before["run"] | before["environment"]
    differences = [
        f"{name} was {then.get(name)!r}, is {now[name]!r}"
        for name in SAME
        if name in now and then.get(name) != now[name]
    ]
    if odd := set(then["ids"]) ^ set(now["ids"]):
        differences.append(
            f"ids: {len(odd)} clips are in only one of the selections, such as {min(odd)} (--samples, --seed)"
        )
    if differences:
        named = "\n  ".join([f"--resume: the run in {out} has other settings:", *differences])
        raise BenchError(f"{named}\nUse the settings of that run, or choose another --out.")


def _memory(before: dict[str, Any] | None, now: dict[str, Any], split: dict[str, int | None]) -> dict[str, Any]:
    """The peaks over the parts of a run. A killed part has none; different sources are not compared."""
    memory = dict(now)
    if before and before["source"] and now["source"] in (None, before["source"]):
        larger = max(before, now, key=lambda part: part["peak_bytes"] or 0)
        memory |= {name: larger[name] for name in ("peak_bytes", "source", "reason")}
        memory["end_bytes"] = now["end_bytes"] if now["source"] else before["end_bytes"]
    for name in ("device_peak_bytes", "host_rss_peak_bytes"):
        memory[name] = max(((before or {}).get(name) or 0), now[name] or 0) or None
    parts = list(split.values())
    # Not on a CPU: memory that was not written yet, such as most of the cache, is not resident.
    known = memory["source"] != "rss_process_tree" and memory["peak_bytes"] and None not in parts
    return memory | split | {"other_bytes": memory["peak_bytes"] - sum(parts) if known else None}  # type: ignore[arg-type]
