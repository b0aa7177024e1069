"""Segments of at most two lines of subtitles, and their files: SubRip and WebVTT."""

import html
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from voxtral_serve.transcript.words import Word

LINE, LINES = 42, 2  # characters and lines, the usual limits of subtitles
LONGEST_S = 7.0
SENTENCE = re.compile(r"[.?!]$")


class Segment(NamedTuple):
    """Text with its start and end in seconds from the clip's beginning."""

    text: str
    start: float
    end: float


def grouped(timed: Iterable[Word]) -> list[list[Word]]:
    """The words of each segment. It ends with a sentence, and before it would need more than LINES or last longer than
    LONGEST_S."""
    found: list[list[Word]] = []
    text = ""  # of the last one
    for word in timed:
        longer = f"{text} {word.text}"
        if (
            not found
            or SENTENCE.search(text)
            or word.end - found[-1][0].start > LONGEST_S
            or len(textwrap.wrap(longer, LINE)) > LINES
        ):
            found.append([word])
            text = word.text
        else:
            found[-1].append(word)
            text = longer
    return found


def segment(words: Sequence[Word]) -> Segment:
    """The segment of these words, one at least."""
    return Segment(" ".join(word.text for word in words), words[0].start, words[-1].end)


def segments(timed: Iterable[Word]) -> list[Segment]:
    """The segments of a text, see `grouped`."""
    return [segment(words) for words in grouped(timed)]


def srt(found: Sequence[Segment]) -> str:
    """A SubRip file."""
    return "".join(
        f"{number}\n{_stamp(each.start, ',')} --> {_stamp(each.end, ',')}\n{_lines(each)}\n\n"
        for number, each in enumerate(found, 1)
    )


def vtt(found: Sequence[Segment]) -> str:
    """A WebVTT file (https://www.w3.org/TR/webvtt1/), in which &, < and > are escaped."""
    cues = (
        f"{_stamp(each.start, '.')} --> {_stamp(each.end, '.')}\n{html.escape(_lines(each), quote=False)}\n\n"
        for each in found
    )
    return "WEBVTT\n\n" + "".join(cues)


def _stamp(seconds: float, mark: str) -> str:
    milliseconds = round(round(seconds, 3) * 1000)  # the seconds that verbose_json has
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


def _lines(segment: Segment) -> str:
    return "\n".join(textwrap.wrap(segment.text, LINE))
