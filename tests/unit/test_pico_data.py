"""Targets against hand-made ones, the vocabulary against mistral-common, and the benchmark set against its promises."""

import json
from collections import Counter
from statistics import median

import numpy as np
import pytest
import torch
from conftest import DATA, PICO

from pico import data, model, speech, text, train
from pico.tokenizer import TextTokenizer

PAD, WORD, EOS = model.STREAMING_PAD, model.STREAMING_WORD, model.EOS


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(PICO / "tekken.json")


@pytest.fixture(scope="module")
def manifest() -> list[dict]:
    return [json.loads(line) for line in (DATA / "manifest.jsonl").read_text().splitlines()]


def test_targets_by_hand(tokenizer: TextTokenizer) -> None:
    one, two = tokenizer.encode(" the"), tokenizer.encode(" weather.")
    # "the" ends in the third 80 ms frame, "weather." in the next: the second word queues behind the first
    got = data.targets([("the", 0.0, 0.2), ("weather.", 0.2, 0.3)], 16000, tokenizer)
    assert got is not None
    said = [WORD, *one, WORD, *two]
    first = 32 + 2 + 6
    assert got.tolist() == [PAD] * first + said + [PAD] * (32 + 13 + 17 - first - len(said) - 1) + [EOS]


def test_targets_that_do_not_fit(tokenizer: TextTokenizer) -> None:
    crowd = [("unbelievable", 0.0, 0.4)] * 12
    assert data.targets(crowd, 8000, tokenizer) is None


def test_silence_ends_a_clip() -> None:
    """A quiet tail is cut or made audible; a long quiet pause is always made audible."""
    rng = np.random.default_rng(0)
    loud = rng.normal(0, 0.1, 16000).astype(np.float32)
    quiet = np.zeros(32000, np.float32)
    for _ in range(10):
        tail = data.settle_end(np.concatenate((loud, quiet)), rng)
        assert len(tail) < 16000 + 3 * 1280 or np.abs(tail[-1280:]).max() > data.AUDIBLE_RMS
        pause = data.settle_end(np.concatenate((loud, quiet, loud)), rng)
        assert len(pause) == 64000
        assert np.sqrt(np.mean(pause[20000:40000] ** 2)) > data.AUDIBLE_RMS
        assert len(data.settle_end(quiet, rng)) < 1280


def test_vocabulary_is_read_alike_by_mistral_common(tokenizer: TextTokenizer) -> None:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    theirs = MistralTokenizer.from_file(PICO / "tekken.json").instruct_tokenizer.tokenizer
    assert theirs.n_words == tokenizer.vocab_size == 5200
    for sentence in ("The train to Boston leaves at nine.", "I don't know, do you?"):
        ids = tokenizer.encode(" " + sentence)
        assert theirs.encode(" " + sentence, bos=False, eos=False) == ids
        assert theirs.decode([WORD, PAD, *ids]) == tokenizer.decode([WORD, PAD, *ids]) == " " + sentence


def test_tokens_per_word_are_those_of_a_real_vocabulary(tokenizer: TextTokenizer, manifest: list[dict]) -> None:
    words = [word for entry in manifest for word in entry["text"].split()]
    assert sum(len(tokenizer.encode(" " + word)) for word in words) / len(words) == pytest.approx(1.3, abs=0.05)


def test_benchmark_set(manifest: list[dict]) -> None:
    durations = [entry["duration"] for entry in manifest]
    assert len(manifest) == len({entry["text"] for entry in manifest}) == 500
    assert min(durations) >= 2
    assert max(durations) <= 30
    assert 7 <= median(durations) <= 9
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) <= 15e6
    for entry in manifest:
        assert " ".join(word for word, _, _ in entry["words"]) == entry["text"]


def test_benchmark_holds_nothing_that_was_trained(manifest: list[dict]) -> None:
    assert not set(speech.TRAIN_VOICES) & set(speech.BENCH_VOICES)
    voices = Counter(entry["voice"] for entry in manifest)
    assert set(voices) <= set(speech.BENCH_VOICES)
    assert len(voices) >= 20
    for entry in manifest:
        sentences = entry["text"].replace("?", "?|").replace(".", ".|").split("|")[:-1]
        assert all(text.is_held_out(sentence.strip()) for sentence in sentences)


def test_a_clip_is_what_its_seed_makes_it() -> None:
    one, two = (data.clip(np.random.default_rng(7), speech.BENCH_VOICES, held_out=True) for _ in range(2))
    assert one.text == two.text
    np.testing.assert_array_equal(one.audio, two.audio)


def test_what_the_decoder_reads_in_training() -> None:
    """BOS and 38 pads, then each target one position later; about a tenth of the text is dropped, no target is."""
    targets = torch.arange(100, 5100).repeat(3, 1)
    targets[:, :38] = PAD
    tokens = train.inputs_of(targets, torch.Generator().manual_seed(0))
    assert tokens[:, 0].tolist() == [model.BOS] * 3
    assert (tokens[:, 1:39] == PAD).all()
    kept = tokens[:, 39:] == targets[:, 38:-1]
    assert ((tokens[:, 39:] == PAD) | kept).all()
    assert kept.float().mean().item() == pytest.approx(0.9, abs=0.01)
