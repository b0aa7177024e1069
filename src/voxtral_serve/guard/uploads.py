"""Answer an upload: let vLLM transcribe its pieces, each a request of its own, and write the whole as OpenAI has it.

vLLM answers each piece in JSON, or in its own events where the client asked for a stream; what the client gets is
OpenAI's form of either (https://platform.openai.com/docs/api-reference/audio).
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from voxtral_serve.guard import asgi
from voxtral_serve.guard import forms as bodies
from voxtral_serve.guard.asgi import App, Message, Receive, Send
from voxtral_serve.guard.forms import RefusedError
from voxtral_serve.guard.server import recorded_tokens
from voxtral_serve.transcript import formats
from voxtral_serve.transcript.words import TokenStream

AT_ONCE = 8  # pieces of a clip: as fast as a batch, and others still have their turn
IGNORED = b"x-voxtral-ignored"  # names what the request asked for and its model cannot do
EVENTS = b"text/event-stream; charset=utf-8"


class NotServedError(Exception):
    """vLLM answered a piece with something else than 200: these messages, which are for the client."""

    def __init__(self, messages: list[Message]) -> None:
        body = b"".join(message.get("body", b"") for message in messages[1:])
        super().__init__(f"HTTP {messages[0]['status']}: {body.decode(errors='replace')}")
        self.messages = messages


class StreamError(Exception):
    """vLLM's stream has this error in it, in OpenAI's form, with a status as its `code`."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.error = error

    def messages(self) -> list[Message]:
        """The answer with that status, for a client that was sent nothing yet."""
        code = self.error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        body = json.dumps({"error": self.error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        return [start, {"type": "http.response.body", "body": body}]


class GoneError(Exception):
    """The client has gone, and vLLM has dropped its request."""


class Told(NamedTuple):
    """What vLLM says of one piece: the headers of its answer, its JSON, and the tokens behind it."""

    start: Message
    content: dict[str, Any]
    tokens: list[int]


class Transcription:
    """One upload, from vLLM's side and the client's. `request_id` names it in vLLM's log."""

    def __init__(self, app: App, scope: Message, receive: Receive, upload: bodies.Upload, request_id: str) -> None:
        self.app, self.scope, self.receive, self.upload, self.id = app, scope, receive, upload, request_id
        self.gone = asyncio.Event()

    async def answer(self, stream: TokenStream | None, send: Send) -> None:
        """Raises RefusedError where the text has no times, if these were asked for."""
        watcher = asyncio.create_task(self._watch())
        try:
            await (self._events(send) if self.upload.streamed else self._whole(stream, send))
        except NotServedError as error:
            for message in error.messages:
                await send(message)
        except GoneError:
            pass
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def _whole(self, stream: TokenStream | None, send: Send) -> None:
        room, numbers = asyncio.Semaphore(AT_ONCE), range(len(self.upload.pieces))

        async def one(number: int) -> Told:
            async with room:
                return await self._told(number)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number)) for number in numbers]
        except BaseExceptionGroup as errors:  # the first of them ended the others
            raise errors.exceptions[0] from None
        told = [task.result() for task in tasks]
        try:
            kind, body = self._written(told, stream)
        except formats.TimeError as error:
            raise RefusedError(500, f"no times for {self.upload.asked.name}: {error}", "no_times") from error
        replaced = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *self._ignored()]
        names = {name for name, _ in replaced}
        kept = [(name, value) for name, value in told[0].start["headers"] if name.lower() not in names]
        await send({**told[0].start, "headers": [*kept, *replaced]})
        await send({"type": "http.response.body", "body": body})

    def _written(self, told: list[Told], stream: TokenStream | None) -> tuple[bytes, bytes]:
        """(content type, body)"""
        upload = self.upload
        if upload.silent:
            told[0].content["text"] = ""
            told[0].tokens.clear()
        usage = {"type": "duration", "seconds": math.ceil(upload.clip.seconds)}
        if upload.asked.name == "json":
            text = told[0].content["text"] if len(told) == 1 else _joined(each.content["text"] for each in told)
            content = {**told[0].content, "text": text, "usage": usage}
            return b"application/json", json.dumps(content, ensure_ascii=False).encode()
        heard = [
            formats.PieceTranscript(each.content["text"], each.tokens, piece, loud)
            for each, piece, loud in zip(told, upload.pieces, upload.loud, strict=True)
        ]
        kind, written = formats.written(upload.asked, heard, stream, upload.clip.seconds, usage)
        return kind.encode(), written.encode()

    async def _told(self, number: int) -> Told:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        with recorded_tokens() as tokens:
            await self.app(*await self._asked(number), send)
        if self.gone.is_set():
            raise GoneError
        if messages[0]["status"] != 200:
            raise NotServedError(messages)
        return Told(messages[0], json.loads(b"".join(message.get("body", b"") for message in messages[1:])), tokens)

    async def _asked(self, number: int) -> tuple[Message, Receive]:
        """A piece's request, as vLLM gets it."""
        if self.gone.is_set():
            raise GoneError
        content_type, content = await asyncio.to_thread(self.upload.form, number)  # an hour has 230 MB
        name = f"{self.id}-{number}" if number else self.id

        async def gone() -> Message:
            await self.gone.wait()  # vLLM waits for this, to abort the request
            return {"type": "http.disconnect"}

        return asgi.request(self.scope, content_type, content, name, gone)

    def _ignored(self) -> list[tuple[bytes, bytes]]:
        return [(IGNORED, ", ".join(self.upload.ignored).encode())] if self.upload.ignored else []

    async def _events(self, send: Send) -> None:
        """OpenAI's `transcript.text.delta` for each piece of text, in order, and `transcript.text.done`."""
        count = len(self.upload.pieces)
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
            await self._send_events(queues, send)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_events(self, queues: list[asyncio.Queue[Any]], send: Send) -> None:
        started, text = False, ""
        usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}

        async def event(content: dict[str, Any]) -> None:
            line = f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})

        for queue in queues:
            fresh = True  # of a piece, whose text begins after a blank
            async for item in _until_none(queue):
                if isinstance(item, StreamError) and not started:
                    raise NotServedError(item.messages())
                if isinstance(item, GoneError) or (isinstance(item, Exception) and not started):
                    raise item
                if isinstance(item, Exception):
                    # The status is out. vLLM's own form of a failure in the middle of a stream, which clients know.
                    unnamed = {"message": str(item), "type": "server_error", "param": None, "code": "failed"}
                    await event({"error": item.error if isinstance(item, StreamError) else unnamed})
                    await send({"type": "http.response.body", "body": b""})
                    return
                if not started:
                    kept = [(b"content-type", EVENTS), (b"cache-control", b"no-cache"), *self._ignored()]
                    await send({"type": "http.response.start", "status": 200, "headers": kept})
                    started = True
                if told := item.get("usage"):
                    for name, theirs in zip(usage, ("prompt_tokens", "completion_tokens", "total_tokens"), strict=True):
                        usage[name] += told[theirs]
                delta = "".join(choice["delta"].get("content") or "" for choice in item.get("choices", ()))
                if self.upload.silent:
                    continue
                if fresh and (delta := delta.lstrip()):
                    fresh = False
                    delta = f" {delta}" if text else delta
                if delta:
                    text += delta
                    await event({"type": "transcript.text.delta", "delta": delta})
        await event({"type": "transcript.text.done", "text": text.rstrip(), "usage": {"type": "tokens", **usage}})
        await send({"type": "http.response.body", "body": b""})

    async def _stream(self, number: int, queue: asyncio.Queue[Any]) -> None:
        """Put vLLM's chunks for one piece into the queue; None at its end, or an exception."""
        messages: list[Message] = []
        rest, ended = b"", False

        async def send(message: Message) -> None:
            nonlocal rest, ended
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
                    queue.put_nowait(content)

        await self.app(*await self._asked(number), send)
        if self.gone.is_set():
            raise GoneError
        if messages[0]["status"] != 200:
            raise NotServedError(messages)
        if not ended:
            raise StreamError({"message": "vLLM's stream has no end", "code": 500})


async def _until_none(queue: "asyncio.Queue[Any]") -> AsyncIterator[Any]:
    while (item := await queue.get()) is not None:
        yield item


def _joined(texts: Any) -> str:
    return " ".join(text.strip() for text in texts if text.strip())
