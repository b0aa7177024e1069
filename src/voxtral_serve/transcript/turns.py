"""Words with times of a turn of live audio, from the tokens of the requests that it took."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from voxtral_serve.audio.level import FRAME_S, loud_frames
from voxtral_serve.transcript.words import LEAST_S, TokenStream, Word, refine, words


class RequestTokens(NamedTuple):
    """`tokens` of a request whose audio begins at `start`, in seconds of the session."""

    start: float
    tokens: Sequence[int]


def turn_words(requests: Sequence[RequestTokens], stream: TokenStream, power: np.ndarray, first: int) -> list[Word]:
    """The words of a turn, in order and without overlap, in seconds of the session.

    power  of the turn's audio, in frames of FRAME_S
    first  number of its first frame in the session
    """
    offset = first * FRAME_S
    voiced = loud_frames(power)
    timed: list[Word] = []
    for start, tokens in requests:
        shift = start - offset
        found = [
            word._replace(start=max(word.start + shift, 0.0), end=word.end + shift) for word in words(tokens, stream)
        ]
        for word in refine(found, voiced):
            begin = max(word.start + offset, timed[-1].end if timed else offset)
            timed.append(Word(word.text, begin, max(word.end + offset, begin + LEAST_S)))
    # A word that the model writes late ends with the turn.
    limit = (first + len(power)) * FRAME_S
    for number in reversed(range(len(timed))):
        word = timed[number]
        if word.end <= limit:
            break
        start = max(min(word.start, limit - LEAST_S), offset)
        timed[number] = Word(word.text, start, limit)
        limit = start
    return timed
