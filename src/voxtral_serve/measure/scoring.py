"""Texts against references: Whisper's normalisation, word and character errors, and their rates with intervals."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import jiwer
import numpy as np
from whisper_normalizer.basic import BasicTextNormalizer  # type: ignore[import-untyped,unused-ignore]
from whisper_normalizer.english import EnglishTextNormalizer  # type: ignore[import-untyped,unused-ignore]

from . import spread

PACKAGE = f"whisper-normalizer {version('whisper-normalizer')}"
# Languages written without spaces between words. The first five are from Whisper (Radford et al. 2022, appendix C).
NO_SPACES = frozenset(("zh", "ja", "th", "lo", "my", "yue", "cmn", "km"))


class Errors(NamedTuple):
    """Edits between a reference and its transcript; `words` are those of the reference, or its characters."""

    substitutions: int
    deletions: int
    insertions: int
    words: int

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """Errors for each word of the reference; None without words."""
        return self.total / self.words if self.words else None


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


def align_words(reference: str, transcript: str | None, language: str | None = None) -> jiwer.WordOutput:
    """Align the words after normalisation."""
    # jiwer 4 accepts an empty reference: every word of the transcript is then an insertion.
    return jiwer.process_words(normalize(reference, language), normalize(transcript or "", language))


def align_characters(reference: str, transcript: str | None, language: str | None = None) -> jiwer.CharacterOutput:
    """Align characters. jiwer counts spaces; they are removed for languages that are written without spaces."""
    here, there = normalize(reference, language), normalize(transcript or "", language)
    if not has_spaces(language):
        here, there = "".join(here.split()), "".join(there.split())
    return jiwer.process_characters(here, there)


def counted(alignment: jiwer.WordOutput | jiwer.CharacterOutput) -> Errors:
    edits = (alignment.substitutions, alignment.deletions, alignment.insertions)
    return Errors(*edits, alignment.hits + alignment.substitutions + alignment.deletions)


def word_errors(reference: str, transcript: str | None, language: str | None = None) -> Errors:
    """Count the errors of one clip after normalisation. A null transcript (a failed request) deletes all words."""
    return counted(align_words(reference, transcript, language))


def total(errors: Iterable[Errors]) -> Errors:
    """The sums over all clips, whose `rate` is the corpus rate."""
    columns = list(zip(*errors, strict=True))
    return Errors(*map(sum, columns)) if columns else Errors(0, 0, 0, 0)


def rate(errors: Sequence[Errors], unit: str) -> dict[str, Any]:
    """The corpus rate (S + D + I) / units over all clips, its interval, and the counts; the units have this name.

    `ci95` is from the percentile bootstrap over clips (Bisani and Ney 2004): resample the clips with replacement,
    compute the corpus rate of each resample, and take the 2.5th and 97.5th percentiles. It is null for a single clip.
    """
    counts = np.array(errors, dtype=np.int64).reshape(-1, 4)
    wrong, units = counts[:, :3].sum(axis=1), counts[:, 3]
    interval = None
    if len(counts) > 1 and units.sum():
        sums = [(wrong[picks].sum(axis=1), units[picks].sum(axis=1)) for picks in spread.resamples(len(counts))]
        above, below = (np.concatenate(parts) for parts in zip(*sums, strict=True))
        interval = spread.interval(above[below > 0] / below[below > 0])
    names = ("substitutions", "deletions", "insertions", unit)
    return {
        "value": total(errors).rate,
        "ci95": interval,
        **{name: int(count) if len(counts) else None for name, count in zip(names, counts.sum(axis=0), strict=True)},
    }
