"""A transcript in the response formats of OpenAI's speech API (https://platform.openai.com/docs/api-reference/audio).

All but `json`, which may have logprobs, and speakers as Mistral has them: the guard writes that one.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from voxtral_serve.audio.speech import Piece
from voxtral_serve.transcript.language import name_of
from voxtral_serve.transcript.subtitles import Segment, said, segments, srt, vtt
from voxtral_serve.transcript.words import LEAST_S, TokenStream, Word, refine, words

VERBOSE = "verbose_json"
DIARIZED = "diarized_json"
WITH_TIMES = (VERBOSE, DIARIZED, "srt", "vtt")
FormatName = Literal["json", "text", "verbose_json", "srt", "vtt", "diarized_json"]
Granularity = Literal["word", "segment"]


class AnswerFormat(NamedTuple):
    """How to write a transcript.

    name           OpenAI's response_format
    granularities  of verbose_json, or of Mistral's json: some of Granularity
    language       of the text or, if that is not known, the requested one: a code, which verbose_json names
    task           "transcribe" or "translate"
    separator      between the texts of two pieces
    speakers       whether speakers are told apart
    channels       whether each channel of the clip is a speaker
    """

    name: FormatName
    granularities: frozenset[str]
    language: str | None
    task: str
    separator: str = " "
    speakers: bool = False
    channels: bool = False

    @property
    def with_times(self) -> bool:
        """Whether words or segments need times."""
        return (
            self.speakers
            or self.channels
            or self.name in WITH_TIMES
            or (self.name == "json" and bool(self.granularities))
        )

    def speaker(self, number: int | str) -> str:
        """The label of speaker `number`, from 0: as OpenAI's `diarized_json` has it, as Mistral's JSON, or as others.

        A name stays as it is.
        """
        if isinstance(number, str):
            return number
        if self.name == DIARIZED:
            return chr(ord("A") + number)
        return f"speaker_{number + 1}" if self.name == "json" else f"SPEAKER_{number + 1}"


class PieceTranscript(NamedTuple):
    """A piece of the clip, its text and the tokens of that text. `voiced` is that of the piece's samples, see
    audio.level; None if no times of words are needed. `logprobs` has one for each token, or none."""

    text: str
    tokens: Sequence[int]
    piece: Piece
    voiced: np.ndarray | None
    logprobs: Sequence[float] = ()


class TimeError(RuntimeError):
    """The tokens of a piece do not make its text, so its words have no times."""


def written(
    form: AnswerFormat,
    pieces: Sequence[PieceTranscript],
    stream: TokenStream | None,
    seconds: float,
    usage: Mapping[str, Any],
    timed: Sequence[Word] | None = None,
) -> tuple[str, str]:
    """(content type, body) of a transcript.

    pieces   in the clip's order
    stream   how to read the tokens; None for a model whose tokens have no times: each piece is a segment then
    seconds  the clip's length
    usage    for verbose_json and diarized_json
    timed    the words with their speakers; None for `timed_words`

    Raises TimeError.
    """
    if form.name == "text":
        return "text/plain; charset=utf-8", (_text(form, pieces) if timed is None else _dialogue(form, timed)) + "\n"
    if form.name in (VERBOSE, DIARIZED):
        content = (verbose if form.name == VERBOSE else diarized)(form, pieces, stream, seconds, usage, timed)
        return "application/json", json.dumps(content, ensure_ascii=False)
    found = _timed(form, pieces, stream, timed)[1]
    return ("text/vtt; charset=utf-8", vtt(found)) if form.name == "vtt" else ("application/x-subrip", srt(found))


def verbose(
    form: AnswerFormat,
    pieces: Sequence[PieceTranscript],
    stream: TokenStream | None,
    seconds: float,
    usage: Mapping[str, Any],
    timed: Sequence[Word] | None = None,
) -> dict[str, Any]:
    """OpenAI's `verbose_json`, from what `written` takes; its segments lack the fields that are not known here.

    `language` is a name, as OpenAI has it, or what the request has if that is no code of Whisper. Segments
    have `avg_logprob` and words `probability`, as faster-whisper's, if the tokens have logprobs. Raises TimeError.
    """
    timed, found = _timed(form, pieces, stream, timed)
    content: dict[str, Any] = {"task": form.task, "language": form.language and name_of(form.language)}
    content |= {"duration": round(seconds, 3), "text": merged_text(form, pieces, timed)}
    if "word" in form.granularities:
        content["words"] = [
            {"word": w.text, **_times(w), **_known("probability", w.probability), **_speaker(w)} for w in timed
        ]
    if "segment" in form.granularities:
        content["segments"] = [
            {
                **{"id": n, "seek": 0, **_times(s), "text": s.text, "temperature": 0.0},
                **_known("avg_logprob", s.avg_logprob),
                **_speaker(s),
            }
            for n, s in enumerate(found)
        ]
    return content | {"usage": usage}


def diarized(
    form: AnswerFormat,
    pieces: Sequence[PieceTranscript],
    stream: TokenStream | None,
    seconds: float,
    usage: Mapping[str, Any],
    timed: Sequence[Word] | None = None,
) -> dict[str, Any]:
    """OpenAI's `diarized_json`, from what `written` takes. A segment's speaker is None if the words have none.

    Raises TimeError.
    """
    timed, found = _timed(form, pieces, stream, timed)
    content: dict[str, Any] = {"task": form.task, "duration": round(seconds, 3)}
    content["text"] = merged_text(form, pieces, timed)
    content["segments"] = [
        {"type": "transcript.text.segment", "id": f"seg_{n:03}", **_times(s), "text": s.text, "speaker": s.speaker}
        for n, s in enumerate(found, 1)
    ]
    return content | {"usage": usage}


def mistrals_segments(
    form: AnswerFormat,
    pieces: Sequence[PieceTranscript],
    stream: TokenStream | None,
    timed: Sequence[Word] | None = None,
) -> list[dict[str, Any]]:
    """`segments` of Mistral's transcription (https://docs.mistral.ai/api/endpoint/audio/transcriptions), from what
    `written` takes: one for each word, if the form has those. Raises TimeError."""
    timed, found = _timed(form, pieces, stream, timed)
    each = timed if "word" in form.granularities else found
    return [{"type": "transcription_segment", "text": s.text, **_times(s), "speaker_id": s.speaker} for s in each]


def _times(each: Word | Segment) -> dict[str, float]:
    return {"start": round(each.start, 3), "end": round(each.end, 3)}


def _known(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: round(value, 4)}


def _speaker(each: Word | Segment) -> dict[str, str]:
    return {} if each.speaker is None else {"speaker": each.speaker}


def _dialogue(form: AnswerFormat, timed: Sequence[Word]) -> str:
    """A line for each turn of a speaker."""
    parts: Sequence[Word | Segment] = _segments(form, timed) if form.channels else timed
    turns = itertools.groupby(parts, lambda part: part.speaker)
    return "\n".join(said(speaker, " ".join(each.text for each in turn)) for speaker, turn in turns)


def merged_text(form: AnswerFormat, pieces: Sequence[PieceTranscript], timed: Sequence[Word] | None) -> str:
    """The text of the pieces, in their order; of channels, in the order in which it was spoken."""
    if form.channels and timed is not None:
        return " ".join(segment.text for segment in _segments(form, timed))
    return _text(form, pieces)


def _segments(form: AnswerFormat, timed: Sequence[Word]) -> list[Segment]:
    """Those of each channel by itself, by their starts: channels may speak at the same time."""
    if not form.channels:
        return segments(timed)
    own: dict[str | None, list[Word]] = {}
    for word in timed:
        own.setdefault(word.speaker, []).append(word)
    return sorted((each for words in own.values() for each in segments(words)), key=lambda segment: segment.start)


def _text(form: AnswerFormat, pieces: Sequence[PieceTranscript]) -> str:
    return form.separator.join(filter(None, (piece.text.strip() for piece in pieces)))


def _timed(
    form: AnswerFormat, pieces: Sequence[PieceTranscript], stream: TokenStream | None, timed: Sequence[Word] | None
) -> tuple[Sequence[Word], list[Segment]]:
    """(words, segments); no words of a model whose tokens have no times."""
    if timed is not None:
        return timed, _segments(form, timed)
    if stream is None:
        return [], [Segment(each.text.strip(), *each.piece.spoken) for each in pieces if each.text.strip()]
    timed = timed_words(pieces, stream)
    return timed, segments(timed)


def timed_words(pieces: Sequence[PieceTranscript], stream: TokenStream) -> list[Word]:
    """The words of all pieces, in order, without overlap. Raises TimeError."""
    timed: list[Word] = []
    for each in pieces:
        for word in _piece_words(each, stream):
            # A piece's last word may end after the next piece's first word starts.
            start = max(word.start, timed[-1].end if timed else 0.0)
            timed.append(word._replace(start=start, end=max(word.end, start + LEAST_S)))
    return timed


def _piece_words(piece: PieceTranscript, stream: TokenStream) -> list[Word]:
    assert piece.voiced is not None
    timed = refine(words(piece.tokens, stream, piece.logprobs), piece.voiced)
    if [word.text for word in timed] != piece.text.split():
        raise TimeError(f"the text has {len(piece.text.split())} words, and its tokens have {len(timed)} with a time")
    offset = piece.piece.start
    return [word._replace(start=word.start + offset, end=word.end + offset) for word in timed]
