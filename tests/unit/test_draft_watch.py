"""What is drafted, by what was right: simulated steps of a GPU whose time is not quite what the watch takes it for."""

import random
from bisect import bisect
from collections.abc import Sequence

import pytest

from voxtral_serve.engine.draft_watch import PATIENCE, PROBE, Choice, DraftWatch

PAD, WORD = 32, 7
SCHEDULE = [0] + [15] * 16 + [7] * 48 + [3] * 64 + [1] * 128
PICO = (0.339, 0.269, 0.201, 0.144, 0.104)  # survival of pads on pico's texts, of five
NONE = (0.0,) * 15
GOOD = tuple(0.93**draft for draft in range(1, 16))
RUNNING = [1, 16, 64, 256]
CLIP = 144  # tokens of a clip of 10.6 s


def text(chosen: random.Random, pads: Sequence[float]) -> list[int]:
    """Tokens of a clip in which pads, drafted five at a time, survive like this."""
    tokens: list[int] = []
    while len(tokens) < CLIP:
        begins = chosen.random()
        tokens += [PAD] * sum(begins < survival for survival in pads) + [WORD]
    return tokens


class Clip:
    """A request: of its tokens the head guesses some, with one chance for each draft after the one before it."""

    def __init__(self, chosen: random.Random, head: Sequence[float], pads: Sequence[float]) -> None:
        self.tokens, self.at, self.chosen = text(chosen, pads), 0, chosen
        self.head = head[::-1]  # ascending

    def verify(self, choice: Choice) -> int:
        """The number of drafts that are right."""
        if choice.pads:
            following = self.tokens[self.at : self.at + choice.number]
            return next((n for n, token in enumerate(following) if token != PAD), len(following))
        if not choice.number:
            return 0
        return min(len(self.head) - bisect(self.head, self.chosen.random()), choice.number)


def length(running: int, number: int) -> float:
    """The time of a step, in that of one token more."""
    return 250 + (2.5 + 1 + number) * running + (80 if number else 0)


def time_per_token(
    policy: DraftWatch | Choice, running: int, steps: int, head: Sequence[float], pads: Sequence[float], seed: int = 0
) -> float:
    """Of `running` clips at once, each followed by another. The second half of the steps counts."""
    chosen = random.Random(seed)
    clips = [Clip(chosen, head, pads) for _ in range(running)]
    choice, time, tokens = Choice(False, 0), 0.0, 0
    for step in range(steps):
        accepted = [clip.verify(choice) for clip in clips]
        if isinstance(policy, DraftWatch) and choice.number and not choice.pads:
            policy.heard(accepted, choice.number)
        for place, (clip, right) in enumerate(zip(clips, accepted, strict=True)):
            clip.at += right + 1
            if clip.at >= len(clip.tokens):
                if isinstance(policy, DraftWatch):
                    policy.text(clip.tokens)
                clips[place] = Clip(chosen, head, pads)
        if step >= steps // 2:
            time += length(running, choice.number) * chosen.gauss(1, 0.1)
            tokens += sum(accepted) + running
        choice = policy.choose(running) if isinstance(policy, DraftWatch) else policy
    return time / tokens


