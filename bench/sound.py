"""The sound of a live session: a clip, or clips of the dataset joined until the wanted seconds are filled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import soundfile

from bench import BenchError
from bench.dataset import APART_S, Clip
from bench.measure import sound as measure
from bench.measure.sound import RATE_HZ, TOKEN_S, Pcm, Sound


@dataclass(frozen=True)
class SessionClip(Clip):
    """`parts` one after the other, and silence until `age_s` + `duration_s` seconds are full.

    The first `age_s` seconds are sent faster than speech and not measured. `text` and the words are those of all of it.
    """

    parts: tuple[Clip, ...] = ()
    age_s: float = 0.0


def of(clip: Clip) -> Sound:
    """Decode a clip. Raises BenchError if its file cannot be decoded."""
    if isinstance(clip, SessionClip):
        return Sound([_kept(part) for part in clip.parts], round((clip.age_s + clip.duration_s) * RATE_HZ))
    return Sound([pcm16(clip)])


def pcm16(clip: Clip) -> Pcm:
    """The clip's samples: mono, 16 kHz, int16. Raises BenchError if its file cannot be decoded."""
    return measure.pcm16(measure.read(clip.path, f"{clip.path.name} of clip {clip.id}"))


def check(clip: Clip) -> None:
    """Raise BenchError if soundfile cannot read the clip, or any of its `words` is not [word, start_s, end_s]."""
    try:
        soundfile.info(str(clip.path))
    except soundfile.SoundFileError as error:
        raise BenchError(f"--realtime: cannot decode {clip.path.name} of clip {clip.id}: {error}") from None
    for word in clip.extra.get("words") or ():
        if not (isinstance(word, list) and [isinstance(part, str) for part in word] == [True, False, False]):
            raise BenchError(f"clip {clip.id}: 'words' must list [word, start_s, end_s], found {word!r}")


def session(number: int, clips: Sequence[Clip], seconds: float, age_s: float, seed: int) -> SessionClip:
    """The clip of the session of this number, from 1: the dataset's clips in an order of its own.

    A clip that does not fit any more is left out for a shorter one; the rest is silence. Where no clip fits at all, the
    first is cut, and its reference is cut with it where the dataset has the words' times.
    """
    whole, used = round((age_s + seconds) * RATE_HZ), 0
    order = random.Random(f"{seed} {number}").sample(clips, len(clips))
    parts: list[Clip] = []
    words: list[list[object]] | None = []
    while fitting := [clip for clip in order if _fits(clip, whole - used)] or order[: not parts]:
        for clip in fitting:
            begin, length = used / RATE_HZ, len(_kept(clip))
            if parts and not _fits(clip, whole - used):
                continue
            told = clip.extra.get("words")
            words = None if told is None or words is None else words + [[w, s + begin, e + begin] for w, s, e in told]
            parts.append(clip)
            used += length
    text = " ".join(clip.text for clip in parts)
    if used > whole and words is not None:
        words = [word for word in words if float(str(word[2])) <= whole / RATE_HZ]
        text = " ".join(str(word[0]) for word in words) or text
    extra = {} if words is None else {"words": words}
    return SessionClip(f"session-{number:04}", parts[0].path, text, seconds, extra, tuple(parts), age_s)


def _fits(clip: Clip, samples: int) -> bool:
    """Told by the stated duration where that is enough, as decoding takes a while."""
    return clip.duration_s - APART_S <= samples / RATE_HZ and len(_kept(clip)) <= samples


def whole_pieces(seconds: float) -> float:
    """Rounded up to whole pieces of 80 ms."""
    return round(np.ceil(round(seconds / TOKEN_S, 6)) * TOKEN_S, 6)


def _kept(clip: Clip) -> Pcm:
    return _decoded(clip.path, clip.id)


@cache
def _decoded(path: Path, id: str) -> Pcm:
    """Kept, as sessions share the clips: 32 kB a second."""
    return pcm16(Clip(id, path, "", 0.0, {}))
