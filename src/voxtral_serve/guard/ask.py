"""Requests to vLLM for the pieces of a clip, and vLLM's responses. Each piece is a separate ASGI request.

vLLM responds with JSON, or with its own events (https://html.spec.whatwg.org/multipage/server-sent-events.html) if
the form has `stream`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from voxtral_serve.audio.decode import wav
from voxtral_serve.audio.level import raised
from voxtral_serve.guard import asgi, form
from voxtral_serve.guard.asgi import App, Message, Receive
from voxtral_serve.guard.form import Part
from voxtral_serve.guard.pieces import ClipPieces
from voxtral_serve.patches.live_server import recorded_tokens

AT_ONCE = 8  # pieces of one clip in flight: enough for vLLM's batch, with room for other requests


class NotServedError(Exception):
    """vLLM answered a piece with a status other than 200. `messages` are its response, which the client gets."""

    def __init__(self, messages: list[Message]) -> None:
        body = b"".join(message.get("body", b"") for message in messages[1:])
        super().__init__(f"HTTP {messages[0]['status']}: {body.decode(errors='replace')}")
        self.messages = messages


class StreamError(Exception):
    """An error event in vLLM's stream. `error` has OpenAI's form, with an HTTP status as `code`."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.error = error

    @property
    def messages(self) -> list[Message]:
        """A response with that status, for a client that has received nothing yet."""
        code = self.error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        body = json.dumps({"error": self.error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        return [start, {"type": "http.response.body", "body": body}]


class GoneError(Exception):
    """The client has disconnected, and vLLM has dropped its request."""


class PieceResult(NamedTuple):
    """vLLM's response for one piece: the ASGI message with its headers, its JSON, and the generated tokens.

    `logprobs` are those of the tokens, None if they are not requested.
    """

    start: Message
    content: dict[str, Any]
    tokens: list[int]
    logprobs: list[float] | None


class PieceChunk(NamedTuple):
    """A chunk of vLLM's stream for one piece: its JSON, the new tokens, and their logprobs if they are requested."""

    content: dict[str, Any]
    tokens: list[int]
    logprobs: list[float]


class PieceRequests:
    """The requests for the pieces of one upload.

    app         vLLM's ASGI application
    scope       ASGI scope of the client's request
    request_id  id in vLLM's log; piece n > 0 has the suffix -n
    fields      form fields of every piece
    gone        an event to set when the client has disconnected; vLLM then aborts the requests
    logprobs    whether the logprobs of the tokens are needed
    """

    def __init__(
        self,
        app: App,
        scope: Message,
        request_id: str,
        fields: Sequence[Part],
        audio: ClipPieces,
        gone: asyncio.Event,
        logprobs: bool = False,
    ) -> None:
        self.app, self.scope, self.id, self.fields, self.audio, self.gone = app, scope, request_id, fields, audio, gone
        self.logprobs = logprobs

    async def results(self) -> list[PieceResult]:
        """vLLM's results for all pieces, in order. Raises NotServedError or GoneError."""
        room, numbers = asyncio.Semaphore(AT_ONCE), range(len(self.audio.pieces))

        async def one(number: int) -> PieceResult:
            async with room:
                return await self._result(number)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number)) for number in numbers]
        except BaseExceptionGroup as errors:  # the first error has cancelled the others
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def chunks(self) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield (number of the piece, PieceChunk) in order. After an error, the last item has the exception."""
        count = len(self.audio.pieces)
        queues: list[asyncio.Queue[Any]] = [asyncio.Queue() for _ in range(count)]
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with room:
                try:
                    await self._stream(number, queues[number])
                except Exception as error:
                    queues[number].put_nowait(error)

        tasks = [asyncio.create_task(one(number)) for number in range(count)]
        try:
            for number, queue in enumerate(queues):
                while (chunk := await queue.get()) is not None:
                    yield number, chunk
                    if isinstance(chunk, Exception):
                        return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _result(self, number: int) -> PieceResult:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        with recorded_tokens(self.logprobs) as record:
            await self.app(*await self._request(number), send)
        if self.gone.is_set():
            raise GoneError
        if messages[0]["status"] != 200:
            raise NotServedError(messages)
        content = json.loads(b"".join(message.get("body", b"") for message in messages[1:]))
        return PieceResult(messages[0], content, record.tokens, record.logprobs)

    async def _stream(self, number: int, queue: asyncio.Queue[Any]) -> None:
        """Put vLLM's chunks for one piece into the queue, then None. Raises the error if the stream ends early."""
        messages: list[Message] = []
        rest, ended, before = b"", False, 0

        async def send(message: Message) -> None:
            nonlocal rest, ended, before
            if not messages or messages[0]["status"] != 200:
                messages.append(message)
                return
            *events, rest = (rest + message.get("body", b"")).split(b"\n\n")
            for each in events:
                data = each.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    ended = True
                    queue.put_nowait(None)
                elif "error" in (content := json.loads(data)):
                    queue.put_nowait(StreamError(content["error"]))
                else:
                    # vLLM sends a chunk for each of its outputs, so the new tokens are those of this chunk.
                    tokens, logprobs = record.tokens[before:], (record.logprobs or [])[before:]
                    queue.put_nowait(PieceChunk(content, tokens, logprobs))
                    before += len(tokens)

        with recorded_tokens(self.logprobs) as record:
            await self.app(*await self._request(number), send)
        if self.gone.is_set():
            raise GoneError
        if messages[0]["status"] != 200:
            raise NotServedError(messages)
        if not ended:
            raise StreamError({"message": "vLLM's stream ended without [DONE]", "code": 500})

    async def _request(self, number: int) -> tuple[Message, Receive]:
        """(scope, receive) of a piece's request. Raises GoneError."""
        if self.gone.is_set():
            raise GoneError
        # In a thread, because an hour of audio has 230 MB.
        content_type, content = await asyncio.to_thread(piece_form, self.fields, self.audio, number)
        request_id = f"{self.id}-{number}" if number else self.id

        async def gone() -> Message:
            await self.gone.wait()  # vLLM waits for this message, and then aborts the request
            return {"type": "http.disconnect"}

        return asgi.request(self.scope, content_type, content, request_id, gone)


def piece_form(fields: Sequence[Part], audio: ClipPieces, number: int) -> tuple[bytes, bytes]:
    """(content type, body) of the form for one piece. Quiet audio is amplified."""
    return form.write(fields, wav(raised(audio.clip_of(number))))
