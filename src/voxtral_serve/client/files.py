"""Audio files to transcribe, and the files that their transcripts go to."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from voxtral_serve.client.errors import UsageError
from voxtral_serve.client.text import shown

# Audio files in folders: the formats that a server's guard decodes. A file that the user names may have any other.
EXTENSIONS = {
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".au", ".caf"),
    *(".m4a", ".mp4", ".webm", ".aac", ".amr"),
}


class AudioFile(NamedTuple):
    """`path` begins as the user named it; `below` is relative to the folder that the user named, or the file's name."""

    path: Path
    below: Path


def find(paths: Sequence[Path]) -> list[AudioFile]:
    """The files that `paths` name, each once. Of a folder: all audio files in it and below that are not hidden.

    Raises UsageError for a path that is not a file or folder, and for a folder without audio files.
    """
    found: dict[str, AudioFile] = {}
    for each in paths:
        if each.is_dir():
            files = list(_audio_in(each))
            if not files:
                raise UsageError(f"{shown(each)} has no audio files ({' '.join(sorted(EXTENSIONS))})")
        elif each.is_file():
            files = [each]
        else:
            raise UsageError(f"{shown(each)} {'is not a regular file' if each.exists() else 'does not exist'}")
        for path in files:
            below = path.relative_to(each) if each.is_dir() else Path(path.name)
            found.setdefault(os.path.abspath(path), AudioFile(path, below))
    return list(found.values())


def _audio_in(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UsageError(f"{shown(Path(error.filename))} cannot be read: {error.strerror}")

    for directory, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(directory, name)
            if not name.startswith(".") and path.suffix.lower() in EXTENSIONS and path.is_file():
                yield path


def targets(found: Sequence[AudioFile], out: Path, suffix: str) -> list[Path]:
    """The path of each file's transcript: `out`/NAME`suffix`.

    NAME is the file's path below the folder that the user named. Files with the same NAME, upper and lower case taken
    as equal, get the path below the folder that holds all files. If that is equal as well, as for x.wav and x.mp3, NAME
    keeps the file's extension.
    """
    together = os.path.commonpath([os.path.dirname(os.path.abspath(each.path)) for each in found])

    def name(each: AudioFile, level: int) -> str:
        path = each.below if level == 0 else Path(os.path.relpath(each.path, together))
        return str(path if level == 2 else path.with_suffix("")) + suffix

    levels = [0] * len(found)
    while True:
        names = [name(each, level) for each, level in zip(found, levels, strict=True)]
        same: dict[str, list[int]] = {}
        for number, each in enumerate(names):
            same.setdefault(each.casefold(), []).append(number)
        clashes = [numbers for numbers in same.values() if len(numbers) > 1]
        if not clashes:
            return [out / each for each in names]
        for numbers in clashes:
            lowest = min(levels[number] for number in numbers)
            for number in numbers:
                levels[number] += levels[number] == lowest


def write(path: Path, content: bytes) -> None:
    """Write a file and its folders atomically, so that no reader and no later run sees a part of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
