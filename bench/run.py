"""The measuring stage: at each load warm up and send the clips; leave run.json and requests.jsonl behind.

Ctrl-C or a kill loses only what is in flight; --resume sends that, what is missing and what failed.
"""

import hashlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from tqdm import tqdm

from bench import BenchError, dataset, environment, loads, prometheus, results, serve
from bench.answers import Row
from bench.client import Client, clean_url, mime
from bench.dataset import Clip, Dataset
from bench.loads import Load
from bench.memory import MemorySampler

# No clip can succeed after one of these: no answer at all, wrong key, no permission, wrong address or model.
HOPELESS = (None, 401, 403, 404)
# What both parts of a resumed run must share, or its numbers would mix two measurements.
SAME = (
    *("url", "serve", "config_sha256", "dir", "model", "manifest_sha256", "server_version"),
    *("api", "mode", "language", "prompt", "loads", "seed"),
)
QUEUE = "vllm:request_queue_time_seconds"  # vLLM's histogram
SETTLE_S = 0.2  # the server's counters follow its answers
KILLED = {
    "joules": None,
    "joules_reason": "a part of this load was killed",
    "queued": None,
    "queue_threshold_s": None,
    "harness_cpu_s": None,
}


def claim(out: Path, resume: bool) -> Path:
    """Make the run's directory and return the path of its rows; refuse one that holds another run."""
    rows_path = out / results.ROWS
    if rows_path.exists() and not resume:
        raise BenchError(f"{rows_path} exists: continue that run with --resume, or choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot make the directory --out {out} ({error.strerror})") from None
    return rows_path


def check(flags: Namespace) -> tuple[Dataset, list[Clip]]:
    """Refuse what no server is needed to refuse. Returns the dataset, and the clips that --samples picks."""
    if flags.api_key_env and not os.environ.get(flags.api_key_env):
        raise BenchError(f"--api-key-env: the environment variable {flags.api_key_env} is empty or not set")
    data = dataset.load(flags.dataset)
    chosen = dataset.select(data.clips, flags.samples, flags.seed)
    # What would come to light when the clip's turn comes.
    if flags.api == "chat":
        for clip in chosen:
            mime(clip)
    if flags.mode == "realtime":
        from bench import realtime  # which needs libraries that the other modes do without

        for clip in chosen:
            realtime.check(clip)
    if flags.resume and (flags.out / results.ROWS).exists():
        _refuse_differences(flags.out, results.read_run(flags.out), _settings(flags, data, chosen))
    if not flags.language and not data.language and data.format != "manifest":
        print(f"--dataset {flags.dataset} tells no language: scored as English (see --language)", file=sys.stderr)
    return data, chosen


def _sha256(config: Path) -> str:
    try:
        return hashlib.sha256(config.read_bytes()).hexdigest()
    except OSError as error:
        raise BenchError(f"--serve: cannot read {config} ({error.strerror})") from None


def _settings(flags: Namespace, data: Dataset, chosen: Sequence[Clip]) -> dict[str, Any]:
    """What run.json says of the run itself, but for the model's name, which the server may tell."""
    return {
        # a server of our own gets a new port every time
        "url": None if flags.serve else clean_url(flags.url),
        "serve": flags.serve and str(flags.serve),
        "config_sha256": flags.serve and _sha256(flags.serve),
        "dir": str(flags.dir) if flags.serve else None,
        "dataset": flags.dataset,
        "dataset_format": data.format,
        "manifest_sha256": data.manifest_sha256,
        "api": flags.api,
        "mode": flags.mode,
        # Texts are scored in the dataset's language unless another is asked for.
        "language": flags.language or data.language,
        "prompt": flags.prompt if flags.api == "chat" else None,
        "loads": [load.name for load in flags.loads],
        **{name: getattr(flags, name) for name in ("seed", "warmup", "timeout_s")},
        "ids": [clip.id for clip in chosen],
    }


