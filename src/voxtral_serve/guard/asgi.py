"""A request's parts as the ASGI specification has them (https://asgi.readthedocs.io), and one made from another."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

REPLACED = (b"content-type", b"content-length", b"transfer-encoding", b"content-encoding", b"x-request-id")


def request(scope: Message, content_type: bytes, content: bytes, name: str, after: Receive) -> tuple[Message, Receive]:
    """(scope, receive): that request with another body and request id; after the body it receives what `after` does."""
    kept = [(header, value) for header, value in scope["headers"] if header.lower() not in REPLACED]
    ours = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(content)),
        (b"x-request-id", name.encode()),
    ]
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await after()

    return {**scope, "headers": kept + ours}, receive
