"""The response to an upload in OpenAI's format (https://platform.openai.com/docs/api-reference/audio).

It is one body or a stream of events, made from vLLM's responses to the pieces of the clip.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from voxtral_serve.guard.asgi import Message, Send
from voxtral_serve.guard.ask import PieceChunk, PieceResult, StreamError
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.fields import TranscriptRequest
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.transcript.formats import PieceTranscript, TimeError, written
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
    usage = {"type": "duration", "seconds": math.ceil(audio.clip.seconds)}
    if request.form.name == "json":
        # vLLM's texts begin with a blank, as the model's first word does; OpenAI's do not.
        text = " ".join(filter(None, (each.content["text"].strip() for each in results)))
        content = {**results[0].content, "text": text, "usage": usage}
        if request.logprobs and stream is not None:
            content["logprobs"] = _logprobs(results, stream)
        return b"application/json", json.dumps(content, ensure_ascii=False).encode()
    transcripts = [
        PieceTranscript(each.content["text"], each.tokens, piece, voiced)
        for each, piece, voiced in zip(results, audio.pieces, audio.voiced, strict=True)
    ]
    try:
        kind, text = written(request.form, transcripts, stream, audio.clip.seconds, usage)
    except TimeError as error:
        raise RefusedError(500, f"no times for {request.form.name}: {error}", "no_times") from error
    return kind.encode(), text.encode()


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

    `silent` says that the clip has no speech, so that the text of vLLM's chunks is dropped. `stream` is None for a
    model whose tokens have no times.
    """

    def __init__(self, request: TranscriptRequest, silent: bool, send: Send, stream: TokenStream | None = None) -> None:
        self.request, self.silent, self.send = request, silent, send
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
        if self.silent:
            return
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
        usage = {"type": "tokens", **self.usage}
        event: dict[str, Any] = {"type": "transcript.text.done", "text": self.text.rstrip(), "usage": usage}
        if self.logprobs is not None:
            event["logprobs"] = self.logprobs.finish()
        await self._event(event)
        await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: Exception) -> None:
        """End a stream that has started with an error, in the form of vLLM's own, which clients know."""
        unnamed = {"message": str(error), "type": "server_error", "param": None, "code": "failed"}
        await self._event({"error": error.error if isinstance(error, StreamError) else unnamed})
        await self.send({"type": "http.response.body", "body": b""})

    async def _event(self, content: dict[str, Any]) -> None:
        line = f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
        await self.send({"type": "http.response.body", "body": line.encode(), "more_body": True})