def measure(flags: Namespace, startup_s: float | None = None) -> bool:
    """Send every clip that has no completed row yet, load by load. Returns whether Ctrl-C stopped it.

    `startup_s`: how long the server of --serve took to come up, whose log is --out/server.log.
    """
    data, chosen = check(flags)
    key = os.environ[flags.api_key_env] if flags.api_key_env else None
    asked = {name: getattr(flags, name) for name in ("language", "prompt", "api", "mode")}
    client = Client(clean_url(flags.url), flags.timeout_s, key, **asked)
    rows_path = claim(flags.out, flags.resume)
    version = client.get("/version")
    client.model = flags.model or _first_model(client)
    log = flags.out / results.LOG
    record: dict[str, Any] = {
        "schema_version": results.SCHEMA_VERSION,
        "run": {**_settings(flags, data, chosen), "model": client.model},
        "loads": {},
        "environment": {
            **environment.describe(version.get("version") if isinstance(version, dict) else None),
            "server": _server(flags, startup_s, log, version),
        },
        "memory": None,
    }
    attempts: list[Row] = []
    if rows_path.exists():
        before = results.read_run(flags.out)
        _refuse_differences(flags.out, before, record["run"] | record["environment"])
        record = before
        attempts = results.read_rows(rows_path)
        # Written anew without a cut last line, so that the next row starts on a line of its own.
        results.write(rows_path, "".join(map(results.row_line, attempts)))
    finished = {(row.id, row.load) for row in attempts if row.error is None}
    part = 1 + max((row.part for row in attempts), default=0)
    del attempts
    pending = {load: [clip for clip in chosen if (clip.id, load.name) not in finished] for load in flags.loads}
    if not any(pending.values()):
        return False

    warm_ups = [chosen[number % len(chosen)] for number in range(flags.warmup)]
    sampler = MemorySampler(client.url)
    sampler.start()
    bar = tqdm(total=len(chosen) * len(flags.loads), initial=len(finished), unit="clip", file=sys.stderr)
    try:
        for load, clips in pending.items():
            if clips:
                bar.set_description(load.name)
                _one_load(client, load, clips, warm_ups, flags, part, record, sampler, bar)
    except KeyboardInterrupt:
        if not rows_path.exists():
            raise  # still warming up
        return True
    finally:
        bar.close()
        gpus, memory = sampler.gpus(), sampler.stop()
        if rows_path.exists():
            # With several GPUs each process logs its own share, or one does for all.
            split = serve.logged_memory(log) if flags.serve and gpus <= 1 else dict.fromkeys(serve.MEMORY)
            record["memory"] = _memory(record["memory"], memory, split)
            results.write_json(flags.out / results.RUN, record)
    return False


def _one_load(
    client: Client,
    load: Load,
    clips: Sequence[Clip],
    warm_ups: Sequence[Clip],
    flags: Namespace,
    part: int,
    record: dict[str, Any],
    sampler: MemorySampler,
    bar: Any,
) -> None:
    """Warm up, send the clips, write their rows, and then what this load took into `record` and run.json."""
    run = flags.out / results.RUN
    before = record["loads"].get(load.name)
    pool = loads.pool(load, max(len(clips), len(warm_ups)))
    try:
        _warm_up(pool, client, warm_ups)
        record["loads"][load.name] = KILLED  # which is what a kill leaves
        results.write_json(run, record)
        waits = _queue(client)
        joules, cpu_s = sampler.meter(), time.process_time()
        try:
            with (flags.out / results.ROWS).open("a", encoding="ascii") as file:
                for row in loads.send(load, pool, clips, _sender(client, part, load), flags.seed):
                    file.write(results.row_line(row))
                    file.flush()
                    bar.update()
        finally:
            energy, reason = joules()
            cpu_s = time.process_time() - cpu_s
            now = {
                "joules": energy,
                "joules_reason": reason,
                **_queued(waits, _queue(client) if waits else None),
                "harness_cpu_s": round(cpu_s, 3),
            }
            record["loads"][load.name] = _sum(before, now)
            results.write_json(run, record)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _sender(client: Client, part: int, load: Load) -> Callable[[Clip, float | None], Row]:
    return lambda clip, due: client.transcribe(clip, part, load.name, due)


def _server(flags: Namespace, startup_s: float | None, log: Path, version: Any) -> dict[str, Any]:
    """What is known of the server; null is what is not."""
    known: dict[str, Any] = {"startup_s": startup_s, "patches": None, "versions": None, "config": None}
    if isinstance(version, dict) and "version" in version:  # and not what says that there is no such page
        known["versions"] = {name: value for name, value in version.items() if isinstance(value, str)}
    if flags.serve is not None:
        if serve.is_own(flags.server_command):
            installed = environment.versions(serve.LIBRARIES)
            known["versions"] = {name: found for name, found in installed.items() if found}
        known["patches"] = serve.logged_patches(log)
        known["config"] = yaml.safe_load(flags.serve.read_bytes())
    return known


