"""Decode untrusted audio files to one channel of float32 samples at the model's rate.

Decoding reads block by block, folds the channels to one and resamples each block, and stops at a limit. A false header
or a small file with hours of audio therefore takes no more memory than the longest clip allowed. libsndfile reads WAV,
FLAC, MP3 and Ogg (Opus, Vorbis); other formats (M4A, WebM, AMR) need PyAV, which vLLM's audio extra installs. The
server runs this in processes of its own (audio.decode_worker).
"""

import io
import itertools
import re
import struct
from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import soundfile  # type: ignore[import-untyped,unused-ignore]

# Of all channels together, decoded at a time: a block stays in the processor's cache, and its memory is used again
BLOCK_SAMPLES = 1 << 16
LEAST_SAMPLES = 1 << 14  # of one channel, resampled at a time
SHORTEST_SAMPLES = 1024  # of a clip that is resampled; a shorter one is padded (vllm.multimodal.audio)
RATES_HZ = (2000, 384000)
CHANNELS, SEPARATE = 32, 8  # of a file; and of one that is decoded channel by channel
# Frames for each second of a file that PyAV reads, and some more at its beginning; Opus has 400. A frame takes some
# 70 us, however short it is.
FRAMES_A_SECOND, FIRST_FRAMES = 500, 1000
TAGS = 8  # ID3 tags before an MP3; a file with more of them is refused
# The largest absolute value of a float sample. Samples should lie between -1 and 1; this leaves room for recordings
# scaled as 16-bit integers, and the sum of squares does not overflow in the spectrogram.
LOUDEST = 1e6
# FFmpeg's names of the formats that PyAV may read. No playlists: FFmpeg would open the files and URLs that they name.
DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,amr,amrnb,amrwb,aac,ogg,mp3,asf,caf,aiff,wav,flac"
# First bytes of the files that libsndfile reads here: WAV, RF64, W64, FLAC, Ogg, AU, CAF; AIFF and MP3. Other formats
# that it knows can take minutes, such as 8SVX with many empty chunks.
MAGIC = (b"RIFF", b"RF64", b"riff\x2e\x91\xcf\x11", b"fLaC", b"OggS", b".snd", b"caff")
FORMS = re.compile(rb"FORM.{4}AIF[FC]|\xff[\xe0-\xff]", re.DOTALL)
PYAV = find_spec("av") is not None
NO_CHANNEL = "no_channel"  # code of the error for a channel that the file does not have
CODES = ("invalid_audio", "empty_file", "empty_audio", "clip_too_long", "too_many_channels", NO_CHANNEL)
READS = "WAV, FLAC, MP3, Ogg (Opus, Vorbis)" + (", M4A, WebM, AAC or AMR" if PYAV else "")
SOXR = find_spec("soxr") is not None


class AudioError(ValueError):
    """The file cannot be decoded. The message is for the client; `code` is a short name of the problem: of CODES."""

    def __init__(self, message: str, code: str = "invalid_audio") -> None:
        super().__init__(message)
        self.code = code


class Bounds(NamedTuple):
    """The longest clip to decode, in seconds and in bytes of samples; `because` is the reason in the error message."""

    seconds: Fraction
    because: str
    most_bytes: int

    def bytes_at(self, rate: int) -> int:
        """Bytes of the samples of the longest clip at `rate` Hz."""
        return min(int(self.seconds * rate) * 4, self.most_bytes)


class Clip(NamedTuple):
    """One channel of float32 samples, and their rate in Hz."""

    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


class Source(NamedTuple):
    """An audio file that is being decoded.

    rate      of the file, in Hz
    declared  the number of samples of a channel in the file's header; None if the header does not say
    exact     whether a file with fewer samples than declared is damaged
    blocks    float32 samples of shape (samples, channels)
    """

    rate: int
    declared: int | None
    exact: bool
    blocks: Iterator[np.ndarray]


def decode(data: bytes, bounds: Bounds, rate: int) -> Clip:
    """The samples of an audio file at `rate` Hz.

    Raises AudioError if it is no audio, is damaged, or is longer than `bounds`.
    """
    return Clip(np.concatenate([*blocks(data, bounds, rate)]), rate)


def blocks(data: bytes, bounds: Bounds, rate: int, channel: int | None = None) -> Iterator[np.ndarray]:
    """The samples of an audio file at `rate` Hz, block by block: the mean of its channels, or those of one, from 0.

    Raises AudioError as `decode` does, also after the first blocks; and with NO_CHANNEL if there is no such channel.
    """
    if not data:
        raise AudioError("the file is empty: expected audio", "empty_file")
    source = _opened(_without_id3(data))
    for block in _resampled(_bounded(source, bounds, rate, channel), source.rate, rate):
        if not np.isfinite(block).all():
            raise AudioError("the file has samples that are no numbers (NaN or infinite)")
        if np.abs(block).max() > LOUDEST:
            raise AudioError(f"the file has samples beyond {LOUDEST:.0e}: expected float samples between -1 and 1")
        yield block


