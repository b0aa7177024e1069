"""The output of a job: its columns, files and counts.

OUT/rows/parquet/PART.parquet, OUT/rows/jsonl/PART.jsonl   the same rows, twice
OUT/subtitles/ID.srt, ID.vtt                               with --subtitles
OUT/done/PART.parquet                                      the ids of a part that is complete
OUT/manifest.parquet, OUT/run.json, OUT/summary.json

A part is written in two phases (ray.data.checkpoint): done/PART.pending.parquet first, then the rows, then the former
is renamed. So rows without a done/PART.parquet are of a run that ended while it wrote them, and are deleted.
"""

import json
import posixpath
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from ray.data.block import BlockAccessor
from ray.data.datasource import BlockBasedFileDatasink

from voxtral_serve.batch.places import Place, files

TIMES = [("start", pa.float64()), ("end", pa.float64())]  # seconds from the clip's beginning


def schema(speakers: bool) -> pa.Schema:
    """The columns of rows; with `speakers`, segments and words have a speaker."""
    more = [*TIMES, ("speaker", pa.string())] if speakers else TIMES
    columns = [
        ("id", pa.string()),
        ("audio_filepath", pa.string()),
        ("text", pa.string()),  # null with an error
        ("segments", pa.list_(pa.struct([("text", pa.string()), *more]))),
        ("words", pa.list_(pa.struct([("word", pa.string()), *more]))),  # null if the model has no times of words
        ("seconds", pa.float64()),  # the clip's length
        ("model", pa.string()),
        ("config", pa.string()),  # record.config_hash
        ("error", pa.string()),
        ("manifest", pa.string()),  # the manifest's row as JSON
    ]
    return pa.schema(columns)


FORMS = ("parquet", "jsonl")


class RowSink(BlockBasedFileDatasink):
    """Writes each block of rows as Parquet and as JSON lines, with one name."""

    def __init__(self, rows: Place, speakers: bool) -> None:
        super().__init__(rows.path, filesystem=rows.system, file_format="parquet")
        self._schema = schema(speakers)
        self._form = ""

    def write_block(self, block: BlockAccessor, block_index: int, ctx: Any) -> None:
        for self._form in FORMS:
            super().write_block(block, block_index, ctx)

    def open_output_stream(self, path: str) -> Any:
        """`path` is ROWS/PART.parquet."""
        folder, name = posixpath.split(path)
        part = name.removesuffix(".parquet")
        return self.filesystem.open_output_stream(f"{folder}/{self._form}/{part}.{self._form}")

    def write_block_to_file(self, block: BlockAccessor, file: Any) -> None:
        table = block.to_arrow().select(self._schema.names).cast(self._schema)
        if self._form == "parquet":
            pq.write_table(table, file)
        else:
            for row in table.to_pylist():
                row["manifest"] = json.loads(row["manifest"])
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def sweep(out: Place) -> None:
    """Delete rows whose part is not done. Only between runs: the parts of a run are not done while it writes them."""
    done = {posixpath.basename(each.path) for each in files(out.below("done"), ".parquet")}
    for form in FORMS:
        for each in files(out.below(f"rows/{form}"), f".{form}"):
            if posixpath.basename(each.path).removesuffix(f".{form}") + ".parquet" not in done:
                out.system.delete_file(each.path)


class Counts(NamedTuple):
    """Of the rows in an output: `seconds` is of their audio."""

    ids: frozenset[str]
    rows: int
    failed: int
    seconds: float


def counts(out: Place) -> Counts:
    """Of all rows that are done, after a `sweep`."""
    ids: set[str] = set()
    rows, failed, seconds = 0, 0, 0.0
    for each in files(out.below("rows/parquet"), ".parquet"):
        table = pq.read_table(each.path, filesystem=out.system, columns=["id", "seconds", "error"])
        ids.update(table["id"].to_pylist())
        rows += table.num_rows
        failed += table.num_rows - table["error"].null_count
        seconds += sum(filter(None, table["seconds"].to_pylist()))
    return Counts(frozenset(ids), rows, failed, seconds)


def subtitle_name(key: str, form: str) -> str:
    """The path of a row's subtitles below OUT/subtitles: its id, in which only / makes folders."""
    parts = [quote(part, safe=" ()+,=@") for part in key.split("/")]
    # Parts that would not be names of files: an empty one, . and ..
    return "/".join(part if part.strip(".") else "%" + "2E" * len(part) for part in parts) + f".{form}"


def row(given: Mapping[str, str], config: str, **values: Any) -> dict[str, Any]:
    """A row of `schema` for one of the manifest's."""
    base = {name: given[name] for name in ("id", "audio_filepath", "manifest")}
    return {**dict.fromkeys(schema(False).names), **base, "config": config, **values}