def _queue(client: Client) -> dict[float, float] | None:
    """How many requests waited at most so many seconds in vLLM's queue, until now; null where that is not told."""
    if f"{QUEUE}_bucket" not in (client.get_text("/metrics") or ""):
        return None
    time.sleep(SETTLE_S)
    return prometheus.buckets(client.get_text("/metrics") or "", QUEUE)


def _queued(before: dict[float, float] | None, after: dict[float, float] | None) -> dict[str, Any]:
    """How many requests waited longer than the lowest edge of the histogram."""
    if not before or not after or before.keys() != after.keys() or float("inf") not in after:
        return {"queued": None, "queue_threshold_s": None}
    grown = {edge: after[edge] - before[edge] for edge in after}
    return {"queued": round(grown[float("inf")] - grown[min(grown)]), "queue_threshold_s": min(grown)}


def _sum(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """A load's figures over the parts of a run; of those that a part did not measure there is no sum."""
    if before is None:
        return now
    summed = {
        name: before[name] + now[name] if before[name] is not None and now[name] is not None else None
        for name in ("joules", "queued", "harness_cpu_s")
    }
    return {
        "joules": summed["joules"],
        "joules_reason": before["joules_reason"] or now["joules_reason"],
        "queued": summed["queued"],
        "queue_threshold_s": now["queue_threshold_s"] if summed["queued"] is not None else None,
        "harness_cpu_s": summed["harness_cpu_s"],
    }


def _first_model(client: Client) -> str:
    models = client.get("/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError):
        raise client.hopeless(f"GET /v1/models names no model: {str(models)[:200]}") from None


def _warm_up(pool: ThreadPoolExecutor, client: Client, clips: Sequence[Clip]) -> None:
    """Send uncounted requests, so that the first measured one pays for no compilation and no cold cache.

    They share the measured pass's threads, hence its connections and its concurrency.
    """
    for row in pool.map(lambda clip: client.transcribe(clip, part=0), clips):
        if row.error and row.status in HOPELESS:
            raise client.hopeless(f"warm-up with {row.id}: {row.error}")
        if row.error:
            print(f"warm-up with {row.id} failed, measuring all the same: {row.error}", file=sys.stderr)


def _refuse_differences(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before.get("schema_version") != results.SCHEMA_VERSION:
        raise BenchError(
            f"--resume: {out / results.RUN} has schema version {before.get('schema_version')!r}, and this bench writes "
            f"{results.SCHEMA_VERSION}: choose another --out"
        )
    then = before["run"] | before["environment"]
    differences = [
        f"{name} was {then[name]!r}, is {now[name]!r}" for name in SAME if name in now and then[name] != now[name]
    ]
    if odd := set(then["ids"]) ^ set(now["ids"]):
        differences.append(f"ids: {len(odd)} clips are in one choice only, as {min(odd)} (--samples, --seed)")
    if differences:
        named = "\n  ".join([f"--resume: the run in {out} has other settings:", *differences])
        raise BenchError(f"{named}\nUse those, or another --out.")


def _memory(before: dict[str, Any] | None, now: dict[str, Any], split: dict[str, int | None]) -> dict[str, Any]:
    """The peaks over the parts of a run. A part that was killed left none; unlike sources do not compare."""
    memory = dict(now)
    if before and before["source"] and now["source"] in (None, before["source"]):
        larger = max(before, now, key=lambda part: part["peak_bytes"] or 0)
        memory |= {name: larger[name] for name in ("peak_bytes", "source", "reason")}
        memory["end_bytes"] = now["end_bytes"] if now["source"] else before["end_bytes"]
    for name in ("device_peak_bytes", "host_rss_peak_bytes"):
        memory[name] = max(((before or {}).get(name) or 0), now[name] or 0) or None
    parts = list(split.values())
    # On a CPU there is no difference to tell: what nothing was written to yet, as most of the cache, is not resident.
    known = memory["source"] != "rss_process_tree" and memory["peak_bytes"] and None not in parts
    return memory | split | {"other_bytes": memory["peak_bytes"] - sum(parts) if known else None}  # type: ignore[arg-type]
