"""Texts against references and against each other, and percentiles. Without values there is None, never 0."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jiwer
import numpy as np
from whisper_normalizer.basic import BasicTextNormalizer  # type: ignore[import-untyped,unused-ignore]
from whisper_normalizer.english import EnglishTextNormalizer  # type: ignore[import-untyped,unused-ignore]

PERCENTILES = (50, 90, 99)
# Languages written without spaces between words, as in the benchmark
NO_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue", "cmn", "km"))


class Errors(NamedTuple):
    """Word errors (substitutions, deletions, insertions), and the words of the reference."""

    errors: int
    words: int

    @property
    def rate(self) -> float | None:
        return self.errors / self.words if self.words else None


@cache
def _normalizer(primary: str) -> Any:
    if primary == "en":
        return EnglishTextNormalizer()
    # Marks are kept: without them, vowels of Thai, Hindi and similar scripts would be lost.
    return BasicTextNormalizer(split_letters=primary in NO_SPACES, preserve_marks=True)


def words(text: str, language: str) -> list[str]:
    """Words after Whisper's text normalisation (Radford et al. 2022, appendix C), as the benchmark compares them. Of
    NO_SPACES, each letter is a word."""
    return str(_normalizer(language.replace("_", "-").partition("-")[0].lower())(text)).split()


def word_errors(reference: str, text: str, language: str) -> Errors:
    expected, heard = words(reference, language), words(text, language)
    if not expected:
        return Errors(len(heard), 0)
    found = jiwer.process_words(" ".join(expected), " ".join(heard))
    return Errors(found.substitutions + found.deletions + found.insertions, len(expected))


def total(each: Iterable[Errors]) -> Errors:
    counts = list(each)
    return Errors(sum(one.errors for one in counts), sum(one.words for one in counts))


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """{"p50", "p90", "p99"} by linear interpolation, None without values."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {f"p{q}": round(float(value), 4) for q, value in zip(PERCENTILES, found, strict=True)}
