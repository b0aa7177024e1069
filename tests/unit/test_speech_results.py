"""The committed figures of speech synthesis: complete, and quoted as they are."""

import json
from typing import Any

import pytest
from conftest import ROOT

ROWS = json.loads((ROOT / "bench/results/speech-gpu.json").read_text())["rows"]
PAGE = (ROOT / "docs/pages/speech-synthesis.md").read_text(encoding="utf-8")


def line(row: dict[str, Any]) -> str:
    cells = (
        {"graphs": "CUDA graphs", "eager": "eager"}[row["mode"]],
        row["concurrency"],
        f"{row['first_audio_ms']['p50']:.0f} ms",
        f"{row['latency_ms']['p50'] / 1000:.1f} s",
        f"{row['rtf']['p50']:.3f}",
        f"{row['characters_per_s']:,.1f}",
        f"{row['audio_s_per_s']:.1f}",
        f"{100 * row['wait_rate']:.0f} %",
        f"{row['joules_per_audio_second']:.2f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['mode']}-{row['concurrency']}")
def test_rows(row: dict[str, Any]) -> None:
    assert (row["failed"], row["missing"], row["completed"]) == (0, 0, row["samples"])
    assert line(row) in PAGE


def test_the_loads() -> None:
    loads = {(row["mode"], row["concurrency"]) for row in ROWS}
    assert loads == {(mode, load) for mode in ("eager", "graphs") for load in (1, 16, 32)}
