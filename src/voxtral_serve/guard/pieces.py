"""The pieces of a clip that are sent to the model: those with speech, each as long as the model can take."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.level import voiced
from voxtral_serve.audio.speech import Detector, Piece
from voxtral_serve.guard.limits import Rules
from voxtral_serve.transcript.formats import WITH_TIMES

PIECE_S = Fraction(30)  # for a clip that is longer than the model's limit; Whisper's limit is 30 s
SEGMENT_S = Fraction(8)  # for a model whose tokens have no times: each piece becomes one segment


class ClipPieces(NamedTuple):
    """A clip and its pieces, in order.

    voiced  for each piece, the voiced frames of audio.level if words need times, else None
    silent  whether the clip has no speech: its one piece is not transcribed
    """

    clip: Clip
    pieces: tuple[Piece, ...]
    voiced: tuple[np.ndarray | None, ...]
    silent: bool

    def clip_of(self, number: int) -> Clip:
        """The samples of a piece."""
        return _within(self.clip, self.pieces[number])


def whole(clip: Clip, rules: Rules) -> ClipPieces | None:
    """What a model whose tokens have times gets of a clip in which `split` finds speech. None for a clip that it cuts,
    and for other models."""
    return ClipPieces(clip, (_whole(clip),), (None,), False) if rules.timed and not _is_long(clip, rules) else None


def split(clip: Clip, response_format: str, rules: Rules, detector: Detector) -> ClipPieces:
    """The pieces of a clip for an answer in `response_format`."""
    with_times = response_format in WITH_TIMES
    pieces, silent = _pieces(clip, rules, with_times and not rules.timed, detector)
    return ClipPieces(
        clip,
        tuple(pieces),
        tuple(
            voiced(_within(clip, piece).samples, clip.rate) if with_times and rules.timed else None for piece in pieces
        ),
        silent,
    )


def _pieces(clip: Clip, rules: Rules, by_segment: bool, detector: Detector) -> tuple[list[Piece], bool]:
    """(pieces, whether there is no speech in the clip)"""
    silent = [Piece(0.0, clip.seconds, (0.0, 0.0))]
    if not _is_long(clip, rules) and not by_segment:
        return ([_whole(clip)], False) if detector.speaks(clip) else (silent, True)
    most = min(rules.piece_s, SEGMENT_S if by_segment else PIECE_S)
    pieces = detector.pieces(clip, float(most))
    return (pieces, False) if pieces else (silent, True)


def _whole(clip: Clip) -> Piece:
    return Piece(0.0, clip.seconds, (0.0, clip.seconds))


def _is_long(clip: Clip, rules: Rules) -> bool:
    """Whether the model cannot take the clip in one request."""
    return len(clip.samples) > rules.piece_s * clip.rate


def _within(clip: Clip, piece: Piece) -> Clip:
    return clip._replace(samples=clip.samples[round(piece.start * clip.rate) : round(piece.end * clip.rate)])
