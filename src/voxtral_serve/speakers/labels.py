"""A speaker for each word of a recording."""

from collections.abc import Iterator, Sequence

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
    found_words = weights(found.spans, words)
    return _in_order([int((seconds @ scores[first : first + len(seconds)]).argmax()) for first, seconds in found_words])


def weights(spans: np.ndarray, words: Sequence[Span]) -> Iterator[tuple[int, np.ndarray]]:
    """For each word a window, and [k]: the seconds of the word in that one and those after it; others have none of it.

    If it is in none of the windows `spans` [n, 2], whose starts are in their order, it is 1 for the nearest.
    """
    starts, ends = spans.T
    middles = starts + ends
    order = np.argsort(middles, kind="stable")
    ranked = middles[order]
    begins, stops = np.array(words, float).reshape(-1, 2).T
    firsts = np.searchsorted(np.maximum.accumulate(ends), begins, side="right")
    lasts = np.searchsorted(starts, stops)
    afters = np.searchsorted(ranked, begins + stops)
    for (start, end), first, last, after in zip(words, firsts, lasts, afters, strict=True):
        overlap = np.maximum(np.minimum(ends[first:last], end) - np.maximum(starts[first:last], start), 0.0)
        if overlap.any():
            yield int(first), overlap
            continue
        near = [int(order[np.searchsorted(ranked, ranked[at])]) for at in (after - 1, after) if 0 <= at < len(order)]
        yield min(near, key=lambda at: (abs(middles[at] - start - end), at)), np.ones(1)


def _in_order(speakers: Sequence[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(speaker, len(numbers)) for speaker in speakers]
