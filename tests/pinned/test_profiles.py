"""profiles/fast.yaml on vLLM 0.20.0: it starts, and transcribes clips and live audio."""

import json

import live
from places import DATA, PICO, ROOT
from servers import transcribe
from uploads import upload

from bench import dataset, metrics
from bench.measure.scoring import word_errors
from pico import evaluate
from voxtral_serve.check import check_all

SAMPLES = 10


def test_whole_clips(fast_url: str) -> None:
    rows = transcribe(fast_url, dataset.select(dataset.load(DATA)[0], SAMPLES, seed=0))
    assert [row.error for row in rows] == [None] * SAMPLES
    assert metrics.wer(rows)["value"] <= 0.05


def test_language_confidence_and_a_delay(fast_url: str) -> None:
    clip = dataset.load(DATA)[0][1]  # which pico hears right at both delays
    for delay_ms in ("480", "2400"):
        answer = upload(fast_url, clip.path, response_format="verbose_json", target_streaming_delay_ms=delay_ms)
        content = answer.json()
        assert (answer.status_code, content.get("language")) == (200, "english"), content
        assert "x-voxtral-ignored" not in answer.headers
        assert all(-9 < each["avg_logprob"] < 0 for each in content["segments"]) and content["segments"]
        assert word_errors(clip.text, content["text"]).total <= 1


def test_custom_words_are_without_effect(fast_url: str) -> None:
    clip = dataset.load(DATA)[0][1]
    answer = upload(fast_url, clip.path, **{"keywords[]": ["Hazel", "x" * 100], "context_bias": "Hazel"})
    assert (answer.status_code, answer.headers["x-voxtral-ignored"]) == (200, "keywords, context_bias")
    assert answer.json()["text"] == upload(fast_url, clip.path).json()["text"]


def test_pads_with_a_key_of_0_32_0_are_refused_by_name() -> None:
    """The drafter of the profiles is left out on this vLLM, whatever its keys; drafts of pads are served."""
    drafts = {"method": "ngram_gpu", "model": "voxtral_serve.drafter.PadDrafter", "num_speculative_tokens": 5}
    newer = drafts | {"num_speculative_tokens_per_batch_size": [[1, 256, 5]]}
    own, other = (
        check_all(ROOT / "profiles/throughput.yaml", PICO, ["--speculative-config", json.dumps(config)]).problems
        for config in (drafts, newer)
    )
    (problem,) = [text for text in other if text not in own]
    assert "num_speculative_tokens_per_batch_size is not an option of vllm 0.20.0" in problem


def test_live_audio(fast_url: str) -> None:
    # In bfloat16, clip 432 has a near-tie (tests/server/test_live.py).
    clip = next(clip for clip in dataset.select(dataset.load(DATA)[0], 2, seed=0) if clip.id != "432")
    (uploaded,) = transcribe(fast_url, [clip])
    created, *deltas, done = live.transcribe(fast_url, evaluate.read_audio(clip.path), 1280)
    assert (created["type"], done["type"]) == ("session.created", "transcription.done"), done
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    assert done["text"].strip() == uploaded.text
