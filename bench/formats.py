"""Detect a dataset's format from its files, and read it. Each format has one reader.

A reader reports errors in the form of a line. bench.dataset checks texts, ids and audio files, which all formats have.
Each reader's docstring names the source of the format.
"""

import contextlib
import importlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import soundfile

from bench import BenchError

MANIFEST = "manifest.jsonl"
# FLEURS counts samples at this rate. https://www.tensorflow.org/datasets/catalog/xtreme_s
FLEURS_HZ = 16_000
# libsndfile cannot decode these, so they are not checked. Servers with FFmpeg accept them.
UNKNOWN_TO_SOUNDFILE = (".aac", ".amr", ".m4a", ".mp4", ".webm", ".wma")
AUDIO = (".aif", ".aiff", ".au", ".flac", ".mp3", ".oga", ".ogg", ".opus", ".wav", *UNKNOWN_TO_SOUNDFILE)
# Columns with the transcript, in the order in which the Open ASR leaderboard looks for them (normalizer/data_utils.py).
TEXT_COLUMNS = ("text", "sentence", "normalized_text", "transcript", "transcription")
HUB = re.compile(r"hf:(?P<name>[^:/\s]+/[^:/\s]+)(:(?P<config>[^:\[\]]+))?:(?P<split>[\w.]+(\[[^\]]*\])?)")
LOOKED_FOR = f"""
  {MANIFEST}, or one other .jsonl or .json file with an 'audio_filepath' in its first line (NeMo)
  NAME.tsv with audio/NAME/ beside it (FLEURS)
  a .tsv whose first line names the columns 'path' and 'sentence', with clips/ beside it (Common Voice)
  SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt (LibriSpeech)
  audio files, each with a .txt of the same name beside it
--dataset accepts a directory with one of these, a manifest or .tsv itself, or hf:OWNER/NAME[:CONFIG]:SPLIT."""


@dataclass
class Entry:
    """One clip of a dataset, and the problems of its entry. None means that the dataset does not have this value.

    `where` is the line, the row or the file of the entry; `name` is the audio file as written there. `duration_s` in
    seconds, `sha256` of the audio file in hex.
    """

    where: str
    problems: list[str] = field(default_factory=list)
    id: str | None = None
    name: str = ""
    path: Path | None = None
    text: str | None = None
    duration_s: float | None = None
    sha256: str | None = None
    language: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Found(NamedTuple):
    """A dataset in a known format. `manifest` is the file that lists its clips, if there is one."""

    format: str
    root: str
    manifest: Path | None
    entries: Iterator[Entry]


def find(source: str) -> Found:
    """Detect the format of `--dataset`. Raises BenchError if it is unknown or ambiguous."""
    if source.startswith("hf:"):
        return Found("huggingface", source, None, _hugging_face(source))
    path = Path(source)
    if (path / MANIFEST).is_file():
        path /= MANIFEST
    if path.is_file():
        found = _listing(path)
        if found is None:
            raise BenchError(f"--dataset {path} is not a list of clips in a known format. Looked for:{LOOKED_FOR}")
        return found
    if not path.is_dir():
        raise BenchError(f"--dataset {path} is neither a directory nor a file. Looked for:{LOOKED_FOR}")
    listings = [file for file in sorted(path.iterdir()) if file.is_file() and _is_listing(file)]
    trees = sorted(path.glob("*/*/*.trans.txt"))
    subsets = sorted({file.parts[len(path.parts)] for file in path.glob("*/*/*/*.trans.txt")})
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in (*AUDIO, ".txt"))
    pairs = {file.stem for file in files if file.suffix == ".txt"} & {file.stem for file in files if _is_audio(file)}
    seen = [
        *map(str, listings),
        *([f"{path} (LibriSpeech)"] if trees else []),
        *(str(path / subset) for subset in subsets),
        *([f"{path} (audio files with .txt)"] if pairs else []),
    ]
    if not seen:
        raise BenchError(f"--dataset {path} contains no known format. Looked for:{LOOKED_FOR}")
    if len(seen) > 1 or subsets:
        named = "\n  ".join(seen)
        raise BenchError(
            f"--dataset {path} contains several datasets, or one in a subdirectory. Choose one:\n  {named}"
        )
    if listings:
        found = _listing(listings[0])
        assert found is not None
        return found
    if trees:
        return Found("librispeech", str(path), None, _librispeech(path, trees))
    return Found("folder", str(path), None, _folder(files))


