"""The recordings of a job: find them, choose how many, and cut them into clips as the server does.

Recordings have an order that is random but the same in each run, by a hash of their paths: any part of it is a sample
of all of them.
"""

import hashlib
import json
import math
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile  # type: ignore[import-untyped,unused-ignore]

from voxtral_serve.audio.decode import AudioError, Bounds, Clip, blocks
from voxtral_serve.audio.level import raised
from voxtral_serve.audio.speech import Detector
from voxtral_serve.client import files
from voxtral_serve.client.errors import UsageError
from voxtral_serve.client.text import shown
from voxtral_serve.draft.job import DraftError

RATE_HZ = 16000
PIECE_S = 30.0  # of a long recording; the guard cuts files so as well
SECTION_S = 600  # of a long recording, decoded and cut at a time
PATHS = ("audio_filepath", "path")  # names of a manifest's field, as in `batch` and in `prove`
NO_LIMIT = Bounds(Fraction(10**9), "unlimited", 1 << 62)
AHEAD = 64  # clips that are decoded before they are needed


class Recording(NamedTuple):
    """key: 16 hexadecimal digits, of its path. seconds: as its header says, or counted."""

    key: str
    path: Path
    seconds: float


class Piece(NamedTuple):
    """A clip of a recording. samples: float32 [n] at RATE_HZ."""

    key: str
    samples: np.ndarray


class Ending(NamedTuple):
    """A recording was read to its end and has so many clips, or an error stopped it before."""

    recording: Recording
    clips: int
    error: str | None


def find(paths: Sequence[Path]) -> tuple[list[Recording], list[tuple[Path, str]]]:
    """The recordings of folders, files and manifests in their random order; and those that are unreadable, with why.

    Raises DraftError for a path that does not exist, and for a folder or a manifest without recordings.
    """
    try:
        named = [path for each in paths for path in (_listed(each) if each.suffix == ".jsonl" else [each])]
        found = [each.path for each in files.find(named)]
    except UsageError as error:
        raise DraftError(str(error)) from None
    with ThreadPoolExecutor() as pool:
        lengths = list(pool.map(_seconds, found))
    readable = [
        Recording(hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16], path, length)
        for path, length in zip(found, lengths, strict=True)
        if isinstance(length, float)
    ]
    failed = [(path, why) for path, why in zip(found, lengths, strict=True) if isinstance(why, str)]
    return sorted(readable), failed


def _listed(manifest: Path) -> list[Path]:
    """The files of a manifest: JSON lines, each with one of PATHS, relative ones from the manifest's folder."""
    listed = []
    try:
        with manifest.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    name = next(entry[key] for key in PATHS if isinstance(entry.get(key), str))
                except (ValueError, AttributeError, StopIteration):
                    raise DraftError(
                        f"{shown(manifest)} line {number} names no recording: expected a JSON object with "
                        f"{' or '.join(PATHS)}"
                    ) from None
                listed.append(manifest.parent / name)
    except (OSError, UnicodeDecodeError) as error:
        raise DraftError(f"{shown(manifest)} cannot be read: {error}") from None
    if not listed:
        raise DraftError(f"{shown(manifest)} has no lines: expected a JSON object for each recording")
    return listed


def _seconds(path: Path) -> float | str:
    """The length of a recording, or why it cannot be read."""
    try:
        info = soundfile.info(path)
        if 0 < info.frames < 1 << 62:
            return float(info.duration)
    except (OSError, soundfile.SoundFileError):
        pass  # a format that only PyAV reads, or none
    try:
        return sum(len(block) for block in blocks(path.read_bytes(), NO_LIMIT, RATE_HZ)) / RATE_HZ
    except (OSError, AudioError) as error:
        return str(error)


def take(recordings: Sequence[Recording], hours: float | None) -> list[Recording]:
    """The first recordings with so many hours together; all of them if they have less."""
    taken, seconds = [], 0.0
    for recording in recordings:
        if hours is not None and seconds >= 3600 * hours:
            break
        taken.append(recording)
        seconds += recording.seconds
    return taken


def pieces(recording: Recording, longest_s: float, detector: Detector | None) -> Iterator[Piece]:
    """The clips of a recording, each of at most `longest_s`, raised as the server raises quiet clips.

    A longer one is cut at pauses into clips of at most PIECE_S, without its silence; by the clock if `detector` is
    None. Raises AudioError and OSError, also after the first clips.
    """
    number = 0
    for section in _sections(recording.path, longest_s):
        clip = raised(Clip(section, RATE_HZ))
        if clip.seconds <= longest_s:
            spans = [(0.0, clip.seconds)]
        elif detector is None:
            spans = [(part * PIECE_S, (part + 1) * PIECE_S) for part in range(math.ceil(clip.seconds / PIECE_S))]
        else:
            spans = [(piece.start, piece.end) for piece in detector.pieces(clip, PIECE_S)]
        for start, end in spans:
            samples = clip.samples[round(start * RATE_HZ) : round(end * RATE_HZ)]
            if len(samples):
                yield Piece(f"{recording.key}-{number}", samples)
                number += 1


def _sections(path: Path, longest_s: float) -> Iterator[np.ndarray]:
    """The samples of a file in parts of SECTION_S. A rest that fits a clip is a part of its own."""
    size = SECTION_S * RATE_HZ
    kept = np.zeros(0, np.float32)
    for block in blocks(path.read_bytes(), NO_LIMIT, RATE_HZ):
        kept = np.concatenate([kept, block])
        while len(kept) >= size + longest_s * RATE_HZ:
            yield kept[:size]
            kept = kept[size:]
    yield kept


class Reader:
    """Reads recordings in threads, ahead of the engine. `left`: how many recordings have not ended."""

    def __init__(self, recordings: Sequence[Recording], longest_s: float, detector: Detector | None) -> None:
        self.left = len(recordings)
        self._queue: queue.Queue[Piece | Ending | BaseException] = queue.Queue(AHEAD)
        self._recordings = iter(recordings)
        self._longest_s, self._detector = longest_s, detector
        self._lock = threading.Lock()
        for _ in range(min(len(recordings), os.cpu_count() or 1)):
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                with self._lock:
                    recording = next(self._recordings, None)
                if recording is None:
                    return
                count, error = 0, None
                try:
                    for piece in pieces(recording, self._longest_s, self._detector):
                        self._queue.put(piece)
                        count += 1
                except (AudioError, OSError, MemoryError) as failure:
                    error = str(failure) or type(failure).__name__
                self._queue.put(Ending(recording, count, error))
        except BaseException as failure:
            self._queue.put(failure)

    def take(self, wait: bool) -> Piece | Ending | None:
        """The next piece, or the ending of a recording. None if there is none yet, unless it waits, or none at all."""
        if not self.left:
            return None
        try:
            item = self._queue.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        self.left -= isinstance(item, Ending)
        return item
