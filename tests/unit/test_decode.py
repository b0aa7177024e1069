"""Audio files decoded within limits."""

import io
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import inputs
import numpy as np
import pytest
import soundfile
from guarding import BOUNDS, RATE

from voxtral_serve.audio import decode


def test_the_longest_clip_is_exact() -> None:
    longest = np.zeros(4 * RATE + 1, np.float32)
    assert decode.decode(inputs.encoded(longest[:-1]), BOUNDS, RATE).seconds == 4
    with pytest.raises(decode.AudioError, match=r"lasts 4\.00 s and this server takes at most 4\.00 s"):
        decode.decode(inputs.encoded(longest), BOUNDS, RATE)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_no_other_rate_makes_a_clip_longer(rate: int) -> None:
    """At the model's rate, a clip of the longest length has no sample more than the longest clip."""
    clip = decode.decode(inputs.encoded(np.zeros(4 * rate, np.float32), rate), BOUNDS, RATE)
    assert (len(clip.samples), clip.rate) == (4 * RATE, RATE)
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


@pytest.mark.parametrize("rate", [8000, RATE, 48000])
def test_bytes_of_samples_are_bounded(rate: int) -> None:
    """Those at the model's rate, whatever the file's."""
    small = BOUNDS._replace(most_bytes=4 * RATE)
    clip = inputs.encoded(np.zeros((rate + 2, 2), np.float32), rate)
    with pytest.raises(decode.AudioError, match=r"decodes at most 1\.00 s \(its VLLM_MAX_AUDIO_DECODE_BYTES\)"):
        decode.decode(clip, small, RATE)
    assert len(decode.decode(inputs.encoded(np.zeros((rate, 2), np.float32), rate), small, RATE).samples) == RATE


def noise(seconds: float, rate: int, channels: int) -> np.ndarray:
    """float32 [samples, channels]"""
    made = np.random.default_rng(rate + channels).uniform(-0.5, 0.5, (round(seconds * rate), channels))
    return made.astype(np.float32)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG"])
@pytest.mark.parametrize("rate", [RATE, 44100])
def test_a_channel_by_itself(form: str, rate: int) -> None:
    """As a file of it alone has it; of lossless formats, to the bit."""
    spread = noise(2.5, rate, 3)
    whole = inputs.encoded(spread, rate, form)
    for channel in range(3):
        (samples,) = (np.concatenate([*decode.blocks(whole, BOUNDS, RATE, channel)]),)
        alone = decode.decode(inputs.encoded(spread[:, channel], rate, form), BOUNDS, RATE).samples
        assert samples.flags.c_contiguous and len(samples) == len(alone)
        if form != "OGG":
            np.testing.assert_array_equal(samples, alone)
    for channel, content in ((3, whole), (1, inputs.encoded(spread[:, 0], rate, form))):
        with pytest.raises(decode.AudioError, match=r"the file has [13] channels") as error:
            [*decode.blocks(content, BOUNDS._replace(seconds=Fraction(1, 100)), RATE, channel)]
        assert error.value.code == decode.NO_CHANNEL


def test_more_channels_than_are_decoded_by_themselves() -> None:
    eight, nine = (inputs.encoded(noise(0.1, RATE, channels)) for channels in (8, 9))
    assert [*decode.blocks(eight, BOUNDS, RATE, 7)] and decode.decode(nine, BOUNDS, RATE)
    with pytest.raises(decode.AudioError, match="the file has 9 channels: expected at most 8 separate ones") as error:
        [*decode.blocks(nine, BOUNDS, RATE, 0)]
    assert error.value.code == "too_many_channels"


RATES = [2000, 8000, 11025, 22050, 24000, 44100, 48000, 96000, 192000, 384000]


@pytest.mark.skipif(not decode.PYAV, reason="vLLM resamples with PyAV")
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("seconds", [0.01, 3.7])
def test_samples_are_those_of_vllms_resampler(rate: int, channels: int, seconds: float) -> None:
    """Bit for bit, though they are resampled block by block."""
    from vllm.multimodal.audio import resample_audio_pyav

    spread = noise(seconds, rate, channels)
    whole = np.mean(spread.T, axis=0) if channels > 1 else spread[:, 0]
    expected = resample_audio_pyav(whole, orig_sr=rate, target_sr=RATE)
    clip = decode.decode(inputs.encoded(spread, rate, subtype="FLOAT"), BOUNDS, RATE)
    assert clip.samples.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rate", RATES)