def _is_audio(file: Path) -> bool:
    return file.suffix.lower() in AUDIO


def _is_listing(file: Path) -> bool:
    if file.suffix in (".json", ".jsonl"):
        return any(isinstance(value, dict) and "audio_filepath" in value for value in _first_value(file))
    return file.suffix == ".tsv" and _tsv_reader(file) is not None


def _listing(file: Path) -> Found | None:
    if file.suffix in (".json", ".jsonl"):
        return _json_lines(file)
    reader = _tsv_reader(file) if file.suffix == ".tsv" else None
    if reader is None:
        return None
    name, audio, read = reader
    if not audio.is_dir():
        raise BenchError(f"--dataset {file} looks like {name}, but its audio directory {audio} is missing")
    return Found(name, str(file), file, read(file, audio))


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each line that is not empty, with its position.

    Lines are split on \\n only: str.splitlines also splits at U+2028, which texts may contain.
    """
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip(b" \r"):
            yield f"line {number}", line.removesuffix(b"\r")


def _text(line: bytes, entry: Entry) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        entry.problems.append(f"not UTF-8 ({error.reason} at byte {error.start})")
        return None


def _below(directory: Path, name: str, entry: Entry, what: str) -> None:
    """Set the entry's file below `directory`, or add a problem if the name points outside of it."""
    path = PurePosixPath(name)
    if not path.stem or path.is_absolute() or ".." in path.parts:
        entry.problems.append(f"{what} must name a file below the dataset's directory, found {name!r}")
    else:
        entry.id, entry.name, entry.path = path.stem, name, directory / path


# JSON lines: ours and NeMo's


def _first_value(file: Path) -> Iterator[Any]:
    """Yield the JSON value of the first line, or nothing if it is not JSON."""
    with file.open("rb") as lines:
        for line in lines:
            if line.strip():
                with contextlib.suppress(ValueError, RecursionError):
                    yield json.loads(line)
                return


def _json_lines(file: Path) -> Found | None:
    values = []
    for where, line in _lines(file):
        try:
            values.append((Entry(where), json.loads(line)))
        except (ValueError, RecursionError) as error:
            values.append((Entry(where, [f"not valid JSON ({error})"]), None))
    told = ({"path", "audio_filepath"} & set(value) for _, value in values if isinstance(value, dict))
    first = next(filter(None, told), {"path"} if file.name == MANIFEST else set())
    if not first:
        return None
    if len(first) > 1:
        raise BenchError(f"{file} has both 'path' (bench) and 'audio_filepath' (NeMo) in one line: remove one of them")
    name, read = ("nemo", _nemo) if "audio_filepath" in first else ("manifest", _ours)
    return Found(name, str(file), file, (_object(entry, value, file.parent, read) for entry, value in values))


def _object(entry: Entry, value: Any, directory: Path, read: Callable[[Entry, dict[str, Any], Path], None]) -> Entry:
    if isinstance(value, dict):
        read(entry, value, directory)
    elif not entry.problems:
        entry.problems.append(f"expected a JSON object, found {type(value).__name__}")
    return entry


def _ours(entry: Entry, value: dict[str, Any], directory: Path) -> None:
    """`path` (relative to the directory), `text`, `duration` (seconds) and `sha256` of the file."""
    path = _take(entry, value, "path", str)
    entry.text = _take(entry, value, "text", str)
    entry.duration_s = _duration(entry, value)
    entry.sha256 = _take(entry, value, "sha256", str)
    if path is not None:
        _below(directory, path, entry, "'path'")
    entry.extra = value


def _nemo(entry: Entry, value: dict[str, Any], directory: Path) -> None:
    """NeMo's ASR manifest: `audio_filepath`, absolute or relative to the manifest, `text`, `duration`, `lang`.

    https://github.com/NVIDIA-NeMo/NeMo/blob/main/nemo/collections/common/parts/preprocessing/manifest.py
    NeMo datasets often have the same file name in several directories, so the id is the path below the manifest.
    """
    path = _take(entry, value, "audio_filepath", str)
    entry.text = _take(entry, value, "text", str)
    if value.get("duration") is not None:
        entry.duration_s = _duration(entry, value)
    if value.get("offset"):
        entry.problems.append(
            f"'offset' {value['offset']!r} selects a part of the file, but bench sends whole files: extract the part"
        )
    entry.language = value["lang"] if isinstance(value.get("lang"), str) else None
    if path is not None and not PurePosixPath(path).name:
        entry.problems.append(f"'audio_filepath' must name a file, found {path!r}")
    elif path is not None:
        entry.name, entry.path = path, directory / path
        inside = entry.path.is_relative_to(directory)
        entry.id = entry.path.relative_to(directory).with_suffix("").as_posix() if inside else entry.path.stem
    entry.extra = value


