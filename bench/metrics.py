"""Compute the figures of a run from the rows of requests.jsonl. A value that was not measured is null, never 0."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import jiwer
import numpy as np
import numpy.typing as npt
from whisper_normalizer.basic import BasicTextNormalizer  # type: ignore[import-untyped,unused-ignore]
from whisper_normalizer.english import EnglishTextNormalizer  # type: ignore[import-untyped,unused-ignore]

from bench.answers import Row
from bench.loads import parse

PACKAGE = f"whisper-normalizer {version('whisper-normalizer')}"
# Languages written without spaces between words. The first five are from Whisper (Radford et al. 2022, appendix C).
NO_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue", "cmn", "km"))
PERCENTILES = (50, 90, 95, 99)
RESAMPLES = 2000
BOOTSTRAP_SEED = 0
# Resampled values in memory at a time: 16 MB, for any number of clips
CHUNK = 2_000_000
WORST = 10
# Lower bounds of the duration groups with separate error rates, in seconds of audio
DURATIONS_S = (0, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Edits = tuple[int, int, int, int]


# ---- Percentiles and intervals


def spread(values: Sequence[float], percentiles: Sequence[int] = PERCENTILES) -> dict[str, float] | None:
    """Percentiles of the values, {"p50": ...}; null without values.

    Linear interpolation at rank q/100 * (n - 1) of the sorted values (numpy's 'linear').
    """
    if not values:
        return None
    found = np.percentile(values, percentiles, method="linear")
    return {f"p{q}": float(value) for q, value in zip(percentiles, found, strict=True)}


def resamples(count: int) -> Iterator[Counts]:
    """Yield the indices of RESAMPLES draws with replacement, as arrays [draws, count]. Every call yields the same."""
    random = np.random.default_rng(BOOTSTRAP_SEED)
    step = max(1, CHUNK // count)
    for start in range(0, RESAMPLES, step):
        yield random.integers(0, count, (min(step, RESAMPLES - start), count))


def _interval(statistics: Floats) -> list[float]:
    return [float(bound) for bound in np.percentile(statistics, [2.5, 97.5], method="linear")]


def latency(rows: Sequence[Row]) -> dict[str, Any]:
    """Latency of the completed requests in milliseconds.

    `ci95` has an interval [low, high] for each percentile and for the mean, from the percentile bootstrap over requests
    (Efron and Tibshirani 1993, chapter 13). It is null for fewer than two requests.
    """
    values = [row.latency_ms for row in rows if row.error is None and row.latency_ms is not None]
    names = [*(f"p{q}" for q in PERCENTILES), "mean"]
    numbers: dict[str, Any] = spread(values) or dict.fromkeys(names)
    intervals: dict[str, list[float] | None] = dict.fromkeys(names)
    if len(values) > 1:
        drawn = []
        for picks in resamples(len(values)):
            sample = np.array(values)[picks]
            drawn.append(np.vstack([np.percentile(sample, PERCENTILES, axis=1), sample.mean(axis=1)]))
        intervals = {name: _interval(each) for name, each in zip(names, np.hstack(drawn), strict=True)}
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
        "rtfx_clip": spread(speeds, (50, 10)) or {"p50": None, "p10": None},
        "throughput_rps": len(done) / wall_s if done and wall_s else None,
        # Server and meters counted every attempt, including those that a resumed run repeated.
        "wait_rate": queued / len(attempts) if queued is not None and attempts else None,
        "queue_threshold_s": measured.get("queue_threshold_s"),
        "start_delay_ms": {**(spread(late, (50, 99)) or {}), "max": max(late)} if late else None,
        "first_text_ms": spread([row.first_text_ms for row in done if row.first_text_ms is not None]),
        "gap_ms": {**(spread(gaps) or {}), "max": max(gaps)} if gaps else None,
        "word_delay_ms": {**(spread(words) or {}), "words": len(words)} if words else None,
        "joules": joules,
        "joules_per_request": joules / len(done) if joules is not None and done else None,
        "joules_per_audio_second": joules / audio_s if joules is not None and audio_s else None,
        "joules_reason": measured.get("joules_reason"),
        "harness_ms_per_request": 1000 * harness_s / len(attempts) if harness_s is not None and attempts else None,
        "changed_texts": None if first is None else sum(row.id in texts and row.text != texts[row.id] for row in done),
    }


# ---- Words and characters


@dataclass(frozen=True)
class WordErrors:
    """Word-level edits between a reference of `words` words and its transcript."""

    substitutions: int
    deletions: int
    insertions: int
    words: int

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def has_spaces(language: str | None) -> bool:
    """Whether the language is written with spaces between words. `language` is a code such as "th" or "zh-TW"."""
    return _primary(language) not in NO_SPACES


def _primary(language: str | None) -> str:
    primary = (language or "en").lower().replace("_", "-").split("-")[0]
    return {"english": "en", "eng": "en"}.get(primary, primary)


def normalizer_name(language: str | None = None) -> str:
    if _primary(language) == "en":
        return f"whisper-english ({PACKAGE})"
    split = "" if has_spaces(language) else ", every letter a word"
    return f"whisper-basic, marks kept{split} ({PACKAGE})"


def normalize(text: str, language: str | None = None) -> str:
    """Whisper's text normalisation (Radford et al. 2022, appendix C): English, or basic for other languages.

    The basic normaliser is set to keep marks. Its default deletes the vowels of Thai, Hindi and similar scripts. For
    languages written without spaces it puts spaces around every letter, as in Whisper's evaluation.
    """
    return _normalizer(_primary(language))(text)


@cache
def _normalizer(primary: str) -> Callable[[str], str]:
    if primary == "en":
        return EnglishTextNormalizer()  # reads its table of 1,700 spellings from a file
    return BasicTextNormalizer(split_letters=not has_spaces(primary), preserve_marks=True)


def word_errors(reference: str, transcript: str | None, language: str | None = None) -> WordErrors:
    """Count the errors of one clip after normalisation. A null transcript (a failed request) deletes all words."""
    return WordErrors(*_edits(_words(reference, transcript, language)))


def _words(reference: str, transcript: str | None, language: str | None) -> jiwer.WordOutput:
    # jiwer 4 accepts an empty reference: every word of the transcript is then an insertion.
    return jiwer.process_words(normalize(reference, language), normalize(transcript or "", language))


def _characters(reference: str, transcript: str | None, language: str | None) -> jiwer.CharacterOutput:
    """Align characters. jiwer counts spaces; they are removed for languages that are written without spaces."""
    here, there = normalize(reference, language), normalize(transcript or "", language)
    if not has_spaces(language):
        here, there = "".join(here.split()), "".join(there.split())
    return jiwer.process_characters(here, there)


def _edits(result: jiwer.WordOutput | jiwer.CharacterOutput) -> Edits:
    """(substitutions, deletions, insertions, units of the reference)"""
    edits = (result.substitutions, result.deletions, result.insertions)
    return *edits, result.hits + result.substitutions + result.deletions


def _sum(edits: Edits) -> int:
    return edits[0] + edits[1] + edits[2]


def _rate(edits: Sequence[Edits], unit: str) -> dict[str, Any]:
    """The corpus rate (S + D + I) / units over all clips, its interval, and the counts.

    `ci95` is from the percentile bootstrap over clips (Bisani and Ney 2004): resample the clips with replacement,
    compute the corpus rate of each resample, and take the 2.5th and 97.5th percentiles. It is null for a single clip.
    """
    counts = np.array(edits, dtype=np.int64).reshape(-1, 4)
    errors, units = counts[:, :3].sum(axis=1), counts[:, 3]
    interval = None
    if len(counts) > 1 and units.sum():
        sums = [(errors[picks].sum(axis=1), units[picks].sum(axis=1)) for picks in resamples(len(counts))]
        above, below = (np.concatenate(each) for each in zip(*sums, strict=True))
        interval = _interval(above[below > 0] / below[below > 0])
    names = ("substitutions", "deletions", "insertions", unit)
    return {
        "value": float(errors.sum() / units.sum()) if units.sum() else None,
        "ci95": interval,
        **{name: int(total) if len(counts) else None for name, total in zip(names, counts.sum(axis=0), strict=True)},
    }


def wer(rows: Sequence[Row], language: str | None = None) -> dict[str, Any]:
    """Corpus word error rate with its interval and counts, over one row per clip, including failed ones.

    `rows` must be in the order of the run: another order gives another interval for the same transcripts.
    """
    edits = [_edits(_words(row.reference, row.text, language)) for row in rows]
    return {**_rate(edits, "words"), "normalizer": normalizer_name(language)}


def quality(rows: Sequence[Row], language: str | None = None) -> dict[str, Any]:
    """Error rates of the texts, in the form of bench/schema/summary.schema.json.

    `rows` has one row per clip, in the order of the run. For a failed row, the whole reference counts as deleted.
    """
    outputs = [_words(row.reference, row.text, language) for row in rows]
    words = [_edits(output) for output in outputs]
    characters = [_edits(_characters(row.reference, row.text, language)) for row in rows]
    raw = [(row.reference, row.text or "") for row in rows]
    wrong = sorted(
        (each for each in zip(words, rows, outputs, strict=True) if each[1].error is None and _sum(each[0])),
        key=lambda each: (-_sum(each[0]), each[0][3]),  # equal counts: the higher error rate first
    )
    return {
        "headline": "wer" if has_spaces(language) else "cer",
        "language": language,
        "normalizer": normalizer_name(language),
        "wer": _rate(words, "words"),
        "cer": _rate(characters, "characters"),
        "raw": {
            "wer": _total([_edits(jiwer.process_words(*pair)) for pair in raw]),
            "cer": _total([_edits(jiwer.process_characters(*pair)) for pair in raw]),
        },
        "empty": [row.id for row in rows if row.error is None and not (row.text or "").strip()],
        "worst": [
            {
                "id": row.id,
                "errors": _sum(edits),
                "words": edits[3],
                "wer": _total([edits]),
                "reference": row.reference,
                "transcript": row.text,
                "alignment": _alignment(output),
            }
            for edits, row, output in wrong[:WORST]
        ],
        "by_duration": _by_duration(rows, words),
        "clips": [
            {
                "id": row.id,
                "errors": _sum(word),
                "words": word[3],
                "character_errors": _sum(character),
                "characters": character[3],
            }
            for row, word, character in zip(rows, words, characters, strict=True)
        ],
    }


def _total(edits: Sequence[Edits]) -> float | None:
    units = sum(each[3] for each in edits)
    return sum(_sum(each) for each in edits) / units if units else None


def _alignment(output: jiwer.WordOutput) -> list[list[str | None]]:
    """[operation, word of the reference, word of the transcript] for each step; null for a missing word."""
    reference, transcript, steps = output.references[0], output.hypotheses[0], []
    for chunk in output.alignments[0]:
        for step in range(max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)):
            here = None if chunk.type == "insert" else reference[chunk.ref_start_idx + step]
            there = None if chunk.type == "delete" else transcript[chunk.hyp_start_idx + step]
            steps.append([chunk.type, here, there])
    return steps


def _by_duration(rows: Sequence[Row], edits: Sequence[Edits]) -> list[dict[str, Any]]:
    """Error rates by duration. A group covers `from_s` <= duration < `to_s`; a null `to_s` means no upper bound."""
    groups: dict[int, list[Edits]] = {}
    for row, each in zip(rows, edits, strict=True):
        index = int(np.searchsorted(DURATIONS_S, row.duration_s, side="right")) - 1
        groups.setdefault(index, []).append(each)
    ends = (*DURATIONS_S[1:], None)
    return [
        {"from_s": DURATIONS_S[index], "to_s": ends[index], "clips": len(group), "wer": _total(group)}
        for index, group in sorted(groups.items())
    ]
