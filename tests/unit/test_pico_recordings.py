"""Recordings: targets against hand-made ones, every word where its piece put it, and the audio against a plain loop."""

from pathlib import Path

import numpy as np
import pytest
from shards import shard

from mistral_layout.audio import n_tokens, prompt_tokens
from mistral_layout.tekken import EOS, STREAMING_PAD, STREAMING_WORD
from pico import pool, recordings
from pico.recordings import UNTRAINED, Clips, Recording

PAD, WORD = STREAMING_PAD, STREAMING_WORD
RATE, TOKEN = 16_000, 1280


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for i in range(2):
        np.savez(recordings.shard_path(folder, i), **shard(60, i))
    return folder


@pytest.fixture(scope="module")
def clips(directory: Path) -> Clips:
    return Clips.of([recordings.read_words(recordings.shard_path(directory, i)) for i in range(2)])


@pytest.mark.parametrize("delay", [1, 6, 30])
def test_targets_by_hand(delay: int) -> None:
    # the first word ends in the third 80 ms frame, the second in the next and queues behind it
    got = recordings.targets(
        np.array([3200, 4800]), np.array([2, 1]), np.array([1001, 1002, 1003]), n_samples=16000, delay=delay, length=120
    )
    n, said = 32 + 13 + delay + 11, [WORD, 1001, 1002, WORD, 1003]
    first = 32 + 2 + delay
    expected = [UNTRAINED] * (32 + delay) + [PAD] * 2 + said + [PAD] * (n - first - len(said)) + [EOS]
    assert got.tolist() == expected + [UNTRAINED] * (120 - len(expected))
    assert prompt_tokens(delay) == 33 + delay


def test_a_crowd_queues_to_the_end_and_never_hides_the_end() -> None:
    n = n_tokens(8000, 6)
    got = recordings.targets(
        np.full(20, 6400), np.full(20, 3), np.arange(1000, 1060), n_samples=8000, delay=6, length=n + 5
    )
    first = 32 + 5 + 6
    assert got[first : first + 5].tolist() == [WORD, 1000, 1001, 1002, WORD]
    assert (got[first:n] != PAD).all()
    assert got[n:].tolist() == [EOS] + [UNTRAINED] * 4


def test_no_end_in_any_pause() -> None:
    """30 s of silence are pads, the next word comes when it is due, and a row without room for the end has none."""
    ends = np.array([16000, 32 * RATE])
    got = recordings.targets(ends, np.array([1, 1]), np.array([1001, 1002]), n_samples=33 * RATE, delay=6, length=462)
    said = 32 + ends // TOKEN + 6
    assert got[said].tolist() == [WORD, WORD] and got[said + 1].tolist() == [1001, 1002]
    assert (got[said[0] + 2 : said[1]] == PAD).all()
    assert n_tokens(33 * RATE) == 462 and EOS not in got


def test_a_word_that_is_cut_has_no_target(clips: Clips) -> None:
    clip = int(clips.speech[0])
    a = clips.words_at[clip]
    made = Recording()
    made.add(-1, 5000, 0.0)
    recordings._say(made, clips, clip, int(clips.start[a]) + 1, int(clips.end[a + 2]), 1.0)
    assert np.concatenate(made.words).tolist() == [a + 1, a + 2]
    assert np.concatenate(made.ends).tolist() == (clips.end[a + 1 : a + 3] - clips.start[a] - 1 + 5000).tolist()
    recordings._say(made, clips, clip, 0, int(clips.end[a]) - 1, 1.0)
    assert not len(made.words[-1])


