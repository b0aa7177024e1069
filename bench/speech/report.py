"""Score the directory of a speech run: read run.json and requests.jsonl; write summary.json, report.md, report.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from bench import plots, results, tables
from bench.measure import plots as pictures
from bench.measure import spread
from bench.page import Section, one_line
from bench.report import WORST_HEADER, worst_rows, write
from bench.speech import roundtrip
from bench.speech.metrics import PERCENTILES, of_load
from bench.speech.rows import SpeechRow

SCHEMA_VERSION = 1
KIND = "speech"
NO_MEMORY = dict.fromkeys(("peak_bytes", "end_bytes", "source", "device_peak_bytes", "host_rss_peak_bytes"))
RANDOM = (
    "The model's weights are random (--random-weights), so its sound has no words: no word error rate can be had, and "
    "the length of the audio has nothing to do with the text. Characters per second, and the latency of a whole "
    "request, depend on that length and are not those of the trained model. First audio, RTF, the wait rate, energy "
    "per second of audio and memory are those of a model of this size, for audio of the length that was made."
)
RATE = "The server does not say the rate of its PCM. It is taken as 24 kHz mono, OpenAI's format."
SIZED = (
    "Responses had a known length, so their audio was complete before it was sent. First audio is then the latency of "
    "the whole, and such responses have no wait rate."
)
NO_WORDS = "No word error rate can be had: the weights are random, so the sound has no words."
NOT_HEARD = "Not measured: the run has no --transcribe."
CUT_SHORT = "Not measured: the run ended before its speech was transcribed."
DEFINITIONS = (
    ("load", "c16: closed loop with 16 requests in flight."),
    ("completed", "HTTP 200 with whole samples in the format that was requested. Everything else is failed, and in no "
     "figure but the count of failures and the round trip, where each word of its text counts as a deletion."),
    ("first audio", "time from the first byte of the request to the first byte of samples, in ms. The header of a WAV "
     "is no audio."),
    ("latency", "time from the first byte of the request to the end of the response, in ms."),
    ("RTF", "latency / seconds of the audio, per request. Below 1, audio is made faster than it is played. RTF of all: "
     "the sum of the latencies / the sum of the seconds."),
    ("characters/s", "characters of the texts of completed requests / wall-clock seconds of the load, without warm-up. "
     "Audio s/s: their seconds of audio / the same."),
    ("wait rate", "share of the streamed requests in which at least one piece of audio came later than its playback "
     "needed it: a player starts at the first piece and never pauses; a piece is late if it arrives when all audio "
     "before it has been played. A response with a known length (Content-Length) is not a stream and does not count; "
     "without streams the rate is not measured."),
    ("late", "how late the latest piece of a request was, 0 if none was. A player that starts later by this much has "
     "no gap."),
    ("pieces", "reads of the connection that had samples, per request."),
    ("P50, P90, P95", "linear interpolation at rank q/100 * (n - 1) of the sorted values (numpy linear)."),
    ("round trip", "the speech of the first load, transcribed by another server. WER: word errors / words of all "
     "texts, both sides through Whisper's normaliser. Its errors are those of the speech and of the transcriber "
     "together. The transcriber's own WER is that of the dataset's clips with the same texts."),
    ("95 % interval", f"percentile bootstrap over texts, {spread.RESAMPLES} resamples, fixed seed."),
    ("energy", "NVML's energy counter of the server's GPUs, from the first request of the load to its last response."),
    ("peak memory", "sampled every 0.5 s from the warm-up on. nvml_process_tree: GPU memory of the server's "
     "processes. nvml_device: of the whole GPUs. rss_process_tree: resident memory of the server's processes; shared "
     "pages count in each."),
)  # fmt: skip
SHORT = (
    ("load", "load", "{}"),
    ("completed", "completed", "{}"),
    ("failed", "failed", "{}"),
    *((f"first audio {q} ms", f"first_audio_ms.{q.lower()}", "{:.1f}") for q in ("P50", "P90", "P95")),
    ("latency P50 ms", "latency_ms.p50", "{:.1f}"),
    ("RTF P50", "rtf.p50", "{:.3f}"),
    ("characters/s", "characters_per_s", "{:.1f}"),
    ("wait rate", "wait_rate", "{:.1%}"),
    ("J/request", "joules_per_request", "{:.2f}"),
)
SPREAD = ("P50", "P90", "P95", "max")
TIMES = (
    ("load", "load", "{}"),
    *((f"first audio {q} ms", f"first_audio_ms.{q.lower()}", "{:.1f}") for q in SPREAD),
    *((f"latency {q} ms", f"latency_ms.{q.lower()}", "{:.1f}") for q in SPREAD),
)
SPEED = (
    ("load", "load", "{}"),
    ("completed", "completed", "{}"),
    ("failed", "failed", "{}"),
    ("missing", "missing", "{}"),
    *((f"RTF {q}", f"rtf.{q.lower()}", "{:.3f}") for q in SPREAD),
    ("RTF of all", "rtf_total", "{:.3f}"),
    ("characters/s", "characters_per_s", "{:.1f}"),
    ("audio s/s", "audio_s_per_s", "{:.2f}"),
    ("requests/s", "requests_per_s", "{:.2f}"),
    ("characters", "characters", "{}"),
    ("audio s", "audio_s", "{:.1f}"),
    ("wall clock s", "wall_s", "{:.1f}"),
    ("J", "joules", "{:.0f}"),
    ("J/request", "joules_per_request", "{:.2f}"),
    ("J/s of audio", "joules_per_audio_second", "{:.2f}"),
    ("harness ms/request", "harness_ms_per_request", "{:.2f}"),
)
PLAYBACK = (
    ("load", "load", "{}"),
    ("streamed", "streamed", "{}"),
    ("wait rate", "wait_rate", "{:.1%}"),
    *((f"late {q} ms", f"late_ms.{q.lower()}", "{:.1f}") for q in SPREAD),
    ("pieces P50", "pieces.p50", "{:.0f}"),
)


def is_one(out: Path) -> bool:
    """Whether the directory has a speech run. Raises BenchError if it has no run."""
    return results.read_run(out).get("kind") == KIND


def rows_of(out: Path, record: Mapping[str, Any]) -> dict[str, list[SpeechRow]]:
    """The rows of each load, in the order of the texts. Raises BenchError for rows that do not belong to the run."""
    place = {text: number for number, text in enumerate(record["run"]["ids"])}
    rows = results.by_load(out, record["run"], results.read_lines(out / results.ROWS, SpeechRow), "text")
    return {load: sorted(spoken, key=lambda row: place[row.id]) for load, spoken in rows.items()}


def score(out: Path) -> dict[str, Any]:
    """Write summary.json, report.md and report.html; return the summary. Raises BenchError for another schema."""
    record = results.read_run(out, SCHEMA_VERSION)
    run, rows = record["run"], rows_of(out, record)
    texts = len(run["ids"])
    levels = [of_load(load, rows[load], texts, record["loads"].get(load)) for load in run["loads"]]
    heard = roundtrip.figures(out, run["transcriber"], run["language"]) if run["transcriber"] else None
    missing = CUT_SHORT if run["transcriber"] else NOT_HEARD
    summary = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        **{name: sum(level[name] for level in levels) for name in ("samples", "completed", "failed", "missing")},
        "loads": levels,
        "round_trip": heard,
        "round_trip_reason": None if heard else NO_WORDS if run["random_weights"] else missing,
        "memory": record["memory"] or {**NO_MEMORY, "reason": "the run was killed"},
        "environment": record["environment"],
        "run": run,
    }
    results.write_json(out / results.SUMMARY, summary)
    title, figures = f"Speech benchmark {one_line(out.resolve().name)}", _figures(summary, rows)
    sections, notes = _sections(summary, rows, roundtrip.failures(out)), _notes(run, rows)
    worst = heard["speech"]["worst"] if heard else None
    table = [Section("The worst texts", "", WORST_HEADER, worst_rows(worst))] if worst else []
    write(out, title, _setup(summary), headline(summary), figures, sections, DEFINITIONS, worst, table, notes)
    return summary


def console(out: Path, summary: dict[str, Any]) -> str:
    """The console output at the end of a run."""
    lines = [f"{name:<24}{value}" for name, value in headline(summary)]
    lines += tables.lines(summary["loads"], SHORT)
    if note := summary["run"]["note"]:
        lines.insert(0, one_line(note))
    return "\n".join([*lines, "", f"report: {out / results.REPORT}, {results.PAGE}"])


def headline(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of the main results. With several loads, without the values that differ between them."""
    samples = f"{summary['completed']}/{summary['samples']} completed, {summary['failed']} failed"
    if summary["missing"]:
        samples += f", {summary['missing']} not sent"
    lines = [("samples", samples)]
    if len(summary["loads"]) == 1:
        (load,) = summary["loads"]
        for name, label in (("first_audio_ms", "first audio"), ("latency_ms", "latency")):
            for q in PERCENTILES:
                lines.append((f"{label} P{q}", tables.number(tables.at(load, f"{name}.p{q}"), "{:.1f} ms")))
        lines.append(("RTF", tables.number(tables.at(load, "rtf.p50"), "{:.3f} (P50)")))
        lines.append(("characters/s", tables.number(load["characters_per_s"], "{:.1f}")))
        lines.append(("wait rate", tables.number(load["wait_rate"], "{:.1%}")))
        if load["joules"] is not None:
            each = [tables.number(load[f"joules_per_{what}"], "{:.2f} J") for what in ("request", "audio_second")]
            lines.append(("energy", "{} per request, {} per second of audio".format(*each)))
    lines.append(("peak memory", tables.peak(summary["memory"])))
    if heard := summary["round_trip"]:
        lines.append(("WER of the round trip", _wer(heard["speech"])))
        lines.append(("transcriber's own WER", _wer(heard["clips"])))
    elif summary["run"]["random_weights"]:
        lines.append(("WER", "none (random weights have no words)"))
    return lines


