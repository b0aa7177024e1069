"""The files of one run's directory, which the stages exchange.

run.json        settings, environment, memory, and resources of each load; written before the first measured request
requests.jsonl  one row per request, flushed when it ends; for a clip with several rows at a load, the last row counts
server.log      log of the server that bench started
summary.json    the figures, computed from run.json and requests.jsonl
report.md       the figures as tables
report.html     the figures as tables and plots
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from bench import BenchError
from bench.answers import Row

AnyRow = TypeVar("AnyRow", bound=Any)  # a dataclass with `id` and `load`
SCHEMA_VERSION = 2
RUN = "run.json"
ROWS = "requests.jsonl"
SUMMARY = "summary.json"
REPORT = "report.md"
PAGE = "report.html"
LOG = "server.log"


def row_line(row: Any) -> str:
    """The line of a row, which is a dataclass."""
    # ASCII only: lone surrogates cannot be written in UTF-8, and many readers end a line at U+2028.
    return json.dumps(asdict(row)) + "\n"


def read_rows(path: Path) -> list[Row]:
    """Read requests.jsonl. Raises BenchError as `read_lines`."""

    def row(**entry: Any) -> Row:
        # Rows of other tools, such as the reference model's, have no load.
        named = [each.name for each in fields(Row) if each.name in entry or each.default is MISSING]
        return Row(**{name: entry[name] for name in named})

    return read_lines(path, row)


def read_lines(path: Path, make: Callable[..., AnyRow]) -> list[AnyRow]:
    """What `make` makes of each line's fields.

    A last line without a newline was truncated by a kill; it counts only if it is valid JSON. Any other invalid line
    raises BenchError.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BenchError(f"cannot read {path} ({error.strerror})") from None
    rows: list[AnyRow] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(make(**json.loads(line)))
        except (ValueError, LookupError, TypeError) as error:
            if line.endswith(b"\n"):
                raise BenchError(f"{path} line {number} is damaged ({error!r})") from None
    return rows


def read_run(out: Path, version: int | None = None) -> dict[str, Any]:
    """The content of run.json. Raises BenchError if it cannot be read, or has another schema version than `version`."""
    try:
        run: dict[str, Any] = json.loads((out / RUN).read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {out / RUN}, which holds the run's settings ({error})") from None
    if version is not None and (form := run.get("schema_version")) != version:
        raise BenchError(f"{out / RUN} has schema_version {form!r}; this bench reads {version}")
    return run


def by_load(out: Path, run: dict[str, Any], rows: Sequence[AnyRow], unit: str = "clip") -> dict[str, list[AnyRow]]:
    """The rows of each load of the run. Raises BenchError for a row that does not belong to it."""
    loads: dict[str, list[AnyRow]] = {load: [] for load in run["loads"]}
    ids = set(run["ids"])
    for number, row in enumerate(rows, 1):
        if row.load not in loads or row.id not in ids:
            what = f"{unit} {row.id!r} at load {row.load!r}"
            raise BenchError(f"{out / ROWS} line {number}: {what} is not part of the run in {RUN}")
        loads[row.load].append(row)
    return loads


def write_json(path: Path, value: dict[str, Any]) -> None:
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write(path: Path, text: str) -> None:
    """Replace a file atomically: a kill leaves either the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
