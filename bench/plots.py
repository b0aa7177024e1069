"""The plots of a run's report: which of measure/plots.py are drawn, and of what."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from bench import live
from bench.answers import Row
from bench.measure.plots import bars, by_level, curves, scatter, shares

MARKS = (50, 90, 95, 99)


def figures(summary: dict[str, Any], rows: Mapping[str, Sequence[Row]]) -> list[tuple[str, str, Element]]:
    """(title, note, picture) of each plot for which the run has data."""
    loads, quality = summary["loads"], summary["quality"]
    done = {load: [row for row in each if row.latency_ms is not None] for load, each in rows.items()}
    points = {load: [(row.duration_s, row.latency_ms or 0.0) for row in each] for load, each in done.items()}
    latencies = {load: [row.latency_ms or 0.0 for row in each] for load, each in done.items()}
    firsts = {load: [row.first_text_ms for row in each if row.first_text_ms is not None] for load, each in done.items()}
    found: list[tuple[str, str, Element]] = []
    dots = "Dots: P50, P90, P95 and P99."
    if any(latencies.values()):
        note = f"Share of requests with at most this latency. {dots}"
        found.append(("Latency distribution", note, shares(latencies)))
        found.append(("Latency against duration", "One dot per request.", scatter(points)))
    if any(firsts.values()):
        note = f"Share of requests whose first text arrived within this time. {dots}"
        found.append(("Time to first text", note, shares(firsts)))
    found += _lags(loads, done)
    for unit, name in (("requests in flight", "concurrency"), ("arrivals per second", "rate")):
        levels = levels_of(loads, name)
        if len(levels) < 2:
            continue
        labels = [f"{load[name]:g}" for load in levels]
        latency = [load["latency_ms"] for load in levels]
        lines = {f"P{q}": [each[f"p{q}"] for each in latency] for q in MARKS}
        intervals = {f"P{q}": [each["ci95"][f"p{q}"] for each in latency] for q in MARKS}
        picture = by_level(labels, lines, intervals, unit, "ms")
        found.append((f"Latency against {name}", "Vertical bars: 95 % intervals.", picture))
        speed = by_level(labels, {"RTFx": [load["rtfx"] for load in levels]}, {}, unit, "RTFx")
        found.append((f"RTFx against {name}", "Seconds of audio transcribed per second.", speed))
    if any(each["wer"] is not None for each in quality["by_duration"]):
        title = "CER by duration" if quality["headline"] == "cer" else "WER by duration"
        note = "By duration of the clips in seconds, with the number of clips below."
        found.append((title, note, bars(quality["by_duration"])))
    return found


def levels_of(loads: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The loads that have a value for `name`, in ascending order of it."""
    return sorted((load for load in loads if load.get(name) is not None), key=lambda load: float(load[name]))


def _lags(loads: Sequence[dict[str, Any]], done: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str, Element]]:
    """The plots of live audio: lag against the age of a session, and against the number of sessions."""
    aged = {load: found for load, rows in done.items() if len(found := live.by_age(rows)) > 1}
    if aged:
        lines = {f"P99, {load}": [(age, p99) for age, _, p99 in found] for load, found in aged.items()}
        if len(aged) == 1:
            (found,) = aged.values()
            lines = {"P50": [(age, p50) for age, p50, _ in found], "P99": [(age, p99) for age, _, p99 in found]}
        yield "Lag against session age", "Of all tokens whose audio has this age.", curves(lines)
    for unit, name in (("sessions", "sessions"), ("sessions in flight", "concurrency")):
        levels = [load for load in levels_of(loads, name) if load.get("lag_ms")]
        if len(levels) > 1:
            figures = {f"P{q}": [load["lag_ms"][f"p{q}"] for load in levels] for q in MARKS}
            picture = by_level([f"{load[name]:g}" for load in levels], figures, {}, unit, "ms")
            yield "Lag against number of sessions", "Of all tokens of all sessions.", picture
