"""When each word was said, from where in the token stream it was written; and texts with times, as OpenAI has them.

Voxtral Realtime writes one token for each 80 ms of audio, and a word, after [STREAMING_WORD], `delay` tokens after its
end was heard. So the n-th generated token, from 0, closes what ended between n * 80 and (n + 1) * 80 ms of the clip:
mistral-common's prompt is as long as the left padding and the delay. A word's start is not in the stream: it is the end
of the word before, or where speech begins again after a pause in between.
"""

import contextlib
import functools
import html
import json
import re
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve.audio.speech import Piece

FRAME_S = 0.01
# Loudness is between that of the quietest and the loudest frames; under this part of the way up, in dB, is no speech.
GATE = 0.3
PAUSE_S = 0.12  # shorter silences are within words, such as before a stop
LEAST_S = 0.02  # a word
LINE, LINES = 42, 2  # characters, as subtitles are commonly held to
LONGEST_S = 7.0
SENTENCE = re.compile(r"[.?!]$")


class Word(NamedTuple):
    """As written, without the blank before it; seconds from the clip's beginning."""

    text: str
    start: float
    end: float


class Stream(NamedTuple):
    """What a model's token stream is made of: two token ids, seconds of audio for each token, ids to text."""

    pad: int
    word: int
    token_s: float
    decode: Callable[[list[int]], str]


def stream_of(tokenizer: Any) -> Stream:
    """Of vLLM's MistralTokenizer."""
    text = tokenizer.instruct.tokenizer
    audio = tokenizer.instruct.audio_encoder.audio_config
    pad, word = map(text.get_special_token, ("[STREAMING_PAD]", "[STREAMING_WORD]"))
    return Stream(pad, word, 1 / audio.frame_rate, functools.partial(_decode, text))


def _decode(text: Any, tokens: list[int]) -> str:
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    decoded: str = text.decode(tokens, special_token_policy=SpecialTokenPolicy.IGNORE)
    return decoded


def words(tokens: Sequence[int], stream: Stream) -> list[Word]:
    """The words of a token stream, each as if it began where the one before ended."""
    found: list[tuple[int, list[int]]] = []
    inside = False
    for number, token in enumerate(tokens):
        if token in (stream.pad, stream.word):
            inside = False
            continue
        if not inside:
            # [STREAMING_WORD] came one token earlier, when the word was over.
            found.append((number - 1 if number and tokens[number - 1] == stream.word else number, []))
            inside = True
        found[-1][1].append(token)
    timed: list[Word] = []
    for number, pieces in found:
        text, end = stream.decode(pieces), (number + 0.5) * stream.token_s
        if not text.strip():
            continue
        if timed and not text[0].isspace():  # the rest of the word before, such as its full stop
            timed[-1] = timed[-1]._replace(text=timed[-1].text + text.strip(), end=end)
        else:
            timed.append(Word(text.strip(), timed[-1].end if timed else 0.0, end))
    return timed


# The generated tokens of the request that is being served; None where nobody asked for them
RECORDED: ContextVar[list[int] | None] = ContextVar("RECORDED", default=None)


