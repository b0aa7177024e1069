"""The committed comparisons of the two layouts say what the log of findings takes from them."""

import json
from typing import Any

import pytest
from places import ROOT

LAYOUTS = ROOT / "bench/results/layouts"


def load(name: str) -> dict[str, Any]:
    comparison: dict[str, Any] = json.loads((LAYOUTS / name).read_text())
    return comparison


@pytest.mark.parametrize("path", sorted(LAYOUTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_text_is_the_same_in_both_layouts(path: Any) -> None:
    comparison = load(path.name)
    assert comparison["identical"] == comparison["clips"] >= 40
    assert comparison["different"] == []
    assert comparison["failed"] == {"mistral": [], "hugging_face": []}
    assert comparison["wer"]["mistral"] == comparison["wer"]["hugging_face"]


def test_the_cpus_are_as_right_as_the_full_benchmark() -> None:
    """Which was made on another CPU, without instructions for bfloat16: near-ties fall otherwise there."""
    comparison = load("cpu-vllm-0.32.0.json")
    full = json.loads((ROOT / "bench/results/pico-cpu/summary.json").read_text())
    assert comparison["clips"] == full["completed"] == 500
    assert comparison["wer"]["mistral"] == pytest.approx(full["quality"]["wer"]["value"], abs=0.0005)


def test_the_figures_that_the_documents_quote() -> None:
    wer = {path.stem: load(path.name)["wer"]["mistral"] for path in LAYOUTS.glob("*.json")}
    quoted = {
        "cpu-vllm-0.32.0": "1.42 %",
        "h200-vllm-0.20.0-triton-attn": "1.73 %",
        "h200-vllm-0.20.0-flash-attn": "84 %",
    }
    assert wer.keys() == quoted.keys()
    document = (ROOT / "docs/pages/findings.md").read_text()
    for name, figure in quoted.items():
        (line,) = [line for line in document.splitlines() if f"{name}.json" in line]
        assert figure in line
        digits = len(figure.partition(".")[2].split()[0]) if "." in figure else 0
        assert f"{100 * wer[name]:.{digits}f} %" == figure
