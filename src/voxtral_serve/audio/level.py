"""Loudness of audio in frames of 10 ms: raise quiet clips, level clips out, and find the loud frames.

Levels are in dB relative to a full-scale square wave, so they are at most 0 for samples between -1 and 1.
"""

from typing import Any

import numpy as np

from voxtral_serve.audio.decode import Clip

FRAME_S = 0.01
# The level of a clip is that of the loudest hundredth of its frames. Speech at -42 dB still stands out of the
# spectrogram's floor; clips at this level and above are not changed.
QUIET_DB = -42.0
# The level that quieter clips are raised to. A higher one raises their noise as well: with pico, -24 and -17 dBFS gave
# more word errors than the clips as they were, and this level fewer.
NORMAL_DB = -28.0
MOST_DB = 60.0  # of gain
# `voiced` puts its threshold at this part of the way, in dB, from the quietest frames to the loudest.
GATE = 0.3


def raised(clip: Clip) -> Clip:
    """The clip at NORMAL_DB if its level is under QUIET_DB, else the same object. Silence stays silence."""
    power = _power(clip.samples, max(1, round(clip.rate * FRAME_S)))
    if not power.size:
        return clip
    level = decibels(np.percentile(power, 99))
    if level >= QUIET_DB:
        return clip
    gain = 10 ** (min(NORMAL_DB - level, MOST_DB) / 20)
    return clip._replace(samples=np.clip(clip.samples * np.float32(gain), -1, 1))


def levelled(samples: np.ndarray, rate: int) -> np.ndarray:
    """float32 [n]: samples [n] at `rate` (Hz) with every second brought to NORMAL_DB.

    Silero VAD needs this: after a loud voice it misses a quiet one.
    """
    count = -(-len(samples) // rate)
    power = _power(np.pad(samples, (0, count * rate - len(samples))), round(rate * FRAME_S))
    seconds = np.pad(power.reshape(count, -1), ((1, 1), (0, 0)), "edge")
    around = np.concatenate([seconds[:-2], seconds[1:-1], seconds[2:]], axis=1)
    gain = np.minimum(NORMAL_DB - decibels(np.percentile(around, 99, axis=1)), MOST_DB)
    of_sample = np.interp(np.arange(len(samples)), (np.arange(count) + 0.5) * rate, gain)
    return np.clip(samples * (10 ** (of_sample / 20)).astype(np.float32), -1, 1)


def voiced(samples: np.ndarray, rate: int) -> np.ndarray:
    """bool [n]: for each FRAME_S of samples at `rate` (Hz), whether there is speech or another sound as loud."""
    return loud_frames(_power(samples, round(rate * FRAME_S)))


def loud_frames(power: np.ndarray) -> np.ndarray:
    """bool [n]: of frames of FRAME_S with this power, as in `voiced`."""
    smooth = np.convolve(power, np.ones(3) / 3, "same") if power.size else power
    level = 10 * np.log10(smooth + 1e-12)
    low, high = np.percentile(level, (5, 95)) if power.size else (0.0, 0.0)
    loud: np.ndarray = level > low + GATE * (high - low)
    return loud


def _power(samples: np.ndarray, hop: int) -> np.ndarray:
    """float64 [n]: the mean square of each frame of `hop` samples."""
    frames = samples[: len(samples) // hop * hop].reshape(-1, hop)
    power: np.ndarray = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / hop
    return power


def decibels(power: Any) -> Any:
    """The level in dB of a mean square, a number or an array."""
    return 10 * np.log10(power + 1e-20)


class StreamPower:
    """The power of each FRAME_S of audio that arrives in pieces. Frames count from the beginning of the stream."""

    def __init__(self, rate: int) -> None:
        self.hop = round(rate * FRAME_S)
        self.first = 0  # number of the first frame that is kept
        self._frames: list[np.ndarray] = []
        self._rest = b""

    def take(self, pcm: bytes) -> None:
        """PCM16."""
        data = self._rest + pcm
        whole = len(data) - len(data) % (2 * self.hop)
        self._rest = data[whole:]
        if whole:
            self._frames.append(_power(np.frombuffer(data[:whole], "<i2").astype(np.float32) / 2**15, self.hop))

    @property
    def last(self) -> int:
        """Frames so far."""
        return self.first + len(self._joined())

    def power(self, first: int, last: int) -> np.ndarray:
        """float64 [n]: of frames `first` to `last - 1`, as far as they are there."""
        kept = self._joined()
        return kept[max(0, first - self.first) : max(0, last - self.first)]

    def forget(self, first: int) -> None:
        """The frames before this one."""
        kept = self._joined()
        dropped = min(max(0, first - self.first), len(kept))
        self._frames = [kept[dropped:]]
        self.first += dropped

    def _joined(self) -> np.ndarray:
        if len(self._frames) != 1:
            self._frames = [np.concatenate(self._frames) if self._frames else np.zeros(0)]
        return self._frames[0]
