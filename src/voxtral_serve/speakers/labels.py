"""A speaker for each word of a recording."""

from collections.abc import Sequence

import numpy as np

from voxtral_serve.speakers import clusters
from voxtral_serve.speakers.windows import Network, Span, Voices, voices


def label(
    samples: np.ndarray, speech: Sequence[Span], words: Sequence[Span], network: Network, number: int | None = None
) -> list[int]:
    """The speaker of each word, numbered from 0 in the order in which they speak first.

    samples  float32 [n] at 16 kHz, between -1 and 1
    speech   start and end in seconds of its stretches of speech, in their order
    words    start and end of each, in their order
    number   of the speakers, 1 to clusters.MOST; None if it is not known
    """
    return labelled(voices(samples, speech, network), words, number)


def labelled(found: Voices, words: Sequence[Span], number: int | None = None) -> list[int]:
    """The speaker of each word, as `label`, from the voices of the speech."""
    used = _with_words(found, words)
    return of_words(used, words, clusters.clusters(used.vectors, number))


def _with_words(found: Voices, words: Sequence[Span]) -> Voices:
    """The windows with a word in them: noises that were taken for speech make no speaker."""
    if not words or not len(found.spans):
        return Voices(found.spans[:0], found.vectors[:0])
    starts, ends = np.array(words).T
    ends = np.maximum.accumulate(ends)
    # The first word that ends after the window's start begins before the window's end
    following = np.searchsorted(ends, found.spans[:, 0], side="right")
    used = np.append(starts, np.inf)[following] < found.spans[:, 1]
    return Voices(found.spans[used], found.vectors[used]) if used.any() else found


def of_words(found: Voices, words: Sequence[Span], labels: np.ndarray) -> list[int]:
    """The speaker of each word from those of the windows: int [n]."""
    if not len(labels):
        return [0] * len(words)
    means = clusters.centres(found.vectors, labels)
    scores = found.vectors @ means.T
    return _in_order([int((weights(found.spans, word) @ scores).argmax()) for word in words])


def weights(spans: np.ndarray, word: Span) -> np.ndarray:
    """[n]: the seconds of the word in each of the windows `spans` [n, 2]. If it is in none, 1 for the nearest."""
    (starts, ends), (start, end) = spans.T, word
    overlap = np.maximum(np.minimum(ends, end) - np.maximum(starts, start), 0.0)
    if not overlap.any():
        overlap[np.abs(starts + ends - start - end).argmin()] = 1.0
    return np.asarray(overlap)


def _in_order(speakers: Sequence[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(speaker, len(numbers)) for speaker in speakers]
