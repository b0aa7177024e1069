"""A transcript in the response formats of OpenAI's speech API (https://platform.openai.com/docs/api-reference/audio).

All but `json`, which may have logprobs: the guard writes that one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from voxtral_serve.audio.speech import Piece
from voxtral_serve.transcript.subtitles import Segment, segments, srt, vtt
from voxtral_serve.transcript.words import LEAST_S, TokenStream, Word, refine, words

VERBOSE = "verbose_json"
WITH_TIMES = (VERBOSE, "srt", "vtt")
FormatName = Literal["json", "text", "verbose_json", "srt", "vtt"]
Granularity = Literal["word", "segment"]


class AnswerFormat(NamedTuple):
    """How to write a transcript.

    name           OpenAI's response_format
    granularities  of verbose_json, some of Granularity
    language       of verbose_json: the requested one
    task           "transcribe" or "translate"
    separator      between the texts of two pieces
    """

    name: FormatName
    granularities: frozenset[str]
    language: str | None
    task: str
    separator: str = " "


class PieceTranscript(NamedTuple):
    """A piece of the clip, its text and the tokens of that text. `voiced` is that of the piece's samples, see
    audio.level; None if no times of words are needed."""

    text: str
    tokens: Sequence[int]
    piece: Piece
    voiced: np.ndarray | None


class TimeError(RuntimeError):
    """The tokens of a piece do not make its text, so its words have no times."""


def written(
    form: AnswerFormat,
    pieces: Sequence[PieceTranscript],
    stream: TokenStream | None,
    seconds: float,
    usage: Mapping[str, Any],
) -> tuple[str, str]:
    """(content type, body) of a transcript.

    pieces   in the clip's order
    stream   how to read the tokens; None for a model whose tokens have no times: each piece is a segment then
    seconds  the clip's length
    usage    for verbose_json

    Raises TimeError.
    """
    if form.name == "text":
        return "text/plain; charset=utf-8", _text(form, pieces) + "\n"
    if form.name == VERBOSE:
        content = verbose(form, pieces, stream, seconds, usage)
        return "application/json", json.dumps(content, ensure_ascii=False)
    found = _timed(pieces, stream)[1]
    return ("text/vtt; charset=utf-8", vtt(found)) if form.name == "vtt" else ("application/x-subrip", srt(found))


def verbose(
    form: AnswerFormat,
    pieces: Sequence[PieceTranscript],
    stream: TokenStream | None,
    seconds: float,
    usage: Mapping[str, Any],
) -> dict[str, Any]:
    """OpenAI's `verbose_json`, from what `written` takes; its segments lack the fields that are not known here.

    `language` is the request's, because vLLM does not say which language it recognized. Raises TimeError.
    """
    timed, found = _timed(pieces, stream)
    content: dict[str, Any] = {"task": form.task, "language": form.language, "duration": round(seconds, 3)}
    content["text"] = _text(form, pieces)
    if "word" in form.granularities:
        content["words"] = [{"word": w.text, "start": round(w.start, 3), "end": round(w.end, 3)} for w in timed]
    if "segment" in form.granularities:
        content["segments"] = [
            {"id": n, "seek": 0, "start": round(s.start, 3), "end": round(s.end, 3), "text": s.text, "temperature": 0.0}
            for n, s in enumerate(found)
        ]
    return content | {"usage": usage}


def _text(form: AnswerFormat, pieces: Sequence[PieceTranscript]) -> str:
    return form.separator.join(filter(None, (piece.text.strip() for piece in pieces)))


def _timed(pieces: Sequence[PieceTranscript], stream: TokenStream | None) -> tuple[list[Word], list[Segment]]:
    """(words, segments); no words of a model whose tokens have no times."""
    if stream is None:
        return [], [Segment(each.text.strip(), *each.piece.spoken) for each in pieces if each.text.strip()]
    timed = _all_words(pieces, stream)
    return timed, segments(timed)


def _all_words(pieces: Sequence[PieceTranscript], stream: TokenStream) -> list[Word]:
    timed: list[Word] = []
    for each in pieces:
        for word in _piece_words(each, stream):
            # A piece's last word may end after the next piece's first word starts.
            start = max(word.start, timed[-1].end if timed else 0.0)
            timed.append(Word(word.text, start, max(word.end, start + LEAST_S)))
    return timed


def _piece_words(piece: PieceTranscript, stream: TokenStream) -> list[Word]:
    assert piece.voiced is not None
    timed = refine(words(piece.tokens, stream), piece.voiced)
    if [word.text for word in timed] != piece.text.split():
        raise TimeError(f"the text has {len(piece.text.split())} words, and its tokens have {len(timed)} with a time")
    offset = piece.piece.start
    return [word._replace(start=word.start + offset, end=word.end + offset) for word in timed]
