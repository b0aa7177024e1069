"""The model in Transformers, without vLLM, on one clip of pico."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from bench import results

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out: Path = tmp_path_factory.mktemp("transformers") / "out.json"
    flags = ("--model", "pico/checkpoint", "--clips", "1", "--device", "cpu", "--out", str(out))
    subprocess.run([sys.executable, "-m", "tools.transformers_runtime", *flags], cwd=ROOT, check=True)
    read: dict = json.loads(out.read_text())
    return read


def test_its_text_is_what_vllm_says(outcome: dict) -> None:
    ((clip, text),) = outcome["texts"].items()
    served = {row.id: row for row in results.read_rows(ROOT / "bench/results/pico-reference" / results.ROWS)}
    assert text == (served[clip].text or "").strip()
    assert outcome["wer"]["words"] > 0


def test_its_figures(outcome: dict) -> None:
    assert outcome["tokens"] > 10
    assert outcome["ms_per_token"] * outcome["tokens"] == pytest.approx(outcome["p50_ms"])
    assert outcome["rtfx"] > 0
    # No GPU: not measured, not 0
    assert (outcome["joules_per_audio_second"], outcome["peak_vram_bytes"]) == (None, None)
    assert outcome["environment"]["libraries"]["transformers"]