def _take(entry: Entry, value: dict[str, Any], key: str, types: Any) -> Any:
    """Remove and return a key's value; on a problem, record it and return None."""
    if key not in value:
        entry.problems.append(f"the key {key!r} is missing")
        return None
    found = value.pop(key)
    if not isinstance(found, types) or isinstance(found, bool):
        entry.problems.append(f"{key!r} must be a {'string' if types is str else 'number'}, found {found!r}")
        return None
    return found


def _duration(entry: Entry, value: dict[str, Any]) -> float | None:
    found = _take(entry, value, "duration", (int, float))
    if found is not None and not 0 < found < math.inf:
        entry.problems.append(f"'duration' must be more than 0 seconds, found {found!r}")
        return None
    return None if found is None else float(found)


# Tab-separated lines: FLEURS and Common Voice. Neither uses quoting: a " is part of the sentence.


def _tsv_reader(file: Path) -> tuple[str, Path, Callable[[Path, Path], Iterator[Entry]]] | None:
    """The format's name, the directory of its audio, and its reader."""
    with file.open("rb") as lines:
        columns = lines.readline().decode("utf-8-sig", errors="replace").rstrip("\r\n").split("\t")
    if {"path", "sentence"} <= set(columns):
        return "common-voice", file.parent / "clips", _common_voice
    audio = file.parent / "audio" / file.stem
    return ("fleurs", audio, _fleurs) if audio.is_dir() or len(columns) == 7 else None


def _fleurs(file: Path, audio: Path) -> Iterator[Entry]:
    """LANGUAGE/SPLIT.tsv without a header, LANGUAGE/audio/SPLIT/*.wav, as Google's archives unpack.

    https://github.com/tensorflow/datasets/blob/master/tensorflow_datasets/audio/xtreme_s/xtreme_s.py
    The columns are the sentence's id, file, raw transcription, transcription, its characters, samples, gender. Several
    speakers read a sentence, so a clip's id is that of its file. The reference is the transcription without capitals
    and punctuation, which is commonly used for scoring, for example of Whisper.
    """
    folder = file.resolve().parent.name
    language = folder if re.fullmatch(r"[a-z]{2,3}(_[a-z0-9]+)+", folder) else None
    for where, line in _lines(file):
        entry = Entry(where, language=language)
        if (text := _text(line, entry)) is not None:
            columns = text.split("\t")
            if len(columns) != 7:
                entry.problems.append(f"expected 7 columns between tabs, found {len(columns)}")
            else:
                sentence, name, _, entry.text, _, samples, gender = columns
                _below(audio, name, entry, "column 2")
                if samples.isascii() and samples.isdigit() and int(samples):
                    entry.duration_s = int(samples) / FLEURS_HZ
                else:
                    entry.problems.append(f"column 6 must be the number of samples, found {samples!r}")
                entry.extra = {"sentence_id": sentence, "gender": gender}
        yield entry


def _common_voice(file: Path, clips: Path) -> Iterator[Entry]:
    """LANGUAGE/SPLIT.tsv with a header, LANGUAGE/clips/*.mp3.

    https://github.com/common-voice/CorporaCreator/blob/master/src/corporacreator/corpus.py writes it, unquoted. The
    columns depend on the release; all have `path` and `sentence`, and since release 5 `locale`.
    """
    lines = _lines(file)
    where, line = next(lines)
    entry = Entry(where)
    if (names := _text(line, entry)) is None:
        yield entry
        return
    header = names.split("\t")
    for where, line in lines:
        entry = Entry(where)
        if (text := _text(line, entry)) is not None:
            columns = text.split("\t")
            if len(columns) != len(header):
                entry.problems.append(f"expected {len(header)} columns between tabs, found {len(columns)}")
            else:
                entry.extra = dict(zip(header, columns, strict=True))
                entry.text = entry.extra.pop("sentence")
                entry.language = entry.extra.get("locale") or None
                _below(clips, entry.extra.pop("path"), entry, "'path'")
        yield entry


