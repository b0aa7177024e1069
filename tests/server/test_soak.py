"""The soak's long session: ten minutes of audio, in a context that holds two."""

from pathlib import Path

import pytest
import soak


@pytest.mark.slow
def test_ten_minutes(tmp_path: Path) -> None:
    outcome = soak.one_session(10, tmp_path, ("--max-model-len", "2048"), None)
    assert outcome["rollovers"] >= 4
    # As many tokens as without rollovers, whose cuts are not at whole tokens
    assert abs(outcome["tokens"] - outcome["pieces"] - 11) <= 2
    assert outcome["verdict"] | {"not_slower": True, "no_growth": True} == dict.fromkeys(outcome["verdict"], True)
    (only,) = outcome["passes"]
    assert only["wer"] <= 0.03