def folded(block: np.ndarray) -> np.ndarray:
    """One channel of a block of shape (samples, channels): the mean of its channels, as in vLLM."""
    mean: np.ndarray = block.T.mean(axis=0) if block.shape[1] > 1 else block[:, 0]
    return mean


def _bounded(source: Source, bounds: Bounds, rate: int, channel: int | None) -> Iterator[np.ndarray]:
    """The blocks with one channel. Raises AudioError as soon as there are more samples than `bounds` allows.

    The limit in bytes is that of the samples at `rate` Hz.
    """
    by_bytes = Fraction(bounds.most_bytes // 4, rate)
    most = int(min(bounds.seconds, by_bytes) * source.rate)
    count, declared = 0, source.declared
    for block in source.blocks:
        if channel is not None and not channel < block.shape[1] <= SEPARATE:
            said = f"the file has {block.shape[1]} channels: expected at most {SEPARATE} separate ones"
            raise AudioError(said, NO_CHANNEL) if channel >= block.shape[1] else AudioError(said, "too_many_channels")
        count += len(block)
        if count > most:
            lasts = f"more than {most / source.rate:.2f} s"
            if declared is not None and declared >= count:
                lasts = f"{declared / source.rate:.2f} s"
            if by_bytes < bounds.seconds:
                raise AudioError(
                    f"the clip lasts {lasts} and this server decodes at most {float(by_bytes):.2f} s (its "
                    "VLLM_MAX_AUDIO_DECODE_BYTES). Send a shorter clip, or in pieces",
                    "clip_too_long",
                )
            raise AudioError(
                f"the clip lasts {lasts} and this server takes at most {float(bounds.seconds):.2f} s "
                f"({bounds.because}). Send a shorter clip, or in pieces",
                "clip_too_long",
            )
        if len(block):
            yield folded(block) if channel is None else np.ascontiguousarray(block[:, channel])
    if not count:
        raise AudioError("the file holds no samples: expected audio", "empty_audio")
    if source.exact and declared is not None and count < declared:
        raise AudioError(
            f"the file is cut short: it says {declared / source.rate:.2f} s and holds {count / source.rate:.2f} s"
        )


def _opened(data: bytes) -> Source:
    """The file, whose rate and channels are within limits. Raises AudioError."""
    try:
        if not (data.startswith(MAGIC) or FORMS.match(data)):
            raise AudioError("of another format")
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.LibsndfileError, AudioError) as error:
        if not PYAV:
            raise AudioError(
                f"the file is no audio that this server reads: expected {READS} (other formats need the package `av` "
                "on the server)"
            ) from error
        decoded = _by_pyav(data)
        rate, first = next(decoded)
        return Source(rate, None, False, itertools.chain([first], (block for _, block in decoded)))
    _check(file.samplerate, file.channels)
    # A FLAC file written to a pipe has no length in its header; libsndfile then says 2**63 - 1.
    declared = file.frames if file.frames < 1 << 62 else None
    return Source(file.samplerate, declared, file.format == "FLAC", _by_libsndfile(file))


def _check(rate: int, channels: int) -> None:
    """Raises AudioError if a file's sample rate or number of channels is beyond the limits."""
    low, high = RATES_HZ
    if not low <= rate <= high:
        raise AudioError(f"the file's sample rate is {rate} Hz: expected {low} to {high} Hz")
    if channels > CHANNELS:
        raise AudioError(f"the file has {channels} channels: expected at most {CHANNELS}")


def _without_id3(data: bytes) -> bytes:
    """The data without ID3 tags at its beginning: behind one, libsndfile accepts any of its formats."""
    start = 0
    for _ in range(TAGS):
        if data[start : start + 3] != b"ID3":
            break
        seven_bits_each = data[start + 6 : start + 10]
        start += 10 + sum((byte & 0x7F) << 7 * (3 - index) for index, byte in enumerate(seven_bits_each))
    return data[start:]


