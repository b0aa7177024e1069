"""Words with times, from their positions in a model's token stream.

Voxtral Realtime generates one token for each 80 ms of audio. It writes a word after [STREAMING_WORD], `delay` tokens
after the word ended in the audio. mistral-common's prompt is as long as the left padding and the delay together, so
generated token n, counted from 0, writes what ended between n * 80 and (n + 1) * 80 ms of the clip. The stream does not
say when a word begins: that is the end of the word before, or the end of the pause after it, see `refine`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve.audio.level import FRAME_S

PAUSE_S = 0.12  # shorter silences are within words, such as before a stop consonant
LEAST_S = 0.02  # of a word
TAIL_S = 0.04  # the end of a word, which may be quiet


class Word(NamedTuple):
    """A word as it is written, without the blank before it; start and end in seconds from the clip's beginning.

    `speaker` is the name of who says it; None if speakers are not told apart. `logprobs` are those of its tokens:
    natural logarithms, none where they are not known.
    """

    text: str
    start: float
    end: float
    speaker: str | None = None
    logprobs: tuple[float, ...] = ()

    @property
    def probability(self) -> float | None:
        """The mean of its tokens' probabilities, from 0 to 1, as `probability` of faster-whisper's words
        (https://github.com/SYSTRAN/faster-whisper, `find_alignment` in transcribe.py). None where they are not known.
        """
        return sum(map(math.exp, self.logprobs)) / len(self.logprobs) if self.logprobs else None


class TokenStream(NamedTuple):
    """How to read a model's tokens: the ids of [STREAMING_PAD] and [STREAMING_WORD], seconds of audio for each token,
    a function from ids to text, and one from an id to its bytes, which are none for a special token."""

    pad: int
    word: int
    token_s: float
    decode: Callable[[list[int]], str]
    piece: Callable[[int], bytes]

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "TokenStream":
        """From vLLM's MistralTokenizer."""
        text = tokenizer.instruct.tokenizer
        audio = tokenizer.instruct.audio_encoder.audio_config
        pad, word = map(text.get_special_token, ("[STREAMING_PAD]", "[STREAMING_WORD]"))
        return cls(pad, word, 1 / audio.frame_rate, functools.partial(_decode, text), text.id_to_byte_piece)


def _decode(text: Any, tokens: list[int]) -> str:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    decoded: str = text.decode(tokens, special_token_policy=SpecialTokenPolicy.IGNORE)
    return decoded


class WrittenWord(NamedTuple):
    """A word, and the numbers of the token from which it is written, of that at which it had ended, and of those with
    its bytes, so of no special token."""

    text: str
    first: int
    ended: int
    content: tuple[int, ...]


def written_words(tokens: Sequence[int], stream: TokenStream) -> list[WrittenWord]:
    """The words of generated tokens. The last one may lack its end."""
    groups: list[tuple[int, list[int]]] = []  # numbers of the token at which a word ended, and of the word's tokens
    inside = False
    for number, token in enumerate(tokens):
        if token in (stream.pad, stream.word):
            inside = False
            continue
        if not inside:
            # [STREAMING_WORD] came one token earlier, when the word was over.
            groups.append((number - 1 if number and tokens[number - 1] == stream.word else number, []))
            inside = True
        groups[-1][1].append(number)
    found: list[WrittenWord] = []
    for number, numbers in groups:
        text = stream.decode([tokens[each] for each in numbers])
        if not text.strip():
            continue
        content = tuple(each for each in numbers if stream.piece(tokens[each]))
        if found and not text[0].isspace():  # the rest of the word before, such as its full stop
            last = found[-1]
            found[-1] = WrittenWord(last.text + text.strip(), last.first, number, last.content + content)
        else:
            found.append(WrittenWord(text.strip(), number, number, content))
    return found


def words(tokens: Sequence[int], stream: TokenStream, logprobs: Sequence[float] = ()) -> list[Word]:
    """The words of generated tokens, with logprobs if the tokens have them. Each word starts where the one before ends,
    the first at 0."""
    found: list[Word] = []
    for each in written_words(tokens, stream):
        start, end = found[-1].end if found else 0.0, (each.ended + 0.5) * stream.token_s
        own = tuple(logprobs[number] for number in each.content) if logprobs else ()
        found.append(Word(each.text, start, end, logprobs=own))
    return found


def refine(timed: Sequence[Word], voiced: np.ndarray) -> list[Word]:
    """The same words, each starting after the last pause before it. `voiced` is that of audio.level: bool [frames]."""
    refined = []
    for word in timed:
        first, last = round(word.start / FRAME_S), round((word.end - TAIL_S) / FRAME_S)
        silent, start = 0, word.start
        for frame, loud in enumerate(voiced[first:last].tolist(), first):
            silent = 0 if loud else silent + 1
            if silent >= round(PAUSE_S / FRAME_S):
                start = (frame + 1) * FRAME_S
        refined.append(word._replace(start=min(start, word.end - LEAST_S)))
    return refined
