"""The command `bench.gpu live`: start one server, run the trials of live sessions, write the file after each trial.

The client is `python -m bench run --realtime --sessions` in a separate process, on separate CPU cores if there are
enough. A model with random weights never ends its text; a live session ends with its audio.
"""

import contextlib
import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, dataset, environment, results
from bench.dataset import Clip
from bench.gpu import checkpoint, liverows, rows, servers, tasks
from bench.gpu.clock import Clock
from bench.gpu.meanwhile import Samples, Uploads
from bench.gpu.plan import LivePlan, Trial
from bench.gpu.readings import watts
from bench.gpu.run import LIBRARIES, RANDOM
from bench.gpu.servers import Server
from bench.measure.gpus import Gpus

CLIENT = ("jiwer", "soundfile", "soxr", "websockets", "whisper_normalizer")  # modules that `bench run` needs
UPLOADED = 128  # number of different clips that the uploads send in turn
WARM_UP = (6, 1)  # live clips sent before the first trial, and before each further one
MARGIN_S = 1.5  # sampling continues for this time after the last text


def run(plan: LivePlan) -> dict[str, Any]:
    """Measure every trial. Returns the content of the file. Raises BenchError for an invalid plan."""
    if missing := [name for name in CLIENT if importlib.util.find_spec(name) is None]:
        raise BenchError(f"no module {missing[0]}: the client needs `pip install -e '.[bench]'`")
    clock, gpus, content = Clock(), Gpus(), config_of(plan)
    earlier = json.loads(plan.out.read_bytes()) if plan.out.exists() else liverows.merge()
    record = {
        **environment.describe(None, LIBRARIES),
        "vllm": None,
        "command": _command(plan),
        "idle_watts": watts(gpus),
        "settings": servers.variables(),
        "notes": [RANDOM] if plan.model is None else [],
        "not_measured": {},
    }
    own: dict[str, Any] = {"runs": [record], "configs": {}, "rows": []}
    for directory in (plan.logs, plan.out.parent):
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as up:
        places = Path(scratch)
        model = plan.model or places / "checkpoint"
        if plan.model is None:
            checkpoint.write(model)
            clock.say("checkpoint written")
        clips = _decoded(places) if any(trial.uploads for trial in plan.trials) else []
        with _cores(plan.cores) as cores:
            record["cores"] = cores
            server = _start(plan, content, model, places, up, clock)
            record["start_s"] = server.start_s
            said = server.client.get("/version")
            record["vllm"] = said["version"] if isinstance(said, dict) and "version" in said else None
        own["configs"][server.sha256] = server.text
        os.sched_setaffinity(0, cores["client"])  # of this thread and of all threads and processes that it starts later
        for number, trial in enumerate(plan.trials):
            clock.say(f"{plan.name}: {trial}")
            out = (plan.results or places) / f"{plan.name}-{time.time():.0f}-{number}"
            try:
                for found in _measure(plan, trial, server, gpus, clips, out, WARM_UP[number > 0]):
                    named = {"name": plan.name, "vllm": record["vllm"] or record["libraries"]["vllm"], **found}
                    own["rows"].append({**named, "config_sha256": server.sha256, "run": 0})
                    clock.say(f"lag {found['lag_ms']}  final {found['final_ms']}  fell behind {found['fell_behind']}")
            except BenchError as error:
                record["not_measured"][str(trial)] = str(error)
                clock.say(str(error))
            results.write_json(plan.out, liverows.merge(earlier, own))
    clock.say("done")
    return liverows.merge(earlier, own)


def config_of(plan: LivePlan) -> dict[str, Any]:
    """The profile with the changes of the plan; max_num_seqs is large enough for every trial. Raises BenchError."""
    try:
        content: dict[str, Any] = yaml.safe_load(plan.profile.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"--profile: cannot read {plan.profile} ({error.strerror})") from None
    most = max((trial.find or trial.sessions) + trial.uploads for trial in plan.trials)
    content |= {"model": ".", "served_model_name": "voxtral", "max_num_seqs": max(most, content.get("max_num_seqs", 0))}
    return {key: value for key, value in (content | dict(plan.changes)).items() if value is not None}


