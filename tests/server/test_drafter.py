"""Speculation by PadDrafter on a CPU: the tokens are the reference's, as without it, and drafts are accepted."""

from collections.abc import Iterator
from typing import Any

import offline
import pytest
from vllm.engine.arg_utils import EngineArgs

pytestmark = pytest.mark.slow
DRAFTER = "voxtral_serve.drafter.PadDrafter"
DRAFTS = 5
PADS = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": DRAFTS}
LATE = ("154", "217")  # pico says no EOS within a clip, so drafts reach beyond its end
AT_ONCE, CONTEXT = 4, 192


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """With a KV cache that is too small for four of the longer clips: drafts of preempted requests are lost."""
    with offline.crowded(CONTEXT, AT_ONCE, speculative_config=PADS) as running:
        yield running


def test_the_tokens_are_those_without_it(llm: Any) -> None:
    names = [*offline.varied(5, longest_s=8.0), *LATE]
    expected = offline.reference_tokens(names)
    before = offline.counters(llm)
    # Their drafts reach beyond their clips.
    assert [offline.generate(llm, [offline.read(name)])[0] for name in names] == expected
    after = offline.counters(llm)
    accepted, drafts = (
        after[name] - before[name] for name in ("spec_decode_num_accepted_tokens", "spec_decode_num_drafts")
    )
    assert after["num_preemptions"] == before["num_preemptions"]
    assert 1 < accepted / drafts <= DRAFTS  # pico says a pad more often than not


def test_so_are_those_of_several_at_once(llm: Any) -> None:
    names = [*offline.varied(6, longest_s=8.0), *LATE]
    before = offline.counters(llm)
    assert offline.generate(llm, [offline.read(name) for name in names]) == offline.reference_tokens(names)
    after = offline.counters(llm)
    assert after["num_preemptions"] > before["num_preemptions"]
    assert after["spec_decode_num_accepted_tokens"] > before["spec_decode_num_accepted_tokens"]


def test_sampling_with_drafts_ends(llm: Any) -> None:
    audio = offline.read(LATE[0])
    (tokens,) = offline.generate(llm, [audio], temperature=1.0, seed=7)
    assert 1 <= len(tokens) <= offline.limit(audio)


# What is refused, before anything starts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hf_overrides": {}, "speculative_config": PADS}, "speculative_config with vLLM's own model of Voxtral"),
        (
            {"hf_overrides": {}, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config with vLLM's own model of Voxtral Realtime: expected none",
        ),
        (
            {"speculative_config": PADS | {"method": "ngram_gpu"}},
            f"has method 'ngram_gpu' and model '{DRAFTER}': expected",
        ),
        ({"speculative_config": PADS | {"method": "ngram"}}, f"has method 'ngram' and model '{DRAFTER}': expected"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2: expected 1 for VoxtralRealtimeEncodeOnce"),
    ],
    ids=["stock, pads", "stock, n-grams", "ngram_gpu without Triton", "ngram", "pipeline"],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"speculative_config|pipeline") as refused:
        EngineArgs(**offline.OPTIONS | options).create_engine_config()
    assert words in str(refused.value)
