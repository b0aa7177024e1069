"""pico.speech: the word times must be espeak-ng's own and match the sound, or training learns them wrong."""

import _ctypes
import ctypes
import hashlib
import importlib
import multiprocessing
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

espeakng_loader = pytest.importorskip("espeakng_loader")
speech = importlib.import_module("pico.speech")
sounds = importlib.import_module("pico.sounds")

RATE = speech.SAMPLE_RATE
SENTENCES = [
    "when the cat sat, we left it in the dark of the night.",
    "did it, or not?",
    "i don't know, so ask dad.",
]
MERGED = "there are some out of the house. we would have to go on with it in the end, as it was of a lot of use."


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def level_db(x: np.ndarray, reference: float) -> float:
    return 20 * np.log10(max(1e-9, float(np.sqrt(np.mean(np.square(x))))) / reference)


def digest(seed: int, voice: str) -> str:
    utterance = speech.speak(SENTENCES, rng(seed), voice)
    return hashlib.sha256(utterance.audio.tobytes() + repr(utterance.words).encode()).hexdigest()


@pytest.mark.parametrize("voice", ["en-us", "en-gb+f4", "en-gb-scotland+m7", "en-029+f5"])
def test_every_word_once_in_order_without_overlap(voice: str) -> None:
    for seed in range(4):
        utterance = speech.speak([*SENTENCES, MERGED], rng(seed), voice)
        assert [word for word, _, _ in utterance.words] == " ".join([*SENTENCES, MERGED]).split()
        edges = [0.0, *(t for _, start, end in utterance.words for t in (start, end))]
        assert edges == sorted(edges)
        assert all(0.01 < end - start < 1.5 for _, start, end in utterance.words)
        duration = len(utterance.audio) / RATE
        assert 0 <= duration - edges[-1] <= speech.EDGE_S[1] + 1e-3
        assert utterance.audio.dtype == np.float32 and np.abs(utterance.audio).max() <= 1
        words_per_minute = len(utterance.words) / (edges[-1] / 60)
        assert 80 < words_per_minute < 320


def test_words_fill_their_times_and_pauses_are_silent() -> None:
    # Voices without echo: sound up to the end, then digital silence apart from the resampler's ringing.
    for seed, voice in enumerate(["en-us", "en-gb+m1", "en-gb-x-rp+m8", "en-029+f1"]):
        utterance = speech.speak(SENTENCES, rng(seed), voice)
        audio, words = utterance.audio, utterance.words
        reference, pauses = sounds.speech_rms(audio), 0
        for (word, start, end), following in zip(words, [*words[1:], ("", len(audio) / RATE, 0.0)], strict=True):
            if following[1] - end < 0.06:
                assert not word.endswith(tuple(",.?")) or not following[0]
                continue
            pauses += 1
            a, b, c = (int(t * RATE) for t in (start, end, following[1]))
            assert level_db(audio[b + 80 : c - 80], reference) < -50, (voice, word)
            assert level_db(audio[max(a, b - 960) : b], reference) > -25, (voice, word)
        assert pauses >= 5


def test_merged_phrases_get_a_time_per_word() -> None:
    """The library without the no-break space merges; if it stops doing so, the space can go."""
    with speech.Espeak("en-us") as espeak:
        data = b"in the end\0"
        espeak._lib.espeak_Synth(data, len(data), 0, 1, 0, 1, None, None)
        assert sum(kind == speech._EVENT_WORD for kind, *_ in espeak._events) == 2
        assert [word for word, _, _ in espeak.say("in the end")[1]] == ["in", "the", "end"]


def test_full_stop_inside_a_text_is_a_pause() -> None:
    with speech.Espeak("en-us") as espeak:
        times = espeak.say("we saw him. he left? 'tis so, mr. smith")[1]
    gaps = {a[0]: (b[1] - a[2]) / speech.NATIVE_RATE for a, b in pairwise(times)}
    assert min(gaps["him."], gaps["left?"], gaps["so,"]) > 0.1 > gaps["we"]


def test_missing_events_raise() -> None:
    with speech.Espeak("en-us") as espeak:
        espeak.say("one two")
        espeak._events = [e for e in espeak._events if e[1] < 5]
        with pytest.raises(speech.WordTimingError, match="two"):
            espeak._word_times(["one", "two"], [1, 5], 10**6)


def test_speaker_factor_scales_the_times_exactly() -> None:
    tone = np.sin(2 * np.pi * 1000 * np.arange(22_050) / 22_050).astype(np.float32)
    expected = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(speech._resample(tone, 320)[200:-200], expected[200:-200], atol=2e-4)
    click = np.zeros(44_100, np.float32)
    click[30_870] = 1
    for ratio in speech.RATIOS:
        assert np.argmax(speech._resample(click, ratio)) == round(30_870 * ratio / 441)
    alias = np.sin(2 * np.pi * 9000 * np.arange(22_050) / 22_050).astype(np.float32)
    assert np.abs(speech._resample(alias, 320)[400:-400]).max() < 1e-3


def test_same_generator_same_speech_also_in_other_processes() -> None:
    for voice in ("en-us+f5", "en-gb+m1"):  # breath noise; flutter
        first = digest(1, voice)
        digest(2, "en-029+f3")
        assert digest(1, voice) == first != digest(2, voice)
        code = f"import sys; sys.path[:] = {sys.path!r}; import runpy\n"
        code += f"print(runpy.run_path({__file__!r})['digest'](1, {voice!r}))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == first
    with multiprocessing.get_context("fork").Pool(1) as pool:  # after speaking here: no thread may be missing
        assert pool.apply_async(digest, (1, voice)).get(timeout=20) == first


