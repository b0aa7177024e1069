"""Audio for a live session: a file at the pace of speech, or the microphone. Pieces of PCM16, mono, 16 kHz."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from voxtral_serve.client.errors import UsageError
from voxtral_serve.client.text import shown
from voxtral_serve.measure.sound import RATE_HZ, TOKEN, TOKEN_S, pcm16

POLL_S = 0.1  # interval at which the microphone checks for the end of the session


def spoken(path: Path, ending: threading.Event) -> Iterator[bytes]:
    """The pieces of a file in real time: each at the time of its last sample. Ends early once `ending` is set.

    Raises UsageError at once if the file cannot be decoded.
    """
    try:
        file = soundfile.SoundFile(path)
    except (OSError, soundfile.SoundFileError) as error:
        raise UsageError(f"{shown(path)} cannot be decoded: {error}") from None
    return _spoken(file, ending)


def _spoken(file: Any, ending: threading.Event) -> Iterator[bytes]:
    with file:
        begun, spoken_s = time.monotonic(), 0.0
        for samples in _resampled(file):
            spoken_s += len(samples) / RATE_HZ
            if ending.wait(max(0, begun + spoken_s - time.monotonic())):
                return
            yield pcm16(samples).tobytes()


def _resampled(file: Any) -> Iterator[np.ndarray]:
    """Samples in -1 to 1, mono, 16 kHz, about 80 ms at a time. Raises UsageError for damaged audio."""
    resampler = soxr.ResampleStream(file.samplerate, RATE_HZ, 1, "float32")
    size = max(1, round(TOKEN_S * file.samplerate))
    last = False
    while not last:
        try:
            block = file.read(size, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise UsageError(f"the audio is damaged: {error}") from None
        last = len(block) < size
        mono = block.mean(axis=1)
        samples = mono if file.samplerate == RATE_HZ else resampler.resample_chunk(mono, last)
        if len(samples):
            yield samples


def microphone(ending: threading.Event) -> Iterator[bytes]:
    """The system's default microphone, until `ending` is set. Raises UsageError at once if there is none."""
    try:
        import sounddevice
    except ImportError:
        raise UsageError(
            "the microphone needs the package sounddevice: pip install 'voxtral-serve[live]', or pass a FILE to --live"
        ) from None
    except OSError as error:
        raise UsageError(f"the microphone needs PortAudio ({error}): on Debian, apt install libportaudio2") from None
    recorded: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    try:
        stream = sounddevice.RawInputStream(
            samplerate=RATE_HZ,
            blocksize=TOKEN,
            channels=1,
            dtype="int16",
            callback=lambda samples, *_: recorded.put(bytes(samples)),
        )
        stream.start()
    except (sounddevice.PortAudioError, ValueError) as error:
        raise UsageError(f"no microphone: {error}") from None
    return _recorded(stream, recorded, ending)


def _recorded(stream: Any, recorded: "queue.SimpleQueue[bytes]", ending: threading.Event) -> Iterator[bytes]:
    while not ending.is_set():
        with contextlib.suppress(queue.Empty):
            yield recorded.get(timeout=POLL_S)
    stream.close()
    while not recorded.empty():
        yield recorded.get()
