"""A row of live sessions: the client, the uploads beside it, and its figures.

The client is `python -m bench run --realtime --sessions` in a separate process, on separate CPU cores if there are
enough. A model with random weights never ends its text; a live session ends with its audio.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench import BenchError, dataset, results
from bench.answers import Row
from bench.dataset import Clip
from bench.gpu import rows, tasks
from bench.gpu.meanwhile import Samples, Uploads
from bench.gpu.measure import gained, memory
from bench.gpu.plan import Sessions
from bench.gpu.readings import MemoryWatch, processes
from bench.gpu.servers import Server
from bench.measure.gpus import Gpus

UPLOADED = 128  # number of different clips that the uploads send in turn
MARGIN_S = 1.5  # sampling continues for this time after the last text
TIMEOUT_S = 120  # longest wait of the client for data
SHOWN_ERRORS = 5


@contextlib.contextmanager
def cores(pid: int, count: int) -> Iterator[None]:
    """Inside the `with` block, run the client on the last `count` cores and the server `pid` on the others.

    Of this process, that is this thread and what it starts. Both keep all cores if `count` is 0 or more than a third.
    """
    every = sorted(os.sched_getaffinity(0))
    if not 0 < count <= len(every) // 3:
        yield
        return
    _pin(pid, every[:-count])
    os.sched_setaffinity(0, every[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)
        _pin(pid, every)


def _pin(pid: int, cores: Sequence[int]) -> None:
    """Let a process and its descendants run on these cores: every thread, since each has cores of its own."""
    with contextlib.suppress(psutil.Error):  # it has ended, so its sessions fail
        for process in processes(pid):
            for thread in Path(f"/proc/{process}/task").glob("[0-9]*"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)


def measure(
    item: Sessions, server: Server, gpus: Gpus, clips: Sequence[Clip], out: Path, warm_up: int
) -> dict[str, Any]:
    """The row of some sessions. `clips`: decoded clips for the uploads. `out`: directory of the client's results.

    Raises BenchError if the client has no result.
    """
    samples = Samples(gpus, server.pid)
    samples.start()
    watch = MemoryWatch(gpus, lambda: processes(server.pid))
    watch.start()
    uploads = Uploads(server.client, clips, item.uploads) if item.uploads else None
    before = server.counters()
    try:
        _run_client(item, server, out, warm_up)
    finally:
        if uploads:
            uploads.stop()
        time.sleep(MARGIN_S)
        samples.stop()
        watch.stop()
    (load,) = json.loads((out / results.SUMMARY).read_bytes())["loads"]
    sessions = results.read_rows(out / results.ROWS)
    return {
        **figures(item, load, sessions, uploads.rows if uploads else [], samples),
        **memory(server, watch, gpus),
        "acceptance": rows.acceptance_of(server.config),
        **rows.drafts(gained(before, server.counters())),
    }


def _run_client(item: Sessions, server: Server, out: Path, warm_up: int) -> None:
    """Run `bench run` to its end. Raises BenchError if it writes no summary. Failed sessions are in its rows."""
    flags = {
        "--url": server.url,
        "--sessions": item.sessions,
        "--seconds": item.most_s,
        "--least-seconds": item.least_s,
        "--age": item.age_s,
        "--warmup": warm_up,
        "--timeout": TIMEOUT_S,
        "--out": out.resolve(),
    }
    command = [sys.executable, "-m", "bench", "run", "--realtime"]
    command += [str(word) for pair in flags.items() for word in pair]
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    ended = subprocess.run(command, cwd=rows.ROOT, check=False, **streams)
    if ended.returncode not in (0, 1) or not (out / results.SUMMARY).exists():
        last = "\n".join(ended.stderr.splitlines()[-SHOWN_ERRORS:])
        raise BenchError(f"the client of {item.row} ended with status {ended.returncode}:\n{last}")


def decoded(places: Path, seconds: float) -> list[Clip]:
    """The clips of the uploads, decoded to WAV in a new directory of `places`. With `seconds`, each has as many, of
    clips from its own on."""
    everything = dataset.load(rows.ROOT / "bench/data").clips
    chosen = random.Random(tasks.SEED).sample(everything, UPLOADED)
    directory = places / "clips"
    directory.mkdir()
    clips = chosen
    if seconds:
        clips = [Clip(clip.id, Path(f"{i}.wav"), "", seconds, {"first": i}) for i, clip in enumerate(chosen)]
    return [tasks.decode(clip, directory, chosen) for clip in clips]


def figures(
    item: Sessions, load: Mapping[str, Any], sessions: Sequence[Row], uploads: Sequence[Row], samples: Samples
) -> dict[str, Any]:
    """The figures of a row; null if not measured. `load` is from the client's summary.json, `sessions` are its rows.

    `lag_ms`, `lag_in_audio_ms`: P50 and P99 over all tokens with a known lag (bench/measure/lag.py), and over those
    that do not need the end of the audio. `final_ms`: from the end of a session's audio to its final text.
    `fell_behind`: sessions with a lag above 500 ms in their last 5 s, or without text for part of their audio.
    `joules_per_audio_second`: energy of the whole GPU from the first start to the last text / seconds of audio, live
    and uploaded. `upload_rtfx`: seconds of audio of `uploads` that ended in this time / its seconds. `host_bytes`:
    resident bytes of the server's processes at the end; a shared page counts in each process. `client_*`: CPU seconds
    of the client per second of a session, and how late it sent its audio.
    """
    begin, end = min(row.start for row in sessions), max(row.end for row in sessions)
    ended = [row for row in uploads if begin <= row.end <= end]
    uploaded_s = sum(row.duration_s for row in ended if row.error is None)
    live_s = sum(row.duration_s for row in sessions if row.error is None)
    joules, host = samples.joules(begin, end), samples.host_bytes(begin, end)
    failures = [row.error for row in (*sessions, *ended) if row.error is not None]
    return {
        "sessions": item.sessions,
        "least_s": item.least_s,
        "most_s": item.most_s,
        "age_s": item.age_s,
        "uploads": item.uploads,
        "upload_s": item.upload_s,
        "lag_ms": _some(load["lag_ms"], "p50", "p99"),
        "lag_in_audio_ms": _some(load["lag_in_audio_ms"], "p50", "p99"),
        "lag_of": load["lag_of"],
        "final_ms": _some(load["latency_ms"], "p50", "p95", "p99"),
        "fell_behind": load["fell_behind"],
        "failed": load["failed"] + load["missing"] + sum(row.error is not None for row in ended),
        "errors": sorted({error[:300] for error in failures})[:SHOWN_ERRORS],
        "joules_per_audio_second": joules / (live_s + uploaded_s) if joules and live_s + uploaded_s else None,
        "upload_rtfx": uploaded_s / (end - begin) if uploaded_s and end > begin else None,
        "host_bytes": host[1],
        "client_cpu_per_session_s": load["harness_cpu_per_session_s"],
        "client_late_sends_ms": load["late_sends_ms"],
        "audio_s": round(live_s, 3),
        "wall_s": round(end - begin, 3),
    }


def _some(spread: Mapping[str, Any] | None, *names: str) -> dict[str, float] | None:
    """The percentiles of these names; null if there are none."""
    return {name: spread[name] for name in names} if spread and spread["p50"] is not None else None
