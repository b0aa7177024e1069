"""Audio files decoded within limits."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import soundfile
from guarding import BOUNDS, RATE, SAMPLES

from tools import inputs
from voxtral_serve.audio import decode


def test_the_longest_clip_is_exact() -> None:
    longest = np.zeros(4 * RATE + 1, np.float32)
    assert decode.decode(inputs.encoded(longest[:-1]), BOUNDS, RATE).seconds == 4
    with pytest.raises(decode.AudioError, match=r"lasts 4\.00 s and this server takes at most 4\.00 s"):
        decode.decode(inputs.encoded(longest), BOUNDS, RATE)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_no_other_rate_makes_a_clip_longer(rate: int) -> None:
    """Once at the model's rate, a clip of the longest length has no sample more than the longest clip."""
    clip = decode.decode(inputs.encoded(np.zeros(4 * rate, np.float32), rate), BOUNDS, RATE)
    assert len(clip.samples) * Fraction(RATE, clip.rate) == 4 * RATE
    with pytest.raises(decode.AudioError, match="at most"):
        decode.decode(inputs.encoded(np.zeros(4 * rate + 1, np.float32), rate), BOUNDS, RATE)


def test_no_more_is_decoded_than_the_longest_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two hours in a small file: a block past the limit, and no more."""
    hours = inputs.encoded(np.zeros(2 * 3600 * RATE, np.int16), RATE, "FLAC")
    assert len(hours) < 1 << 20
    read: list[int] = []

    class Counting(soundfile.SoundFile):  # type: ignore[misc,unused-ignore]
        def read(self, *args: Any, **kwargs: Any) -> Any:
            block = super().read(*args, **kwargs)
            read.append(len(block))
            return block

    monkeypatch.setattr(decode.soundfile, "SoundFile", Counting)
    with pytest.raises(decode.AudioError, match=r"lasts 7200\.00 s"):
        decode.decode(hours, BOUNDS, RATE)
    assert 4 * RATE < sum(read) <= 4 * RATE + decode.BLOCK_SAMPLES


def test_bytes_of_samples_are_bounded() -> None:
    small = BOUNDS._replace(most_bytes=4 * RATE)
    with pytest.raises(decode.AudioError, match="VLLM_MAX_AUDIO_DECODE_BYTES"):
        decode.decode(inputs.encoded(SAMPLES), small, RATE)
