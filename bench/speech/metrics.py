"""The figures of a speech run, from the rows of requests.jsonl. A value that was not measured is null, never 0."""

from collections.abc import Sequence
from typing import Any

from bench.loads import parse
from bench.measure import spread
from bench.speech.rows import SpeechRow, late_ms, rtf

PERCENTILES = (50, 90, 95)


def percentiles(values: Sequence[float | None]) -> dict[str, float | int] | None:
    """{"p50", "p90", "p95", "max"} of the values that are known; null if none is."""
    known = [value for value in values if value is not None]
    found = spread.percentiles(known, PERCENTILES)
    return None if found is None else {**found, "max": max(known)}


def of_load(load: str, rows: Sequence[SpeechRow], samples: int, resources: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of one load, in the form of bench/schema/speech-summary.schema.json.

    `samples` is the number of texts to send. `resources` is the entry of the load in run.json, null if the run was
    killed before this load ended.
    """
    done = [row for row in rows if row.error is None]
    late = [late for row in done if (late := late_ms(row)) is not None]
    measured = resources or {"joules_reason": "the run was killed before this load ended"}
    joules, harness_s = measured.get("joules"), measured.get("harness_cpu_s")
    audio_s = sum(row.audio_s or 0 for row in done)
    latency_s = sum(row.latency_ms or 0 for row in done) / 1000
    wall_s = max(row.end for row in rows) - min(row.start for row in rows) if rows else None
    characters = sum(len(row.text) for row in done)
    return {
        "load": load,
        "concurrency": parse(load).concurrency,
        "samples": samples,
        "completed": len(done),
        "failed": len(rows) - len(done),
        "missing": samples - len(rows),
        "wall_s": wall_s,
        "first_audio_ms": percentiles([row.first_audio_ms for row in done]),
        "latency_ms": percentiles([row.latency_ms for row in done]),
        "rtf": percentiles([rtf(row) for row in done]),
        "rtf_total": latency_s / audio_s if audio_s else None,
        "audio_s": audio_s if done else None,
        "characters": characters if done else None,
        "characters_per_s": characters / wall_s if done and wall_s else None,
        "audio_s_per_s": audio_s / wall_s if done and wall_s else None,
        "requests_per_s": len(done) / wall_s if done and wall_s else None,
        "streamed": len(late),
        "wait_rate": sum(each > 0 for each in late) / len(late) if late else None,
        "late_ms": percentiles(late),
        "pieces": percentiles([len(row.pieces) if row.pieces else None for row in done]),
        "joules": joules,
        "joules_per_request": joules / len(done) if joules is not None and done else None,
        "joules_per_audio_second": joules / audio_s if joules is not None and audio_s else None,
        "joules_reason": measured.get("joules_reason"),
        "harness_ms_per_request": 1000 * harness_s / len(rows) if harness_s is not None and rows else None,
    }
