"""The sound of a live session: a clip, or clips of the dataset joined until the wanted seconds are filled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from bench import BenchError
from bench.dataset import APART_S, Clip
from mistral_layout.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN

Samples = npt.NDArray[np.int16]


@dataclass(frozen=True)
class SessionClip(Clip):
    """`parts` one after the other, and silence until `age_s` + `duration_s` seconds are full.

    The first `age_s` seconds are sent faster than speech and not measured. `text` and the words are those of all of it.
    """

    parts: tuple[Clip, ...] = ()
    age_s: float = 0.0


class Sound:
    """16 kHz mono PCM16 of several parts and then silence, which are joined only where they are read."""

    def __init__(self, parts: Sequence[Samples], samples: int | None = None) -> None:
        """Of so many samples; null for those of the parts."""
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.samples = self._ends[-1] if samples is None else samples

    def read(self, begin: int, count: int) -> Samples:
        """At most `count` samples from sample `begin` on."""
        end = min(begin + count, self.samples)
        found = np.zeros(end - begin, dtype="<i2")
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while number < len(self._parts) and (start := self._ends[number] - len(self._parts[number])) < end:
            low, high = max(begin, start), min(end, self._ends[number])
            found[low - begin : high - begin] = self._parts[number][low - start : high - start]
            number += 1
        return found


def of(clip: Clip) -> Sound:
    """Decode a clip. Raises BenchError if its file cannot be decoded."""
    if isinstance(clip, SessionClip):
        return Sound([_kept(part) for part in clip.parts], round((clip.age_s + clip.duration_s) * SAMPLE_RATE))
    return Sound([pcm16(clip)])


def pcm16(clip: Clip) -> Samples:
    """The clip's samples: mono, 16 kHz, int16. Raises BenchError if its file cannot be decoded."""
    try:
        samples, rate = soundfile.read(clip.path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise BenchError(f"cannot decode {clip.path.name} of clip {clip.id}: {error}") from None
    mono = samples.mean(axis=1)
    if rate != SAMPLE_RATE:
        mono = soxr.resample(mono, rate, SAMPLE_RATE)
    if not len(mono):
        raise BenchError(f"{clip.path.name} of clip {clip.id} has no samples")
    found: Samples = (mono.clip(-1, 1) * 32767).round().astype("<i2")
    return found


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
    whole, used = round((age_s + seconds) * SAMPLE_RATE), 0
    order = random.Random(f"{seed} {number}").sample(clips, len(clips))
    parts: list[Clip] = []
    words: list[list[object]] | None = []
    while fitting := [clip for clip in order if _fits(clip, whole - used)] or order[: not parts]:
        for clip in fitting:
            begin, length = used / SAMPLE_RATE, len(_kept(clip))
            if parts and not _fits(clip, whole - used):
                continue
            told = clip.extra.get("words")
            words = None if told is None or words is None else words + [[w, s + begin, e + begin] for w, s, e in told]
            parts.append(clip)
            used += length
    text = " ".join(clip.text for clip in parts)
    if used > whole and words is not None:
        words = [word for word in words if float(str(word[2])) <= whole / SAMPLE_RATE]
        text = " ".join(str(word[0]) for word in words) or text
    extra = {} if words is None else {"words": words}
    return SessionClip(f"session-{number:04}", parts[0].path, text, seconds, extra, tuple(parts), age_s)


def _fits(clip: Clip, samples: int) -> bool:
    """Told by the stated duration where that is enough, as decoding takes a while."""
    return clip.duration_s - APART_S <= samples / SAMPLE_RATE and len(_kept(clip)) <= samples


def whole_pieces(seconds: float) -> float:
    """Rounded up to whole pieces of 80 ms."""
    piece_s = SAMPLES_PER_TOKEN / SAMPLE_RATE
    return round(np.ceil(round(seconds / piece_s, 6)) * piece_s, 6)


def _kept(clip: Clip) -> Samples:
    return _decoded(clip.path, clip.id)


@cache
def _decoded(path: Path, id: str) -> Samples:
    """Kept, as sessions share the clips: 32 kB a second."""
    return pcm16(Clip(id, path, "", 0.0, {}))
