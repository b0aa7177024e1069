"""Read a dataset and refuse a broken one before the first request.

The default format is a directory with `manifest.jsonl`, one JSON object per line:
`path` (relative to the directory), `text` (the reference), `duration` (seconds), `sha256` (hex, of the file).
Further keys, such as `words` and `voice`, are kept and not needed. A clip's id is its path's stem.
bench.formats reads this and the formats of others.
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

# A stated duration may differ from the file's by so much, as lossy formats' do: RTFx is reckoned with it.
APART_S = 0.1
# What libsndfile calls the length of a FLAC stream whose header does not tell it (SF_COUNT_MAX).
NO_LENGTH = 2**63 - 1


@dataclass(frozen=True)
class Clip:
    """One audio file with its reference transcript.

    `duration_s` in seconds, as the dataset states it, or as the file's header does where the dataset does not.
    """

    id: str
    path: Path
    text: str
    duration_s: float
    extra: dict[str, Any]


class Dataset(NamedTuple):
    """Every clip in the dataset's order, and what a run's record says of it.

    `manifest_sha256` is of the file that lists the clips. Where there is none it is of a list made here: for each clip
    the JSON array [id, text, sha256 of its file] and a line feed, in ASCII. `format` is the recognised format's name:
    manifest, nemo, fleurs, common-voice, librispeech, folder or huggingface. `language` is as the dataset writes it
    (FLEURS en_us, Common Voice zh-CN, NeMo's `lang`), None when it tells none or several.
    """

    clips: list[Clip]
    manifest_sha256: str
    format: str
    language: str | None


def load(source: Path | str) -> Dataset:
    """Read what `--dataset` names: a path, or hf:OWNER/NAME[:CONFIG]:SPLIT.

    Raises BenchError with all problems of all clips at once, so that a dataset is mended in one go.
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
                    entry.problems.append(f"the id {entry.id!r} is already that of {first}")
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
        problems.append("it names no clip")
    if problems:
        raise BenchError(f"{len(problems)} problem(s) in {found.root}:\n  " + "\n  ".join(problems))
    return Dataset(clips, digest.hexdigest(), found.format, languages.pop() if len(languages) == 1 else None)


def select(clips: list[Clip], samples: int | None, seed: int) -> list[Clip]:
    """Pick `samples` clips (all when None) with a fixed seed, in manifest order."""
    if samples is None:
        return clips
    if samples > len(clips):
        raise BenchError(f"--samples {samples} asks for more than the {len(clips)} clips of the dataset")
    return [clips[index] for index in sorted(random.Random(seed).sample(range(len(clips)), samples))]


def _clip(entry: Entry) -> Clip:
    id, path, text, duration = entry.id, entry.path, entry.text, entry.duration_s
    assert id is not None and path is not None and text is not None and duration is not None
    return Clip(id, path, text, duration, entry.extra)


def _problems(entry: Entry, hashed: bool) -> Iterator[str]:
    """Yield what is wrong with one clip's text and file; fill in its duration and, if `hashed`, its file's sha256."""
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
            yield f"{entry.name!r} ({entry.path.stat().st_size} bytes) is no audio that soundfile can read"
        elif entry.duration_s is None:
            yield f"{entry.name!r} has no duration: the dataset states none and soundfile reads no {entry.path.suffix}"
        return
    if not header.frames:
        yield f"{entry.name!r} holds no samples"
    elif header.frames == NO_LENGTH:
        if entry.duration_s is None:
            yield f"{entry.name!r} has no duration: neither the dataset nor the file's header states one"
    elif entry.duration_s is None:
        entry.duration_s = header.frames / header.samplerate
    else:
        real = header.frames / header.samplerate
        if abs(entry.duration_s - real) > APART_S:
            yield f"the duration is stated as {entry.duration_s:g} s, but {entry.name!r} lasts {real:g} s"