def _by_libsndfile(file: Any) -> Iterator[np.ndarray]:
    frames = max(1, BLOCK_SAMPLES // file.channels)
    with file:
        while True:
            try:
                block = file.read(frames, dtype="float32", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise AudioError(f"the file is damaged: {error.error_string.rstrip('.')}") from error
            yield block
            if len(block) < frames:
                return


def _by_pyav(data: bytes) -> Iterator[tuple[int, np.ndarray]]:
    """(the file's rate in Hz, a block of shape (samples, channels)) for each frame. At least one. Raises AudioError."""
    import av  # type: ignore[import-not-found,unused-ignore]

    options = {"format_whitelist": DEMUXERS, "protocol_whitelist": ""}
    count, frames, form = 0, 0, None
    try:
        with av.open(io.BytesIO(data), options=options) as container:
            if not container.streams.audio:
                raise AudioError("the file holds no audio stream")
            stream = container.streams.audio[0]
            codec = stream.codec_context
            codec.thread_count = 1
            if codec.sample_rate:  # 0 if only the frames have it
                _check(codec.sample_rate, codec.channels)
            packed = av.AudioResampler(format="flt")  # PyAV crashes in reading a frame of eight planes
            for frame in container.decode(stream):
                _check(frame.sample_rate, frame.layout.nb_channels)
                frames += 1
                if frames > FIRST_FRAMES + FRAMES_A_SECOND * count / frame.sample_rate:
                    raise AudioError(f"the file has more than {FRAMES_A_SECOND} frames a second: expected longer ones")
                form = form or (frame.format.name, frame.sample_rate, frame.layout.nb_channels)
                if form != (frame.format.name, frame.sample_rate, frame.layout.nb_channels):
                    raise AudioError("the file changes its sample rate or its channels: expected one of each")
                for converted in packed.resample(frame):
                    count += converted.samples
                    yield frame.sample_rate, converted.to_ndarray().reshape(converted.samples, -1)
    except (av.FFmpegError, ValueError, OverflowError) as error:
        if isinstance(error, AudioError | MemoryError):
            raise
        why = getattr(error, "strerror", None) or error
        raise AudioError(
            f"the file is no audio that this server reads, or damaged ({why}): expected {READS}"
        ) from error
    if not count:
        raise AudioError("the file holds no samples: expected audio", "empty_audio")


def _resampled(blocks: Iterator[np.ndarray], source_rate: int, rate: int) -> Iterator[np.ndarray]:
    """Blocks of one channel at `rate` Hz, of at least one sample each: bit for bit those of vLLM's resampler.

    There are as many samples as vLLM's resampler returns: the number of tokens depends on it.
    """
    if source_rate == rate:
        yield from blocks
        return
    read = written = 0

    def counted() -> Iterator[np.ndarray]:
        nonlocal read
        for block in _joined(blocks):
            read += len(block)
            yield block

    resample = _resampled_by_pyav if PYAV else _resampled_by_soxr
    for block in resample(counted(), source_rate, rate):
        kept = block[: -(-read * rate // source_rate) - written]
        written += len(kept)
        if len(kept):
            yield kept
    if missing := -(-read * rate // source_rate) - written:
        yield np.zeros(missing, np.float32)


def _joined(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same samples in blocks of at least LEAST_SAMPLES; only the last may have fewer."""
    kept: list[np.ndarray] = []
    count = 0
    for block in blocks:
        kept.append(block)
        count += len(block)
        if count >= LEAST_SAMPLES:
            yield np.concatenate(kept)
            kept.clear()
            count = 0
    if kept:
        yield np.concatenate(kept)


def _resampled_by_pyav(blocks: Iterator[np.ndarray], source_rate: int, rate: int) -> Iterator[np.ndarray]:
    import av

    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    count = 0
    for block in blocks:
        count += len(block)
        # vLLM too pads a short clip: the resampler needs as many samples for its first output.
        padded = np.pad(block, (0, max(0, SHORTEST_SAMPLES - count)))
        frame = av.AudioFrame.from_ndarray(padded.reshape(1, -1), format="fltp", layout="mono")
        frame.sample_rate = source_rate
        for resampled in resampler.resample(frame):
            yield resampled.to_ndarray()[0]
    for resampled in resampler.resample(None):
        yield resampled.to_ndarray()[0]


def _resampled_by_soxr(blocks: Iterator[np.ndarray], source_rate: int, rate: int) -> Iterator[np.ndarray]:
    import soxr  # type: ignore[import-untyped,unused-ignore]

    stream = soxr.ResampleStream(source_rate, rate, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def wav(clip: Clip) -> bytes:
    """A WAV file of float32 samples, which readers return bit for bit."""
    samples = clip.samples.astype("<f4", copy=False).tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, clip.rate, clip.rate * 4, 4, 32)
    data = struct.pack("<4sI", b"data", len(samples))
    return b"".join(
        [struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data) + len(samples), b"WAVE"), form, data, samples]
    )
