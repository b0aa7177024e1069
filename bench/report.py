"""Score the directory of a run: read requests.jsonl and run.json; write summary.json, report.md and report.html."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from bench import live, metrics, page, plots, results, tables
from bench.answers import Row
from bench.loads import parse
from bench.measure import spread
from bench.page import Section, one_line

# Characters of a text in report.md. summary.json and requests.jsonl have the full texts.
LONGEST_TEXT = 600
WORST_NOTE = "Completed clips with the most word errors. [a → b]: a substituted by b; [− a]: deleted; [+ b]: inserted."
STAGES_NOTE = "P50 in ms, as the server says in the header Server-Timing."
WORST_HEADER = ("clip", "errors", "words", "reference", "transcript", "alignment")
NO_MEMORY = dict.fromkeys((*tables.BYTES, "source", "reason"))
DEFINITIONS = (
    (
        "load",
        "c16: closed loop with 16 requests in flight. r2.5: open loop with Poisson arrivals, 2.5 requests per second.",
    ),
    ("completed", "HTTP 200 with a transcript, which may be empty."),
    (
        "failed",
        "any other outcome. Failed requests are excluded from latency and RTFx. In WER and CER, each word or character "
        "of their reference counts as a deletion.",
    ),
    (
        "latency",
        "time from the first byte sent to the end of the response, in ms, of completed requests only. In an open "
        "loop, it starts when the request was due. With --realtime, it is the time from the last audio sent to the "
        "final text.",
    ),
    ("P50, P90, P95, P99", "linear interpolation at rank q/100 * (n - 1) of the sorted values (numpy linear)."),
    ("95 % interval", f"percentile bootstrap over clips, {spread.RESAMPLES} resamples, fixed seed."),
    (
        "RTFx",
        "seconds of audio of the completed requests / wall-clock seconds, without warm-up, as on the Open ASR "
        "leaderboard. RTFx of a clip: its duration / its latency. 90 % of the clips exceed P10.",
    ),
    (
        "wall clock",
        "from the start of the first measured request to the end of the last one; in a resumed run, the sum of its "
        "parts.",
    ),
    (
        "waited",
        "share of requests that spent more than the threshold in the server's queue, from the server's metrics.",
    ),
    ("start delay", "open loop: actual minus intended start, the delay that the benchmark itself adds."),
    ("first text", "time to the first piece of text that is not empty, in ms. Gap: time between two pieces, in ms."),
    ("word delay", "--realtime: time from the end of a word in the audio to the text that completes it, in ms."),
    (
        "lag",
        "--realtime: the time at which the client receives a token minus the time at which it sent the last sample "
        "that the token's audio row needs, or the end of the audio. If the server does not send one delta per token: "
        "the delay of a word minus the delay of the model. Lag in the audio: without the tokens that need the end of "
        "the audio.",
    ),
    (
        "fell behind",
        "sessions with a lag above 500 ms in the last 5 s of their audio, or without text for a part of their audio.",
    ),
    (
        "late sends",
        "--realtime: how much later than due the client sent its audio. This delay is part of every lag. The CPU time "
        "of the client is given per second of a session.",
    ),
    ("s64", "64 concurrent live sessions (--sessions), all started within one second."),
    (
        "WER",
        "(substitutions + deletions + insertions) / reference words of all clips, both texts normalised. CER: the "
        "same for characters. For languages written without spaces, CER is the headline and every letter counts as a "
        "word. Raw: without normalisation.",
    ),
    ("changed texts", "clips whose transcript differs from the one at the first load."),
    ("energy", "NVML's energy counter of the server's GPUs, from the first request of the load to its last response."),
    ("nvml_process_tree", "peak GPU memory of the server's processes, sampled every 0.5 s from the warm-up on."),
    ("nvml_device", "the same for all memory in use on the server's GPUs, by any process."),
    ("rss_process_tree", "the same for resident memory of the server's processes. Shared pages count in each process."),
)


def read(out: Path) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """Return run.json and the rows of each load, with all attempts.

    Raises BenchError for another schema version, and for rows that do not belong to the run.
    """
    record = results.read_run(out, results.SCHEMA_VERSION)
    return record, results.by_load(out, record["run"], results.read_rows(out / results.ROWS))


def score(out: Path) -> tuple[dict[str, Any], list[Row]]:
    """Write summary.json, report.md and report.html; return the summary and each clip's last row at the first load."""
    record, attempts = read(out)
    run = record["run"]
    rows: dict[str, list[Row]] = {}
    for load, tries in attempts.items():
        last = {row.id: row for row in tries}
        rows[load] = [last[clip] for clip in run["ids"] if clip in last]
    first = run["loads"][0]
    age_s = (run.get("live") or {}).get("age_s", 0.0)
    loads = []
    for load in run["loads"]:
        took, sessions = record["loads"].get(load), parse(load).sessions
        clips = sessions or len(run["ids"])
        peers = None if load == first else rows[first]
        loads.append(metrics.of_load(load, rows[load], attempts[load], clips, took, run["mode"], peers))
        if run["mode"] == "realtime":
            loads[-1] |= live.of_load(sessions, rows[load], attempts[load], took or {}, age_s)
    summary = {
        "schema_version": results.SCHEMA_VERSION,
        **{name: sum(load[name] for load in loads) for name in ("samples", "completed", "failed", "missing")},
        "loads": loads,
        "quality": metrics.quality(rows[first], run["language"]),
        "memory": record["memory"] or {**NO_MEMORY, "reason": "the run was killed"},
        "environment": {name: value for name, value in record["environment"].items() if name != "server"},
        "server": record["environment"]["server"],
        "run": run,
    }
    if found := live.trials(summary):
        summary["search"] = found
    results.write_json(out / results.SUMMARY, summary)
    worst = summary["quality"]["worst"]
    table = Section(f"The {metrics.WORST} worst clips", WORST_NOTE, WORST_HEADER, worst_rows(worst))
    title, figures = f"Benchmark {one_line(out.resolve().name)}", plots.figures(summary, rows)
    sections = _sections(summary, rows)
    write(out, title, _setup(summary), headline(summary), figures, sections, DEFINITIONS, worst, [table])
    return summary, rows[first]