# Directories without a manifest


def _librispeech(directory: Path, transcripts: list[Path]) -> Iterator[Entry]:
    """SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt with lines `ID TEXT`, in capitals, and ID.flac beside it.

    https://www.openslr.org/12, README.TXT, 2.1
    """
    named = set()
    for file in transcripts:
        for where, line in _lines(file):
            entry = Entry(f"{file.relative_to(directory)} {where}")
            if (text := _text(line, entry)) is not None:
                name, _, entry.text = text.partition(" ")
                _below(file.parent, f"{name}.flac", entry, "the first word")
                named.add(entry.path)
            yield entry
    for audio in sorted(directory.glob("*/*/*.flac")):
        if audio not in named:
            yield Entry(str(audio.relative_to(directory)), ["no .trans.txt file in its directory has a line for it"])


def _folder(files: list[Path]) -> Iterator[Entry]:
    """Audio files, each with its text in a .txt of the same name; line breaks in a text count as spaces."""
    texts = {file.stem: file for file in files if file.suffix == ".txt"}
    for audio in filter(_is_audio, files):
        entry = Entry(audio.name, id=audio.stem, name=audio.name, path=audio)
        if audio.stem in texts:
            text = _text(texts[audio.stem].read_bytes().removeprefix(b"\xef\xbb\xbf"), entry)
            entry.text = None if text is None else " ".join(text.split())
        else:
            entry.problems.append(f"its transcript {audio.stem}.txt is missing")
        yield entry
    heard = {audio.stem for audio in filter(_is_audio, files)}
    for stem in sorted(texts.keys() - heard):
        yield Entry(f"{stem}.txt", ["there is no audio file of the same name"])


# The Hugging Face Hub


def _hugging_face(source: str) -> Iterator[Entry]:
    """The rows of a split. Their audio is stored undecoded in a cache directory. A clip's id is its row number.

    https://huggingface.co/docs/datasets/audio_load
    """
    match = HUB.fullmatch(source)
    if match is None:
        raise BenchError(f"--dataset {source} must look like hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise BenchError(f"--dataset {source} needs the package datasets ({error}): pip install datasets") from None
    try:
        split = datasets.load_dataset(match["name"], match["config"], split=match["split"])
    # Errors of the Hub, the network and the format have no common class.
    except Exception as error:
        raise BenchError(f"--dataset {source}: {type(error).__name__}: {error}") from None
    columns = ", ".join(split.column_names)
    audio = [name for name, kind in split.features.items() if isinstance(kind, datasets.Audio)]
    if len(audio) != 1:
        raise BenchError(f"--dataset {source} must have one audio column, found {audio} among the columns {columns}")
    text = next((name for name in TEXT_COLUMNS if name in split.column_names), None)
    if text is None:
        known = ", ".join(TEXT_COLUMNS)
        raise BenchError(f"--dataset {source} must have a text column, one of {known}; its columns are {columns}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "voxtral-serve" / "datasets"
    directory = cache / re.sub(r"[^\w.-]+", "--", source)
    directory.mkdir(parents=True, exist_ok=True)
    rows = split.select_columns([audio[0], text]).cast_column(audio[0], datasets.Audio(decode=False))
    for number, row in enumerate(rows):
        entry = Entry(f"row {number}", id=f"{number:06}")
        entry.text = row[text] if isinstance(row[text], str) else ""
        _keep_audio(entry, row[audio[0]] or {}, directory)
        yield entry


def _keep_audio(entry: Entry, audio: dict[str, Any], directory: Path) -> None:
    """Write the audio's bytes unchanged, with the suffix from which servers and soundfile detect the format."""
    content, name = audio.get("bytes"), audio.get("path")
    if content is None:
        if name is None:
            entry.problems.append("it has no audio")
        else:
            entry.name, entry.path = name, Path(name)
        return
    suffix = PurePosixPath(name or "").suffix.lower()
    if suffix not in AUDIO:
        try:
            with soundfile.SoundFile(io.BytesIO(content)) as file:
                suffix = f".{file.format.lower()}"
        except soundfile.SoundFileError:
            entry.problems.append(f"its {len(content)} bytes are not audio that soundfile can read")
            return
    entry.path = directory / f"{entry.id}{suffix}"
    entry.name = entry.path.name
    if not entry.path.exists() or entry.path.read_bytes() != content:
        entry.path.write_bytes(content)
