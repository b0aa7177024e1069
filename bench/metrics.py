"""Compute the figures of a run from the rows of requests.jsonl. A value that was not measured is null, never 0."""

from collections.abc import Sequence
from typing import Any

import jiwer
import numpy as np

from bench.answers import Row
from bench.loads import parse
from bench.measure import scoring, spread
from bench.measure.scoring import Errors
from bench.measure.spread import PERCENTILES

WORST = 10
# Lower bounds of the duration groups with separate error rates, in seconds of audio
DURATIONS_S = (0, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)


def latency(rows: Sequence[Row]) -> dict[str, Any]:
    """Latency of the completed requests in milliseconds.

    `ci95` has an interval [low, high] for each percentile and for the mean, from the percentile bootstrap over requests
    (Efron and Tibshirani 1993, chapter 13). It is null for fewer than two requests.
    """
    values = [row.latency_ms for row in rows if row.error is None and row.latency_ms is not None]
    names = [*(f"p{q}" for q in PERCENTILES), "mean"]
    numbers: dict[str, Any] = spread.percentiles(values) or dict.fromkeys(names)
    intervals: dict[str, list[float] | None] = dict.fromkeys(names)
    if len(values) > 1:
        drawn = []
        for picks in spread.resamples(len(values)):
            sample = np.array(values)[picks]
            drawn.append(np.vstack([np.percentile(sample, PERCENTILES, axis=1), sample.mean(axis=1)]))
        intervals = {name: spread.interval(column) for name, column in zip(names, np.hstack(drawn), strict=True)}
    return numbers | {
        "mean": float(np.mean(values)) if values else None,
        "max": max(values, default=None),
        "ci95": intervals,
    }


# ---- One level of load


def wall_seconds(attempts: Sequence[Row]) -> float | None:
    """Wall-clock seconds from the start of the first measured request to the end of the last one.

    For a resumed run, this is the sum over its parts, without the time between them. A killed part ends with its last
    written row: the requests in flight at that time have no row and are sent again. `attempts` must be all rows of the
    load, because failed attempts and those that a later part repeated take time too.
    """
    parts: dict[int, list[Row]] = {}
    for row in attempts:
        parts.setdefault(row.part, []).append(row)
    spans = [max(row.end for row in part) - min(row.start for row in part) for part in parts.values()]
    return sum(spans) if spans else None


def rtfx(rows: Sequence[Row], wall_s: float | None) -> float | None:
    """Inverse real-time factor: audio seconds of completed requests / wall-clock seconds, without warm-up.

    The Open ASR leaderboard computes it in the same way: sum of audio_length_s / sum of transcription_time_s. Its
    run_eval.py divides the time of a batch among its clips (Srivastav et al. 2025, arXiv 2510.06961).
    """
    audio_s = sum(row.duration_s for row in rows if row.error is None)
    return audio_s / wall_s if audio_s and wall_s else None


def of_load(
    load: str,
    rows: Sequence[Row],
    attempts: Sequence[Row],
    clips: int,
    resources: dict[str, Any] | None,
    mode: str,
    first: Sequence[Row] | None,
) -> dict[str, Any]:
    """The figures of one load, in the form of bench/schema/summary.schema.json.

    `rows` has the last row of each clip at this load, `attempts` all rows. `clips` is the number of clips to send.
    `resources` is the entry of the load in run.json, null if the run was killed. `mode` is that of run.json. `first`
    has the rows of the run's first load; it is null for that load itself.
    """
    done = [row for row in rows if row.error is None]
    level = parse(load)
    wall_s = wall_seconds(attempts)
    measured = resources or {"joules_reason": "the run was killed before this load ended"}
    joules, queued, harness_s = (measured.get(name) for name in ("joules", "queued", "harness_cpu_s"))
    audio_s = sum(row.duration_s for row in done)
    speeds = [1000 * row.duration_s / row.latency_ms for row in done if row.latency_ms and row.latency_ms > 0]
    if mode == "realtime":
        speeds = []  # the latency covers only the end of a session, so it gives no speed
    late = [1000 * (row.start - row.due) for row in attempts if row.due is not None]
    gaps = [gap for row in done for gap in np.diff(row.deltas_ms or []).tolist()]
    words = [delay for row in done for delay in row.words_ms or []]
    texts = {row.id: row.text for row in first or () if row.error is None}
    stages = server_ms(done)
    return {
        "load": load,
        "concurrency": level.concurrency,
        "rate": level.rate,
        "samples": clips,
        "completed": len(done),
        "failed": len(rows) - len(done),
        "missing": clips - len(rows),
        "wall_s": wall_s,
        "latency_ms": latency(rows),
        "rtfx": rtfx(rows, wall_s),
        "rtfx_clip": spread.percentiles(speeds, (50, 10)) or {"p50": None, "p10": None},
        "throughput_rps": len(done) / wall_s if done and wall_s else None,
        # Server and meters counted every attempt, including those that a resumed run repeated.
        "wait_rate": queued / len(attempts) if queued is not None and attempts else None,
        "queue_threshold_s": measured.get("queue_threshold_s"),
        "start_delay_ms": {**(spread.percentiles(late, (50, 99)) or {}), "max": max(late)} if late else None,
        "first_text_ms": spread.percentiles([row.first_text_ms for row in done if row.first_text_ms is not None]),
        "gap_ms": {**(spread.percentiles(gaps) or {}), "max": max(gaps)} if gaps else None,
        "word_delay_ms": {**(spread.percentiles(words) or {}), "words": len(words)} if words else None,
        "joules": joules,
        "joules_per_request": joules / len(done) if joules is not None and done else None,
        "joules_per_audio_second": joules / audio_s if joules is not None and audio_s else None,
        "joules_reason": measured.get("joules_reason"),
        "harness_ms_per_request": 1000 * harness_s / len(attempts) if harness_s is not None and attempts else None,
        "changed_texts": None if first is None else sum(row.id in texts and row.text != texts[row.id] for row in done),
        **({} if stages is None else {"server_ms": stages}),
    }