def _start(
    plan: LivePlan, content: dict[str, Any], model: Path, places: Path, up: contextlib.ExitStack, clock: Clock
) -> Server:
    ready, failures = servers.start({plan.name: content}, plan, model, places, up, clock)
    if failures:
        raise BenchError(failures[plan.name])
    return ready[plan.name]


@contextlib.contextmanager
def _cores(count: int) -> Iterator[dict[str, list[int]]]:
    """Run on the server's cores inside the `with` block. Yields the cores of the server and of the client.

    Both get all cores if `count`, the number of the client's cores, is 0 or more than a third of all.
    """
    every = sorted(os.sched_getaffinity(0))
    apart = 0 < count <= len(every) // 3
    cores = {"server": every[:-count], "client": every[-count:]} if apart else {"server": every, "client": every}
    os.sched_setaffinity(0, cores["server"])
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, every)


def _measure(
    plan: LivePlan, trial: Trial, server: Server, gpus: Gpus, clips: list[Clip], out: Path, warm_up: int
) -> Iterator[dict[str, Any]]:
    """Yield the row of one trial, or the rows if it is a search."""
    samples = Samples(gpus, server.pid)
    samples.start()
    uploads = Uploads(server.client, clips, trial.uploads) if trial.uploads else None
    begin = time.time()
    try:
        if trial.sessions:
            _run_client(plan, trial, server, out, warm_up)
        else:
            time.sleep(trial.seconds)
    finally:
        end = time.time()
        if uploads:
            uploads.stop()
        time.sleep(MARGIN_S)
        samples.stop()
    uploaded = uploads.rows if uploads else []
    if not trial.sessions:
        yield liverows.row(trial, {"begin": begin, "end": end}, [], uploaded, samples)
        return
    summary = json.loads((out / results.SUMMARY).read_bytes())
    sessions = results.read_rows(out / results.ROWS)
    for load in summary["loads"]:
        yield liverows.row(trial, load, [row for row in sessions if row.load == load["load"]], uploaded, samples)


def _run_client(plan: LivePlan, trial: Trial, server: Server, out: Path, warm_up: int) -> None:
    """Run `bench run` to its end. Raises BenchError if it writes no summary. Failed sessions are in its rows."""
    audio = {"--sessions": trial.sessions, "--seconds": trial.seconds, "--age": trial.age_s}
    flags = {
        "--url": server.url,
        **(audio if trial.clips is None else {"--concurrency": trial.sessions, "--samples": trial.clips}),
        "--warmup": warm_up,
        "--timeout": plan.timeout_s,
        "--out": out.resolve(),
        **({"--most-sessions": trial.find} if trial.find else {}),
    }
    command = [sys.executable, "-m", "bench", "run", "--realtime", *(["--find-sessions"] if trial.find else [])]
    command += [str(word) for pair in flags.items() for word in pair]
    status = subprocess.run(command, cwd=rows.ROOT, stdout=subprocess.DEVNULL, check=False).returncode
    if status not in (0, 1) or not (out / results.SUMMARY).exists():
        raise BenchError(f"the client of {trial} ended with status {status}")


def _decoded(places: Path) -> list[Clip]:
    """The clips of the uploads, decoded to WAV."""
    everything = dataset.load(rows.ROOT / "bench/data").clips
    chosen = random.Random(tasks.SEED).sample(everything, UPLOADED)
    directory = places / "clips"
    directory.mkdir()
    return [tasks.decode(clip, directory, chosen) for clip in chosen]


def _command(plan: LivePlan) -> str:
    """The command line. Absolute paths are shortened to names, so that results contain no local directories."""
    words = list(plan.arguments)
    for path in (plan.out, plan.cache, plan.logs, plan.model, plan.results, plan.profile):
        if path is not None and path.is_absolute():
            words = [word.replace(str(path), path.name) for word in words]
    return shlex.join(["python", "-m", "bench.gpu", *words])
