"""Score a run's directory: requests.jsonl and run.json -> summary.json, report.md and a table to print."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import metrics, results
from bench.client import Row

WORST = 10
DEFINITIONS = f"""\
- **completed**: HTTP 200 with a JSON object whose `text` is a string, be it empty.
- **failed**: any other outcome. Left out of latency and RTFx; in WER every word of it is deleted.
- **latency**: ms from the request's first byte until the answer's body is read; completed requests alone.
- **P50, P90, P95, P99**: linear interpolation at rank q/100 * (n - 1) of the sorted latencies (numpy linear).
- **RTFx**: audio seconds of the completed requests / wall-clock seconds; warm-up left out.
- **wall clock**: first measured request's start to last one's end; the parts of a resumed run add up.
- **WER**: (substitutions + deletions + insertions) / reference words of all clips, both sides normalised.
- **95 % interval**: percentile bootstrap over clips, {metrics.RESAMPLES} resamples, fixed seed.
- **nvml_process_tree**: peak GPU memory of the server's processes, sampled every 0.5 s from warm-up on.
- **nvml_device**: likewise, all memory in use on the server's GPUs, by whomever.
- **rss_process_tree**: likewise, resident memory of the server's processes; pages they share count in each.
"""


def score(out: Path) -> tuple[dict[str, Any], list[Row]]:
    """Write summary.json and report.md; return the summary and each clip's last row, in the run's order."""
    record = results.read_run(out)
    every = results.read_rows(out / results.ROWS)
    first = record["run"].get("loads", ["c1"])[0]
    ends = {(row.id, row.load): row.error for row in every}
    attempts = [row for row in every if row.load == first]
    last = {row.id: row for row in attempts}
    rows = [last[clip] for clip in record["run"]["ids"] if clip in last]
    wall_s = metrics.wall_seconds(attempts)
    summary = {
        "schema_version": 1,
        "samples": len(record["run"]["ids"]) * len(record["run"].get("loads", [first])),
        "completed": sum(error is None for error in ends.values()),
        "failed": sum(error is not None for error in ends.values()),
        "latency_ms": metrics.latency(rows),
        "rtfx": metrics.rtfx(rows, wall_s),
        "wer": metrics.wer(rows),
        "memory": record["memory"] or {"peak_bytes": None, "source": None, "reason": "the run was killed"},
        "wall_s": wall_s,
        "environment": record["environment"],
        "run": record["run"],
    }
    results.write_json(out / results.SUMMARY, summary)
    results.write(out / results.REPORT, _markdown(out.resolve().name, summary, rows))
    return summary, rows


def console(out: Path, summary: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table that ends a run, three transcripts beside their references, and where the report is."""
    lines = [f"{name:<13}{value}" for name, value in _headline(summary)]
    for row, label in _examples(rows):
        lines += ["", f"{row.id} ({label})", f"  reference   {_line(row.reference)}"]
        lines += [f"  transcript  {_line(row.text) or '(empty)'}"]
    return "\n".join([*lines, "", f"report: {out / results.REPORT}"])


def _headline(summary: dict[str, Any]) -> list[tuple[str, str]]:
    latency, wer, memory = summary["latency_ms"], summary["wer"], summary["memory"]
    samples = f"{summary['completed']}/{summary['samples']} completed, {summary['failed']} failed"
    if missing := summary["samples"] - summary["completed"] - summary["failed"]:
        samples += f", {missing} without an answer yet"
    errors = _number(wer["value"], "{:.2%}")
    if wer["ci95"]:
        errors += " (95 % interval {:.2%} to {:.2%})".format(*wer["ci95"])
    peak = f"not measured: {memory['reason']}"
    if memory["source"]:
        peak = f"{memory['peak_bytes'] / 2**30:.2f} GiB ({memory['source']})"
    return [
        ("samples", samples),
        *((f"latency {q.upper()}", _number(latency[q], "{:.1f} ms")) for q in ("p50", "p90", "p95")),
        ("RTFx", _number(summary["rtfx"], "{:.2f}")),
        ("WER", errors),
        ("peak memory", peak),
    ]


def _markdown(name: str, summary: dict[str, Any], rows: Sequence[Row]) -> str:
    completed = [row for row in rows if row.error is None]
    failures = [(row.id, row.status, row.error) for row in rows if row.error is not None]
    empties = [(row.id, row.duration_s, row.reference) for row in completed if not _line(row.text)]
    worst = [(row.id, bad.total, bad.words, row.reference, row.text) for bad, row in _by_errors(rows)[:WORST]]
    setup = {key: summary[key] for key in ("environment", "run")}
    numbers = {key: value for key, value in summary.items() if key not in setup}
    return f"""# Benchmark {_line(name)}

{_table(("measure", "value"), _headline(summary))}

## What the numbers mean

{DEFINITIONS}
## All numbers

{_table(("number", "value"), list(_flat(numbers)))}

## Machine, versions, configuration

The machine is the bench's; a server elsewhere has its own.

{_table(("setting", "value"), list(_flat(setup)))}

## Failures: {len(failures)}

{_table(("clip", "status", "error"), failures)}

## Empty transcripts: {len(empties)}

{_table(("clip", "seconds", "reference"), empties)}

## The {WORST} worst clips

Completed clips with the most word errors.

{_table(("clip", "errors", "words", "reference", "transcript"), worst)}
"""


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects with its dotted name, but for the ids, which are too many to read."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif key != "ids":
            yield prefix + key, value


def _by_errors(rows: Sequence[Row]) -> list[tuple[metrics.WordErrors, Row]]:
    """Completed clips with word errors, most first; among equals the shorter reference, which fared worse."""
    pairs = [(metrics.word_errors(row.reference, row.text), row) for row in rows if row.error is None]
    return sorted((pair for pair in pairs if pair[0].total), key=lambda pair: (-pair[0].total, pair[0].words))


def _examples(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Three completed clips: the one with the most word errors, the longest of the rest, the first of what is left."""
    completed = [row for row in rows if row.error is None]
    by_errors = [row for _, row in _by_errors(completed)]
    by_duration = sorted(completed, key=lambda row: -row.duration_s)
    picks: dict[str, tuple[Row, str]] = {}
    for label, order in (("most word errors", by_errors), ("longest", by_duration), ("first", completed)):
        if row := next((row for row in order if row.id not in picks), None):
            picks[row.id] = (row, label)
    yield from reversed(picks.values())


def _table(header: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, or "None." without rows."""
    if not body:
        return "None."
    rows = [header, ["---"] * len(header)]
    rows += [[_line(cell).replace("|", "\\|") for cell in cells] for cells in body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _line(value: Any) -> str:
    """One printable line: a transcript can hold line breaks and terminal escapes."""
    text = " ".join(("null" if value is None else str(value)).split())
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _number(value: float | None, pattern: str) -> str:
    return "not measured" if value is None else pattern.format(value)
