"""The pieces of a clip that are sent to the model: those with speech, each as long as the model can take."""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.level import voiced
from voxtral_serve.audio.speech import SPEECH, Detector, Piece
from voxtral_serve.engine.session import SessionShape
from voxtral_serve.guard.limits import Rules

PIECE_S = Fraction(30)  # for a clip that is longer than the model's limit; Whisper's limit is 30 s
SEGMENT_S = Fraction(8)  # for a model whose tokens have no times: each piece becomes one segment


class ClipPieces(NamedTuple):
    """A clip and its pieces, in order.

    voiced  for each piece, the voiced frames of audio.level if words need times, else None
    silent  whether the clip has no speech: its one piece is not sent to the model
    speech  start and end in seconds of the stretches of speech, if speakers are labelled
    channels  of each piece, if the channels of the clip are separate: from 0, with the channel's samples
    parts   number of the channels, if they are separate
    """

    clip: Clip
    pieces: tuple[Piece, ...]
    voiced: tuple[np.ndarray | None, ...]
    silent: bool
    speech: tuple[tuple[float, float], ...] = ()
    channels: tuple[tuple[int, Clip], ...] = ()
    parts: int = 1

    @property
    def seconds(self) -> float:
        """Of audio, of all channels together."""
        return self.clip.seconds * self.parts

    def clip_of(self, number: int) -> Clip:
        """The samples of a piece."""
        return _within(self.channels[number][1] if self.channels else self.clip, self.pieces[number])


def joined(channels: Sequence[ClipPieces]) -> ClipPieces:
    """The pieces of a clip whose channels are separate, from those of each channel."""
    voices = [(number, each) for number, each in enumerate(channels) if not each.silent]
    if not voices:
        return channels[0]._replace(parts=len(channels))
    return ClipPieces(
        channels[0].clip,
        tuple(piece for _, each in voices for piece in each.pieces),
        tuple(voiced for _, each in voices for voiced in each.voiced),
        silent=False,
        channels=tuple((number, each.clip) for number, each in voices for _ in each.pieces),
        parts=len(channels),
    )


def split(
    clip: Clip,
    with_times: bool,
    rules: Rules,
    detector: Detector,
    speakers: bool = False,
    shape: SessionShape | None = None,
) -> ClipPieces:
    """The pieces of a clip for an answer with or without times, or with speakers. `shape`: of a delay that is not the
    checkpoint's."""
    probabilities = detector.probabilities(clip) if speakers else None
    pieces, silent = _pieces(clip, rules.longest_s(shape), with_times and not rules.timed, detector, probabilities)
    return ClipPieces(
        clip,
        tuple(pieces),
        tuple(
            voiced(_within(clip, piece).samples, clip.rate) if with_times and rules.timed else None for piece in pieces
        ),
        silent,
        () if probabilities is None else tuple(detector.stretches(clip, probabilities)),
    )


def _pieces(
    clip: Clip, piece_s: Fraction, by_segment: bool, detector: Detector, probabilities: np.ndarray | None
) -> tuple[list[Piece], bool]:
    """(pieces, whether there is no speech in the clip)"""
    whole = Piece(0.0, clip.seconds, (0.0, clip.seconds))
    silent = [Piece(0.0, clip.seconds, (0.0, 0.0))]
    if len(clip.samples) <= piece_s * clip.rate and not by_segment:
        heard = probabilities is not None and (probabilities >= SPEECH).any()
        return ([whole], False) if heard or detector.speaks(clip) else (silent, True)
    most = min(piece_s, SEGMENT_S if by_segment else PIECE_S)
    pieces = detector.pieces(clip, float(most), probabilities)
    return (pieces, False) if pieces else (silent, True)


def _within(clip: Clip, piece: Piece) -> Clip:
    return clip._replace(samples=clip.samples[round(piece.start * clip.rate) : round(piece.end * clip.rate)])
