"""Find the speech in a clip, and cut long clips between words.

On one core, Silero VAD takes about 2 ms for each second of audio, outside of Python's global lock.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve.audio import level, silero
from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.silero import FRAME, RATE

# Silero's own default for the probability of speech. Each of pico's 500 clips, the noisiest included, has a frame above
# it; no noise, hum or tone in tests/unit/test_speech.py has one. A clip without one is not sent to the model, which
# would make words of it.
SPEECH = 0.5
# A clip may be cut where the probability stays below SILENCE for SILENCE_S. A part is left out only if it stays below
# NOTHING for PAUSE_S: words under noise may reach no more than that.
SILENCE, NOTHING = 0.35, 0.15
SILENCE_S, PAUSE_S = 0.1, 1.0
MARGIN_S = 0.3  # of a pause, kept on each side of speech
TURN_S, TURN_PAUSE_S = 0.1, 0.2  # `stretches`: the shortest speech, and the shortest pause in it
FIRST_S = 4  # searched for speech first
# Of these, the frames that come first of all: nearly all of 150 of pico's clips have speech in the first second. The
# model is causal, so their probabilities are those that they have among the others.
FIRST_FRAMES = 32
# A piece ends at a silence if the spectra of AROUND_S before and after it differ by more than CHANGE_DB: that is
# another voice or another noise, and a model that follows one voice may lose the next. A spectrum is the median and the
# loudest tenth of its frames, in bands that widen with frequency as those of the ear do.
CHANGE_DB, AROUND_S = 5.0, 2.0
BANDS = [3, 5, 7, 10, 14, 19, 26, 36, 50, 70, 98, 140, 256]  # edges, in steps of 31.25 Hz


class Piece(NamedTuple):
    """A part of a clip that is sent to the model; `spoken` is (start, end) of the speech in it.

    All four are seconds from the clip's beginning.
    """

    start: float
    end: float
    spoken: tuple[float, float]


class Detector:
    """Silero VAD. Load it once in a process; threads may share it."""

    def __init__(self) -> None:
        """Raises ImportError where silero-vad or onnxruntime is not installed."""
        self._model, self._stretches = silero.for_clips()

    def speaks(self, clip: Clip) -> bool:
        """Whether a clip at RATE has speech. Its beginning is enough for most clips."""
        first = _levelled(clip._replace(samples=clip.samples[: clip.rate * FIRST_S]))
        return (
            self._spoken(first[: FIRST_FRAMES * FRAME])
            or (len(first) > FIRST_FRAMES * FRAME and self._spoken(first))
            or (len(first) < len(clip.samples) and self._spoken(_levelled(clip)))
        )

    def silent_s(self, clip: Clip) -> float:
        """Seconds without speech at the end of a clip at RATE."""
        spoken = np.flatnonzero(self.probabilities(clip) >= SILENCE)
        return max(0.0, clip.seconds - (int(spoken[-1]) + 1) * FRAME / RATE) if spoken.size else clip.seconds

    def pieces(self, clip: Clip, most_s: float, probabilities: np.ndarray | None = None) -> list[Piece]:
        """The parts of a clip at RATE with speech, in order, each of at most `most_s` seconds; [] without speech.

        `probabilities` are the clip's, if they are known.
        """
        seconds = clip.seconds
        longest = most_s - 2 * MARGIN_S
        if probabilities is None:
            probabilities = self.probabilities(clip)
        frames = probabilities.copy()
        # Keep doubtful sounds: in a pause that would be left out, they count as speech.
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

    def stretches(self, clip: Clip, probabilities: np.ndarray | None = None) -> list[tuple[float, float]]:
        """Start and end in seconds of the speech of a clip at RATE, without its pauses, in order.

        `probabilities` are the clip's, if they are known.
        """
        found: list[dict[str, int]] = self._stretches(
            self.probabilities(clip) if probabilities is None else probabilities,
            sampling_rate=RATE,
            threshold=SPEECH,
            min_speech_duration_ms=round(TURN_S * 1000),
            min_silence_duration_ms=round(TURN_PAUSE_S * 1000),
            speech_pad_ms=30,
            audio_length_samples=len(clip.samples),
        )
        return [(stretch["start"] / RATE, min(stretch["end"] / RATE, clip.seconds)) for stretch in found]

    def probabilities(self, clip: Clip) -> np.ndarray:
        """float [n]: the probability of speech in each FRAME of a clip at RATE."""
        probabilities: np.ndarray = self._model.audio_forward(_levelled(clip))
        return probabilities

    def _spoken(self, levelled: np.ndarray) -> bool:
        return bool((self._model.audio_forward(levelled) >= SPEECH).any())

    def _speech(self, probabilities: np.ndarray, seconds: float, longest: float) -> list[tuple[float, float]]:
        stretches: list[dict[str, Any]] = self._stretches(
            probabilities,
            sampling_rate=RATE,
            threshold=SILENCE,
            min_speech_duration_ms=0,
            max_speech_duration_s=longest,
            min_silence_duration_ms=round(SILENCE_S * 1000),
            speech_pad_ms=0,
            audio_length_samples=round(seconds * RATE),
        )
        return [(stretch["start"] / RATE, min(stretch["end"] / RATE, seconds)) for stretch in stretches]


def _levelled(clip: Clip) -> np.ndarray:
    if clip.rate != RATE:
        raise ValueError(f"the clip has a rate of {clip.rate} Hz: the detector takes {RATE} Hz")
    return level.levelled(clip.samples, RATE)


def _within(probabilities: np.ndarray, piece: Piece) -> np.ndarray:
    return probabilities[int(piece.start * RATE / FRAME) : math.ceil(piece.end * RATE / FRAME)]


def _changes(samples: np.ndarray, end: float, start: float) -> bool:
    """Whether the spectrum after `start` differs from the one before `end` (seconds); see CHANGE_DB."""
    before = samples[max(0, round((end - AROUND_S) * RATE)) : round(end * RATE)]
    after = samples[round(start * RATE) : round((start + AROUND_S) * RATE)]
    if min(len(before), len(after)) < FRAME:
        return False
    return bool(np.sqrt(np.mean((_spectrum(after) - _spectrum(before)) ** 2)) > CHANGE_DB)


def _spectrum(samples: np.ndarray) -> np.ndarray:
    """float [2, bands], in dB: the median of the frames, and their 90th percentile."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, FRAME)[:: round(RATE * level.FRAME_S)]
    power = np.abs(np.fft.rfft(frames * np.hanning(FRAME), axis=1)) ** 2
    bands = np.stack([power[:, low:high].mean(1) for low, high in itertools.pairwise(BANDS)], axis=1)
    spectrum: np.ndarray = np.percentile(10 * np.log10(bands + 1e-9), (50, 90), axis=0)
    return spectrum


def cut(stretches: list[tuple[float, float]], ends: list[bool], seconds: float, most_s: float) -> list[Piece]:
    """Pieces of at most `most_s` seconds, in order, without overlap, that hold all the speech of a clip.

    stretches  (start, end) of the speech in seconds, each at most most_s - 2 * MARGIN_S long
    ends       for each stretch but the last, whether a piece must end after it
    seconds    the clip's length

    A piece that is full ends at the longest silence of its second half.
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