def test_blocks_resampled_with_soxr_are_a_clip_resampled_at_once(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyAV is not installed. Bit for bit."""
    import soxr

    monkeypatch.setattr(decode, "PYAV", False)
    monkeypatch.setattr(decode, "BLOCK_SAMPLES", 1 << 12)
    monkeypatch.setattr(decode, "LEAST_SAMPLES", 1 << 10)
    samples = noise(3.7, rate, 1)
    expected = soxr.resample(samples[:, 0], rate, RATE)
    clip = decode.decode(inputs.encoded(samples, rate, subtype="FLOAT"), BOUNDS, RATE)
    assert clip.samples[: len(expected)].tobytes() == expected.tobytes()
    assert len(clip.samples) == -(-len(samples) * RATE // rate) <= len(expected) + 1


def test_few_samples_are_kept() -> None:
    """Less than a resampler needs for its first output."""
    for rate in (8000, 48000):
        assert len(decode.decode(inputs.encoded(np.zeros(1, np.float32), rate), BOUNDS, RATE).samples) >= 1


# ---- Rates and channels of each decoder


def matroska(samples: np.ndarray, rate: int, channels: int = 1, packets: int = 1) -> bytes:
    """A file that only PyAV reads: packets of 8-bit samples of one channel, whose header says `channels`."""
    import av

    data = io.BytesIO()
    with av.open(data, "w", format="matroska") as container:
        stream = container.add_stream("pcm_u8", rate=rate)
        stream.layout = "mono"
        for part in np.array_split(samples.reshape(1, -1), packets, axis=1):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(part), format="u8", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    header = b"\x9f\x81"  # Channels, of one byte
    assert data.getvalue().count(header + b"\x01") == 1
    return data.getvalue().replace(header + b"\x01", header + bytes([channels]))


def wav(samples: np.ndarray, rate: int, channels: int) -> bytes:
    """A file of 8-bit samples that libsndfile reads."""
    spread = (samples.astype(np.int16) - 128 << 8).reshape(-1, channels)
    return inputs.encoded(spread, rate, subtype="PCM_U8")


MAKERS = {"libsndfile": wav, "PyAV": matroska}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[np.ndarray, int, int], bytes]:
    """A file of 8-bit samples that one of the decoders reads."""
    if request.param == "PyAV" and not decode.PYAV:
        pytest.skip("PyAV is not installed")
    maker: Callable[[np.ndarray, int, int], bytes] = MAKERS[request.param]
    return maker


@pytest.mark.parametrize("rate", [700, 1999, 384001])
def test_rates_are_bounded(make: Any, rate: int) -> None:
    with pytest.raises(decode.AudioError, match=f"sample rate is {rate} Hz: expected 2000 to 384000 Hz"):
        decode.decode(make(np.full(1 << 10, 128, np.uint8), rate, 1), BOUNDS, RATE)


@pytest.mark.parametrize("channels", [33, 100])
def test_channels_are_bounded(make: Any, channels: int) -> None:
    with pytest.raises(decode.AudioError, match=f"has {channels} channels: expected at most 32"):
        decode.decode(make(np.full(100 * channels, 128, np.uint8), RATE, channels), BOUNDS, RATE)


@pytest.mark.parametrize("channels", [1, 2, 8, 9, 32])
def test_channels_are_averaged(channels: int) -> None:
    """PyAV alone crashes on frames of eight planes."""
    if not decode.PYAV:
        pytest.skip("PyAV is not installed")
    spread = np.random.default_rng(0).integers(0, 256, (1000, channels), np.uint8)
    clip = decode.decode(matroska(spread, RATE, channels), BOUNDS, RATE)
    np.testing.assert_allclose(clip.samples, (spread.astype(np.float32) / 128 - 1).mean(1), atol=1e-6)


def test_the_number_of_frames_is_bounded() -> None:
    """Each takes time, however short it is: those of one sample would take minutes for a clip of seconds."""
    if not decode.PYAV:
        pytest.skip("PyAV is not installed")
    samples = np.full(3 * RATE, 128, np.uint8)
    assert len(decode.decode(matroska(samples, RATE, packets=1200), BOUNDS, RATE).samples) == len(samples)
    with pytest.raises(decode.AudioError, match="more than 500 frames a second"):
        decode.decode(matroska(samples, RATE, packets=len(samples)), BOUNDS, RATE)


def test_blocks_are_joined_in_linear_time() -> None:
    class Counted(np.ndarray):
        looks = 0

        def __len__(self) -> int:
            Counted.looks += 1
            return 1

    blocks = [np.ones(1, np.float32).view(Counted) for _ in range(2 * decode.LEAST_SAMPLES + 1)]
    assert sum(joined.size for joined in decode._joined(iter(blocks))) == len(blocks)
    assert len(blocks) <= Counted.looks <= 2 * len(blocks)


def test_one_large_packet_is_counted_before_it_is_resampled(make: Any) -> None:
    """At 2 kHz, 16 MB would become half a gigabyte at 16 kHz."""
    data = make(np.full(1 << 24, 128, np.uint8), 2000, 1)
    tracemalloc.start()
    try:
        with pytest.raises(decode.AudioError, match=r"at most 4\.00 s"):
            decode.decode(data, BOUNDS, RATE)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(data)
    finally:
        tracemalloc.stop()