def unheard(summary: Mapping[str, Any]) -> int:
    """The number of transcriptions of the round trip that failed."""
    return int(summary["round_trip"]["failed"]) if summary["round_trip"] else 0


def _wer(quality: Mapping[str, Any]) -> str:
    rate = quality[quality["headline"]]
    value = tables.number(rate["value"], "{:.2%}")
    return value + (" (95 % interval {:.2%} to {:.2%})".format(*rate["ci95"]) if rate["ci95"] else "")


def _sections(
    summary: dict[str, Any], rows: Mapping[str, Sequence[SpeechRow]], unheard: Sequence[tuple[Any, ...]]
) -> list[Section]:
    """`unheard` are the transcriptions that failed."""
    levels, memory = summary["loads"], summary["memory"]
    failures: list[tuple[Any, ...]] = [
        (load, row.id, row.status, row.error) for load, each in rows.items() for row in each if row.error is not None
    ]
    failures += unheard
    times, speed, playback = (tables.measured(levels, wanted) for wanted in (TIMES, SPEED, PLAYBACK))
    return [
        Section("First audio and latency", "", *times),
        Section("Playback", "", *playback),
        Section("Speed and resources", tables.resources(levels), *speed),
        Section("Memory of the server", memory["reason"] or "", ("measure", "amount"), tables.sizes(memory)),
        _round_trip(summary),
        Section(f"Failures: {len(failures)}", "", ("where", "text", "status", "error"), failures),
        *tables.last_sections(summary, ("environment", "run"), "Machine, versions, settings"),
    ]


