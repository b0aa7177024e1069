"""Tokens of a text with their logprobs, as OpenAI's transcriptions have them.

https://platform.openai.com/docs/api-reference/audio/json-object
"""

import codecs
from collections.abc import Iterable
from typing import Any

from voxtral_serve.transcript.words import TokenStream

LEAST_LOGPROB = -9999.0  # as in vLLM's own answers: JSON has no -inf


def chosen_logprobs(answer: Any) -> list[float]:
    """The logprobs of the tokens of vLLM's CompletionOutput, one for each."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [max(candidates[token].logprob, LEAST_LOGPROB) for token, candidates in pairs]


class TokenLogprobs:
    """The `logprobs` of a text, made of the tokens of one piece of the clip after the other.

    `found` has an object for each token that writes something, so none for [STREAMING_PAD] and its kind: their `token`s
    joined are the text, and their `bytes` joined its UTF-8. A character that is split over tokens stands in the
    `token` of the last of them.
    """

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.found: list[dict[str, Any]] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begins = True

    def begin_piece(self) -> None:
        self._begins = True

    def add(self, tokens: Iterable[int], logprobs: Iterable[float]) -> list[dict[str, Any]]:
        """The objects of these tokens, which follow those that were added before."""
        added = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            content = self.stream.piece(token)
            if self._begins:  # one blank between pieces, and none before the first
                content = content.lstrip()
                if content and self.found:
                    content = b" " + content
            if content:
                self._begins = False
                added.append({"token": self._decoder.decode(content), "bytes": [*content], "logprob": logprob})
        self.found += added
        return added

    def finish(self) -> list[dict[str, Any]]:
        """All objects, without blanks at the end."""
        while self.found and not (content := bytes(self.found[-1]["bytes"]).rstrip()):
            self.found.pop()
        if self.found and len(content) < len(self.found[-1]["bytes"]):
            last = self.found[-1]
            self.found[-1] = {**last, "token": last["token"].rstrip(), "bytes": [*content]}
        return self.found
