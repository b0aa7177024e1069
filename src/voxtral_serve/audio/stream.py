"""Audio that arrives in pieces: raw samples of several encodings to PCM16 at the model's rate.

The samples do not depend on how the audio is cut into pieces: a sample whose bytes are split waits for the rest, and
soxr resamples a stream as it would the whole.
"""

import io
from typing import Any, NamedTuple

import numpy as np
import soundfile  # type: ignore[import-untyped,unused-ignore]

RATES_HZ = (8000, 48000)


class StreamFormat(NamedTuple):
    """`encoding` is one of WIDTHS; `rate` is in Hz."""

    encoding: str
    rate: int


def _table(subtype: str) -> np.ndarray:
    """int16 [256]: the samples of the bytes of ITU-T G.711, by libsndfile."""
    every = io.BytesIO(bytes(range(256)))
    raw = {"samplerate": 8000, "channels": 1, "format": "RAW", "subtype": subtype}
    samples: np.ndarray = soundfile.read(every, dtype="int16", **raw)[0]
    return samples


# Bytes of one sample
WIDTHS = {"pcm_s16le": 2, "pcm_s32le": 4, "pcm_f16le": 2, "pcm_f32le": 4, "pcm_mulaw": 1, "pcm_alaw": 1}
TABLES = {"pcm_mulaw": _table("ULAW"), "pcm_alaw": _table("ALAW")}
FLOATS = {"pcm_f16le": "<f2", "pcm_f32le": "<f4"}


class StreamDecoder:
    """Bytes of one format to PCM16, mono, at `rate` (Hz)."""

    def __init__(self, form: StreamFormat, rate: int) -> None:
        self.form, self.rate = form, rate
        self._rest = b""  # of a sample
        self._resampler = self._new()

    def take(self, data: bytes) -> bytes:
        """PCM16 of what is decided by the bytes so far: a resampler answers a little later."""
        if self._rest:
            data = self._rest + data
        whole = len(data) - len(data) % WIDTHS[self.form.encoding]
        data, self._rest = data[:whole], data[whole:]
        if self.form.encoding == "pcm_s16le" and self._resampler is None:
            return data
        samples = self._samples(data)
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples)
        return _pcm16(samples)

    def flush(self) -> bytes:
        """The rest of the audio so far; what follows is another piece of audio. Half a sample is dropped."""
        self._rest = b""
        if self._resampler is None:
            return b""
        samples = self._resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        self._resampler = self._new()
        return _pcm16(samples)

    def _new(self) -> Any:
        if self.form.rate == self.rate:
            return None
        import soxr  # type: ignore[import-untyped,unused-ignore]

        return soxr.ResampleStream(self.form.rate, self.rate, 1, dtype="float32")

    def _samples(self, data: bytes) -> np.ndarray:
        """float32 [n], between -1 and 1."""
        encoding = self.form.encoding
        if encoding in TABLES:
            return TABLES[encoding][np.frombuffer(data, np.uint8)].astype(np.float32) / 2**15
        if encoding in FLOATS:
            with np.errstate(all="ignore"):
                samples = np.frombuffer(data, FLOATS[encoding]).astype(np.float32)
            return np.clip(np.nan_to_num(samples), -1, 1)
        if encoding == "pcm_s32le":
            return (np.frombuffer(data, "<i4") / 2**31).astype(np.float32)
        return np.frombuffer(data, "<i2").astype(np.float32) / 2**15


def _pcm16(samples: np.ndarray) -> bytes:
    return np.rint(samples * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes()
