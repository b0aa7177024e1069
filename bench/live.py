"""The figures of live audio at one level of load, and whether a server holds so many sessions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.answers import Row
from bench.measure import spread
from bench.measure.lag import Lag

AGES = 60  # points of a line of lag against session age, at most
TOLERANCE_S = 0.001


def of_load(
    sessions: int | None, rows: Sequence[Row], attempts: Sequence[Row], took: Mapping[str, Any], age_s: float
) -> dict[str, Any]:
    """What summary.json says of a load besides metrics.of_load.

    `sessions` are those of the load, null where clips are sent. `rows` is each session's last row, `attempts` all rows
    of the load, `took` what run.json holds of it, and `age_s` that of the sessions when their measurement began. Null
    is what was not measured: a percentile of nothing is none.
    """
    done = [row for row in rows if row.error is None]
    told = [row for row in done if row.lags is not None]
    lags = [lag for row in told for lag in row.lags or ()]
    in_audio = [lag for row in told for lag in row.lags or () if lag[0] <= age_s + row.duration_s + TOLERANCE_S]
    kinds = {row.lag_of for row in told}
    seconds, harness_s = sum(row.duration_s for row in attempts), took.get("harness_cpu_s")
    return {
        "sessions": sessions,
        "lag_ms": _spread(lags),
        "lag_in_audio_ms": _spread(in_audio),
        "lag_of": (kinds.pop() if len(kinds) == 1 else "both") if kinds else None,
        "lag_unknown": len(done) - len(told),
        "fell_behind": sum(bool(row.fell_behind) for row in told) if told else None,
        "late_sends_ms": took.get("late_sends_ms"),
        "harness_cpu_per_session_s": harness_s / seconds if harness_s is not None and seconds else None,
    }


def _spread(lags: Sequence[Lag]) -> dict[str, float] | None:
    values = [ms for _, ms in lags]
    return {**(spread.percentiles(values) or {}), "max": max(values), "count": len(values)} if values else None


def holds(figures: Mapping[str, Any], failed: int, lag_ms: float) -> bool:
    """Whether no session failed or fell behind, all lags are known, and their P99 is at most `lag_ms`."""
    lag = figures["lag_ms"]
    sound = not failed and not figures["lag_unknown"] and not figures["fell_behind"]
    return bool(sound and lag and lag["p99"] <= lag_ms)


def by_age(rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """(seconds of audio, P50, P99 in ms) of the lags of all sessions in each of up to 60 equal spans of their age."""
    lags = np.array([lag for row in rows for lag in row.lags or ()]).reshape(-1, 2)
    if not len(lags):
        return []
    low, high = lags[:, 0].min(), lags[:, 0].max()
    width = max(1.0, (high - low) / AGES)
    spans = ((lags[:, 0] - low) // width).astype(int)
    found = []
    for span in np.unique(spans):
        here = lags[spans == span]
        amounts = spread.percentiles(here[:, 1], (50, 99)) or {}
        found.append((float(here[:, 0].mean()), amounts["p50"], amounts["p99"]))
    return found


def trials(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a search found, as summary.json has it; null for a run without one."""
    search = (summary["run"].get("live") or {}).get("search")
    if not search:
        return None
    outcomes = [
        (load["sessions"], holds(load, load["failed"] + load["missing"], search["lag_ms"])) for load in summary["loads"]
    ]
    refused = [sessions for sessions, held in outcomes if not held]
    return {
        **search,
        "held": max(
            (sessions for sessions, held in outcomes if held and sessions < min(refused, default=sessions + 1)),
            default=0,
        ),
        "trials": [{"sessions": sessions, "held": held} for sessions, held in outcomes],
    }
