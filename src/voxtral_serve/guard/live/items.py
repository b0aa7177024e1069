"""The text of one turn as it comes: pieces that join to the whole, segments of words with times, logprobs."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from voxtral_serve.audio.level import StreamPower
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.turns import TimedSegment, TurnWords, frame
from voxtral_serve.transcript.words import TokenStream

SENTENCE_END = re.compile(r"[.?!…][\"'”’)]?$")


class SessionOutput(NamedTuple):
    """What one output of the engine adds to the text of a turn.

    turn      number of the turn, from 0
    start     samples of the session before the audio of the request
    text      often empty
    tokens    their ids
    logprobs  of the tokens; None unless the session asks for them
    """

    turn: int
    start: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float] | None


class TurnEnd(NamedTuple):
    """The text of a turn is complete."""

    turn: int


class TurnText:
    """
    number      of the turn in its session, from 0
    begin       samples of the session before the turn
    end         after its last sample; None until it is cut
    is_dropped  whether the client has cleared its audio
    text        so far: no blank at its ends
    """

    def __init__(self, number: int, begin: int, stream: TokenStream | None, rate_hz: int) -> None:
        self.number, self.begin, self._rate_hz = number, begin, rate_hz
        self.end: int | None = None
        self.is_dropped = False
        self.text = ""
        self.tokens = 0
        self.logprobs = TokenLogprobs(stream) if stream is not None else None
        self.requests = 0  # of the engine, that have given text or tokens
        self._words = TurnWords(stream, begin / rate_hz) if stream is not None else None
        self._news = False  # there may be complete segments
        self._blank = ""  # at the end of what came
        self._start: int | None = None  # samples before the last request

    def add(self, output: SessionOutput) -> tuple[str, list[dict[str, Any]]]:
        """(what the text is longer by, the logprobs of its tokens)"""
        self.tokens += len(output.tokens)
        if output.start != self._start:
            self._start, self.requests = output.start, self.requests + 1
            if self.logprobs is not None:
                self.logprobs.begin_piece()
        if self._words is not None:
            self._news |= self._words.add(output.start / self._rate_hz, output.tokens, output.text)
        logprobs = []
        if self.logprobs is not None and output.logprobs is not None:
            logprobs = self.logprobs.add(output.tokens, output.logprobs)
        came = self._blank + output.text
        if not self.text:
            came = came.lstrip()
        delta = came.rstrip()
        self._blank = came[len(delta) :]
        self.text += delta
        return delta, logprobs

    @property
    def seconds(self) -> float:
        """The length of a turn that has ended."""
        return round(((self.end or self.begin) - self.begin) / self._rate_hz, 3)

    @property
    def ends_sentence(self) -> bool:
        return SENTENCE_END.search(self.text) is not None

    def complete_segments(self, power: StreamPower) -> list[TimedSegment]:
        """The segments that have come since the last call; [] where the model's tokens have no times."""
        if self._words is None or not self._news or self.end is not None:
            return []
        self._news = False
        return self._words.complete(power)

    def last_segments(self, power: StreamPower) -> list[TimedSegment]:
        """The other segments of a turn that has ended and whose text is complete."""
        if self._words is None or self.end is None:
            return []
        end = self.end / self._rate_hz
        segments = self._words.rest(power, end)
        power.forget(frame(end))
        return segments
