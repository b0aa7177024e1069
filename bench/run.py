"""The measuring stage: warm up, send the clips, leave run.json and requests.jsonl behind.

Ctrl-C or a kill loses only what is in flight; --resume sends that, what is missing and what failed.
"""

import hashlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import BenchError, dataset, environment, results
from bench.client import Client, Row, clean_url
from bench.dataset import Clip
from bench.memory import MemorySampler

# No clip can succeed after one of these: no answer at all, wrong key, no permission, wrong address or model.
HOPELESS = (None, 401, 403, 404)
# What both parts of a resumed run must share, or its numbers would mix two measurements.
SAME = ("url", "serve", "config_sha256", "dir", "model", "manifest_sha256", "concurrency", "server_version")


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


def measure(flags: Namespace) -> bool:
    """Send every clip that has no completed row yet. Returns whether Ctrl-C stopped it."""
    if flags.api_key_env and not os.environ.get(flags.api_key_env):
        raise BenchError(f"--api-key-env: the environment variable {flags.api_key_env} is empty or not set")
    key = os.environ[flags.api_key_env] if flags.api_key_env else None
    client = Client(clean_url(flags.url), flags.timeout_s, key)
    data = dataset.load(flags.dataset)
    chosen = dataset.select(data.clips, flags.samples, flags.seed)
    rows_path = claim(flags.out, flags.resume)
    version = client.get("/version")
    client.model = flags.model or _first_model(client)
    record: dict[str, Any] = {
        "schema_version": 1,
        "run": {
            # a server of our own gets a new port every time
            "url": None if flags.serve else client.url,
            "serve": flags.serve and str(flags.serve),
            "config_sha256": flags.serve and hashlib.sha256(flags.serve.read_bytes()).hexdigest(),
            "dir": str(flags.dir) if flags.serve else None,
            "model": client.model,
            "dataset": flags.dataset,
            "dataset_format": data.format,
            "manifest_sha256": data.manifest_sha256,
            **{name: getattr(flags, name) for name in ("seed", "concurrency", "warmup", "timeout_s")},
            "ids": [clip.id for clip in chosen],
        },
        "environment": environment.describe(version.get("version") if isinstance(version, dict) else None),
        "memory": None,
    }
    attempts: list[Row] = []
    if rows_path.exists():
        before = results.read_run(flags.out)
        _refuse_differences(flags.out, before, record)
        record = before
        attempts = results.read_rows(rows_path)
        # Written anew without a cut last line, so that the next row starts on a line of its own.
        results.write(rows_path, "".join(map(results.row_line, attempts)))
    finished = {row.id for row in attempts if row.error is None}
    pending = [clip for clip in chosen if clip.id not in finished]
    if not pending:
        return False

    part = 1 + max((row.part for row in attempts), default=0)
    pool = ThreadPoolExecutor(flags.concurrency)
    sampler = MemorySampler(client.url)
    sampler.start()
    try:
        _warm_up(pool, client, (chosen[number % len(chosen)] for number in range(flags.warmup)))
        results.write_json(flags.out / results.RUN, record)
        bar = tqdm(total=len(chosen), initial=len(finished), unit="clip", file=sys.stderr)
        with rows_path.open("a", encoding="ascii") as file, bar:
            for future in as_completed([pool.submit(client.transcribe, clip, part) for clip in pending]):
                file.write(results.row_line(future.result()))
                file.flush()
                bar.update()
    except KeyboardInterrupt:
        if not rows_path.exists():
            raise  # still warming up
        return True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        memory = sampler.stop()
        if rows_path.exists():
            record["memory"] = _larger(record["memory"], memory)
            results.write_json(flags.out / results.RUN, record)
    return False


def _first_model(client: Client) -> str:
    models = client.get("/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (LookupError, TypeError):
        raise client.hopeless(f"GET /v1/models names no model: {str(models)[:200]}") from None


def _warm_up(pool: ThreadPoolExecutor, client: Client, clips: Iterable[Clip]) -> None:
    """Send uncounted requests, so that the first measured one pays for no compilation and no cold cache.

    They share the measured pass's threads, hence its connections and its concurrency.
    """
    for row in pool.map(lambda clip: client.transcribe(clip, part=0), clips):
        if row.error and row.status in HOPELESS:
            raise client.hopeless(f"warm-up with {row.id}: {row.error}")
        if row.error:
            print(f"warm-up with {row.id} failed, measuring all the same: {row.error}", file=sys.stderr)


def _refuse_differences(out: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    then, new = (record["run"] | record["environment"] for record in (before, now))
    differences = [f"{name} was {then[name]!r}, is {new[name]!r}" for name in SAME if then[name] != new[name]]
    if odd := set(then["ids"]) ^ set(new["ids"]):
        differences.append(f"ids: {len(odd)} clips are in one choice only, as {min(odd)} (--samples, --seed)")
    if differences:
        named = "\n  ".join([f"--resume: the run in {out} has other settings:", *differences])
        raise BenchError(f"{named}\nUse those, or another --out.")


def _larger(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The peak over the parts of a run. A part that was killed left none; unlike sources do not compare."""
    if before and before["source"] and now["source"] in (None, before["source"]):
        return max(before, now, key=lambda memory: memory["peak_bytes"] or 0)
    return now
