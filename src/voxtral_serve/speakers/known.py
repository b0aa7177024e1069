"""Known speakers: the names of voices in a recording, from a short clip of each.

As OpenAI's `known_speaker_names[]` with `known_speaker_references[]` (https://platform.openai.com/docs/guides/speech-to-text):
speakers with a clip of SHORTEST_S to LONGEST_S each. Whose voice is like no clip stays without a name.
"""

import itertools
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from voxtral_serve.speakers import MOST
from voxtral_serve.speakers.labels import weights
from voxtral_serve.speakers.windows import Span, Voices

SHORTEST_S, LONGEST_S = 2.0, 10.0  # of a clip
LEAST_SPEECH_S = 1.0  # in it
LONGEST_NAME = 64  # characters
SAME = 0.70  # cosine from which two voices are one; chosen with `python -m bench speakers`
OF_UNKNOWN = re.compile(r"[a-z]|speaker_[0-9]+")  # the labels of speakers without a name, in small letters
JOINERS = "\u200c\u200d"  # not printable, but part of words in Persian and in languages of India

Speaker = int | str  # one without a name by number, from 0; others by name


class KnownSpeakerError(ValueError):
    """Names or clips that cannot be used. The message says which, and what is expected."""


def check_names(names: Sequence[str]) -> None:
    """Raises KnownSpeakerError for names that cannot be used. They may have markup, which is for who writes them."""
    if len(names) > MOST:
        raise KnownSpeakerError(f"{len(names)} known speakers: expected at most {MOST}")
    found: dict[str, str] = {}
    for number, name in enumerate(names, 1):
        if len(name) > LONGEST_NAME:
            raise KnownSpeakerError(
                f"the name of known speaker {number} has {len(name):,} characters: expected at most {LONGEST_NAME}"
            )
        for sign in name:
            if not (sign.isprintable() or sign in JOINERS):
                raise KnownSpeakerError(
                    f"the name of known speaker {number} has U+{ord(sign):04X}: expected printable characters"
                )
        if not any(map(str.isalnum, name)):
            raise KnownSpeakerError(f"the name of known speaker {number} is {name!a}: expected letters or digits")
        plain = unicodedata.normalize("NFKC", name).strip().casefold()
        if OF_UNKNOWN.fullmatch(plain):
            raise KnownSpeakerError(f"{name!a} is a label of speakers who are not known: expected another name")
        if plain in found:
            raise KnownSpeakerError(f"two known speakers have the names {found[plain]!a} and {name!a}: expected others")
        found[plain] = name


def check_clip(name: str, seconds: float, speech: Sequence[Span]) -> None:
    """Raises KnownSpeakerError for a clip of this length that cannot be used. `speech` has its stretches of speech."""
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise KnownSpeakerError(
            f"the clip of {name!a} has {seconds:.2f} s: expected {SHORTEST_S:.0f} to {LONGEST_S:.0f} s of one voice"
        )
    spoken = sum(end - start for start, end in speech)
    if spoken < LEAST_SPEECH_S:
        raise KnownSpeakerError(
            f"the clip of {name!a} has {spoken:.2f} s of speech: expected {LEAST_SPEECH_S:.0f} s or more of one voice"
        )


def vector(name: str, found: Voices) -> np.ndarray:
    """[size], of length 1: the mean of the voices in a clip. Raises KnownSpeakerError if there are none."""
    mean = found.vectors.sum(axis=0)
    length = float(np.linalg.norm(mean))
    if not len(found.vectors) or length < 1e-6:
        raise KnownSpeakerError(f"the clip of {name!a} has no voice")
    return np.asarray(mean / length)


def centres(found: Voices, words: Sequence[Span], speakers: Sequence[int]) -> np.ndarray:
    """[speakers, size], each of length 1: the voice of each speaker of the words, as labels.labelled numbers them.

    Zeros if `found` has no window. There is at least one word.
    """
    sums = np.zeros((max(speakers) + 1, found.vectors.shape[1]))
    if len(found.spans):
        for speaker, (first, seconds) in zip(speakers, weights(found.spans, words), strict=True):
            sums[speaker] += seconds @ found.vectors[first : first + len(seconds)]
    return np.asarray(sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9))


def matched(voices: np.ndarray, known: np.ndarray) -> list[int | None]:
    """Which of `known` [m, size] each of `voices` [n, size] is, None for none of them; all of length 1.

    Each of `known` is at most one of the voices. The sum of the cosines, of SAME or more, is the largest.
    """
    from scipy.optimize import linear_sum_assignment

    cosines = voices @ known.T
    cosines[cosines < SAME] = 0.0
    found: list[int | None] = [None] * len(voices)
    for row, column in zip(*linear_sum_assignment(-cosines), strict=True):
        if cosines[row, column]:
            found[row] = int(column)
    return found


def named(speakers: Sequence[int], matches: Sequence[int | None], names: Sequence[str]) -> list[Speaker]:
    """Each of `speakers`, numbers from 0, by the name of `matches`; those without one are numbered in their order."""
    unnamed = itertools.count()
    found: list[Speaker] = [next(unnamed) if match is None else names[match] for match in matches]
    return [found[speaker] for speaker in speakers]
