"""Measure one row: warm the server up, send the clips, and read its counters and the GPU."""

import contextlib
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from bench.answers import Row
from bench.dataset import Clip
from bench.gpu import rows, steps
from bench.gpu.readings import MemoryWatch, in_use, joules, processes
from bench.gpu.servers import Server
from bench.gpu.tasks import Task
from bench.measure.gpus import Gpus

SETTLE_S = 0.2  # the server updates its counters after its responses


def measure(server: Server, task: Task, gpus: Gpus, vllm: str) -> dict[str, Any]:
    """Warm up, send the clips with `task.concurrency` in flight, and return the row of the file (bench/gpu/record.py).

    The clips are those of bench.gpu.tasks.decode; `vllm` is the server's version.
    """

    def send(clip: Clip) -> Row:
        return server.client.transcribe(clip, part=1, max_completion_tokens=str(clip.extra["tokens"]))

    pids: set[int] = set()
    with contextlib.suppress(psutil.Error):  # it has ended, so its requests fail
        pids = processes(server.pid)
    watch = MemoryWatch(gpus, lambda: pids)
    watch.start()
    with ThreadPoolExecutor(task.concurrency) as pool:
        for answer in pool.map(send, task.warm_up):
            if answer.error:
                print(f"warm-up of {task.row} failed: {answer.error}", file=sys.stderr)
        time.sleep(SETTLE_S)
        before = server.counters()
        energy = joules(gpus)
        begun = time.time()
        answers = list(pool.map(send, task.clips))
        ended = time.time()
        after = joules(gpus)
    time.sleep(SETTLE_S)
    counted = gained(before, server.counters())
    watch.stop()
    clip_tokens = {clip.id: clip.extra["tokens"] for clip in task.clips}
    return {
        "vllm": vllm,
        "in_flight": task.concurrency,
        **rows.figures(answers, clip_tokens, counted.get(rows.GENERATED), _difference(energy, after)),
        **memory(server, watch, gpus),
        "start_s": server.start_s,
        "start_caches": server.cache,
        "acceptance": rows.acceptance_of(server.config),
        **rows.drafts(counted),
        "steps": None if server.steps is None else steps.summary(steps.read(server.steps, begun, ended)),
    }


def gained(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters have gained. One that was not there before is new, since the server makes some at their first use.
    Nothing if the server has not answered before."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()} if before else {}


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def memory(server: Server, watch: MemoryWatch, gpus: Gpus) -> dict[str, Any]:
    """`peak_vram_bytes`, the peak GPU memory since the start of the server, and its source.

    `nvml_process_tree`: the memory of the server's processes according to NVML. In many containers NVML reports no
    processes. Then `nvml_growth`: the growth of the memory in use during the start of the server, if no other server
    started at the same time, and during its measurements. Otherwise `nvml_device`: all memory in use.
    """
    if not watch.whole:
        return {"peak_vram_bytes": None, "peak_vram_source": None}
    if watch.theirs:
        return {"peak_vram_bytes": max(watch.theirs, server.peak), "peak_vram_source": "nvml_process_tree"}
    if server.held is None:
        return {"peak_vram_bytes": watch.whole, "peak_vram_source": "nvml_device"}
    server.peak = max(server.peak, server.held + watch.whole - watch.before)
    server.held += in_use(gpus) - watch.before
    return {"peak_vram_bytes": server.peak, "peak_vram_source": "nvml_growth"}