def steps(running: int) -> int:
    return max(12_000 // running, 300)


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("pads", [PICO, NONE], ids=["pico's pads", "no pads"])
def test_a_useless_head_ends_near_the_best_without_it(running: int, pads: Sequence[float]) -> None:
    watched = time_per_token(DraftWatch(SCHEDULE, True, PAD), running, steps(running), NONE, pads)
    numbers = [number for number in (1, 3, 7, 15) if number <= SCHEDULE[running]]
    fixed = [Choice(False, 0), *(Choice(True, number) for number in numbers)]
    assert watched <= 1.05 * min(time_per_token(choice, running, steps(running), NONE, pads) for choice in fixed)


def test_a_useless_head_is_given_up_at_once() -> None:
    """In fewer steps than a clip has tokens, also alone, where no draft after the first one is ever reached."""
    watch, heard = DraftWatch([0, 15], True, PAD), 0
    for _ in range(100):
        watch.text([WORD] * CLIP)  # pads are of no use, either
    while watch.best(1, 15) != Choice(False, 0):
        watch.heard([0], 15)
        heard += 1
    assert 10 < heard < 100


@pytest.mark.parametrize("running", RUNNING)
def test_a_good_head_drafts_what_the_schedule_has(running: int) -> None:
    watch = DraftWatch(SCHEDULE, True, PAD)
    watched = time_per_token(watch, running, steps(running), GOOD, PICO)
    assert watch.best(running, SCHEDULE[running]) == Choice(False, SCHEDULE[running])
    assert watched <= 1.01 * time_per_token(Choice(False, SCHEDULE[running]), running, steps(running), GOOD, PICO)


@pytest.mark.parametrize("running", RUNNING)
def test_a_change_of_the_audio_is_followed(running: int) -> None:
    watch, most = DraftWatch(SCHEDULE, True, PAD), SCHEDULE[running]
    for head, returns in ((GOOD, True), (NONE, False), (GOOD, True)):
        # Alone, one step in 64 says what the head is worth: 12,000 steps are half a minute.
        time_per_token(watch, running, steps(running), head, PICO)
        assert (watch.best(running, most) == Choice(False, most)) == returns


def test_a_weaker_head_has_fewer_drafts() -> None:
    watch = DraftWatch(SCHEDULE, True, PAD)
    time_per_token(watch, 16, 600, tuple(0.6**draft for draft in range(1, 16)), NONE)
    assert watch.best(16, 15) == Choice(False, 3)


def test_one_step_in_sixty_four_hears_a_useless_head() -> None:
    watch = DraftWatch(SCHEDULE, True, PAD)
    watch.heard([0] * 10**5, 15)
    chosen = [watch.choose(16) for _ in range(100 * PROBE)]
    assert chosen.count(Choice(False, 15)) == 100
    assert 1 / PROBE < 0.02


def test_pads_are_known_from_texts() -> None:
    watch = DraftWatch(SCHEDULE, False, PAD)
    for _ in range(2000):
        watch.text([WORD, PAD, PAD, PAD, WORD, PAD])  # five tokens to the last word: WORD; PAD, PAD, PAD, WORD
    assert watch.of_pads == pytest.approx({1: 5 / 3, 3: 5 / 2, 7: 5 / 2, 15: 5 / 2}, rel=0.01)
    assert watch.choose(1) == Choice(True, 3)  # not 15, which make no more
    for _ in range(500):
        watch.text([WORD] * 5)
    assert {watch.choose(running).number for running in RUNNING for _ in range(PROBE)} == {0}
    watch.text([])
    watch.text([PAD] * 9)


def test_a_schedule_may_have_none() -> None:
    watch = DraftWatch([0, 3, 0], True, PAD)
    assert [watch.choose(2) for _ in range(2 * PROBE)] == 2 * PROBE * [Choice(False, 0)]
    assert [DraftWatch([0, 0], head, PAD).choose(1).number for head in (True, False)] == [0, 0]


def test_a_change_is_reported_once() -> None:
    watch = DraftWatch(SCHEDULE, True, PAD)
    assert not any(watch.report(16) for _ in range(3 * PATIENCE))
    watch.heard([0] * 10**5, 15)
    (line,) = filter(None, (watch.report(16) for _ in range(9 * PATIENCE)))
    assert line == (
        "drafts: pads for 16 running requests. 0% of the first guesses were right, 1.00 tokens a step with 15; 2.00 "
        "tokens a step with 15 pads. `voxtral-serve draft train` trains a drafter, which guesses, with your own audio"
    )
    # Requests that come and go change the choice as well: ever fewer lines say so.
    watch = DraftWatch([0, 5, 0], False, PAD)
    assert sum(watch.report(1 + step // 1000 % 2) is not None for step in range(10**5)) < 8
