"""The steps of a server's engine in a row: their kinds, counts, times and the share of the GPU's time.

A server of voxtral-serve writes them, as lines of JSON, to the file that VOXTRAL_SERVE_STEPS names. A step is one run
of the model over the tokens that the scheduler chose, with its sampling. A line has:

    at           seconds since 1970 at which the step began on the host
    execute_ms, sample_ms
                 milliseconds of the host inside the model's run and inside sampling
    gpu_ms       milliseconds of the GPU's stream from the begin of the step to its end; null without a GPU
    gpu_idle_ms  milliseconds of the stream from the end of the previous step to the begin of this one; null without a
                 GPU and in the first line
    requests, tokens, new, encode
                 numbers of requests, of their tokens, of requests that begin, and of clips that are encoded

`summary` has three kinds: `begin`, the steps with a request that begins or with a clip that is encoded; `decode`, all
others; `idle`, the times between a step and the next one of the same row.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.measure import spread

KEYS = {"at", "execute_ms", "sample_ms", "gpu_ms", "gpu_idle_ms", "requests", "tokens", "new", "encode"}
COUNTS = ("requests", "tokens")  # whose means are figures
PATIENCE_S = 2.0  # longest wait for lines that the server has not written yet
QUIET_S = 0.3  # the file is complete if it has not grown for so long

Step = dict[str, Any]


def read(path: Path, begun: float, ended: float) -> list[Step] | None:
    """The steps that began between these two times (seconds since 1970); null if the server wrote no file.

    Waits until the file has stopped growing. Raises BenchError for a line of another form.
    """
    if not path.exists():
        return None
    deadline, size = time.monotonic() + PATIENCE_S, -1
    while size != (size := path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(QUIET_S)
    steps = []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)
        except ValueError:
            step = None
        if not isinstance(step, dict) or not step.keys() >= KEYS:
            raise BenchError(f"{path.name}, line {number} is {line[:80]!r}: expected a step with {sorted(KEYS)}")
        if begun <= step["at"] <= ended:
            steps.append(step)
    return steps


def summary(steps: Sequence[Step] | None) -> list[dict[str, Any]] | None:
    """The figures of each kind that occurs: `decode`, `begin`, `idle`. Null for null.

    count           number of steps, or of times between two steps
    share_of_time   part of the time from the begin of the first step to the end of the last one: of the GPU's stream,
                    or of the host without a GPU. The shares of all kinds add up to 1
    ms              mean, p50 and p99 of the milliseconds of the GPU's stream; null without a GPU
    host_ms         the same of the host: inside a step, or between two steps outside of both
    requests_mean   mean number of requests in a step; null for `idle`
    tokens_mean     mean number of tokens in a step; null for `idle`
    gpu_busy_share  part of the time of the GPU's stream from the end of the previous step to the end of this one that
                    lies inside this one; 0 for `idle`, null without a GPU. A gap between the kernels of a step counts
                    as busy, so this is an upper bound
    """
    if steps is None:
        return None
    kinds: dict[str, list[Step]] = {"decode": [], "begin": [], "idle": []}
    for before, step in zip([None, *steps], steps, strict=False):
        inside = {"gpu": step["gpu_ms"], "host": _host_ms(step), "idle": 0.0, **{name: step[name] for name in COUNTS}}
        if before is not None:
            outside_ms = max(0.0, 1e3 * (step["at"] - before["at"]) - _host_ms(before))
            kinds["idle"].append({"gpu": step["gpu_idle_ms"], "host": outside_ms})
            inside["idle"] = step["gpu_idle_ms"]
        kinds["begin" if step["new"] or step["encode"] else "decode"].append(inside)
    clock = "gpu" if all(step["gpu_ms"] is not None for step in steps) else "host"
    whole = math.fsum(part[clock] for parts in kinds.values() for part in parts)
    return [_figures(kind, parts, clock, whole) for kind, parts in kinds.items() if parts]


def _host_ms(step: Step) -> float:
    return float(step["execute_ms"] + step["sample_ms"])


def _figures(kind: str, parts: Sequence[Step], clock: str, whole_ms: float) -> dict[str, Any]:
    """The figures of one kind, whose parts have their milliseconds by clock. `whole_ms`: of the parts of all kinds."""
    total_ms = math.fsum(part[clock] for part in parts)
    busy = None
    if clock == "gpu":
        busy = 0.0 if kind == "idle" else total_ms / (total_ms + math.fsum(part["idle"] for part in parts))
    return {
        "kind": kind,
        "count": len(parts),
        "share_of_time": total_ms / whole_ms,
        "ms": _spread([part["gpu"] for part in parts]) if clock == "gpu" else None,
        "host_ms": _spread([part["host"] for part in parts]),
        **{f"{name}_mean": None if kind == "idle" else _mean([part[name] for part in parts]) for name in COUNTS},
        "gpu_busy_share": busy,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": _mean(values), **(spread.percentiles(values, (50, 99)) or {})}


def table(summary: Sequence[dict[str, Any]] | None) -> str:
    """The figures of `summary` as a table of text."""
    if summary is None:
        return "  no steps: this server has written none (vLLM's own models have no probe)"
    if not summary:
        return "  no steps between the first request and the last answer"
    heads = ("", "steps", "time", "GPU ms", "p50", "p99", "host ms", "p50", "p99", "requests", "tokens", "GPU busy")
    lines = ["  " + "".join(f"{head:>9}" for head in heads)]
    for figures in summary:
        times = [(figures[name] or {}).get(key) for name in ("ms", "host_ms") for key in ("mean", "p50", "p99")]
        numbers = [*times, *(figures[f"{name}_mean"] for name in COUNTS)]
        cells = [figures["kind"], str(figures["count"]), f"{figures['share_of_time']:.1%}"]
        cells += ["-" if number is None else f"{number:.2f}" for number in numbers]
        cells.append("-" if figures["gpu_busy_share"] is None else f"{figures['gpu_busy_share']:.1%}")
        lines.append("  " + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)
