"""The files of one run's directory, which the stages exchange.

run.json        settings, environment, memory, and resources of each load; written before the first measured request
requests.jsonl  one row per request, flushed when it ends; for a clip with several rows at a load, the last row counts
server.log      log of the server that bench started
summary.json    the figures, computed from run.json and requests.jsonl
report.md       the figures as tables
report.html     the figures as tables and plots
"""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.answers import Row

SCHEMA_VERSION = 2
RUN = "run.json"
ROWS = "requests.jsonl"
SUMMARY = "summary.json"
REPORT = "report.md"
PAGE = "report.html"
LOG = "server.log"


def row_line(row: Row) -> str:
    # ASCII only: lone surrogates cannot be written in UTF-8, and many readers end a line at U+2028.
    return json.dumps(asdict(row)) + "\n"


def read_rows(path: Path) -> list[Row]:
    """Read requests.jsonl.

    A last line without a newline was truncated by a kill; it counts only if it is valid JSON. Any other invalid line
    raises BenchError.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BenchError(f"cannot read {path} ({error.strerror})") from None
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            # Rows of other tools, such as the reference model's, have no load.
            named = [each.name for each in fields(Row) if each.name in entry or each.default is MISSING]
            rows.append(Row(**{name: entry[name] for name in named}))
        except (ValueError, LookupError, TypeError) as error:
            if line.endswith(b"\n"):
                raise BenchError(f"{path} line {number} is damaged ({error!r})") from None
    return rows


def read_run(out: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads((out / RUN).read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {out / RUN}, which holds the run's settings ({error})") from None
    return run


def write_json(path: Path, value: dict[str, Any]) -> None:
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write(path: Path, text: str) -> None:
    """Replace a file atomically: a kill leaves either the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
