"""tools.speech_rows without the GPU that it is for: a fixed length of speech, and a row for each load."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_omni.config import load_deploy_config

from bench.measure import engine
from speech.conftest import ENVIRONMENT, ON_CPU, START_TIMEOUT_S
from tools import speech_rows


def test_each_speech_has_its_length(tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    speech_rows.write_deploy(path, 37)
    first, second = load_deploy_config(path).stages
    sampling = first.default_sampling_params
    assert (sampling["max_tokens"], sampling["ignore_eos"]) == (462, True)  # of 80 ms
    assert sampling["extra_args"] == {"cfg_alpha": 1.2}  # the deploy file's own
    assert first.max_num_batched_tokens == 32768 and second.max_num_seqs == 32
    assert "ignore_eos" not in second.default_sampling_params


def test_each_load_of_a_mode_is_a_row(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine, "START_TIMEOUT_S", START_TIMEOUT_S)
    monkeypatch.setattr(speech_rows, "overrides", lambda _: json.loads(ON_CPU[-1]))
    monkeypatch.setattr(speech_rows, "LEAST_TEXTS", 3)
    given = argparse.Namespace(
        **{"out": tmp_path / "rows.json", "logs": tmp_path, "dir": tiny, "concurrency": "1,2", "characters": 40},
        **{"seconds": 2.0, "voice": "casual_male", "command": f"{sys.executable} -m vllm_omni.entrypoints.cli.main"},
    )
    found: dict[str, Any] = {"run": speech_rows.describe(given), "rows": []}
    speech_rows.measure("eager", given, found)
    assert json.loads(given.out.read_text()) == found
    shown = [(row["mode"], row["concurrency"], row["samples"], row["completed"]) for row in found["rows"]]
    assert shown == [("eager", 1, 3, 3), ("eager", 2, 4, 4)]
    for row in found["rows"]:  # 2 s each; noise may have an end in it, which cuts it. Without the length: up to 164 s
        assert row["samples"] <= row["audio_s"] <= 2 * row["samples"], row
    lines = speech_rows.table(found["rows"]).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| eager", "1"], ["| eager", "2"]]
    assert "not measured" not in "".join(lines)
