"""bench on a real vLLM: streamed at several loads, and at random times; what it writes keeps to its schemas."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import all_valid

from bench import results
from bench.__main__ import main
from bench.client import Row

SAMPLES, SEED = 3, 29  # 9, 3 and 4 s


def measured(url: str, out: Path, *flags: str) -> tuple[dict[str, Any], list[Row]]:
    samples = ["--samples", str(SAMPLES), "--seed", str(SEED)]
    assert main(["run", "--url", url, "--out", str(out), *samples, *flags]) == 0
    all_valid(out)
    summary: dict[str, Any] = json.loads((out / results.SUMMARY).read_text())
    return summary, results.read_rows(out / results.ROWS)


@pytest.mark.slow
def test_streams_at_two_loads(pico_url: str, tmp_path: Path) -> None:
    summary, rows = measured(pico_url, tmp_path / "run", "--stream", "--concurrency", "1,3")
    alone, crowded = summary["loads"]
    assert [(load["load"], load["completed"], load["failed"]) for load in (alone, crowded)] == [
        ("c1", SAMPLES, 0),
        ("c3", SAMPLES, 0),
    ]
    for row in rows:
        assert row.deltas_ms and row.first_text_ms == row.deltas_ms[0]
        assert row.deltas_ms == sorted(row.deltas_ms)
        assert row.latency_ms is not None and len(row.deltas_ms) > 3 and row.deltas_ms[-1] <= row.latency_ms
    # One sequence at a time: of three requests in flight, two wait.
    assert alone["wait_rate"] == 0
    assert crowded["wait_rate"] > 0.3
    assert crowded["first_text_ms"]["p50"] > alone["first_text_ms"]["p50"]
    assert summary["quality"]["wer"]["value"] < 0.1


@pytest.mark.slow
def test_requests_at_random_times(pico_url: str, tmp_path: Path) -> None:
    """Twenty a second, where one at a time is served: all wait, and latency has the wait in it."""
    summary, rows = measured(pico_url, tmp_path / "run", "--rate", "20")
    (load,) = summary["loads"]
    assert (load["load"], load["rate"], load["completed"]) == ("r20", 20, SAMPLES)
    assert load["start_delay_ms"]["max"] < 1000
    for row in rows:
        assert row.due is not None and row.latency_ms == pytest.approx((row.end - row.due) * 1000, abs=1)
    first, *_, last = sorted(rows, key=lambda row: row.start)
    assert last.start < first.end
