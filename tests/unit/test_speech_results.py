"""The committed figures of speech synthesis: complete, and quoted as they are."""

import json
from typing import Any

import pytest
from places import ROOT

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


def test_the_loads_and_the_sentences() -> None:
    loads = {(row["mode"], row["concurrency"]): row for row in ROWS}
    assert loads.keys() == {(mode, load) for mode in ("eager", "graphs") for load in (1, 16, 32)}
    eager, graphs = loads["eager", 1], loads["graphs", 1]
    first = eager["first_audio_ms"]["p50"] / graphs["first_audio_ms"]["p50"]
    whole = eager["latency_ms"]["p50"] / graphs["latency_ms"]["p50"]
    assert f"the first audio {first:.1f} times and the speech {whole:.1f} times faster" in PAGE
    assert f"RTF {eager['rtf']['p50']:.3f} becomes {graphs['rtf']['p50']:.3f}" in PAGE
    assert f"All {sum(row['completed'] for row in ROWS)} requests completed" in PAGE
