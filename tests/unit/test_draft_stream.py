"""The guesses of the drafter that hears: each slot has those of its own request, whatever ran before or beside it."""

import numpy as np
import pytest
import torch
from drafting import DELAY, DIM, DRAFTS, EMBEDDINGS, LENGTH, PAD, POSITIONS, RING, SLOTS, alone, clip, made

from voxtral_serve.engine import draft_stream
from voxtral_serve.engine.draft_network import HeadError
from voxtral_serve.engine.draft_stream import DraftTokens, gather, gathered
from voxtral_serve.engine.live_audio import LivePart


@pytest.fixture
def drafts() -> DraftTokens:
    return made()


def holds(drafts: DraftTokens, slot: int, guessed: list[int]) -> bool:
    """Whether a slot has these guesses, the first for position 1, and pads at all others."""
    tokens: list[int] = drafts.tokens[slot].tolist()
    return tokens == [PAD, *guessed, *[PAD] * (LENGTH - 1 - len(guessed))]


def test_clips_that_begin_together_have_the_guesses_that_they_have_alone(drafts: DraftTokens) -> None:
    clips = {slot: clip(drafts, slot, rows) for slot, rows in ((2, 60), (0, POSITIONS), (3, 1))}
    drafts.run()
    for slot, rows in clips.items():
        assert len({*alone(drafts, rows)}) > 1 or len(rows) == 1
        assert holds(drafts, slot, alone(drafts, rows))
    assert holds(drafts, 1, []) and holds(drafts, SLOTS, [])
    assert not drafts.waiting


def test_so_does_a_clip_that_one_pass_does_not_hold(drafts: DraftTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_stream, "ROWS", 50)  # the network's reach is 9
    passes: list[int] = []
    monkeypatch.setattr(drafts, "guess", lambda size: (passes.append(size), DraftTokens.guess(drafts, size)))
    clips = {slot: clip(drafts, slot, rows) for slot, rows in ((1, 51), (2, POSITIONS), (3, 20), (0, 20))}
    drafts.run()
    assert len(passes) > 8 and max(passes) <= 50
    for slot, rows in clips.items():
        assert holds(drafts, slot, alone(drafts, rows))


def test_nothing_is_left_of_the_request_before(drafts: DraftTokens) -> None:
    clip(drafts, 1, POSITIONS)
    drafts.run()
    shorter = clip(drafts, 1, 70)
    assert holds(drafts, 1, [])  # a step may draft before the network has run
    drafts.run()
    assert holds(drafts, 1, alone(drafts, shorter))
    clip(drafts, 1, 90)  # has ended before the network ran
    drafts.clear(1)
    drafts.run()
    assert holds(drafts, 1, [])


def test_one_that_begins_again_before_the_network_ran_has_the_later_rows(drafts: DraftTokens) -> None:
    clip(drafts, 1, 200)
    later = clip(drafts, 1, 80)
    drafts.run()
    assert holds(drafts, 1, alone(drafts, later))


def test_a_clip_of_another_delay_has_pads(drafts: DraftTokens) -> None:
    clip(drafts, 1, POSITIONS)
    drafts.run()
    clip(drafts, 1, 60, DELAY + 1)
    rows = clip(drafts, 2, 60, DELAY)
    drafts.run()
    assert holds(drafts, 1, []) and holds(drafts, 2, alone(drafts, rows))
    assert drafts.rows.delay.tolist()[1:3] == [DELAY + 1, DELAY]


def test_guesses_are_those_that_follow_the_last_token(drafts: DraftTokens) -> None:
    guessed = alone(drafts, clip(drafts, 2, 60))
    drafts.run()
    out = torch.full((3, DRAFTS), -1)
    lengths = torch.tensor([7, 58, 39, 999], dtype=torch.int32)
    gather(drafts.tokens, torch.tensor([2, 1, 0]), lengths, out)
    # The token at position 39, which row 38 guesses, is the first after a prompt of 39.
    assert out[0].tolist() == guessed[38 : 38 + DRAFTS]
    assert out[1:].tolist() == [[PAD] * DRAFTS] * 2
    gather(drafts.tokens, torch.tensor([2]), torch.tensor([0, 0, 58, 0], dtype=torch.int32), out[:1])
    assert out[0].tolist() == [*guessed[57:], PAD, PAD]


