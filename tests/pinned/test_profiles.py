"""profiles/fast.yaml on vLLM 0.20.0: it starts, transcribes, and tells a client of `/v1/realtime` where to go."""

import live
import pytest
from conftest import DATA, PICO, ROOT, transcribe
from vllm.entrypoints.openai.realtime.protocol import ErrorEvent
from websockets.exceptions import ConnectionClosed

from bench import dataset, metrics
from voxtral_serve.check import check_all

SAMPLES = 10


def test_whole_clips(fast_url: str) -> None:
    rows = transcribe(fast_url, dataset.select(dataset.load(DATA)[0], SAMPLES, seed=0))
    assert [row.error for row in rows] == [None] * SAMPLES
    assert metrics.wer(rows)["value"] <= 0.05


def test_speculation_has_a_profile_of_its_own() -> None:
    """fast-spec.yaml is for vLLM 0.32.0, and `check` says so before the engine does."""
    profiles = [ROOT / f"profiles/{name}.yaml" for name in ("fast-spec", "fast-spec-0.20.0")]
    other, own = (
        [problem for problem in check_all(path, PICO).problems if problem.startswith("speculative_config")]
        for path in profiles
    )
    name = "num_speculative_tokens_per_batch_size is not an option of vllm 0.20.0"
    assert own == [] and len(other) == 1 and name in other[0]


def test_live_audio(fast_url: str) -> None:
    with live.session(fast_url) as socket:
        event = live.receive(socket)
        assert ErrorEvent.model_validate(event).model_dump() == event
        assert "profiles/realtime.yaml" in event["error"]
        with pytest.raises(ConnectionClosed) as closed:
            live.receive(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
