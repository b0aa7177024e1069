"""Manifests: which files a job transcribes.

Three forms: JSON lines as NeMo has them (https://docs.nvidia.com/nemo-framework/user-guide/latest/nemotoolkit/asr/
datasets.html), Parquet with the same columns, or a folder with audio files. Each row has `audio_filepath`, a path or
URI, relative ones from the manifest's folder, and may have `id`. Other fields are kept.
"""

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import ArrowException, fs

from voxtral_serve.batch.places import Place, parent, place, resolved
from voxtral_serve.client.errors import UsageError
from voxtral_serve.client.files import EXTENSIONS

LONGEST_ID = 512  # characters
# id; audio_filepath as the manifest has it; source, where that leads; manifest, the whole row as JSON
SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "audio_filepath", "source", "manifest")])
CHUNK = 10_000  # rows that are read at a time


def read(where: str) -> pa.Table:
    """The rows of a manifest, with SCHEMA. Raises UsageError for one that cannot be read, with the line or row."""
    found = place(where)
    try:
        info = found.system.get_file_info(found.path)
        if info.type == fs.FileType.NotFound:
            raise UsageError(f"{where} does not exist: expected a manifest (.jsonl or .parquet) or a folder")
        if info.type == fs.FileType.Directory:
            rows = _folder(found)
            folder = where
        else:
            rows = _parquet(found) if found.path.endswith(".parquet") else _lines(found)
            folder = parent(where)
        return _checked(rows, where, folder if "://" in folder else place(folder).path)
    except (OSError, ArrowException) as error:
        raise UsageError(f"{where} cannot be read: {error}") from None


def _folder(folder: Place) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Audio files in and below a folder, by their extensions, but no hidden ones."""
    found = folder.system.get_file_info(fs.FileSelector(folder.path, recursive=True))
    for info in sorted(found, key=lambda each: each.path):
        below = PurePosixPath(info.path).relative_to(folder.path)
        hidden = any(part.startswith(".") for part in below.parts)
        if info.is_file and not hidden and below.suffix.lower() in EXTENSIONS:
            yield info.path, {"audio_filepath": str(below)}


def _lines(file: Place) -> Iterator[tuple[str, Any]]:
    with file.system.open_input_stream(file.path) as stream:
        for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8"), 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{file.path} line {number} is not JSON: {error}") from None


def _parquet(file: Place) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(file.path, filesystem=file.system) as parquet:
        number = 0
        for chunk in parquet.iter_batches(CHUNK):
            for row in chunk.to_pylist():
                number += 1
                yield f"row {number}", row


def _checked(rows: Iterator[tuple[str, Any]], name: str, folder: str) -> pa.Table:
    """The rows with an id each. `folder` is the one that relative paths are below."""
    seen: dict[str, str] = {}
    columns: dict[str, list[str]] = {each: [] for each in SCHEMA.names}
    for where, row in rows:
        path = row.get("audio_filepath") if isinstance(row, dict) else None
        if not isinstance(path, str) or not path:
            raise UsageError(f"{name} {where} has no audio_filepath: expected a path or a URI, found {_short(row)}")
        if row.get("offset"):
            raise UsageError(f"{name} {where} has offset {row['offset']}: only whole files can be transcribed")
        key = row.get("id", path)
        if isinstance(key, bool) or not isinstance(key, str | int) or not 0 < len(str(key)) <= LONGEST_ID:
            raise UsageError(f"{name} {where} has id {_short(key)}: expected text of 1 to {LONGEST_ID} characters")
        key = str(key)
        if key in seen:
            raise UsageError(f"{name} has the id {_short(key)} twice, {seen[key]} and {where}: ids must be unique")
        seen[key] = where
        values = (key, path, resolved(path, folder), json.dumps(row, ensure_ascii=False, default=str))
        for column, value in zip(SCHEMA.names, values, strict=True):
            columns[column].append(value)
    if not seen:
        raise UsageError(f"{name} has no rows, or no audio files ({' '.join(sorted(EXTENSIONS))})")
    return pa.table(columns, SCHEMA)


def _short(value: Any) -> str:
    return ascii(value)[:80]
