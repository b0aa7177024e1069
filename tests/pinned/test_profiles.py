"""profiles/fast.yaml on vLLM 0.20.0: it starts, and transcribes clips and live audio."""

import live
from conftest import DATA, PICO, ROOT, transcribe

from bench import dataset, metrics
from pico import evaluate
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
    # In bfloat16, clip 432 has a near-tie (tests/server/test_live.py).
    clip = next(clip for clip in dataset.select(dataset.load(DATA)[0], 2, seed=0) if clip.id != "432")
    (upload,) = transcribe(fast_url, [clip])
    created, *deltas, done = live.transcribe(fast_url, evaluate.read_audio(clip.path), 1280)
    assert (created["type"], done["type"]) == ("session.created", "transcription.done"), done
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    assert done["text"].strip() == upload.text
