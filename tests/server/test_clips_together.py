"""Uploads that begin together on real vLLM: all have the tokens that the reference has for them alone."""

import itertools
import json
from pathlib import Path

import offline
import pytest

pytestmark = pytest.mark.slow

AT_ONCE, ASKED, TOGETHER = 80, 120, 4


@pytest.mark.parametrize("together", [0, TOGETHER])
def test_tokens_are_those_of_each_clip_alone(together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = tmp_path / "steps.jsonl"
    monkeypatch.setenv("VOXTRAL_SERVE_STEPS", str(timeline))
    names = offline.varied(ASKED)
    options = {"max_num_seqs": AT_ONCE, "additional_config": {"clips_together": together}, "max_model_len": 192}
    with offline.running(**options, kv_cache_memory_bytes=1 << 29) as llm:
        answers = offline.generate(llm, [offline.read(name) for name in names])
    assert answers == offline.reference_tokens(names)
    lines = [json.loads(line) for line in timeline.read_text().splitlines()]
    begun = list(itertools.accumulate(line["new"] for line in lines))
    assert begun[-1] == ASKED
    # While 64 run, one that could begin waits for a second: for 25 ms, which is a step or a few of this model.
    held = [
        line
        for line, count in zip(lines, begun, strict=True)
        if 64 <= line["requests"] < AT_ONCE and not line["new"] and count < ASKED
    ]
    assert bool(held) == bool(together)