def server_ms(rows: Sequence[Row]) -> dict[str, float] | None:
    """The P50 of each stage of the server, in order; None if it does not say. A stage that a row lacks took no time."""
    told = [row.server_ms for row in rows if row.server_ms is not None]
    stages = dict.fromkeys(stage for each in told for stage in each)
    return {stage: float(np.median([each.get(stage, 0.0) for each in told])) for stage in stages} or None


# ---- Words and characters


def wer(rows: Sequence[Row]) -> dict[str, Any]:
    """Corpus word error rate with its interval and counts, over one row per clip, including failed ones.

    `rows` must be in the order of the run: another order gives another interval for the same transcripts.
    """
    errors = [scoring.word_errors(row.reference, row.text) for row in rows]
    return {**scoring.rate(errors, "words"), "normalizer": scoring.normalizer_name()}


def quality(rows: Sequence[Row], language: str | None = None) -> dict[str, Any]:
    """Error rates of the texts, in the form of bench/schema/summary.schema.json.

    `rows` has one row per clip, in the order of the run. For a failed row, the whole reference counts as deleted.
    """
    outputs = [scoring.align_words(row.reference, row.text, language) for row in rows]
    words = [scoring.counted(output) for output in outputs]
    characters = [scoring.counted(scoring.align_characters(row.reference, row.text, language)) for row in rows]
    raw = [(row.reference, row.text or "") for row in rows]
    wrong = sorted(
        (place for place, row in enumerate(rows) if row.error is None and words[place].total),
        key=lambda place: (-words[place].total, words[place].words),  # equal counts: the higher error rate first
    )
    return {
        "headline": "wer" if scoring.has_spaces(language) else "cer",
        "language": language,
        "normalizer": scoring.normalizer_name(language),
        "wer": scoring.rate(words, "words"),
        "cer": scoring.rate(characters, "characters"),
        "raw": {
            "wer": scoring.total(scoring.counted(jiwer.process_words(*pair)) for pair in raw).rate,
            "cer": scoring.total(scoring.counted(jiwer.process_characters(*pair)) for pair in raw).rate,
        },
        "empty": [row.id for row in rows if row.error is None and not (row.text or "").strip()],
        "worst": [_worst(rows[place], words[place], outputs[place]) for place in wrong[:WORST]],
        "by_duration": _by_duration(rows, words),
        "clips": [
            {
                "id": row.id,
                "errors": word.total,
                "words": word.words,
                "character_errors": character.total,
                "characters": character.words,
            }
            for row, word, character in zip(rows, words, characters, strict=True)
        ],
    }


def _worst(row: Row, errors: Errors, output: jiwer.WordOutput) -> dict[str, Any]:
    return {
        "id": row.id,
        "errors": errors.total,
        "words": errors.words,
        "wer": errors.rate,
        "reference": row.reference,
        "transcript": row.text,
        "alignment": _alignment(output),
    }


def _alignment(output: jiwer.WordOutput) -> list[list[str | None]]:
    """[operation, word of the reference, word of the transcript] for each step; null for a missing word."""
    reference, transcript, steps = output.references[0], output.hypotheses[0], []
    for chunk in output.alignments[0]:
        for step in range(max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)):
            here = None if chunk.type == "insert" else reference[chunk.ref_start_idx + step]
            there = None if chunk.type == "delete" else transcript[chunk.hyp_start_idx + step]
            steps.append([chunk.type, here, there])
    return steps


def _by_duration(rows: Sequence[Row], errors: Sequence[Errors]) -> list[dict[str, Any]]:
    """Error rates by duration. A group covers `from_s` <= duration < `to_s`; a null `to_s` means no upper bound."""
    groups: dict[int, list[Errors]] = {}
    for row, clip in zip(rows, errors, strict=True):
        index = int(np.searchsorted(DURATIONS_S, row.duration_s, side="right")) - 1
        groups.setdefault(index, []).append(clip)
    ends = (*DURATIONS_S[1:], None)
    return [
        {"from_s": DURATIONS_S[index], "to_s": ends[index], "clips": len(group), "wer": scoring.total(group).rate}
        for index, group in sorted(groups.items())
    ]
