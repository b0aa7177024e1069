"""Words with times of a turn of live audio, in segments that are given out as they are complete."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from voxtral_serve.audio.level import FRAME_S, StreamPower, loud_frames
from voxtral_serve.transcript.subtitles import LINE, LINES, LONGEST_S, SENTENCE, Segment, grouped, segment
from voxtral_serve.transcript.words import LEAST_S, TokenStream, Word, WrittenWord, refine, written_words

# Tokens without text after which a sentence is complete, 400 ms: its last word may get a quotation mark before.
QUIET = 5
KEPT_S = 30.0  # of the turn before its last segment, by whose loudness pauses are found
SENTENCE_AND_WORD = re.compile(r"[.?!]\s+\S")


class TimedSegment(NamedTuple):
    """A segment and its words; times are seconds of the session."""

    segment: Segment
    words: list[Word]


class _Request:
    """Tokens of a request of the engine: those from number `first` on. Its audio begins at `start`, in seconds."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.first = 0
        self.tokens: list[int] = []

    def drop(self, count: int) -> None:
        """The first tokens."""
        del self.tokens[:count]
        self.first += count


class TurnWords:
    """The words of one turn. Each is given out once, in the segment that uploads have; what was given out stays."""

    def __init__(self, stream: TokenStream, begin: float) -> None:
        """`begin` is the turn's, in seconds of the session, as all times here are."""
        self._stream, self._begin = stream, begin
        self._end = begin  # of the last word that was given out
        self._requests: list[_Request] = []  # with words that were not
        self._text = ""  # of these words
        self._quiet = 0  # tokens since the last text

    def add(self, start: float, tokens: Sequence[int], text: str) -> bool:
        """More tokens and their text, of the request whose audio begins at `start`.

        Returns whether `complete` may have news.
        """
        if not self._requests or self._requests[-1].start != start:
            self._requests.append(_Request(start))
        self._requests[-1].tokens.extend(tokens)
        self._text += text
        if not text.strip():
            before, self._quiet = self._quiet, self._quiet + len(tokens)
            return before < QUIET <= self._quiet and SENTENCE.search(self._text.rstrip()) is not None
        self._quiet = 0
        last = self._requests[-1]
        seconds = last.start + (last.first + len(last.tokens)) * self._stream.token_s - self._end
        long = len(self._text) > LINE * LINES or seconds > LONGEST_S
        return long or SENTENCE_AND_WORD.search(self._text) is not None

    def complete(self, power: StreamPower) -> list[TimedSegment]:
        """The segments that are complete: the next word has begun another one, or a pause follows a sentence.

        power  of the session's audio so far
        """
        written = self._written()
        groups = grouped(self._timed(written, power, None))
        if groups and not (self._quiet >= QUIET and SENTENCE.search(groups[-1][-1].text)):
            groups.pop()  # it may go on
        return self._given(groups, written, power)

    def rest(self, power: StreamPower, end: float) -> list[TimedSegment]:
        """The other segments of a turn that ended at `end`, and whose tokens have all come."""
        written = self._written()
        return self._given(grouped(self._timed(written, power, end)), written, power)

    def _written(self) -> list[tuple[_Request, WrittenWord]]:
        return [(request, word) for request in self._requests for word in written_words(request.tokens, self._stream)]

    def _timed(
        self, written: Sequence[tuple[_Request, WrittenWord]], power: StreamPower, end: float | None
    ) -> list[Word]:
        found: list[Word] = []
        before = None
        for request, word in written:
            ended = request.start + (request.first + word.ended + 0.5) * self._stream.token_s
            start = found[-1].end if found and request is before else max(self._end, request.start)
            found.append(Word(word.text, start, ended))
            before = request
        first = max(frame(max(self._begin, self._end - KEPT_S)), power.first)
        last = power.last if end is None else frame(end + FRAME_S / 2)
        return placed(found, power.power(first, last), first, self._end, end)

    def _given(
        self, groups: Sequence[list[Word]], written: Sequence[tuple[_Request, WrittenWord]], power: StreamPower
    ) -> list[TimedSegment]:
        """Give these out, and drop their tokens."""
        count = sum(map(len, groups))
        if count < len(written):
            request, word = written[count]
            self._requests = self._requests[self._requests.index(request) :]
            request.drop(word.first)
        elif self._requests:
            # The last token may be the [STREAMING_WORD] of the next word.
            self._requests = self._requests[-1:]
            self._requests[0].drop(len(self._requests[0].tokens) - 1)
        self._text = " ".join(word.text for _, word in written[count:])
        if groups:
            self._end = groups[-1][-1].end
            power.forget(frame(self._end - KEPT_S))
        return [TimedSegment(segment(words), words) for words in groups]


def frame(seconds: float) -> int:
    """The number of the frame of FRAME_S in the session."""
    return int(seconds / FRAME_S + 1e-6)


def placed(found: Sequence[Word], power: np.ndarray, first: int, after: float, end: float | None) -> list[Word]:
    """The same words, each starting after the last pause before it, in order, without overlap, not before `after`.

    power  float64 [frames of FRAME_S]: of the audio from frame `first` of the session on
    end    of the audio, if it has ended: a word that the model writes late ends there
    """
    offset = first * FRAME_S
    near = [word._replace(start=max(word.start - offset, 0.0), end=word.end - offset) for word in found]
    timed: list[Word] = []
    for word in refine(near, loud_frames(power)):
        begin = max(word.start + offset, timed[-1].end if timed else after)
        timed.append(word._replace(start=begin, end=max(word.end + offset, begin + LEAST_S)))
    limit = end
    for number in reversed(range(len(timed))):
        word = timed[number]
        if limit is None or word.end <= limit:
            break
        start = max(min(word.start, limit - LEAST_S), after)
        timed[number] = word._replace(start=start, end=limit)
        limit = start
    return timed
