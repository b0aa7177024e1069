"""The parts of a request in the ASGI specification (https://asgi.readthedocs.io).

A request with another body, and work that ends when its client leaves.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Headers that describe the body or name the request
REPLACED = (b"content-type", b"content-length", b"transfer-encoding", b"content-encoding", b"x-request-id")


def receiving(content: bytes, after: Receive) -> Receive:
    """A `receive` that returns the whole body in its first message, and then what `after` returns."""
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await after()

    return receive


def request(
    scope: Message, content_type: bytes, content: bytes, request_id: str, after: Receive
) -> tuple[Message, Receive]:
    """(scope, receive) of the same request with another body and request id; `receive` is that of `receiving`."""
    kept = [(header, value) for header, value in scope["headers"] if header.lower() not in REPLACED]
    ours = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(content)),
        (b"x-request-id", request_id.encode()),
    ]
    return {**scope, "headers": kept + ours}, receiving(content, after)


class GoneError(Exception):
    """The client has disconnected."""


@contextlib.asynccontextmanager
async def connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs inside once the client disconnects, whose body has been received. Raises GoneError then.

    The last message of an answer belongs after it: with that, the server says that the client has disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise GoneError from None
        raise
