"""When each word was said, from where in the token stream it was written; and texts with times, as OpenAI has them.

Voxtral Realtime writes one token for each 80 ms of audio, and a word, after [STREAMING_WORD], `delay` tokens after its
end was heard. So the n-th generated token, from 0, closes what ended between n * 80 and (n + 1) * 80 ms of the clip:
mistral-common's prompt is as long as the left padding and the delay. A word's start is not in the stream: it is the end
of the word before, or where speech begins again after a pause in between.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

FRAME_S = 0.01
# Loudness is between that of the quietest and the loudest frames; under this part of the way up, in dB, is no speech.
GATE = 0.3
PAUSE_S = 0.12  # shorter silences are within words, such as before a stop
LINE, LINES = 42, 2  # characters, as subtitles are commonly held to
LONGEST_S = 7.0
SENTENCE = re.compile(r"[.?!]$")


class Word(NamedTuple):
    """As written, without the blank before it; seconds from the clip's beginning."""

    text: str
    start: float
    end: float


def words(
    tokens: Sequence[int], decode: Callable[[list[int]], str], special: tuple[int, int], token_s: float
) -> list[Word]:
    """The words of a token stream, each as if it began where the one before ended.

    `special` are the ids of [STREAMING_PAD] and [STREAMING_WORD], `token_s` the seconds of audio for each token.
    """
    pad, begin = special
    found: list[tuple[int, list[int]]] = []
    open_ = False
    for number, token in enumerate(tokens):
        if token == begin or token == pad:
            open_ = token == begin
            if open_:
                found.append((number, []))
        elif open_:
            found[-1][1].append(token)
    timed: list[Word] = []
    before = 0.0
    for number, pieces in found:
        if text := decode(pieces).strip():
            end = (number + 0.5) * token_s
            timed.append(Word(text, before, end))
            before = end
    return timed


def voiced(samples: np.ndarray, rate: int) -> np.ndarray:
    """bool [n]: whether there is speech, or another sound of its loudness, in each FRAME_S."""
    hop = round(rate * FRAME_S)
    count = len(samples) // hop
    power = (samples[: count * hop].reshape(count, hop).astype(np.float64) ** 2).mean(1)
    smooth = np.convolve(power, np.ones(3) / 3, "same") if count else power
    level = 10 * np.log10(smooth + 1e-12)
    low, high = np.percentile(level, (5, 95)) if count else (0.0, 0.0)
    loud: np.ndarray = level > low + GATE * (high - low)
    return loud


def refine(timed: Sequence[Word], speech: np.ndarray) -> list[Word]:
    """Each word begins after the last pause before it."""
    refined = []
    for word in timed:
        # A word's last frames may be quiet, and are no pause before it.
        first, last = round(word.start / FRAME_S), round((word.end - 0.04) / FRAME_S)
        silent, start = 0, word.start
        for frame, loud in enumerate(speech[first:last].tolist(), first):
            silent = 0 if loud else silent + 1
            if silent >= round(PAUSE_S / FRAME_S):
                start = (frame + 1) * FRAME_S
        refined.append(word._replace(start=min(start, word.end - 0.02)))
    return refined


class Segment(NamedTuple):
    words: list[Word]

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)

    @property
    def start(self) -> float:
        return self.words[0].start

    @property
    def end(self) -> float:
        return self.words[-1].end


def segments(timed: Iterable[Word]) -> list[Segment]:
    """Ended by a sentence, and before it would fill more than two lines or last longer than LONGEST_S."""
    found: list[Segment] = []
    for word in timed:
        last = found[-1] if found else None
        if (
            last is None
            or SENTENCE.search(last.words[-1].text)
            or word.end - last.start > LONGEST_S
            or len(textwrap.wrap(f"{last.text} {word.text}", LINE)) > LINES
        ):
            found.append(Segment([word]))
        else:
            last.words.append(word)
    return found


def _stamp(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


def srt(found: Sequence[Segment]) -> str:
    """SubRip."""
    return "".join(
        f"{number}\n{_stamp(each.start, ',')} --> {_stamp(each.end, ',')}\n{_lines(each)}\n\n"
        for number, each in enumerate(found, 1)
    )


def vtt(found: Sequence[Segment]) -> str:
    """WebVTT (https://www.w3.org/TR/webvtt1/)."""
    cues = (f"{_stamp(each.start, '.')} --> {_stamp(each.end, '.')}\n{_lines(each)}\n\n" for each in found)
    return "WEBVTT\n\n" + "".join(cues)


def _lines(segment: Segment) -> str:
    return "\n".join(textwrap.wrap(segment.text, LINE))


def verbose(
    text: str, duration_s: float, language: str, timed: Sequence[Word], granularities: set[str]
) -> dict[str, Any]:
    """OpenAI's `verbose_json`; of a segment what is known here, with OpenAI's names."""
    answer: dict[str, Any] = {
        "task": "transcribe",
        "language": language,
        "duration": round(duration_s, 3),
        "text": text,
    }
    if "word" in granularities:
        answer["words"] = [{"word": w.text, "start": round(w.start, 3), "end": round(w.end, 3)} for w in timed]
    if "segment" in granularities:
        answer["segments"] = [
            {"id": n, "seek": 0, "start": round(s.start, 3), "end": round(s.end, 3), "text": s.text, "temperature": 0.0}
            for n, s in enumerate(segments(timed))
        ]
    return answer