# Live sessions


def live(drafts: DraftTokens, live_slot: int, rows: int) -> torch.Tensor:
    """The last rows of a session of so many, which are in its ring. Returns them, in order."""
    ring = drafts.rows.live()[live_slot * RING : (live_slot + 1) * RING]
    ring.copy_(torch.randn(RING, DIM))
    return ring[torch.arange(max(rows - draft_stream.TAIL, 0), rows) % RING]


def part(rows: int, last: bool = True, delay: int = DELAY) -> LivePart:
    return LivePart(rows - 3, 3, np.zeros(0, np.int16), delay, last)


@pytest.mark.parametrize("rows", [60, 139, 500, LENGTH * 3 + 40])
def test_the_tail_of_a_session_is_guessed_when_its_audio_has_ended(drafts: DraftTokens, rows: int) -> None:
    """At positions modulo the length of a slot, since a session may be of any length."""
    clip(drafts, 1, POSITIONS)
    drafts.run()
    drafts.clear(1)  # the session begins
    tail = live(drafts, 1, rows)
    drafts.begin_tails({"a": part(rows, last=False)}, {"a": 1}, {"a": 1})
    drafts.run()
    assert holds(drafts, 1, [])
    drafts.begin_tails({"a": part(rows)}, {"a": 1}, {"a": 1})
    drafts.run()
    guessed = alone(drafts, tail)
    first = rows - len(tail) + 1
    got = gathered(drafts.tokens, torch.tensor([1]), torch.tensor([first]), len(guessed) + DRAFTS)
    assert got[0].tolist() == [*guessed, *[PAD] * DRAFTS]


@pytest.mark.parametrize(
    ("delay", "live_slots"), [(DELAY + 1, {"a": 1}), (DELAY, {})], ids=["another delay", "no slot of the encoder"]
)
def test_a_session_without_guesses(drafts: DraftTokens, delay: int, live_slots: dict[str, int]) -> None:
    live(drafts, 1, 200)
    drafts.begin_tails({"a": part(200, delay=delay)}, live_slots, {"a": 1})
    drafts.run()
    assert holds(drafts, 1, [])


# What does not fit


def test_other_weights_are_refused_by_the_rows_of_the_chirp(drafts: DraftTokens) -> None:
    changed = drafts.chirp.clone()
    changed[4] = -changed[4]
    with pytest.raises(HeadError, match=r"row 4 of its chirp has a cosine of -1\.0000 .* expected more than 0\.99\. T"):
        drafts.prepare(lambda tokens: EMBEDDINGS[tokens], changed, False)
    with pytest.raises(HeadError, match="a cosine of nan"):
        drafts.prepare(lambda tokens: EMBEDDINGS[tokens], changed * torch.nan, False)
    with pytest.raises(HeadError, match=r"has \[9, 8\] audio rows of its chirp, and this checkpoint makes \[8, 8\]"):
        drafts.prepare(lambda tokens: EMBEDDINGS[tokens], changed[1:], False)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the graphs and the kernel run on a GPU")
def test_on_a_gpu_the_graphs_and_the_kernel_do_the_same() -> None:
    on_gpu = made("cuda")
    assert on_gpu.graphs.keys() == {*draft_stream.SIZES}
    for lengths in ((60, POSITIONS, 1), (POSITIONS,) * SLOTS, (64,), (7, 200)):
        clips = {slot: clip(on_gpu, slot, rows) for slot, rows in enumerate(lengths)}
        torch.cuda.set_sync_debug_mode("error")  # no wait for the GPU
        on_gpu.run()
        torch.cuda.set_sync_debug_mode("default")
        for slot, rows in clips.items():
            same = np.equal(on_gpu.tokens[slot, 1 : 1 + len(rows)].tolist(), alone(on_gpu, rows))
            assert same.mean() > 0.99  # products of another size may round differently
    slots = torch.tensor([2, 0, 3], device="cuda")
    lengths = torch.tensor([39, 0, POSITIONS + 70, 2 * LENGTH], dtype=torch.int32, device="cuda")
    for drafts in (1, 3, DRAFTS, 15):
        out = torch.full((3, drafts), -7, device="cuda")
        gather(on_gpu.tokens, slots, lengths, out)
        assert torch.equal(out, gathered(on_gpu.tokens, slots, lengths[slots].long(), drafts))
