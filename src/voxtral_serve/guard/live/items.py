"""The text of one turn as it comes: pieces that join to the whole, words with times, logprobs."""

import re
from collections.abc import Callable
from typing import Any

from voxtral_serve.audio.level import FRAME_S, StreamPower
from voxtral_serve.guard.live.session import Output
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.subtitles import Segment, segments
from voxtral_serve.transcript.turns import RequestTokens, turn_words
from voxtral_serve.transcript.words import TokenStream, Word

SENTENCE_END = re.compile(r"[.?!…][\"'”’)]?$")
SAME_S = 1e-6  # two times are one


class TurnText:
    """
    begin   samples of the session before the turn
    end     after its last sample; None until it is cut
    text    so far: no blank at its ends
    """

    def __init__(self, begin: int, stream: TokenStream | None) -> None:
        self.begin = begin
        self.end: int | None = None
        self.text = ""
        self.tokens = 0
        self.logprobs = TokenLogprobs(stream) if stream is not None else None
        self._stream = stream
        self._blank = ""  # at the end of what came
        self._requests: dict[int, list[int]] = {}  # tokens by the samples before their request

    def add(self, output: Output) -> tuple[str, list[dict[str, Any]]]:
        """(what the text is longer by, the logprobs of its tokens)"""
        self.tokens += len(output.tokens)
        if output.start not in self._requests and self.logprobs is not None:
            self.logprobs.begin_piece()
        self._requests.setdefault(output.start, []).extend(output.tokens)
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
    def requests(self) -> int:
        """Of the engine, that have given text or tokens."""
        return len(self._requests)

    @property
    def ends_sentence(self) -> bool:
        return SENTENCE_END.search(self.text) is not None

    def words(self, power: StreamPower, rate_hz: int) -> list[Word]:
        """With times in seconds of the session; [] where the model's tokens have none. The turn has ended."""
        if self._stream is None or self.end is None:
            return []
        first, last = self.begin // power.hop, -(-self.end // power.hop)
        requests = [RequestTokens(start / rate_hz, tokens) for start, tokens in sorted(self._requests.items())]
        found = turn_words(requests, self._stream, power.power(first, last), first)
        power.forget(int(self.end / rate_hz / FRAME_S))
        return found


def timed_segments(words: list[Word], entry: Callable[[Segment, list[Word]], dict[str, Any]]) -> list[dict[str, Any]]:
    """An entry for each segment of a turn, with the words that it is made of."""
    return [
        entry(each, [w for w in words if each.start - SAME_S <= w.start and w.end <= each.end + SAME_S])
        for each in segments(words)
    ]