def recording(generate: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's EngineClient.generate, with its tokens put into the list that RECORDED holds at the call."""

    @functools.wraps(generate)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        outputs, kept = generate(*args, **kwargs), RECORDED.get()
        return outputs if kept is None else _kept(outputs, kept)

    return recorded


async def _kept(outputs: Any, kept: list[int]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            # All at once, or those since the last time: what a transcription asks vLLM for.
            kept.extend(output.outputs[0].token_ids)
            yield output


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
        refined.append(word._replace(start=min(start, word.end - LEAST_S)))
    return refined


class Segment(NamedTuple):
    """Seconds from the clip's beginning."""

    text: str
    start: float
    end: float


def segments(timed: Iterable[Word]) -> list[Segment]:
    """Ended by a sentence, and before it would fill more than two lines or last longer than LONGEST_S."""
    found: list[Segment] = []
    for word in timed:
        last = found[-1] if found else None
        if (
            last is None
            or SENTENCE.search(last.text)
            or word.end - last.start > LONGEST_S
            or len(textwrap.wrap(f"{last.text} {word.text}", LINE)) > LINES
        ):
            found.append(Segment(*word))
        else:
            found[-1] = Segment(f"{last.text} {word.text}", last.start, word.end)
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
    """WebVTT (https://www.w3.org/TR/webvtt1/), in which &, < and > are signs of its own."""
    cues = (
        f"{_stamp(each.start, '.')} --> {_stamp(each.end, '.')}\n{html.escape(_lines(each), quote=False)}\n\n"
        for each in found
    )
    return "WEBVTT\n\n" + "".join(cues)


def _lines(segment: Segment) -> str:
    return "\n".join(textwrap.wrap(segment.text, LINE))


class Asked(NamedTuple):
    """How the answer is to be written: `form` is OpenAI's response_format, `task` its name for what was done."""

    form: str
    granularities: frozenset[str]
    language: str | None
    task: str


class Heard(NamedTuple):
    """What the model made of a piece of the clip: its text, the tokens behind it, the piece, and where that is loud."""

    text: str
    tokens: Sequence[int]
    piece: Piece
    loud: np.ndarray | None


class TimeError(RuntimeError):
    """The tokens are not those of the text."""


def answer(
    asked: Asked, heard: Sequence[Heard], stream: Stream | None, seconds: float, usage: Mapping[str, Any]
) -> tuple[str, str]:
    """(content type, body) of a transcript of a clip of so many seconds. `stream` is None for a model whose tokens have
    no times: its segments are the pieces. Raises TimeError."""
    text = " ".join(filter(None, (each.text.strip() for each in heard)))
    if asked.form == "text":
        return "text/plain; charset=utf-8", text + "\n"
    timed: list[Word] = []
    if stream is None:
        found = [Segment(each.text.strip(), *each.piece.spoken) for each in heard if each.text.strip()]
    else:
        for each in heard:
            for word in _timed(each, stream):
                # The last word of a piece may be written after the first of the next was said.
                start = max(word.start, timed[-1].end if timed else 0.0)
                timed.append(Word(word.text, start, max(word.end, start + LEAST_S)))
        found = segments(timed)
    if asked.form == "verbose_json":
        content = _verbose(asked, text, timed, found, seconds) | {"usage": usage}
        return "application/json", json.dumps(content, ensure_ascii=False)
    return ("text/vtt; charset=utf-8", vtt(found)) if asked.form == "vtt" else ("application/x-subrip", srt(found))


def _timed(heard: Heard, stream: Stream) -> list[Word]:
    assert heard.loud is not None
    timed = refine(words(heard.tokens, stream), heard.loud)
    if [word.text for word in timed] != heard.text.split():
        raise TimeError(f"the text has {len(heard.text.split())} words, and its tokens have {len(timed)} with a time")
    offset = heard.piece.start
    return [word._replace(start=word.start + offset, end=word.end + offset) for word in timed]


def _verbose(
    asked: Asked, text: str, timed: Sequence[Word], found: Sequence[Segment], seconds: float
) -> dict[str, Any]:
    """OpenAI's `verbose_json`; of a segment what is known here, with OpenAI's names. The language is the one that was
    asked for: vLLM does not say which was heard."""
    content: dict[str, Any] = {"task": asked.task, "language": asked.language, "duration": round(seconds, 3)}
    content["text"] = text
    if "word" in asked.granularities:
        content["words"] = [{"word": w.text, "start": round(w.start, 3), "end": round(w.end, 3)} for w in timed]
    if "segment" in asked.granularities:
        content["segments"] = [
            {"id": n, "seek": 0, "start": round(s.start, 3), "end": round(s.end, 3), "text": s.text, "temperature": 0.0}
            for n, s in enumerate(found)
        ]
    return content
