"""Tables of figures, for the console, report.md and report.html."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.page import Section, one_line

Columns = Sequence[tuple[str, str, str]]  # heading, path to the value in a load of summary.json, format
BYTES = {
    "peak_bytes": "peak",
    "end_bytes": "at the end",
    "weights_bytes": "weights",
    "kv_cache_bytes": "KV cache",
    "other_bytes": "rest of the peak",
    "device_peak_bytes": "peak of the whole GPUs, all processes",
    "host_rss_peak_bytes": "peak of host memory (RSS)",
}


def columns(
    loads: Sequence[dict[str, Any]], wanted: Columns, intervals: bool = True
) -> tuple[list[str], list[list[str]]]:
    """Header and one row per load, with intervals after the values. Columns without any value are left out."""
    kept = [column for column in wanted if any(at(load, column[1]) is not None for load in loads)]
    body = []
    for load in loads:
        cells = []
        for _, path, pattern in kept:
            where, _, name = path.rpartition(".")
            interval = intervals and at(load, f"{where}.ci95.{name}")
            cells.append(number(at(load, path), pattern, "–"))
            if interval:
                cells[-1] += " ({} to {})".format(*(pattern.format(bound) for bound in interval))
        body.append(cells)
    return [column[0] for column in kept], body


def measured(loads: Sequence[dict[str, Any]], wanted: Columns) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows: one row per load. With a single load: one row per measure. No rows if nothing was measured."""
    header, body = columns(loads, wanted)
    if len(header) == 1:
        return header, []
    if len(loads) == 1:
        return ("measure", "value"), [*zip(header[1:], body[0][1:], strict=True)]
    return header, body


def at(load: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; null if the path does not exist."""
    value: Any = load
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects with its dotted name, without the long lists that have one entry per clip."""
    for key, value in values.items():
        if key == "loads" and isinstance(value, list) and isinstance(value[0], dict):
            value = {load["load"]: load for load in value}
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif key not in ("ids", "clips", "worst", "by_duration", "empty"):
            yield prefix + str(key), value


def lines(loads: Sequence[dict[str, Any]], wanted: Columns) -> list[str]:
    """The console's table of several loads, after an empty line; nothing for a single load."""
    if len(loads) == 1:
        return []
    header, body = columns(loads, wanted, intervals=False)
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    rows = (
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in (header, *body)
    )
    return ["", *rows]


def machine(environment: Mapping[str, Any]) -> str:
    """The GPUs of a machine, or its processor."""
    gpus = environment["gpu"]
    if not gpus:
        return f"{environment['cpu'] or 'CPU'}, {environment['cores']} cores"
    kinds = ", ".join(dict.fromkeys(gpus))
    return f"{len(gpus)} x {kinds}" if len(gpus) > 1 else kinds


def commit(environment: Mapping[str, Any]) -> str | None:
    """The benchmark's commit, with "-dirty" if the working tree had changes."""
    found = environment["git_commit"]
    return found and f"commit {found[:10]}{found[40:]}"


def sizes(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, amount) of each amount of memory that is known."""
    return [(label, f"{memory[name] / 2**30:.2f} GiB") for name, label in BYTES.items() if memory.get(name) is not None]


def last_sections(summary: Mapping[str, Any], setup: Sequence[str], title: str) -> list[Section]:
    """The last sections of a report: the parts `setup` of the summary, under this title, and all other parts."""
    settings = {name: summary[name] for name in setup}
    numbers = {name: value for name, value in summary.items() if name not in settings}
    return [
        Section(
            title,
            "The machine is the one that ran the benchmark. A remote server runs on another one.",
            ("setting", "value"),
            list(flat(settings)),
        ),
        Section("All numbers", "", ("number", "value"), list(flat(numbers)), folded=True),
    ]


def resources(loads: Sequence[Mapping[str, Any]]) -> str:
    """Why the energy of loads was not measured; empty if it was."""
    reasons = {load["joules_reason"] for load in loads if load["joules_reason"]}
    return "; ".join(f"Energy: {reason}." for reason in sorted(reasons))


def peak(memory: Mapping[str, Any]) -> str:
    if not memory["source"]:
        return f"not measured: {memory['reason']}"
    return f"{memory['peak_bytes'] / 2**30:.2f} GiB ({memory['source']})"


def markdown(
    title: str, sections: Sequence[Section], definitions: Sequence[tuple[str, str]], notes: Sequence[str] = ()
) -> str:
    """report.md. `notes` are what a reader has to know before the figures."""
    parts = [f"# {title}", *(f"> {escape(note)}" for note in notes)]
    for section in sections:
        if section.title:
            parts.append(f"## {section.title}")
        if section.note:
            parts.append(escape(section.note))
        parts.append(table(section.header, section.body))
    meaning = "\n".join(f"- **{term}**: {text}" for term, text in definitions)
    return "\n\n".join([*parts, "## Definitions", meaning]) + "\n"


def table(header: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; "None." if there are no rows."""
    if not body:
        return "None."
    rows = [header, ["---"] * len(header)]
    rows += [[escape(cell).replace("|", "\\|") for cell in cells] for cells in body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def escape(value: Any) -> str:
    """Escape HTML: Markdown may contain it, and texts of servers and datasets are untrusted."""
    return one_line(value).replace("&", "&amp;").replace("<", "&lt;")


def rate(found: Mapping[str, Any]) -> str:
    """An error rate with its 95 % interval in brackets."""
    text = number(found["value"], "{:.2%}")
    return text + (" ({:.2%} to {:.2%})".format(*found["ci95"]) if found["ci95"] else "")


def number(value: Any, pattern: str, otherwise: str = "not measured") -> str:
    return otherwise if value is None else pattern.format(value)


def trusted_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose cells are Markdown themselves."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """As a code span of Markdown, which needs more backticks around it than the text has in a row."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"
