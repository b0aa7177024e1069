"""Recordings as the model hears them: mono, 16 kHz, as float32 in -1 to 1 or as PCM16."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from .errors import MeasureError

RATE_HZ = 16000
TOKEN = 1280  # samples of audio for each token of the text
TOKEN_S = TOKEN / RATE_HZ
FULL_SCALE = 32767  # of PCM16

Samples = npt.NDArray[np.float32]
Pcm = npt.NDArray[np.int16]


def read(path: Path, name: str) -> Samples:
    """The samples of a file, [n]. Raises MeasureError, which calls the file `name`, if it cannot be decoded."""
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise MeasureError(f"cannot decode {name}: {error}") from None
    mono: Samples = samples.mean(axis=1)
    if rate != RATE_HZ:
        import soxr  # for other rates only

        mono = soxr.resample(mono, rate, RATE_HZ)
    if not len(mono):
        raise MeasureError(f"{name} has no samples")
    return mono


def pcm16(samples: Samples) -> Pcm:
    pcm: Pcm = (samples.clip(-1, 1) * FULL_SCALE).round().astype("<i2")
    return pcm


class Sound:
    """PCM16 of several parts and then silence, which are joined only where they are read."""

    def __init__(self, parts: Sequence[Pcm], samples: int | None = None) -> None:
        """Of so many `samples`; None for those of the parts."""
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.samples = self._ends[-1] if samples is None else samples

    def read(self, begin: int, count: int) -> Pcm:
        """At most `count` samples from sample `begin` on."""
        end = min(begin + count, self.samples)
        samples = np.zeros(end - begin, dtype="<i2")
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while number < len(self._parts) and (start := self._ends[number] - len(self._parts[number])) < end:
            low, high = max(begin, start), min(end, self._ends[number])
            samples[low - begin : high - begin] = self._parts[number][low - start : high - start]
            number += 1
        return samples
