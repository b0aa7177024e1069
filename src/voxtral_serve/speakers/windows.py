"""Windows of the speech in a recording, and the vectors of their voices."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from voxtral_serve.speakers.campplus import BINS, FRAME, HOP, RATE, spectrogram

WINDOW_S, HOP_S = 1.5, 0.75
GAP_S = 0.25  # speech with a shorter pause is one stretch
LEAST_S = 0.4  # a shorter stretch is widened to this on both sides
STRETCH_S = 60.0  # a longer stretch is computed in parts
FRAMES = 1 + (round(WINDOW_S * RATE) - FRAME) // HOP  # of a window

Span = tuple[float, float]  # start and end in seconds


class Network(Protocol):
    """What computes vectors: `campplus.CamPlusPlus`."""

    def vectors(self, features: np.ndarray) -> np.ndarray:
        """float32 [n, size], each of length 1, of features [n, FRAMES, BINS]."""


class Voices(NamedTuple):
    """Windows of a recording in their order, and their vectors.

    spans    float64 [n, 2]: start and end in seconds
    vectors  float32 [n, size], each of length 1
    """

    spans: np.ndarray
    vectors: np.ndarray


def stretches(speech: Sequence[Span], seconds: float) -> list[Span]:
    """Speech in its order, in a recording of this length, without short pauses and with short stretches widened."""
    found: list[Span] = []
    for start, end in speech:
        if found and start - found[-1][1] < GAP_S:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    wide: list[Span] = []
    for start, end in found:
        more = max(LEAST_S - (end - start), 0.0) / 2
        wide.append((max(start - more, 0.0), min(end + more, seconds)))
    return wide


def windows(stretch: Span) -> list[Span]:
    """Windows of WINDOW_S at every HOP_S of a stretch. The last one ends with it; a short stretch is one window."""
    start, end = stretch
    found = []
    while start + WINDOW_S < end:
        found.append((start, start + WINDOW_S))
        start += HOP_S
    return [*found, (max(stretch[0], end - WINDOW_S), end)]


def voices(samples: np.ndarray, speech: Sequence[Span], network: Network) -> Voices:
    """The windows of `speech`, stretches in their order, of samples [n] at RATE, and their vectors."""
    spans: list[Span] = []
    vectors: list[np.ndarray] = []
    for stretch in stretches(speech, len(samples) / RATE):
        for part in _parts(windows(stretch)):
            features = _features(samples, part)
            if features is not None:
                spans += part
                vectors.append(network.vectors(features))
    if not spans:
        return Voices(np.empty((0, 2)), np.empty((0, 1), np.float32))
    return Voices(np.array(spans), np.concatenate(vectors))


def _parts(spans: Sequence[Span]) -> Iterator[list[Span]]:
    count = round(STRETCH_S / HOP_S)
    for start in range(0, len(spans), count):
        yield list(spans[start : start + count])


def _features(samples: np.ndarray, spans: Sequence[Span]) -> np.ndarray | None:
    """float32 [n, FRAMES, BINS] of windows of one stretch; None if it has not one frame. Short ones are repeated."""
    first = round(spans[0][0] * RATE)
    frames = spectrogram(samples[first : round(spans[-1][1] * RATE)])
    if not len(frames):
        return None
    features = np.empty((len(spans), FRAMES, BINS), np.float32)
    for number, (start, _) in enumerate(spans):
        at = min(round((start * RATE - first) / HOP), len(frames) - 1)
        window = frames[at : at + FRAMES]
        features[number] = np.resize(window, (FRAMES, BINS))
    return features