def test_every_word_is_due_where_its_audio_ends(clips: Clips) -> None:
    """Of many recordings: each target's word ends, by its own clip's times, in the audio that the plan puts there."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        made = recordings.recording(rng, clips, 30 * RATE, 448)
        assert 0 < made.n_samples <= 30 * RATE
        starts = np.array([piece[0] for piece in made.pieces])
        assert starts[0] == 0 and (np.diff(starts) == [piece[2] for piece in made.pieces[:-1]]).all()
        words, ends = np.concatenate([*made.words, []]).astype(int), np.concatenate([*made.ends, []]).astype(int)
        assert (np.diff(ends) > 0).all()
        for word, end in zip(words, ends, strict=True):
            clip = int(np.searchsorted(clips.words_at, word, side="right")) - 1
            first, source, n, gain = made.pieces[int(np.searchsorted(starts, end - 1, side="right")) - 1]
            assert end - first + source == clips.audio_at[clip] + clips.end[word]
            assert source <= clips.audio_at[clip] + clips.start[word] and end - first <= n and gain > 0


def test_a_batch_fills_its_rows_and_draws_every_kind(clips: Clips) -> None:
    batches = [recordings.batch(np.random.default_rng(i), clips, 8000) for i in range(60)]
    assert {batch.length for batch in batches} == set(recordings.LENGTHS)
    delays = np.concatenate([batch.delays for batch in batches])
    assert np.mean(delays == 6) == pytest.approx(0.4 + 0.36 / 30, abs=0.05)
    assert set(delays) == set(range(1, 31))
    voices, paused, inside = set(), 0, 0
    for batch in batches:
        for row, delay in enumerate(batch.delays):
            n = n_tokens(int(batch.n_samples[row]), int(delay))
            assert n <= batch.length
            assert (batch.targets[row, 32 + delay : n] >= PAD).all()
            assert (batch.targets[row, n + 1 :] == UNTRAINED).all()
            assert n == batch.length or batch.targets[row, n] == EOS
            pieces = batch.pieces[batch.pieces[:, 0] == row]
            assert pieces[:, 3].sum() == batch.n_samples[row] and (pieces[:, 3] > 0).all()
            clip = np.searchsorted(clips.audio_at, pieces[pieces[:, 2] >= 0, 2], side="right") - 1
            voices.add(len(set(clips.voice[clip]) - {-1}))
            paused += bool((pieces[pieces[:, 2] < 0, 3] > 2 * RATE).any())
            inside += bool((pieces[pieces[:, 2] >= 0, 2] != clips.audio_at[clip]).any())
    assert voices >= {1, 2, 3, 4}
    assert paused > 20 and inside > 20


def test_same_step_same_plan(clips: Clips) -> None:
    one, two, other = (recordings.batch(np.random.default_rng([0, step]), clips, 500) for step in (5, 5, 6))
    np.testing.assert_array_equal(one.targets, two.targets)
    np.testing.assert_array_equal(one.pieces, two.pieces)
    assert not np.array_equal(one.targets[:1, :100], other.targets[:1, :100])


def test_audio_is_what_the_plan_says(directory: Path, clips: Clips) -> None:
    audio = pool.Pool(directory, 0.2, "cpu")
    while audio.take_in():
        pass
    assert audio.shards == 2 and audio.samples == clips.n_samples.sum()
    with_background = 0
    for seed in range(8):
        plan = recordings.batch(np.random.default_rng(seed), clips, 1500)
        expected = np.zeros((len(plan.delays), plan.length * TOKEN), np.float32)
        left = 32 * TOKEN
        for (row, first, source, n), gain in zip(plan.pieces, plan.gains, strict=True):
            if source >= 0:
                samples = audio.audio[source : source + n].numpy() * (gain / 32767)
                expected[row, left + first : left + first + n] += samples
        for row, gain in enumerate(plan.background_gain):
            if gain:
                first, n = plan.background[row]
                sound = audio.audio[first : first + n].numpy() * (gain / 32767)
                expected[row, left : left + plan.n_samples[row]] += np.resize(sound, plan.n_samples[row])
                with_background += 1
        loaded = audio.load(plan)
        np.testing.assert_allclose(loaded.audio.numpy(), expected.clip(-1, 1), atol=1e-6)
        assert loaded.targets.tolist() == plan.targets.tolist()
    assert with_background


def test_plans_come_in_order_and_know_only_the_shards_in_memory(directory: Path, clips: Clips) -> None:
    plans = pool.Plans(directory, seed=3, tokens=500, workers=1)
    try:
        first = Clips.of([recordings.read_words(recordings.shard_path(directory, 0))])
        for step in (7, 8):
            expected = recordings.batch(np.random.default_rng([3, step]), first, 500)
            np.testing.assert_array_equal(plans.next(step, shards=1).pieces, expected.pieces)
    finally:
        plans.close()


def test_a_pool_that_gets_no_more_says_so(directory: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has 0 shards, and pico\.data failed"):
        pool.Pool(directory, 0.1, "cpu").wait(3, coming=lambda: False)
