"""The encode-once model on vLLM 0.20.0, in float32, is pico's reference: alone, and many at once in little memory."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import offline
import pytest

from pico import model

AT_ONCE, CHUNK, CONTEXT = 8, 16, 512
RELATIVE = 1e-5  # the greatest difference over the greatest magnitude


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    """Prompts go in chunks of 16 tokens; the KV cache holds one request of 512 tokens, or half of eight of 5 s."""
    with offline.crowded(
        CONTEXT, AT_ONCE, max_num_batched_tokens=CHUNK, max_logprobs=-1, logprobs_mode="raw_logits"
    ) as running:
        yield running


@pytest.mark.parametrize("seconds", [0.1, 2.0, 15.0, 29.0])
def test_audio_rows_and_first_logits_are_the_references(llm: Any, seconds: float) -> None:
    audio = offline.speech(seconds)
    ((rows,),) = llm.apply_model(partial(offline.rows_of, audios=[audio]))
    assert len(rows) == model.n_tokens(len(audio))
    assert offline.relative(rows, offline.reference_rows(audio)) <= RELATIVE
    assert offline.relative(offline.first_logits(llm, audio), offline.reference_first_logits(audio)) <= RELATIVE


def test_pieces_give_the_rows_of_the_whole(llm: Any) -> None:
    audios = [offline.speech(29.0)]
    for frames in (100, 748, 1000):
        ((pieces,),) = llm.apply_model(partial(offline.rows_of, audios=audios, frames=frames))
        assert offline.relative(pieces, offline.reference_rows(audios[0])) <= RELATIVE


def test_many_at_once_have_the_tokens_that_they_have_alone(llm: Any) -> None:
    names = offline.varied(12)
    audios, expected = [offline.read(name) for name in names], offline.reference_tokens(names)
    before = offline.counters(llm)["num_preemptions"]
    assert [offline.generate(llm, [audio])[0] for audio in audios] == expected
    assert offline.counters(llm)["num_preemptions"] == before
    assert offline.generate(llm, audios) == expected
    assert offline.counters(llm)["num_preemptions"] > before
