"""The answer to an upload in OpenAI's format (https://platform.openai.com/docs/api-reference/audio).

It is one body or a stream of events, made of the chunks of the clip's pieces, which come in order.
"""

import contextlib
import json
import math
from collections.abc import Sequence
from typing import Any

from voxtral_serve.guard.asgi import Message, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.fields import TranscriptRequest
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.guard.timing import UploadTiming
from voxtral_serve.guard.transcriber import PieceChunk, Transcriber
from voxtral_serve.transcript.formats import VERBOSE, AnswerFormat, PieceTranscript, TimeError, verbose, written
from voxtral_serve.transcript.logprobs import TokenLogprobs
from voxtral_serve.transcript.words import TokenStream

IGNORED_HEADER = b"x-voxtral-ignored"  # names the fields that have no effect with this model
EVENTS = b"text/event-stream; charset=utf-8"


async def answered(
    transcriber: Transcriber,
    request: TranscriptRequest,
    audio: ClipPieces,
    language: str | None,
    stream: TokenStream | None,
    request_id: str,
    send: Send,
    timing: UploadTiming,
) -> list[Message]:
    """Transcribe an upload; a streamed answer is sent as its text comes. Returns the messages that end the answer.

    language  that of the prompt; None for the model to detect it, if it needs one
    stream    how to read the model's tokens; None for a model whose tokens have no times

    Raises RefusedError while the client has got nothing.
    """
    task = request.form.task
    if language is None and not audio.silent:
        language = await transcriber.language_of(audio, task, request_id)
    form = request.form._replace(separator=transcriber.separator(language, task))
    answer = Answer(request, audio, form, stream)
    writer = EventWriter(answer, send) if request.streamed else None
    try:
        if not audio.silent:
            async with contextlib.aclosing(transcriber.chunks(request, audio, language, request_id)) as chunks:
                async for number, chunk in chunks:
                    timing.add(chunk.times)
                    if writer is None:
                        answer.add(number, chunk)
                    else:
                        await writer.add(number, chunk)
        return answer.messages() if writer is None else await writer.end()
    except RefusedError as error:
        if writer is None or not writer.started:
            raise
        return writer.failed(error)


