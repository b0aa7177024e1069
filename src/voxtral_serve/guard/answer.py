"""The response to an upload in OpenAI's format (https://platform.openai.com/docs/api-reference/audio).

It is one body or a stream of events, made from vLLM's responses to the pieces of the clip.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from voxtral_serve.guard.asgi import Message, Send
from voxtral_serve.guard.ask import PieceChunk, PieceResult, StreamError
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.fields import TranscriptRequest
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.transcript.formats import VERBOSE, PieceTranscript, TimeError, verbose, written
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.words import TokenStream

IGNORED_HEADER = b"x-voxtral-ignored"  # names the fields that have no effect with this model
EVENTS = b"text/event-stream; charset=utf-8"


def response(
    request: TranscriptRequest, audio: ClipPieces, results: Sequence[PieceResult], stream: TokenStream | None
) -> list[Message]:
    """The ASGI messages of an answer that is not streamed; `results` has one item for each piece.

    Raises RefusedError if times are asked for and the tokens do not give them.
    """
    if audio.silent:
        results = [each._replace(content={**each.content, "text": ""}, tokens=[], logprobs=[]) for each in results]
    kind, body = _body(request, audio, results, stream)
    replaced = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *_ignored(request)]
    names = {name for name, _ in replaced}
    start = results[0].start
    kept = [(name, value) for name, value in start["headers"] if name.lower() not in names]
    return [{**start, "headers": [*kept, *replaced]}, {"type": "http.response.body", "body": body}]


def _body(
    request: TranscriptRequest, audio: ClipPieces, results: Sequence[PieceResult], stream: TokenStream | None
) -> tuple[bytes, bytes]:
    """(content type, body)"""
    usage = _duration(audio)
    if request.form.name == "json":
        # vLLM's texts begin with a blank, as the model's first word does; OpenAI's do not.
        text = " ".join(filter(None, (each.content["text"].strip() for each in results)))
        content = {**results[0].content, "text": text, "usage": usage}
        if request.logprobs and stream is not None:
            content["logprobs"] = _logprobs(results, stream)
        return b"application/json", json.dumps(content, ensure_ascii=False).encode()
    transcripts = _transcripts(audio, ((each.content["text"], each.tokens) for each in results))
    try:
        kind, text = written(request.form, transcripts, stream, audio.clip.seconds, usage)
    except TimeError as error:
        raise RefusedError(500, f"no times for {request.form.name}: {error}", "no_times") from error
    return kind.encode(), text.encode()


def _duration(audio: ClipPieces) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(audio.clip.seconds)}


def _transcripts(audio: ClipPieces, texts: Iterable[tuple[str, Sequence[int]]]) -> list[PieceTranscript]:
    """`texts` has (text, tokens) of each piece."""
    found = zip(texts, audio.pieces, audio.voiced, strict=True)
    return [PieceTranscript(text, tokens, piece, voiced) for (text, tokens), piece, voiced in found]


def _logprobs(results: Sequence[PieceResult], stream: TokenStream) -> list[dict[str, Any]]:
    writer = TokenLogprobs(stream)
    for each in results:
        writer.begin_piece()
        writer.add(each.tokens, each.logprobs or ())
    return writer.finish()


def _ignored(request: TranscriptRequest) -> list[tuple[bytes, bytes]]:
    return [(IGNORED_HEADER, ", ".join(request.ignored).encode())] if request.ignored else []


class EventWriter:
    """A streamed answer: OpenAI's event `transcript.text.delta` for each part of the text, and `transcript.text.done`.

    With `verbose_json`, `transcript.text.done` has its fields. The text of a clip without speech is dropped. `stream`
    is None for a model whose tokens have no times.
    """

    def __init__(
        self, request: TranscriptRequest, audio: ClipPieces, send: Send, stream: TokenStream | None = None
    ) -> None:
        self.request, self.audio, self.send, self.stream = request, audio, send, stream
        self._texts, self._tokens = [""] * len(audio.pieces), [list[int]() for _ in audio.pieces]
        self.logprobs = TokenLogprobs(stream) if request.logprobs and stream is not None else None
        self._unsent: list[dict[str, Any]] = []  # logprobs of text that has not come yet
        self._number = 0  # of the piece
        self.started = False  # whether the client has got the status
        self.text = ""
        self.usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        self._begun: int | None = None  # the last piece of which there is text

    async def add(self, number: int, chunk: PieceChunk) -> None:
        """Send the text in vLLM's chunk for a piece; pieces come in order."""
        if not self.started:
            headers = [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), *_ignored(self.request)]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True
        if counts := chunk.content.get("usage"):
            for name, theirs in zip(self.usage, ("prompt_tokens", "completion_tokens", "total_tokens"), strict=True):
                self.usage[name] += counts[theirs]
        delta = "".join(choice["delta"].get("content") or "" for choice in chunk.content.get("choices", ()))
        if self.audio.silent:
            return
        self._texts[number] += delta
        self._tokens[number] += chunk.tokens
        if self.logprobs is not None:
            if number != self._number:
                self._number = number
                self.logprobs.begin_piece()
            self._unsent += self.logprobs.add(chunk.tokens, chunk.logprobs)
        if number != self._begun and (delta := delta.lstrip()):  # a piece's text begins after one blank
            self._begun = number
            delta = f" {delta}" if self.text else delta
        if delta:
            self.text += delta
            event: dict[str, Any] = {"type": "transcript.text.delta", "delta": delta}
            if self.logprobs is not None:
                event["logprobs"], self._unsent = self._unsent, []
            await self._event(event)

    async def finish(self) -> None:
        try:
            content = self._verbose() if self.request.form.name == VERBOSE else self._plain()
        except TimeError as error:
            await self.fail(RuntimeError(f"no times for {VERBOSE}: {error}"))
            return
        await self._event({"type": "transcript.text.done", **content})
        await self.send({"type": "http.response.body", "body": b""})

    def _plain(self) -> dict[str, Any]:
        content: dict[str, Any] = {"text": self.text.rstrip(), "usage": {"type": "tokens", **self.usage}}
        if self.logprobs is not None:
            content["logprobs"] = self.logprobs.finish()
        return content

    def _verbose(self) -> dict[str, Any]:
        pieces = _transcripts(self.audio, zip(self._texts, self._tokens, strict=True))
        return verbose(self.request.form, pieces, self.stream, self.audio.clip.seconds, _duration(self.audio))

    async def fail(self, error: Exception) -> None:
        """End a stream that has started with an error, in the form of vLLM's own, which clients know."""
        unnamed = {"message": str(error), "type": "server_error", "param": None, "code": "failed"}
        await self._event({"error": error.error if isinstance(error, StreamError) else unnamed})
        await self.send({"type": "http.response.body", "body": b""})

    async def _event(self, content: dict[str, Any]) -> None:
        line = f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
        await self.send({"type": "http.response.body", "body": line.encode(), "more_body": True})
