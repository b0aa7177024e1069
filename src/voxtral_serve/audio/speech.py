"""Find the speech in a clip, raise it where it is too quiet for the model, and cut long clips where nobody speaks.

What is speech is told by Silero VAD (https://github.com/snakers4/silero-vad), which gives each 32 ms a probability. On
one core that takes about 1 ms for a second of audio, outside of Python's lock.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve.audio import decode as audio

RATE = 16000  # Hz, what Silero VAD takes
FRAME = 512  # samples of a probability
# Silero's own default. In pico's 500 clips, down to the noisiest, there is a moment above it, and in no noise, hum or
# tone that was tried: what has none is not sent to a model, which would make words of it.
SPEECH = 0.5
# Where probability falls below the first for SILENCE_S, a clip may be cut. What is left out must stay below the second
# for PAUSE_S: words under noise have no more than that.
SILENCE, NOTHING = 0.35, 0.15
SILENCE_S, PAUSE_S = 0.1, 1.0
MARGIN_S = 0.3  # kept of a pause
FIRST_S = 4
# Another voice or another noise, if the sound on both sides of a silence differs by so many dB: models that follow one
# voice may lose the next. Compared are the median and the loudest tenth of AROUND_S, in bands that widen as those of
# the ear do.
CHANGE_DB, AROUND_S = 5.0, 2.0
BANDS = [3, 5, 7, 10, 14, 19, 26, 36, 50, 70, 98, 140, 256]  # edges, in steps of 31.25 Hz
# A level is that of the loudest hundredth of frames of 10 ms, in dB below a full-scale square wave. Speech of this
# level still stands out of the spectrogram's floor, and clips above it go to the model as they came.
QUIET_DB = -42.0
# The level that quieter clips are raised to. Higher raises their noise as well: on 160 clips at -40 dBFS pico's WER was
# 1.96 % with this, 2.29 % with -24 and 2.61 % with -17; 2.02 % as they are.
NORMAL_DB = -28.0
MOST_DB = 60.0
FRAME_S = 0.01


class Piece(NamedTuple):
    """A part of a clip, in seconds from its beginning: what is sent to the model, and where in it somebody speaks."""

    start: float
    end: float
    spoken: tuple[float, float]


class Detector:
    """Silero VAD, loaded once a process. Threads may share it."""

    def __init__(self) -> None:
        """Raises ImportError where silero-vad or onnxruntime is not installed."""
        import torch

        threads = torch.get_num_threads()
        try:
            import silero_vad

            self._model = silero_vad.load_silero_vad(sequence=True)
            self._stretches = silero_vad.utils_vad.get_speech_timestamps_from_probs
        finally:
            torch.set_num_threads(threads)  # which the import sets to 1 for the whole process

    def speaks(self, clip: audio.Clip) -> bool:
        """Whether there is any speech. Mostly there is, and the first seconds say so."""
        first = clip._replace(samples=clip.samples[: clip.rate * FIRST_S])
        return self._spoken(first) or (len(first.samples) < len(clip.samples) and self._spoken(clip))

    def pieces(self, clip: audio.Clip, most_s: float) -> list[Piece]:
        """What to send of a clip, if each piece may have `most_s`: nothing where nobody speaks."""
        seconds, clip = clip.seconds, audio.at(clip, RATE)
        longest = most_s - 2 * MARGIN_S
        probabilities = self._probabilities(clip)
        frames = probabilities.copy()
        # Doubtful sounds in what would be left out are speech for this purpose.
        before = 0.0
        for start, end in [*self._speech(frames, seconds, longest), (seconds, seconds)]:
            if start - before > PAUSE_S:
                pause = frames[math.ceil(before * RATE / FRAME) : int(start * RATE / FRAME)]
                pause[pause >= NOTHING] = 1
            before = end
        stretches = self._speech(frames, seconds, longest)
        ends = [
            after[0] - before[1] > PAUSE_S or _changes(clip.samples, before[1], after[0])
            for before, after in itertools.pairwise(stretches)
        ]
        pieces = cut(stretches, ends, seconds, most_s)
        return [piece for piece in pieces if (_within(probabilities, piece) >= SPEECH).any()]

    def _spoken(self, clip: audio.Clip) -> bool:
        return bool((self._probabilities(audio.at(clip, RATE)) >= SPEECH).any())

    def _probabilities(self, clip: audio.Clip) -> np.ndarray:
        """float [n]: of speech in each 32 ms of a clip at RATE."""
        found: np.ndarray = self._model.audio_forward(_levelled(clip.samples))
        return found

    def _speech(self, probabilities: np.ndarray, seconds: float, longest: float) -> list[tuple[float, float]]:
        found: list[dict[str, Any]] = self._stretches(
            probabilities,
            sampling_rate=RATE,
            threshold=SILENCE,
            min_speech_duration_ms=0,
            max_speech_duration_s=longest,
            min_silence_duration_ms=round(SILENCE_S * 1000),
            speech_pad_ms=0,
            audio_length_samples=round(seconds * RATE),
        )
        return [(each["start"] / RATE, min(each["end"] / RATE, seconds)) for each in found]


def _within(probabilities: np.ndarray, piece: Piece) -> np.ndarray:
    return probabilities[int(piece.start * RATE / FRAME) : math.ceil(piece.end * RATE / FRAME)]


def raised(clip: audio.Clip) -> audio.Clip:
    """The clip, louder if it is quieter than QUIET_DB; see NORMAL_DB. Silence stays silence."""
    power = _power(clip.samples, max(1, round(clip.rate * FRAME_S)))
    if not power.size:
        return clip
    level = _decibels(np.percentile(power, 99))
    if level >= QUIET_DB:
        return clip
    gain = 10 ** (min(NORMAL_DB - level, MOST_DB) / 20)
    return clip._replace(samples=np.clip(clip.samples * np.float32(gain), -1, 1))


def _levelled(samples: np.ndarray) -> np.ndarray:
    """All of it brought to NORMAL_DB, second for second: after a loud voice, Silero VAD passes over a quiet one."""
    count = -(-len(samples) // RATE)
    power = _power(np.pad(samples, (0, count * RATE - len(samples))), round(RATE * FRAME_S))
    seconds = np.pad(power.reshape(count, -1), ((1, 1), (0, 0)), "edge")
    around = np.concatenate([seconds[:-2], seconds[1:-1], seconds[2:]], axis=1)
    gain = np.minimum(NORMAL_DB - _decibels(np.percentile(around, 99, axis=1)), MOST_DB)
    each = np.interp(np.arange(len(samples)), (np.arange(count) + 0.5) * RATE, gain)
    return np.clip(samples * (10 ** (each / 20)).astype(np.float32), -1, 1)


def _power(samples: np.ndarray, hop: int) -> np.ndarray:
    """float64 [n]: of frames of so many samples."""
    frames = samples[: len(samples) // hop * hop].reshape(-1, hop)
    power: np.ndarray = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / hop
    return power


def _decibels(power: Any) -> Any:
    return 10 * np.log10(power + 1e-20)


def _changes(samples: np.ndarray, end: float, start: float) -> bool:
    """Whether it sounds otherwise after `start` than before `end`, in seconds."""
    before = samples[max(0, round((end - AROUND_S) * RATE)) : round(end * RATE)]
    after = samples[round(start * RATE) : round((start + AROUND_S) * RATE)]
    if min(len(before), len(after)) < FRAME:
        return False
    return bool(np.sqrt(np.mean((_sound(after) - _sound(before)) ** 2)) > CHANGE_DB)


def _sound(samples: np.ndarray) -> np.ndarray:
    """float [2, bands], in dB: the median and the loudest tenth."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, FRAME)[:: round(RATE * FRAME_S)]
    power = np.abs(np.fft.rfft(frames * np.hanning(FRAME), axis=1)) ** 2
    bands = np.stack([power[:, low:high].mean(1) for low, high in itertools.pairwise(BANDS)], axis=1)
    found: np.ndarray = np.percentile(10 * np.log10(bands + 1e-9), (50, 90), axis=0)
    return found


def cut(stretches: list[tuple[float, float]], ends: list[bool], seconds: float, most_s: float) -> list[Piece]:
    """Pieces of at most `most_s`, in order and apart, with all the speech of a clip of so many seconds.

    (start, end) of that speech, each less than `most_s` by both margins; `ends` says after which of them, but the last,
    a piece must end. One that is full ends at the longest silence of its second half.
    """
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(stretches)]
    pieces: list[Piece] = []
    first = 0
    while first < len(stretches):
        last, begin_s = first, stretches[first][0]
        while last < len(gaps) and not ends[last] and stretches[last + 1][1] - begin_s <= most_s - 2 * MARGIN_S:
            last += 1
        if last < len(gaps) and not ends[last]:
            late = [n for n in range(first, last + 1) if stretches[n][1] - begin_s >= most_s / 2] or [last]
            last = max(late, key=lambda n: gaps[n])
        before = gaps[first - 1] / 2 if first else begin_s
        after = gaps[last] / 2 if last < len(gaps) else seconds - stretches[last][1]
        end_s = stretches[last][1]
        pieces.append(Piece(begin_s - min(before, MARGIN_S), end_s + min(after, MARGIN_S), (begin_s, end_s)))
        first = last + 1
    return pieces
