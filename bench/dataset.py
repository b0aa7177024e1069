"""Read a dataset and refuse a broken one before the first request.

A dataset is a directory with `manifest.jsonl`, one JSON object per line:
`path` (relative to the directory), `text` (the reference), `duration` (seconds), `sha256` (hex, of the file).
Further keys, such as `words` and `voice`, are kept and not needed. A clip's id is its path's stem.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bench import BenchError

MANIFEST = "manifest.jsonl"
KEYS: dict[str, Any] = {"path": str, "text": str, "duration": (int, float), "sha256": str}


@dataclass(frozen=True)
class Clip:
    """One audio file with its reference transcript; `duration_s` in seconds, as the manifest states it."""

    id: str
    path: Path
    text: str
    duration_s: float
    extra: dict[str, Any]


def load(directory: Path) -> tuple[list[Clip], str]:
    """Return every clip in manifest order and the manifest's sha256.

    Raises BenchError with all problems of all lines at once, so that a dataset is mended in one go.
    """
    manifest = directory / MANIFEST
    try:
        raw = manifest.read_bytes()
    except OSError as error:
        raise BenchError(
            f"cannot read {manifest} ({error.strerror}): --dataset takes a directory that holds a {MANIFEST}"
        ) from None
    clips: list[Clip] = []
    problems: list[str] = []
    lines: dict[str, int] = {}
    # Split on \n alone: str.splitlines would also cut at U+2028, which JSON strings may contain.
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: not valid JSON ({error})")
            continue
        found = list(_problems(entry, directory))
        if isinstance(entry, dict) and isinstance(entry.get("path"), str):
            first = lines.setdefault(PurePosixPath(entry["path"]).stem, number)
            if first != number:
                found.append(f"the id {PurePosixPath(entry['path']).stem!r} is already that of line {first}")
        problems += [f"line {number}: {problem}" for problem in found]
        if not found:
            path, text, duration, _ = (entry.pop(key) for key in KEYS)
            clips.append(Clip(PurePosixPath(path).stem, directory / path, text, float(duration), extra=entry))
    if not clips and not problems:
        problems.append("it names no clip")
    if problems:
        raise BenchError(f"{len(problems)} problem(s) in {manifest}:\n  " + "\n  ".join(problems))
    return clips, hashlib.sha256(raw).hexdigest()


def select(clips: list[Clip], samples: int | None, seed: int) -> list[Clip]:
    """Pick `samples` clips (all when None) with a fixed seed, in manifest order."""
    if samples is None:
        return clips
    if samples > len(clips):
        raise BenchError(f"--samples {samples} asks for more than the {len(clips)} clips of the dataset")
    return [clips[index] for index in sorted(random.Random(seed).sample(range(len(clips)), samples))]


def _problems(entry: Any, directory: Path) -> Iterator[str]:
    """Yield what is wrong with one manifest entry taken alone."""
    if not isinstance(entry, dict):
        yield f"expected a JSON object, found {type(entry).__name__}"
        return
    good = {}
    for key, types in KEYS.items():
        if key not in entry:
            yield f"the key {key!r} is missing"
        elif not isinstance(entry[key], types) or isinstance(entry[key], bool):
            yield f"{key!r} must be a {'string' if types is str else 'number'}, found {entry[key]!r}"
        else:
            good[key] = entry[key]
    if not good.get("text", "some").strip():
        yield "'text' is empty"
    if not 0 < good.get("duration", 1) < math.inf:
        yield f"'duration' must be more than 0 seconds, found {good['duration']!r}"
    if "path" not in good:
        return
    path = PurePosixPath(good["path"])
    if not path.stem or path.is_absolute() or ".." in path.parts:
        yield f"'path' must name a file below the dataset's directory, found {good['path']!r}"
        return
    try:
        digest = hashlib.sha256((directory / path).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        yield f"cannot read {good['path']!r} ({getattr(error, 'strerror', None) or error})"
        return
    if digest != good.get("sha256", digest).lower():
        yield f"the sha256 of {good['path']!r} is {digest}, not {good['sha256']!r}"
