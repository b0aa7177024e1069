"""How many tokens a step has if a drafter's guesses are verified, computed from the guesses for whole clips."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAFTS = (1, 3, 7, 15)  # numbers of drafts that the table has; the server's for 1 to 256 requests


class Walk(NamedTuple):
    """The steps of a clip after its prompt's, which makes the first token.

    tokens    that the steps made
    accepted  how many drafts were right in each step
    """

    tokens: int
    accepted: list[int]


def walk(right: np.ndarray, drafts: int) -> Walk:
    """The steps of one clip. right, bool [tokens]: whether the guess for each token is the token.

    A step verifies the next `drafts` guesses, keeps those before the first that is wrong, and makes one token itself.
    """
    position, accepted = 1, []
    while position < len(right):
        ahead = right[position : position + drafts]
        count = len(ahead) if ahead.all() else int(ahead.argmin())
        accepted.append(count)
        position += count + 1
    return Walk(max(0, len(right) - 1), accepted)


class Score(NamedTuple):
    """Of a drafter on held-out clips.

    right     share of the tokens that it guesses
    a_step    tokens a step, by number of drafts
    survival  share of the steps in which drafts 1 to j were all right, for j from 1 to the most drafts
    """

    right: float
    a_step: dict[int, float]
    survival: list[float]


def score(clips: Sequence[np.ndarray]) -> Score:
    """`clips`: for each, bool [tokens], whether the guess for each token is the token. They have steps in all."""
    a_step = {}
    for drafts in DRAFTS:
        walks = [walk(right, drafts) for right in clips]
        a_step[drafts] = sum(each.tokens for each in walks) / sum(len(each.accepted) for each in walks)
    accepted = np.array([count for right in clips for count in walk(right, DRAFTS[-1]).accepted])
    survival = [float((accepted >= j).mean()) for j in range(1, DRAFTS[-1] + 1)]
    return Score(float(np.concatenate(clips).mean()), a_step, survival)