def _notes(run: Mapping[str, Any], rows: Mapping[str, Sequence[SpeechRow]]) -> list[str]:
    """What a reader has to know before the figures."""
    done = [row for each in rows.values() for row in each if row.error is None]
    notes = [run["note"]] if run["note"] else []
    notes += [RANDOM] if run["random_weights"] else []
    notes += [RATE] if any(not row.rate_told for row in done) else []
    notes += [SIZED] if any(not row.streamed for row in done) else []
    return notes


def _round_trip(summary: dict[str, Any]) -> Section:
    heard = summary["round_trip"]
    if heard is None:
        return Section("Round trip", summary["round_trip_reason"], ("rate", "value"), [("WER", "not measured")])
    by = heard["transcriber"]
    note = f"Transcribed by {by['model']} at {by['url']}. Normaliser: {heard['speech']['normalizer']}."
    body = [
        (
            label,
            tables.rate(quality["wer"]),
            tables.rate(quality["cer"]),
            *(
                tables.number(quality["wer"][name], "{}")
                for name in ("substitutions", "deletions", "insertions", "words")
            ),
            len(quality["empty"]),
        )
        for label, quality in (("the speech", heard["speech"]), ("the dataset's clips", heard["clips"]))
    ]
    edits = ("substitutions", "deletions", "insertions", "words", "empty transcripts")
    return Section("Round trip", note, ("what was transcribed", "WER", "CER", *edits), body)