def naming(ignored: Sequence[str], send: Send) -> Send:
    """`send`, with the names of fields that had no effect among the headers of an answer."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_ignored(ignored)]
        await send(message)

    return sent


def _ignored(names: Sequence[str]) -> list[tuple[bytes, bytes]]:
    return [(IGNORED_HEADER, ", ".join(names).encode())] if names else []


class Answer:
    """The text of an upload as its chunks come.

    stream  how to read the model's tokens; None for a model whose tokens have no times
    text    so far, without blanks at its beginning
    """

    def __init__(
        self, request: TranscriptRequest, audio: ClipPieces, form: AnswerFormat, stream: TokenStream | None
    ) -> None:
        self.request, self.audio, self.form, self.stream = request, audio, form, stream
        self.text = ""
        self.usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
        self._texts, self._tokens = [""] * len(audio.pieces), [list[int]() for _ in audio.pieces]
        self._logprobs = TokenLogprobs(stream) if request.logprobs and stream is not None else None
        self._unsent: list[dict[str, Any]] = []  # logprobs whose text has not been sent
        self._number: int | None = None  # of the last piece that has text

    def add(self, number: int, chunk: PieceChunk) -> dict[str, Any] | None:
        """Take a chunk of a piece. Returns the event for it, or None if the text has not grown."""
        self.usage["input_tokens"] += chunk.prompt_tokens
        self.usage["output_tokens"] += len(chunk.tokens)
        self.usage["total_tokens"] += chunk.prompt_tokens + len(chunk.tokens)
        if self._logprobs is not None:
            if not self._tokens[number]:
                self._logprobs.begin_piece()
            self._unsent += self._logprobs.add(chunk.tokens, chunk.logprobs)
        self._texts[number] += chunk.text
        self._tokens[number] += chunk.tokens
        delta = chunk.text
        if number != self._number and (delta := delta.lstrip()):
            self._number = number
            delta = self.form.separator + delta if self.text else delta
        if not delta:
            return None
        self.text += delta
        event: dict[str, Any] = {"type": "transcript.text.delta", "delta": delta}
        if self._logprobs is not None:
            event["logprobs"], self._unsent = self._unsent, []
        return event

    def done(self) -> dict[str, Any]:
        """The last event of a stream. Raises RefusedError if times are asked for and the tokens do not give them."""
        if self.form.name == VERBOSE:
            try:
                content = verbose(self.form, self._pieces(), self.stream, self.audio.clip.seconds, self._duration())
            except TimeError as error:
                raise self._no_times(error) from error
        else:
            content = {"text": self.text.rstrip(), "usage": {"type": "tokens", **self.usage}, **self._all_logprobs()}
        return {"type": "transcript.text.done", **content}

    def body(self) -> tuple[bytes, bytes]:
        """(content type, body) of an answer that is not streamed. Raises RefusedError as `done`."""
        usage = self._duration()
        if self.form.name == "json":
            # The model's text begins with a blank, as its first word does; OpenAI's does not.
            text = self.form.separator.join(filter(None, (text.strip() for text in self._texts)))
            content = {"text": text, "usage": usage, **self._all_logprobs()}
            return b"application/json", json.dumps(content, ensure_ascii=False).encode()
        try:
            kind, text = written(self.form, self._pieces(), self.stream, self.audio.clip.seconds, usage)
        except TimeError as error:
            raise self._no_times(error) from error
        return kind.encode(), text.encode()

    def messages(self) -> list[Message]:
        """The ASGI messages of an answer that is not streamed. Raises RefusedError as `done`."""
        kind, body = self.body()
        start = self._start([(b"content-type", kind), (b"content-length", b"%d" % len(body))])
        return [start, {"type": "http.response.body", "body": body}]

    def beginning(self) -> Message:
        """The ASGI message that begins a stream of events."""
        return self._start([(b"content-type", EVENTS), (b"cache-control", b"no-cache")])

    def _start(self, headers: list[tuple[bytes, bytes]]) -> Message:
        return {"type": "http.response.start", "status": 200, "headers": [*headers, *_ignored(self.request.ignored)]}

    def _all_logprobs(self) -> dict[str, Any]:
        return {} if self._logprobs is None else {"logprobs": self._logprobs.finish()}

    def _duration(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.audio.clip.seconds)}

    def _pieces(self) -> list[PieceTranscript]:
        parts = zip(self._texts, self._tokens, self.audio.pieces, self.audio.voiced, strict=True)
        return [PieceTranscript(text, tokens, piece, voiced) for text, tokens, piece, voiced in parts]

    def _no_times(self, error: TimeError) -> RefusedError:
        return RefusedError(500, f"no times for {self.form.name}: {error}", "no_times")


class EventWriter:
    """The events of a streamed answer on their way to the client. `started`: the client has got the status."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self.answer, self.send = answer, send
        self.started = False

    async def add(self, number: int, chunk: PieceChunk) -> None:
        """Send the new text of a chunk."""
        event = self.answer.add(number, chunk)
        await self._begin()
        if event is not None:
            await self.send(_event(event))

    async def end(self) -> list[Message]:
        """The messages that end the stream. Raises RefusedError as `Answer.done`."""
        done = _event(self.answer.done())
        await self._begin()
        return [done, {"type": "http.response.body", "body": b""}]

    def failed(self, error: RefusedError) -> list[Message]:
        """The messages that end a stream that has started with an error in OpenAI's form."""
        return [_event({"error": error.content}), {"type": "http.response.body", "body": b""}]

    async def _begin(self) -> None:
        if not self.started:
            self.started = True
            await self.send(self.answer.beginning())


def _event(content: dict[str, Any]) -> Message:
    line = f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
    return {"type": "http.response.body", "body": line.encode(), "more_body": True}
