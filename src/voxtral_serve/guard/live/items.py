"""The text of one turn as it comes: pieces that join to the whole, segments of words with times, logprobs."""

import re
from typing import Any

from voxtral_serve.audio.level import StreamPower
from voxtral_serve.guard.live.session import Output
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.turns import TimedSegment, TurnWords, frame
from voxtral_serve.transcript.words import TokenStream

SENTENCE_END = re.compile(r"[.?!…][\"'”’)]?$")


class TurnText:
    """
    begin   samples of the session before the turn
    end     after its last sample; None until it is cut
    text    so far: no blank at its ends
    """

    def __init__(self, begin: int, stream: TokenStream | None, rate_hz: int) -> None:
        self.begin, self._rate_hz = begin, rate_hz
        self.end: int | None = None
        self.text = ""
        self.tokens = 0
        self.logprobs = TokenLogprobs(stream) if stream is not None else None
        self.requests = 0  # of the engine, that have given text or tokens
        self._words = TurnWords(stream, begin / rate_hz) if stream is not None else None
        self._news = False  # there may be complete segments
        self._blank = ""  # at the end of what came
        self._start: int | None = None  # samples before the last request

    def add(self, output: Output) -> tuple[str, list[dict[str, Any]]]:
        """(what the text is longer by, the logprobs of its tokens)"""
        self.tokens += len(output.tokens)
        if output.start != self._start:
            self._start, self.requests = output.start, self.requests + 1
            if self.logprobs is not None:
                self.logprobs.begin_piece()
        if self._words is not None:
            self._news |= self._words.add(output.start / self._rate_hz, output.tokens, output.text)
        found = []
        if self.logprobs is not None and output.logprobs is not None:
            found = self.logprobs.add(output.tokens, output.logprobs)
        came = self._blank + output.text
        if not self.text:
            came = came.lstrip()
        delta = came.rstrip()
        self._blank = came[len(delta) :]
        self.text += delta
        return delta, found

    @property
    def ends_sentence(self) -> bool:
        return SENTENCE_END.search(self.text) is not None

    def complete_segments(self, power: StreamPower) -> list[TimedSegment]:
        """Those that have come since the last call; [] where the model's tokens have no times."""
        if self._words is None or not self._news or self.end is not None:
            return []
        self._news = False
        return self._words.complete(power)

    def last_segments(self, power: StreamPower) -> list[TimedSegment]:
        """The others, of a turn that has ended and whose text is complete."""
        if self._words is None or self.end is None:
            return []
        end = self.end / self._rate_hz
        found = self._words.rest(power, end)
        power.forget(frame(end))
        return found
