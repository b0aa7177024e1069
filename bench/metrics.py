"""Turn rows of requests.jsonl into numbers. What was not measured is null, never 0."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import jiwer
import numpy as np
from whisper_normalizer.english import EnglishTextNormalizer  # type: ignore[import-untyped,unused-ignore]

from bench.client import Row

NORMALIZER = f"whisper-english (whisper-normalizer {version('whisper-normalizer')})"
RESAMPLES = 2000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class WordErrors:
    """Word-level edits that turn a reference of `words` words into its transcript."""

    substitutions: int
    deletions: int
    insertions: int
    words: int

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions


@lru_cache(maxsize=1)
def _normalizer() -> EnglishTextNormalizer:
    return EnglishTextNormalizer()  # reads its table of 1,700 spellings from a file


def word_errors(reference: str, transcript: str | None) -> WordErrors:
    """Count one clip's errors after Whisper's English normalisation (Radford et al. 2022, appendix C).

    A null transcript (a failed request) deletes every word.
    """
    # An empty reference is fine with jiwer 4, where every word of the transcript is then an insertion.
    result = jiwer.process_words(_normalizer()(reference), _normalizer()(transcript or ""))
    words = result.hits + result.substitutions + result.deletions
    return WordErrors(result.substitutions, result.deletions, result.insertions, words)


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear interpolation at rank q/100 * (n - 1) of the sorted values (numpy's 'linear')."""
    return float(np.percentile(values, q, method="linear")) if values else None


def latency(rows: Sequence[Row]) -> dict[str, float | None]:
    """Latency in milliseconds over the completed requests alone."""
    values = [row.latency_ms for row in rows if row.error is None and row.latency_ms is not None]
    numbers = {f"p{q}": percentile(values, q) for q in (50, 90, 95, 99)}
    return numbers | {"mean": float(np.mean(values)) if values else None, "max": max(values, default=None)}


def wall_seconds(attempts: Sequence[Row]) -> float | None:
    """Wall-clock seconds of the measured pass: from its first request's start to its last one's end.

    The parts of a resumed run add up, and the hours between them count for nothing. A part that was killed
    counts until the last answer it wrote: what was in flight then left no row and is sent again in full.
    Failed attempts take time as well, also those that a later part repeated: pass every row of the file.
    """
    parts: dict[int, list[Row]] = {}
    for row in attempts:
        parts.setdefault(row.part, []).append(row)
    spans = [max(row.end for row in part) - min(row.start for row in part) for part in parts.values()]
    return sum(spans) if spans else None


def rtfx(rows: Sequence[Row], wall_s: float | None) -> float | None:
    """Inverse real-time factor: audio seconds of completed requests / wall-clock seconds, without warm-up."""
    audio_s = sum(row.duration_s for row in rows if row.error is None)
    return audio_s / wall_s if audio_s and wall_s else None


def wer(rows: Sequence[Row]) -> dict[str, Any]:
    """Corpus word error rate, (S + D + I) / reference words, over one row per clip, failures included.

    `ci95` is the percentile bootstrap over clips (Bisani and Ney 2004): resample the clips with replacement,
    take the corpus rate of each resample, then their 2.5th and 97.5th percentile; a single clip has none.
    Pass rows in the run's order: in that of the answers, the same transcripts give another interval.
    """
    scores = [word_errors(row.reference, row.text) for row in rows]
    errors = np.array([score.total for score in scores], dtype=int)
    words = np.array([score.words for score in scores], dtype=int)
    interval = None
    if len(scores) > 1 and words.sum():
        picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(scores), (RESAMPLES, len(scores)))
        sums = words[picks].sum(axis=1)
        rates = errors[picks].sum(axis=1)[sums > 0] / sums[sums > 0]
        interval = np.percentile(rates, [2.5, 97.5], method="linear").tolist()
    counts = {
        name: sum(getattr(score, name) for score in scores) if scores else None
        for name in ("substitutions", "deletions", "insertions", "words")
    }
    value = float(errors.sum() / words.sum()) if words.sum() else None
    return {"value": value, "ci95": interval, **counts, "normalizer": NORMALIZER}