def _figures(summary: dict[str, Any], rows: Mapping[str, Sequence[SpeechRow]]) -> list[tuple[str, str, Element]]:
    """(title, note, picture) of each plot for which the run has data."""
    done = {load: [row for row in each if row.error is None] for load, each in rows.items()}
    found: list[tuple[str, str, Element]] = []
    if not any(done.values()):
        return found
    dots = "Dots: P50, P90, P95 and P99."
    for title, name in (("First audio", "first_audio_ms"), ("Latency", "latency_ms")):
        values = {load: [getattr(row, name) for row in each] for load, each in done.items()}
        found.append((title, f"Share of requests with at most this time. {dots}", pictures.shares(values)))
    points = {load: [(row.audio_s or 0.0, row.latency_ms or 0.0) for row in each] for load, each in done.items()}
    found.append(("Latency against the length of the audio", "One dot per request.", pictures.scatter(points)))
    levels = plots.levels_of(summary["loads"], "concurrency")
    if len(levels) > 1:
        found += _by_load(levels)
    return found


def _by_load(levels: Sequence[dict[str, Any]]) -> list[tuple[str, str, Element]]:
    labels, unit = [str(load["concurrency"]) for load in levels], "requests in flight"
    found = []
    for title, name, of in (
        ("First audio against concurrency", "first_audio_ms", "ms"),
        ("RTF against concurrency", "rtf", "RTF"),
    ):
        lines = {f"P{q}": [tables.at(load, f"{name}.p{q}") for load in levels] for q in PERCENTILES}
        found.append((title, "", pictures.by_level(labels, lines, {}, unit, of)))
    speed = {"characters/s": [load["characters_per_s"] for load in levels]}
    found.append(("Characters per second", "Of all requests together.", pictures.by_level(labels, speed, {}, unit, "")))
    return found


def _setup(summary: dict[str, Any]) -> str:
    """One line with the model, the server, the machine and the texts of the run."""
    run, machine = summary["run"], summary["environment"]
    length = f" of up to {run['characters']} characters" if run["characters"] else ""
    parts = [
        f"{run['model']}, voice {run['voice']}",
        run["random_weights"] and "random weights",
        machine["server_version"] and f"server version {machine['server_version']}",
        tables.machine(machine),
        run["url"],
        f"{len(run['ids'])} texts{length} of {run['dataset']}",
        f"{run['format']}{'' if run['stream'] else ', whole'}",
        str(machine["date_utc"])[:10],
        tables.commit(machine),
    ]
    return one_line(" · ".join(str(part) for part in parts if part))
