"""The parts of a request in the ASGI specification (https://asgi.readthedocs.io), and a request with another body."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Headers that describe the body or name the request
REPLACED = (b"content-type", b"content-length", b"transfer-encoding", b"content-encoding", b"x-request-id")


def without_body(after: Receive) -> Receive:
    """The `receive` of a request without a body, and then what `after` returns: a body that the client sends is not
    waited for."""
    waiting: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await after()

    return receive


def request(
    scope: Message, content_type: bytes, content: bytes, request_id: str, after: Receive
) -> tuple[Message, Receive]:
    """(scope, receive) of the same request with another body and request id.

    `receive` returns the whole body in its first message, and then what `after` returns.
    """
    kept = [(header, value) for header, value in scope["headers"] if header.lower() not in REPLACED]
    ours = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(content)),
        (b"x-request-id", request_id.encode()),
    ]
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await after()

    return {**scope, "headers": kept + ours}, receive
