"""`bench gpu run --steps` on a real server: what its engine writes, and a row's figures of it."""

import json
from pathlib import Path

import pytest
from places import PICO
from servers import UNBOUND

from bench.gpu.command import main

ROW = "fast-plain:enforce_eager=true:gpu_memory_utilization=0.3:max_num_seqs=16:api_server_count=1"


@pytest.mark.slow
def test_the_steps_of_three_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each begins in a step of its own, and has a token of every other step."""
    for name, value in UNBOUND.items():
        monkeypatch.setenv(name, value)
    out, logs = tmp_path / "gpu.json", tmp_path / "logs"
    where = ["--out", str(out), "--logs", str(logs), "--model", str(PICO)]
    assert main(["run", *where, "--servers", ROW, "--in-flight", "1", "--clips", "3", "--steps"]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    figures = {each["kind"]: each for each in row["steps"]}
    assert figures.keys() == {"decode", "begin", "idle"}
    assert (figures["begin"]["count"], figures["begin"]["requests_mean"]) == (3, 1)
    assert figures["begin"]["tokens_mean"] > 30  # a prompt's
    assert row["tokens"] - 3 <= figures["decode"]["count"] <= row["tokens"] + 3
    assert (figures["decode"]["requests_mean"], figures["decode"]["tokens_mean"]) == (1, 1)
    assert sum(each["share_of_time"] for each in row["steps"]) == pytest.approx(1)
    assert all(each["ms"] is None and each["host_ms"]["p50"] > 0 for each in row["steps"])
    (file,) = logs.glob("*.steps.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sum(line["new"] for line in lines) == 3 + 3  # with those of the warm-up, without vLLM's own