def write(
    out: Path,
    title: str,
    setup: str,
    top: Sequence[tuple[str, str]],
    figures: Sequence[tuple[str, str, Element]],
    sections: Sequence[Section],
    definitions: Sequence[tuple[str, str]],
    worst: Sequence[dict[str, Any]] | None,
    last: Sequence[Section],
    notes: Sequence[str] = (),
) -> None:
    """Write report.md and report.html, of what page.render takes; report.md ends with the sections `last`."""
    written = [Section("", f"{setup}.", ("measure", "value"), top), *sections, *last]
    results.write(out / results.REPORT, tables.markdown(title, written, definitions, notes))
    html = page.render(title, setup, top, figures, sections, definitions, worst, notes)
    results.write(out / results.PAGE, html)


def console(out: Path, summary: dict[str, Any], rows: Sequence[Row]) -> str:
    """The console output at the end of a run: a table, three transcripts with their references, the report's path."""
    lines = [f"{name:<13}{value}" for name, value in headline(summary)]
    lines += tables.lines(summary["loads"], SHORT)
    for row, label in _examples(rows, summary["quality"]["worst"]):
        lines += ["", f"{row.id} ({label})", f"  reference   {one_line(row.reference)}"]
        lines += [f"  transcript  {one_line(row.text) or '(empty)'}"]
    return "\n".join([*lines, "", f"report: {out / results.REPORT}, {results.PAGE}"])


