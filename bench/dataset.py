"""Read a dataset, and report all its problems before the first request.

The default format is a directory with `manifest.jsonl`, one JSON object per line:
`path` (relative to the directory), `text` (the reference), `duration` (seconds), `sha256` (hex, of the file).
Other keys, such as `words` and `voice`, are optional and kept. A clip's id is the stem of its path. bench.formats reads
this format and the others.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import soundfile

from bench import BenchError, formats
from bench.formats import Entry

# The largest difference between a duration in the dataset, which RTFx uses, and that of the file; for lossy formats.
APART_S = 0.1
# The length that libsndfile reports for a FLAC stream without a length in its header (SF_COUNT_MAX).
NO_LENGTH = 2**63 - 1


@dataclass(frozen=True)
class Clip:
    """One audio file with its reference transcript.

    `duration_s` is in seconds, from the dataset, or from the file's header if the dataset has none.
    """

    id: str
    path: Path
    text: str
    duration_s: float
    extra: dict[str, Any]


class Dataset(NamedTuple):
    """All clips in the dataset's order, and the facts about it that run.json records.

    `manifest_sha256` is the hash of the file that lists the clips. Without such a file it is the hash of a list made
    here: for each clip the JSON array [id, text, sha256 of its file] and a line feed, in ASCII. `format` is manifest,
    nemo, fleurs, common-voice, librispeech, folder or huggingface. `language` is spelled as in the dataset (FLEURS
    en_us, Common Voice zh-CN, NeMo's `lang`); None if the dataset has no language, or several.
    """

    clips: list[Clip]
    manifest_sha256: str
    format: str
    language: str | None


def load(source: Path | str) -> Dataset:
    """Read the dataset `source`: a path, or hf:OWNER/NAME[:CONFIG]:SPLIT.

    Raises BenchError with all problems of all clips.
    """
    try:
        found = formats.find(str(source))
        digest = hashlib.sha256(b"" if found.manifest is None else found.manifest.read_bytes())
        clips: list[Clip] = []
        problems: list[str] = []
        languages: set[str | None] = set()
        firsts: dict[str, str] = {}
        for entry in found.entries:
            entry.problems += _problems(entry, hashed=found.manifest is None)
            if entry.id is not None:
                first = firsts.setdefault(entry.id, entry.where)
                if first != entry.where:
                    entry.problems.append(f"the id {entry.id!r} is already used by {first}")
            problems += [f"{entry.where}: {problem}" for problem in entry.problems]
            languages.add(entry.language)
            if not entry.problems:
                clip = _clip(entry)
                clips.append(clip)
                if found.manifest is None:
                    digest.update((json.dumps([clip.id, clip.text, entry.sha256]) + "\n").encode())
    except OSError as error:
        raise BenchError(f"--dataset {source}: cannot read {error.filename} ({error.strerror})") from None
    if not clips and not problems:
        problems.append("the dataset has no clips")
    if problems:
        raise BenchError(f"{len(problems)} problem(s) in {found.root}:\n  " + "\n  ".join(problems))
    return Dataset(clips, digest.hexdigest(), found.format, languages.pop() if len(languages) == 1 else None)


def select(clips: list[Clip], samples: int | None, seed: int) -> list[Clip]:
    """Pick `samples` clips (all when None) with a fixed seed, in manifest order."""
    if samples is None:
        return clips
    if samples > len(clips):
        raise BenchError(f"--samples {samples} is more than the {len(clips)} clips of the dataset")
    return [clips[index] for index in sorted(random.Random(seed).sample(range(len(clips)), samples))]


def _clip(entry: Entry) -> Clip:
    id, path, text, duration = entry.id, entry.path, entry.text, entry.duration_s
    assert id is not None and path is not None and text is not None and duration is not None
    return Clip(id, path, text, duration, entry.extra)


def _problems(entry: Entry, hashed: bool) -> Iterator[str]:
    """Yield the problems of one clip's text and file. Fill in its duration and, if `hashed`, its file's sha256."""
    if entry.text is not None and not entry.text.strip():
        yield "the text is empty"
    if entry.path is None:
        return
    try:
        if entry.sha256 is not None or hashed:
            digest = hashlib.sha256(entry.path.read_bytes()).hexdigest()
        else:
            entry.path.open("rb").close()
    except (OSError, ValueError) as error:
        yield f"cannot read {entry.name!r} ({getattr(error, 'strerror', None) or error})"
        return
    if entry.sha256 is not None and digest != entry.sha256.lower():
        yield f"the sha256 of {entry.name!r} is {digest}, not {entry.sha256!r}"
        return
    if hashed:
        entry.sha256 = digest
    try:
        header = soundfile.info(str(entry.path))
    except soundfile.SoundFileError:
        if entry.path.suffix.lower() not in formats.UNKNOWN_TO_SOUNDFILE:
            yield f"{entry.name!r} ({entry.path.stat().st_size} bytes) is not audio that soundfile can read"
        elif entry.duration_s is None:
            yield f"{entry.name!r} has no duration in the dataset, and soundfile cannot read {entry.path.suffix}"
        return
    if not header.frames:
        yield f"{entry.name!r} contains no samples"
    elif header.frames == NO_LENGTH:
        if entry.duration_s is None:
            yield f"{entry.name!r} has no duration in the dataset, and none in the file's header"
    elif entry.duration_s is None:
        entry.duration_s = header.frames / header.samplerate
    else:
        real = header.frames / header.samplerate
        if abs(entry.duration_s - real) > APART_S:
            yield f"the dataset gives a duration of {entry.duration_s:g} s, but {entry.name!r} lasts {real:g} s"
