"""Segments of at most two lines of subtitles, and their files: SubRip and WebVTT. Needs the standard library only."""

import html
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from voxtral_serve.transcript.words import Word

LINE, LINES = 42, 2  # characters and lines, the usual limits of subtitles
LONGEST_S = 7.0
SENTENCE = re.compile(r"[.?!]$")
MARKUP = re.compile(r"[<>{}\\]")  # of SubRip, which has no escapes


class Segment(NamedTuple):
    """Text with its start and end in seconds from the clip's beginning. `speaker` is that of its words, and
    `avg_logprob` the mean of the logprobs of their tokens; None where they are not known."""

    text: str
    start: float
    end: float
    speaker: str | None = None
    avg_logprob: float | None = None


def grouped(timed: "Iterable[Word]") -> "list[list[Word]]":
    """The words of each segment.

    A segment ends with a sentence, where the speaker changes, and before it would need more than LINES or last longer
    than LONGEST_S.
    """
    groups: list[list[Word]] = []
    text = ""  # of the last group
    for word in timed:
        longer = f"{text} {word.text}"
        if (
            not groups
            or SENTENCE.search(text)
            or word.speaker != groups[-1][-1].speaker
            or word.end - groups[-1][0].start > LONGEST_S
            or len(textwrap.wrap(longer, LINE)) > LINES
        ):
            groups.append([word])
            text = said(word.speaker, word.text)
        else:
            groups[-1].append(word)
            text = longer
    return groups


def segment(words: "Sequence[Word]") -> Segment:
    """The segment of these words, one at least."""
    logprobs = [logprob for word in words for logprob in word.logprobs]
    average = sum(logprobs) / len(logprobs) if logprobs else None
    return Segment(" ".join(word.text for word in words), words[0].start, words[-1].end, words[0].speaker, average)


def segments(timed: "Iterable[Word]") -> list[Segment]:
    """The segments of a text, see `grouped`."""
    return [segment(words) for words in grouped(timed)]


def said(speaker: str | None, text: str) -> str:
    """The text with its speaker before it, if there is one: `SPEAKER_1: Hello.`"""
    return text if speaker is None else f"{speaker}: {text}"


def cue(number: int, segment: Segment) -> str:
    """One subtitle of a SubRip file; `number` counts from 1. The name of a speaker loses what may be markup."""
    if segment.speaker is not None:
        segment = segment._replace(speaker=MARKUP.sub("", segment.speaker))
    return f"{number}\n{_stamp(segment.start, ',')} --> {_stamp(segment.end, ',')}\n{_lines(segment)}\n\n"


def srt(cues: Sequence[Segment]) -> str:
    """A SubRip file."""
    return "".join(cue(number, segment) for number, segment in enumerate(cues, 1))


def vtt(cues: Sequence[Segment]) -> str:
    """A WebVTT file (https://www.w3.org/TR/webvtt1/), in which &, < and > are escaped."""
    return "WEBVTT\n\n" + "".join(
        f"{_stamp(cue.start, '.')} --> {_stamp(cue.end, '.')}\n{html.escape(_lines(cue), quote=False)}\n\n"
        for cue in cues
    )


def _stamp(seconds: float, mark: str) -> str:
    milliseconds = round(round(seconds, 3) * 1000)  # the seconds that verbose_json has
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


def _lines(segment: Segment) -> str:
    return "\n".join(textwrap.wrap(said(segment.speaker, segment.text), LINE))