def headline(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of the main results. With several loads, without the values that differ between them."""
    quality, memory, server = summary["quality"], summary["memory"], summary["server"] or {}
    samples = f"{summary['completed']}/{summary['samples']} completed, {summary['failed']} failed"
    if summary["missing"]:
        samples += f", {summary['missing']} without an answer yet"
    rate = quality[quality["headline"]]
    errors = tables.number(rate["value"], "{:.2%}")
    if rate["ci95"]:
        errors += " (95 % interval {:.2%} to {:.2%})".format(*rate["ci95"])
    lines = [("samples", samples)]
    if len(summary["loads"]) == 1:
        (load,) = summary["loads"]
        latency = load["latency_ms"]
        lines += [(f"latency {q.upper()}", tables.number(latency[q], "{:.1f} ms")) for q in ("p50", "p90", "p95")]
        for name, label in (("first_text_ms", "first text"), ("word_delay_ms", "word delay")):
            if load[name]:
                lines.append((label, "P50 {p50:.1f} ms, P95 {p95:.1f} ms".format(**load[name])))
        if load.get("lag_ms"):
            lines.append(("lag", "P50 {p50:.1f} ms, P99 {p99:.1f} ms".format(**load["lag_ms"])))
            lines.append(("fell behind", str(load["fell_behind"])))
            lines.append(("client", _client(load)))
        lines.append(("RTFx", tables.number(load["rtfx"], "{:.2f}")))
        if load["joules"] is not None:
            each = [tables.number(load[f"joules_per_{what}"], "{:.2f} J") for what in ("request", "audio_second")]
            lines.append(("energy", "{} per request, {} per second of audio".format(*each)))
    if found := summary.get("search"):
        bound = f"P99 of the lag at most {found['lag_ms']:g} ms, none fell behind"
        lines.insert(0, ("sessions held", f"{found['held']} ({bound}; the search limit was {found['most']})"))
    lines += [(quality["headline"].upper(), errors), ("peak memory", tables.peak(memory))]
    if server.get("startup_s") is not None:
        lines.append(("start-up", f"{server['startup_s']:.1f} s"))
    return lines


def _client(load: Mapping[str, Any]) -> str:
    cpu = tables.number(load["harness_cpu_per_session_s"], "{:.4f} CPU s per second of a session")
    late = load["late_sends_ms"]
    return cpu + ("" if late is None else ", sends late by P99 {p99:.1f} ms".format(**late))


# ---- The tables of both reports

# Heading, path to the value in a load of summary.json, format
SHORT = (
    ("load", "load", "{}"),
    ("completed", "completed", "{}"),
    ("failed", "failed", "{}"),
    ("P50 ms", "latency_ms.p50", "{:.1f}"),
    ("P90 ms", "latency_ms.p90", "{:.1f}"),
    ("P95 ms", "latency_ms.p95", "{:.1f}"),
    ("RTFx", "rtfx", "{:.2f}"),
    ("requests/s", "throughput_rps", "{:.2f}"),
    ("waited", "wait_rate", "{:.1%}"),
    ("first text P50", "first_text_ms.p50", "{:.1f}"),
    ("lag P50", "lag_ms.p50", "{:.1f}"),
    ("lag P99", "lag_ms.p99", "{:.1f}"),
    ("fell behind", "fell_behind", "{}"),
    ("J/request", "joules_per_request", "{:.2f}"),
)
LATENCY = (
    ("load", "load", "{}"),
    ("P50 ms", "latency_ms.p50", "{:.1f}"),
    ("P90 ms", "latency_ms.p90", "{:.1f}"),
    ("P95 ms", "latency_ms.p95", "{:.1f}"),
    ("P99 ms", "latency_ms.p99", "{:.1f}"),
    ("mean ms", "latency_ms.mean", "{:.1f}"),
    ("max ms", "latency_ms.max", "{:.1f}"),
    ("start delay P50 ms", "start_delay_ms.p50", "{:.1f}"),
    ("start delay P99 ms", "start_delay_ms.p99", "{:.1f}"),
    ("start delay max ms", "start_delay_ms.max", "{:.1f}"),
)
SPEED = (
    ("load", "load", "{}"),
    ("completed", "completed", "{}"),
    ("failed", "failed", "{}"),
    ("missing", "missing", "{}"),
    ("RTFx", "rtfx", "{:.2f}"),
    ("clip RTFx P50", "rtfx_clip.p50", "{:.2f}"),
    ("clip RTFx P10", "rtfx_clip.p10", "{:.2f}"),
    ("requests/s", "throughput_rps", "{:.2f}"),
    ("wall clock s", "wall_s", "{:.1f}"),
    ("waited", "wait_rate", "{:.1%}"),
    ("queue threshold s", "queue_threshold_s", "{:g}"),
    ("J", "joules", "{:.0f}"),
    ("J/request", "joules_per_request", "{:.2f}"),
    ("J/s of audio", "joules_per_audio_second", "{:.2f}"),
    ("harness ms/request", "harness_ms_per_request", "{:.2f}"),
    ("changed texts", "changed_texts", "{}"),
)
STREAMING = (
    ("load", "load", "{}"),
    *((f"first text {q.upper()} ms", f"first_text_ms.{q}", "{:.1f}") for q in ("p50", "p90", "p95", "p99")),
    *((f"gap {q} ms", f"gap_ms.{q.lower()}", "{:.1f}") for q in ("P50", "P90", "P95", "P99", "max")),
    *((f"word delay {q.upper()} ms", f"word_delay_ms.{q}", "{:.1f}") for q in ("p50", "p90", "p95", "p99")),
    ("words", "word_delay_ms.words", "{}"),
)
LIVE = (
    ("load", "load", "{}"),
    *((f"lag {q} ms", f"lag_ms.{q.lower()}", "{:.1f}") for q in ("P50", "P90", "P95", "P99", "max")),
    ("lag unit", "lag_of", "{}"),
    ("tokens or words", "lag_ms.count", "{}"),
    *((f"lag in the audio {q.upper()} ms", f"lag_in_audio_ms.{q}", "{:.1f}") for q in ("p50", "p99")),
    ("lag unknown", "lag_unknown", "{}"),
    ("fell behind", "fell_behind", "{}"),
    *((f"late sends {q} ms", f"late_sends_ms.{q.lower()}", "{:.1f}") for q in ("P50", "P99", "max")),
    ("client CPU s per second of a session", "harness_cpu_per_session_s", "{:.4f}"),
)


def _sections(summary: dict[str, Any], rows: Mapping[str, Sequence[Row]]) -> list[Section]:
    quality, loads, memory = summary["quality"], summary["loads"], summary["memory"]
    unit = "letters" if quality["headline"] == "cer" else "words"
    rates = [
        (
            name.upper(),
            tables.rate(quality[name]),
            tables.number(quality["raw"][name], "{:.2%}"),
            *(
                tables.number(quality[name][each], "{}")
                for each in ("substitutions", "deletions", "insertions", counted)
            ),
        )
        for name, counted in (("wer", "words"), ("cer", "characters"))
    ]
    edits = ("substitutions", "deletions", "insertions", "reference length")
    groups = [
        (
            f"{each['from_s']} to {each['to_s']} s" if each["to_s"] else f"{each['from_s']} s and more",
            each["clips"],
            tables.number(each["wer"], "{:.2%}"),
        )
        for each in quality["by_duration"]
    ]
    failures = [
        (load, row.id, row.status, row.error) for load, each in rows.items() for row in each if row.error is not None
    ]
    here = {row.id: row for row in rows[summary["run"]["loads"][0]]}
    empties = [(clip, here[clip].duration_s, here[clip].reference) for clip in quality["empty"]]
    stages = dict.fromkeys(stage for load in loads for stage in load.get("server_ms", ()))
    server = (("load", "load", "{}"), *((stage, f"server_ms.{stage}", "{:.1f}") for stage in stages))
    latency, speed, streaming, lags, parts = (
        tables.measured(loads, wanted) for wanted in (LATENCY, SPEED, STREAMING, LIVE, server)
    )
    found = [
        Section("Latency", "95 % intervals in brackets.", *latency),
        Section("Stages of the server", STAGES_NOTE, *parts) if parts[1] else None,
        Section("Speed and resources", tables.resources(loads), *speed),
        Section("Streaming", "", *streaming) if streaming[1] else None,
        Section("Live sessions", "", *lags) if lags[1] else None,
        Section("Memory of the server", memory["reason"] or "", ("measure", "amount"), tables.sizes(memory)),
        Section(
            "Quality",
            f"Texts of load {loads[0]['load']}. Normaliser: {quality['normalizer']}.",
            ("rate", "normalised, 95 % interval", "raw", *edits),
            rates,
        ),
        Section(f"Errors by duration, in {unit}", "", ("duration", "clips", "rate"), groups),
        Section(f"Failures: {len(failures)}", "", ("load", "clip", "status", "error"), failures),
        Section(f"Empty transcripts: {len(empties)}", "", ("clip", "seconds", "reference"), empties),
        *tables.last_sections(summary, ("environment", "server", "run"), "Machine, versions, configuration"),
    ]
    return [section for section in found if section]


def worst_rows(worst: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The rows below WORST_HEADER, of `worst` in summary.json."""
    return [
        (
            each["id"],
            each["errors"],
            each["words"],
            _cut(each["reference"]),
            _cut(each["transcript"]),
            _marked(each["alignment"]),
        )
        for each in worst
    ]


def _setup(summary: dict[str, Any]) -> str:
    """One line with the model, the server, the machine and the dataset of the run."""
    run, machine = summary["run"], summary["environment"]
    config = run["serve"] and f"{run['serve']} (sha256 {str(run['config_sha256'])[:8]})"
    parts = [
        run["model"],
        machine["server_version"] and f"server version {machine['server_version']}",
        tables.machine(machine),
        config or run["url"],
        f"{len(run['ids'])} clips of {run['dataset']}",
        None if run["mode"] == "whole" else f"--{run['mode']}",
        str(machine["date_utc"])[:10],
        tables.commit(machine),
    ]
    return one_line(" · ".join(str(part) for part in parts if part))


def _examples(rows: Sequence[Row], worst: Sequence[dict[str, Any]]) -> Iterator[tuple[Row, str]]:
    """Three completed clips: the one with the most word errors, the longest other one, and the first other one."""
    completed = [row for row in rows if row.error is None]
    by_id = {row.id: row for row in completed}
    by_errors = [by_id[each["id"]] for each in worst]
    by_duration = sorted(completed, key=lambda row: -row.duration_s)
    picks: dict[str, tuple[Row, str]] = {}
    for label, order in (("most word errors", by_errors), ("longest", by_duration), ("first", completed)):
        if row := next((row for row in order if row.id not in picks), None):
            picks[row.id] = (row, label)
    yield from reversed(picks.values())


def _cut(text: str | None) -> str:
    line = one_line(text)
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]} […]"


def _marked(alignment: Sequence[Sequence[str | None]]) -> str:
    patterns = {"equal": "{0}", "substitute": "[{0} → {1}]", "delete": "[− {0}]", "insert": "[+ {1}]", "cut": "[…]"}
    return " ".join(patterns[str(kind)].format(here, there) for kind, here, there in page.shortened(alignment))
