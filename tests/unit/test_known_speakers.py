"""Known speakers: their names and clips as clients send them, and which voice of a recording is theirs."""

import numpy as np
import pytest

from voxtral_serve.speakers import known
from voxtral_serve.speakers.campplus import RATE, CamPlusPlus
from voxtral_serve.speakers.known import KnownSpeakerError
from voxtral_serve.speakers.labels import labelled
from voxtral_serve.speakers.windows import Span, Voices, voices


def buzz(hertz: float, seconds: float) -> np.ndarray:
    """Harmonics of a pitch, as a voice has them, with some noise."""
    at = np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * hertz * n * at) / n for n in range(1, int(4000 / hertz)))
    noise = np.random.default_rng(int(hertz)).normal(0, 0.01, len(at))
    return (0.1 * tones + noise).astype(np.float32)


# ---- Names


def test_names_that_can_be_used() -> None:
    known.check_names([])
    known.check_names(["Ann <b>Lee</b> & {x}", "Zo\u0065\u0301", "Łukasz 1", "佐藤", "نی\u200cما", "a" * 64, "7", "AB"])
    known.check_names([f"name {number}" for number in range(20)])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"name {number}" for number in range(21)], "21 known speakers: expected at most 20"),
        (["Ann", "<>"], "the name of known speaker 2 is '<>': expected letters or digits"),
        ([""], "the name of known speaker 1 is '': expected letters or digits"),
        (["a" * 65], "the name of known speaker 1 has 65 characters: expected at most 64"),
        (["x" * 10**6], "the name of known speaker 1 has 1,000,000 characters"),
        *(
            ([f"An{sign}n"], f"the name of known speaker 1 has U+{ord(sign):04X}: expected printable characters")
            for sign in "\0\n\r\t\x1b\x7f\x85\u2028\u202e\ud800\ufeff"
        ),
        (["SPEAKER_1"], "'SPEAKER_1' is a label of speakers who are not known: expected another name"),
        ([" speaker_12 "], "' speaker_12 ' is a label"),
        (["\uff22"], "'\\uff22' is a label"),
        (["b"], "'b' is a label"),
        (["Ann", "ANN "], "two known speakers have the names 'Ann' and 'ANN ': expected others"),
    ],
)
def test_names_that_cannot_be_used(names: list[str], message: str) -> None:
    with pytest.raises(KnownSpeakerError) as caught:
        known.check_names(names)
    assert str(caught.value).startswith(message)


# ---- Clips


@pytest.mark.parametrize(
    ("seconds", "speech", "message"),
    [
        (1.99, [(0.0, 1.9)], "the clip of 'Ann' has 1.99 s: expected 2 to 10 s of one voice"),
        (600.0, [(0.0, 600.0)], "the clip of 'Ann' has 600.00 s: expected 2 to 10 s"),
        (5.0, [], "the clip of 'Ann' has 0.00 s of speech: expected 1 s or more"),
        (5.0, [(0.0, 0.5), (2.0, 2.4)], "the clip of 'Ann' has 0.90 s of speech"),
    ],
)
def test_clips_that_cannot_be_used(seconds: float, speech: list[Span], message: str) -> None:
    with pytest.raises(KnownSpeakerError) as caught:
        known.check_clip("Ann", seconds, speech)
    assert str(caught.value).startswith(message)


def test_clips_that_can_be_used() -> None:
    known.check_clip("Ann", 2.0, [(0.2, 0.7), (1.0, 1.5)])
    known.check_clip("Ann", 10.0, [(0.0, 10.0)])


def test_a_clip_without_a_voice_is_named() -> None:
    for vectors in (np.empty((0, 3)), np.zeros((2, 3)), np.array([[1.0, 0, 0], [-1, 0, 0]])):
        with pytest.raises(KnownSpeakerError, match=r"^the clip of 'Ann' has no voice$"):
            known.vector("Ann", Voices(np.zeros((len(vectors), 2)), vectors))


# ---- Voices


def angles(*degrees: float) -> np.ndarray:
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], axis=1)


@pytest.mark.parametrize(
    ("recording", "references", "expected"),
    [
        ((0, 90), (80, 10), [1, 0]),
        ((0, 90), (5,), [0, None]),
        ((0, 10), (4,), [0, None]),  # one reference is one voice, the nearer one
        ((0, 10), (12, 40), [0, 1]),  # not [1, 0]: its sum is smaller, though 10 is nearest to 12
        ((0, 90), (46, 180), [None, 0]),  # 44 and 46 degrees are on both sides of SAME
        ((0,), (180,), [None]),
        ((0,), (), [None]),
        ((), (0,), []),
    ],
)
def test_each_reference_is_at_most_one_voice(
    recording: tuple[float, ...], references: tuple[float, ...], expected: list[int | None]
) -> None:
    voices_of, known_of = (angles(*each) if each else np.empty((0, 2)) for each in (recording, references))
    assert known.matched(voices_of, known_of) == expected


def test_the_voices_of_speakers_are_those_of_their_words() -> None:
    spans = np.array([(0.0, 1.5), (0.75, 2.25), (4.0, 5.5)])
    words = [(0.0, 0.5), (1.6, 2.2), (4.5, 5.0), (9.0, 9.5)]  # the last one in no window
    speakers = [0, 0, 1, 2]
    found = known.centres(Voices(spans, np.eye(3)), words, speakers)
    expected = np.array([[0.5, 0.6, 0], [0, 0, 1], [0, 0, 1]])
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True))
    nothing = known.centres(Voices(np.empty((0, 2)), np.empty((0, 3))), words, speakers)
    assert known.matched(nothing, np.eye(3)) == [None] * 3


def test_two_buzzes_get_their_names() -> None:
    """The real network, and clips that are not part of the recording."""
    network = CamPlusPlus()
    low, high = buzz(110, 12), buzz(260, 12)
    words = [(float(start), start + 0.8) for start in range(16)]
    found = voices(np.concatenate([high[: 8 * RATE], low[: 8 * RATE]]), [(0.0, 8.0), (8.0, 16.0)], network)
    speakers = labelled(found, words, 2)
    assert speakers == [0] * 8 + [1] * 8
    clips = {"low": low[8 * RATE :], "high": high[8 * RATE :], "other": buzz(420, 4)}
    references = [known.vector(name, voices(clip, [(0.0, 4.0)], network)) for name, clip in clips.items()]
    assert known.matched(known.centres(found, words, speakers), np.stack(references)) == [1, 0]
    assert known.matched(known.centres(found, words, speakers), np.stack(references[:1])) == [None, 0]


def test_speakers_without_a_name_are_numbered_among_themselves() -> None:
    assert known.named([0, 1, 2, 1, 0], [None, 1, None], ["Ann", "Bob"]) == [0, "Bob", 1, "Bob", 0]
    assert known.named([0, 1], [0, None], ["Ann"]) == ["Ann", 0]
    assert known.named([1, 0], [None, None], []) == [1, 0]