@pytest.mark.parametrize("voice", ["en-us+zz", "en-us+", "en-us+F3", "xx", "", "en-us+../x"])
def test_unknown_voice(voice: str) -> None:
    with pytest.raises(speech.UnknownVoiceError, match="expected one of en-us"):
        speech.speak(["hello."], rng(), voice)


@pytest.mark.parametrize("text", ["", "  ", "hello , there", "it is 5 now", "naïve", "a-b", "'", "wait!"])
def test_bad_text(text: str) -> None:
    with pytest.raises(ValueError, match="expected words of a-z"):
        speech.speak([text], rng(), "en-us")


def test_library_that_cannot_be_fresh_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ctypes.CDLL(espeakng_loader.get_library_path())
    with pytest.raises(speech.EspeakError, match="already loaded"):
        speech.speak(["hello."], rng(), "en-us")
    _ctypes.dlclose(other._handle)
    with speech.Espeak("en-us"), monkeypatch.context() as patch:
        patch.setattr(speech, "_LOCK_TIMEOUT_S", 0.1)
        with pytest.raises(speech.EspeakError, match="another Espeak"):
            speech.speak(["hello."], rng(), "en-us")
    assert speech.speak(["hello."], rng(), "en-us").words  # none of these leaves it locked


def test_voices_are_many_disjoint_and_all_different() -> None:
    assert len(speech.TRAIN_VOICES) >= 20 and len(speech.BENCH_VOICES) >= 8
    assert not set(speech.TRAIN_VOICES) & set(speech.BENCH_VOICES)
    variants = {voice.partition("+")[2] for voice in speech.TRAIN_VOICES}
    assert not variants & {variant.strip("+") for variant in speech.BENCH_VARIANTS}
    assert all(voice.partition("+")[2] in variants for voice in speech.HELD_OUT)
    seen: dict[bytes, str] = {}
    for voice in speech.TRAIN_VOICES + speech.BENCH_VOICES:
        with speech.Espeak(voice) as espeak:
            audio, _ = espeak.say("my father took a bath after work, then read the letter.")
        assert len(audio) > 2 * speech.NATIVE_RATE and 0.2 < np.abs(audio).max() < 1, voice
        assert seen.setdefault(audio.tobytes(), voice) == voice


def test_augment_keeps_length_time_and_loudness() -> None:
    clean = speech.speak(SENTENCES, rng(5), "en-us+f2").audio
    size = sounds.fast_size(2 * len(clean))
    spectrum = np.fft.rfft(clean, size)
    lags, peaks = [], []
    for seed in range(60):
        noisy = sounds.augment(clean, rng(seed))
        assert noisy.shape == clean.shape and noisy.dtype == np.float32 and np.isfinite(noisy).all()
        peaks.append(20 * np.log10(np.abs(noisy).max()))
        cross = np.fft.rfft(noisy, size) * spectrum.conj()
        lags.append(np.argmax(np.fft.irfft(cross / (np.abs(cross) + 1e-9 * np.abs(cross).max()), size)))
        np.testing.assert_array_equal(noisy, sounds.augment(clean, rng(seed)))
    assert lags == [0] * 60
    assert -40.01 <= min(peaks) < -30 and -10 < max(peaks) <= -2.99
    np.testing.assert_array_equal(sounds.augment(clean, rng(), strength=0), clean)
    assert np.abs(sounds.augment(clean, rng(), strength=1.5)).max() <= 1
    assert not sounds.augment(np.zeros(100, np.float32), rng()).any()


def test_augment_keeps_speech_above_the_noise() -> None:
    utterance = speech.speak(SENTENCES, rng(7), "en-gb")
    speech_at = np.zeros(len(utterance.audio), bool)
    for _, start, end in utterance.words:
        speech_at[int(start * RATE) : int(end * RATE)] = True
    ratios = []
    for seed in range(40):
        noisy = np.square(sounds.augment(utterance.audio, rng(seed)))
        ratios.append(10 * np.log10(noisy[speech_at].mean() / noisy[~speech_at].mean()))
    assert 5 < min(ratios) < 18 and max(ratios) > 25


def test_not_speech() -> None:
    for kind in sounds.NOT_SPEECH:
        for seed in range(5):
            audio = sounds.not_speech(rng(seed), 1.5, kind)
            assert audio.shape == (24_000,) and audio.dtype == np.float32
            peak = 20 * np.log10(np.abs(audio).max() + 1e-12)
            low, high = {"silence": (-241, -239), "faint": (-85, -50)}.get(kind, sounds.LOUDNESS_DBFS)
            assert low - 0.01 <= peak <= high + 0.01, kind
            np.testing.assert_array_equal(audio, sounds.not_speech(rng(seed), 1.5, kind))
    assert len({sounds.not_speech(rng(seed), 0.3).tobytes() for seed in range(30)}) > 20
    assert sounds.not_speech(rng(), 0).shape == (0,)
    with pytest.raises(ValueError, match="expected one of silence"):
        sounds.not_speech(rng(), 1, "birds")
