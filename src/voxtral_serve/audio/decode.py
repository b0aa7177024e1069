"""Decode untrusted audio files to one channel of float32 samples, resample them, and write them as a WAV file.

Decoding reads block by block and stops at a limit, so a false header or a small file with hours of audio takes no more
memory than the longest clip allowed. libsndfile reads WAV, FLAC, MP3 and Ogg (Opus, Vorbis); other formats (M4A, WebM,
AMR) need PyAV, which vLLM's audio extra installs. Channels are averaged, as vLLM does.
"""

import io
import re
import struct
from collections.abc import Iterator
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import soundfile  # type: ignore[import-untyped,unused-ignore]

BLOCK_SAMPLES = 1 << 18  # of all channels together, decoded at a time
RATES_HZ = (2000, 384000)
CHANNELS = 32
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
READS = "WAV, FLAC, MP3, Ogg (Opus, Vorbis)" + (", M4A, WebM, AAC or AMR" if PYAV else "")
SOXR = find_spec("soxr") is not None


class AudioError(ValueError):
    """The file cannot be decoded. The message is for the client; `code` is a short name of the problem."""

    def __init__(self, message: str, code: str = "invalid_audio") -> None:
        super().__init__(message)
        self.code = code


class Bounds(NamedTuple):
    """The longest clip to decode, in seconds and in bytes of samples; `because` is the reason in the error message."""

    seconds: Fraction
    because: str
    most_bytes: int


class Clip(NamedTuple):
    """One channel of float32 samples, and their rate in Hz."""

    samples: np.ndarray
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def decode(data: bytes, bounds: Bounds, rate: int) -> Clip:
    """The samples of an audio file. Raises AudioError if it is no audio, is damaged, or is longer than `bounds`.

    `rate` is the model's, in Hz. The clip keeps the file's rate if PyAV is installed, with which vLLM resamples it;
    without PyAV, and from a format that only PyAV reads, the clip has the model's rate.
    """
    if not data:
        raise AudioError("the file is empty: expected audio", "empty_file")
    data = _without_id3(data)
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
        clip = _joined(_by_pyav(data, rate), rate, bounds, None)
    else:
        with file:
            if not RATES_HZ[0] <= file.samplerate <= RATES_HZ[1]:
                low, high = RATES_HZ
                raise AudioError(f"the file's sample rate is {file.samplerate} Hz: expected {low} to {high} Hz")
            if file.channels > CHANNELS:
                raise AudioError(f"the file has {file.channels} channels: expected at most {CHANNELS}")
            # A FLAC file written to a pipe has no length in its header; libsndfile then says 2**63 - 1.
            declared = file.frames if file.frames < 1 << 62 else None
            clip = _joined(_by_libsndfile(file), file.samplerate, bounds, declared)
            if file.format == "FLAC" and declared is not None and len(clip.samples) < declared:
                raise AudioError(
                    f"the file is cut short: it says {declared / clip.rate:.2f} s and holds {clip.seconds:.2f} s"
                )
    if not np.isfinite(clip.samples).all():
        raise AudioError("the file has samples that are no numbers (NaN or infinite)")
    if np.abs(clip.samples).max() > LOUDEST:
        raise AudioError(f"the file has samples beyond {LOUDEST:.0e}: expected float samples between -1 and 1")
    return clip if PYAV or clip.rate == rate else _resampled(clip, rate)


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
    while True:
        try:
            block = file.read(frames, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise AudioError(f"the file is damaged: {error.error_string.rstrip('.')}") from error
        yield block.T.mean(axis=0) if file.channels > 1 else block[:, 0]
        if len(block) < frames:
            return


def _by_pyav(data: bytes, rate: int) -> Iterator[np.ndarray]:
    import av  # type: ignore[import-not-found,unused-ignore]

    options = {"format_whitelist": DEMUXERS, "protocol_whitelist": ""}
    try:
        with av.open(io.BytesIO(data), options=options) as container:
            if not container.streams.audio:
                raise AudioError("the file holds no audio stream")
            resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
            for frame in container.decode(container.streams.audio[0]):
                for resampled in resampler.resample(frame):
                    yield resampled.to_ndarray()[0]
            for resampled in resampler.resample(None):
                yield resampled.to_ndarray()[0]
    except (av.FFmpegError, ValueError, OverflowError) as error:
        if isinstance(error, AudioError):
            raise
        why = getattr(error, "strerror", None) or error
        raise AudioError(
            f"the file is no audio that this server reads, or damaged ({why}): expected {READS}"
        ) from error


def _joined(blocks: Iterator[np.ndarray], rate: int, bounds: Bounds, declared: int | None) -> Clip:
    """All samples. Raises AudioError as soon as there are more than `bounds` allows.

    `declared` is the number of samples in the file's header, for the message.
    """
    most = min(int(bounds.seconds * rate), bounds.most_bytes // 4)
    kept, count = [], 0
    for block in blocks:
        kept.append(block)
        count += len(block)
        if count > most:
            lasts = f"more than {most / rate:.2f} s"
            if declared is not None and declared >= count:
                lasts = f"{declared / rate:.2f} s"
            if most < int(bounds.seconds * rate):
                raise AudioError(
                    f"the clip lasts {lasts} at {rate} Hz and this server decodes at most {most / rate:.2f} s at that "
                    "rate (its VLLM_MAX_AUDIO_DECODE_BYTES). Send it at 16000 Hz",
                    "clip_too_long",
                )
            raise AudioError(
                f"the clip lasts {lasts} and this server takes at most {float(bounds.seconds):.2f} s "
                f"({bounds.because}). Send a shorter clip, or in pieces",
                "clip_too_long",
            )
    if not count:
        raise AudioError("the file holds no samples: expected audio", "empty_audio")
    return Clip(kept[0] if len(kept) == 1 else np.concatenate(kept), rate)


def at(clip: Clip, rate: int) -> Clip:
    """The clip at another rate, in Hz."""
    if clip.rate == rate:
        return clip
    return _resampled(clip, rate) if SOXR else Clip(np.concatenate([*_by_pyav(wav(clip), rate)]), rate)


def _resampled(clip: Clip, rate: int) -> Clip:
    import soxr  # type: ignore[import-untyped,unused-ignore]

    samples = soxr.resample(clip.samples, clip.rate, rate)
    # The number of samples that vLLM's own resampling gives: the number of tokens depends on it.
    expected = -(-len(clip.samples) * rate // clip.rate)
    return Clip(np.pad(samples, (0, max(0, expected - len(samples))))[:expected], rate)


def wav(clip: Clip) -> bytes:
    """A WAV file of float32 samples, which readers return bit for bit."""
    samples = clip.samples.astype("<f4", copy=False).tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, clip.rate, clip.rate * 4, 4, 32)
    data = struct.pack("<4sI", b"data", len(samples))
    return b"".join(
        [struct.pack("<4sI4s", b"RIFF", 4 + len(form) + len(data) + len(samples), b"WAVE"), form, data, samples]
    )
