"""Speech told from other sounds, quiet clips raised, long ones cut where nobody speaks."""

import itertools
import random
import time

import numpy as np
import pytest
import soundfile
from places import DATA

from bench import dataset
from voxtral_serve.audio import speech
from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.level import raised

RATE = speech.RATE
SECONDS = 6
LEVELS_DB = (-3, -20, -40)
SAMPLES = 60


@pytest.fixture(scope="module")
def detector() -> speech.Detector:
    return speech.Detector()


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    return dataset.select(dataset.load(DATA).clips, SAMPLES, seed=2)


def read(clip: dataset.Clip) -> Clip:
    samples, rate = soundfile.read(clip.path, dtype="float32")
    return Clip(samples, rate)


def sounds() -> dict[str, np.ndarray]:
    """Each with its peak at 1."""
    rng, t = np.random.default_rng(0), np.arange(SECONDS * RATE) / RATE
    brown = np.cumsum(rng.standard_normal(t.size))
    made = {
        "440 Hz": np.sin(2 * np.pi * 440 * t),
        "hum of 50 Hz": sum(np.sin(2 * np.pi * 50 * k * t) / k for k in (1, 2, 3, 5)),
        "hum of 60 Hz": sum(np.sin(2 * np.pi * 60 * k * t) / k for k in (1, 3, 5)),
        "white noise": rng.standard_normal(t.size),
        "brown noise": brown - brown.mean(),
        "a sweep": np.sin(2 * np.pi * (100 * t + 300 * t * t)),
        "clicks": (np.arange(t.size) % (RATE // 2) < 20) * 1.0,
        "telephone keys": (np.sin(2 * np.pi * 697 * t) + np.sin(2 * np.pi * 1209 * t)) * (t % 0.4 < 0.2),
    }
    return {name: (sound / np.abs(sound).max()).astype(np.float32) for name, sound in made.items()}


@pytest.mark.parametrize("level", LEVELS_DB)
@pytest.mark.parametrize("name", sounds())
def test_no_speech(detector: speech.Detector, name: str, level: float) -> None:
    clip = raised(Clip(sounds()[name] * np.float32(10 ** (level / 20)), RATE))
    assert not detector.speaks(clip)


def test_silence_is_no_speech(detector: speech.Detector) -> None:
    for samples in (np.zeros(RATE * 9, np.float32), np.zeros(10, np.float32), np.full(RATE, 0.5, np.float32)):
        clip = raised(Clip(samples, RATE))
        assert np.isfinite(clip.samples).all()
        assert not detector.speaks(clip)


@pytest.mark.slow
def test_every_clip_speaks_however_quiet(detector: speech.Detector, clips: list[dataset.Clip]) -> None:
    """As it is, which nothing is done to, and at peaks of -40 and -60 dBFS."""
    for clip in map(read, clips):
        assert raised(clip) is clip
        assert detector.speaks(clip)
        for level in (-40, -60):
            quiet = clip._replace(samples=clip.samples * np.float32(10 ** (level / 20) / np.abs(clip.samples).max()))
            assert detector.speaks(raised(quiet))


@pytest.mark.slow
def test_a_clip_takes_less_than_15_ms_of_a_core(detector: speech.Detector, clips: list[dataset.Clip]) -> None:
    """To tell that somebody speaks, of 12 s or more: of one core, in a thread beside the event loop."""
    long = [read(clip) for clip in clips if clip.duration_s > 12]
    detector.speaks(long[0])
    start = time.thread_time()
    for clip in long:
        assert detector.speaks(raised(clip))
    took = (time.thread_time() - start) / len(long)
    print(f"{1000 * took:.1f} ms for each of {len(long)} clips")
    assert took < 0.015


def test_a_click_does_not_keep_a_clip_quiet(clips: list[dataset.Clip]) -> None:
    clip = read(clips[0])
    quiet = clip.samples * np.float32(0.001)
    quiet[100:110] = 1
    assert np.abs(raised(clip._replace(samples=quiet)).samples[200:]).max() > 0.05


@pytest.mark.parametrize("pause_s", [2, 5])
def test_speech_after_a_pause(detector: speech.Detector, clips: list[dataset.Clip], pause_s: int) -> None:
    """In the first seconds, and after them."""
    clip = read(clips[0])
    with_pause = clip._replace(samples=np.concatenate([np.zeros(RATE * pause_s, np.float32), clip.samples]))
    assert detector.speaks(with_pause)
    (piece,) = detector.pieces(with_pause, 60)
    assert pause_s - 0.5 < piece.start < pause_s + 1 and piece.end <= with_pause.seconds


def test_what_follows_changes_nothing_of_the_first_frames(
    detector: speech.Detector, clips: list[dataset.Clip], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a clip has speech in its first frames alone only if it has among the others, too."""
    model, seen = detector._model.audio_forward, list[np.ndarray]()

    def forward(samples: np.ndarray) -> np.ndarray:
        seen.append(model(samples))
        return np.zeros(1)

    monkeypatch.setattr(detector._model, "audio_forward", forward)
    for clip in map(read, clips[:5]):
        seen.clear()
        assert not detector.speaks(clip)
        first, more = seen[:2]
        assert len(first) == speech.FIRST_FRAMES < len(more)
        assert np.array_equal(first, more[: len(first)])


def test_stretches_are_the_speech_without_its_pauses(detector: speech.Detector, clips: list[dataset.Clip]) -> None:
    clip = next(each for each in map(read, clips) if each.seconds > 3)
    pause = np.zeros(RATE, np.float32)
    both = Clip(np.concatenate([pause, clip.samples, pause, pause, clip.samples, pause]), RATE)
    found = detector.stretches(both)
    second = 3 + clip.seconds
    assert found and all(start < end for start, end in found)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    for start, end in found:
        assert 0.9 < start < end < 1.1 + clip.seconds or second - 0.1 < start < end < second + clip.seconds + 0.1
    assert sum(end - start for start, end in found) > clip.seconds  # of two clips: more than half of both
    assert detector.stretches(Clip(pause, RATE)) == []


def test_another_rate_is_no_clip_for_the_detector(detector: speech.Detector) -> None:
    with pytest.raises(ValueError, match="44100 Hz: the detector takes 16000 Hz"):
        detector.speaks(Clip(np.zeros(44100, np.float32), 44100))


def test_a_long_file_is_cut_between_words(detector: speech.Detector) -> None:
    """Ten minutes of clips end to end: of 100 words at most one is lost in what is left out, or cut."""
    clips = list(dataset.load(DATA).clips)
    random.Random(3).shuffle(clips)
    samples, words, seconds = [], [], 0.0
    for clip in clips:
        heard = read(clip)
        samples.append(heard.samples)
        words += [(start + seconds, end + seconds) for _, start, end in clip.extra["words"]]
        seconds += heard.seconds
        if seconds > 600:
            break
    whole = Clip(np.concatenate(samples), RATE)
    pieces = detector.pieces(whole, 30)
    assert all(0 <= piece.start <= piece.spoken[0] < piece.spoken[1] <= piece.end <= seconds for piece in pieces)
    assert all(piece.end - piece.start <= 30 for piece in pieces)
    assert all(piece.end <= after.start for piece, after in itertools.pairwise(pieces))
    assert len(pieces) < seconds / 5
    kept = [
        sum(max(0.0, min(end, p.end) - max(start, p.start)) / (end - start) for p in pieces) for start, end in words
    ]
    cut = [any(start + 0.02 < at < end - 0.02 for p in pieces for at in p[:2]) for start, end in words]
    hurt = sum(share < 0.5 or split for share, split in zip(kept, cut, strict=True))
    print(f"{len(words)} words, {hurt} hurt, {len(pieces)} pieces")
    assert hurt <= len(words) / 100


@pytest.mark.slow
def test_a_piece_has_one_voice(detector: speech.Detector, clips: list[dataset.Clip]) -> None:
    """Most joints of two clips, with half a second in between, are where a piece ends; within clips few do."""
    joints, inside = [], 0
    for first, second in itertools.pairwise(clips):
        both = [read(first).samples, np.zeros(RATE // 2, np.float32), read(second).samples]
        clip = Clip(np.concatenate(both), RATE)
        found = [piece.end for piece in detector.pieces(clip, 60)[:-1]]
        joint = (len(both[0]) + RATE / 4) / RATE
        at_joint = [end for end in found if abs(end - joint) < 0.6]
        joints.append(bool(at_joint))
        inside += len(found) - len(at_joint)
    print(f"{sum(joints)} of {len(joints)} joints, {inside} ends inside")
    assert sum(joints) >= 0.8 * len(joints)
    assert inside <= len(joints)


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [
        ([], []),
        ([(1.0, 2.0)], [(0.7, 2.3)]),
        # A margin of a pause is at most half of it, and nothing is beyond the clip.
        ([(0.1, 2.0), (3.0, 4.0), (5.4, 39.9)], [(0.0, 4.3), (5.1, 40.0)]),
        # Up to the longest silence of its second half
        ([(0, 5), (5.9, 15), (15.2, 20), (20.5, 25), (25.3, 39)], [(0, 20.25), (20.25, 39.3)]),
    ],
)
def test_cut(stretches: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    ends = [after[0] - before[1] > 1 for before, after in itertools.pairwise(stretches)]
    found = speech.cut(stretches, ends, 40.0, 36 if stretches and stretches[0][0] == 0.1 else 30)
    assert [value for piece in found for value in piece[:2]] == pytest.approx([v for pair in expected for v in pair])
