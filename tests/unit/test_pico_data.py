"""The vocabulary against mistral-common, and the benchmark sets against their promises."""

import json
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import soundfile
from places import DATA, PICO

from bench import dataset
from pico import data, make_benchmark, model, speech, text
from pico.tokenizer import TextTokenizer

PAD, WORD = model.STREAMING_PAD, model.STREAMING_WORD


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_file(PICO / "tekken.json")


@pytest.fixture(scope="module")
def manifest() -> list[dict]:
    return [json.loads(line) for line in (DATA / "manifest.jsonl").read_text().splitlines()]


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
    assert sum(path.stat().st_size for path in (DATA / "clips").iterdir()) <= 15e6
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


def test_wav_files_have_the_clips_of_a_shard(tmp_path: Path) -> None:
    clips = data.training_clips(np.random.default_rng([3, 0]), 0.005)
    for tekken in (None, PICO / "tekken.json"):
        assert data.write_shard((tmp_path, 0, 3, 0.005, tekken)) == 0.005
    with np.load(tmp_path / "shard-0000.npz") as shard:
        lengths, audio = shard["n_samples"].tolist(), shard["audio"]
    paths = sorted((tmp_path / "shard-0000").iterdir())
    assert lengths == [len(clip.audio) for clip in clips] and len(paths) == len(clips)
    read = np.concatenate([soundfile.read(path, dtype="int16")[0] for path in paths])
    assert np.abs(read - audio.astype(np.int32)).max() <= 2  # they scale and round in other ways
    assert not list(tmp_path.glob("*partial*"))


@pytest.fixture(scope="module")
def live() -> list[dict]:
    return [json.loads(line) for line in (DATA / "live.jsonl").read_text().splitlines()]


def test_live_set(live: list[dict]) -> None:
    """Recordings of 1 to 5 minutes, with all that the benchmark reads, several voices, and pauses by name."""
    clips, *_ = dataset.load(DATA / "live.jsonl")
    assert [clip.text for clip in clips] == [entry["text"] for entry in live]
    assert min(clip.duration_s for clip in clips) >= 60
    assert 240 < max(clip.duration_s for clip in clips) <= 300
    assert sum(path.stat().st_size for path in (DATA / "live").iterdir()) <= 6e6
    assert {len({voice for voice, _, _ in entry["voices"]}) for entry in live} >= {1, 2, 3, 4}
    pauses = [pause for entry in live for pause in entry["pauses"]]
    assert {kind for kind, _, _ in pauses} == set(make_benchmark.LIVE_PAUSES)
    assert max(end - start for _, start, end in pauses) > 20


def test_live_set_holds_nothing_that_was_trained(live: list[dict]) -> None:
    for entry in live:
        assert {voice for voice, _, _ in entry["voices"]} <= set(speech.BENCH_VOICES)
        sentences = entry["text"].replace("?", "?|").replace(".", ".|").split("|")[:-1]
        # a recording may begin inside a sentence
        assert all(text.is_held_out(sentence.strip()) for sentence in sentences[1:])


def test_words_of_the_live_set_lie_in_its_turns_and_not_in_its_pauses(live: list[dict]) -> None:
    for entry in live:
        assert " ".join(word for word, _, _ in entry["words"]) == entry["text"]
        edges = [t for _, start, end in entry["words"] for t in (start, end)]
        assert edges == sorted(edges)
        assert edges[0] >= 0 and edges[-1] <= entry["duration"] + 0.02
        for _, start, end in entry["words"]:
            assert any(a - 0.01 <= start and end <= b + 0.03 for _, a, b in entry["voices"])
            assert not any(a < start < b - 0.03 for _, a, b in entry["pauses"])
