"""A replica without a model: the routes of `vllm serve` behind the guard, in a process of its own that can be killed.

python tests/support/fakereplica.py PORT [DELAY_S] [MOST_IN_FLIGHT] [starting]

An upload is answered after DELAY_S with the SHA-256 of its body; with a field `stream`, by five events 0.2 s apart.
More than MOST_IN_FLIGHT at a time are 429. With `starting`, everything is 503. WebSockets answer each message with it.
An upload with a field `fatal`, and a handshake with the query `fatal`, end the process.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

EVENTS, BETWEEN_S = 5, 0.2
MOST_BYTES = 26 << 20  # of an upload's body, as the guard has it (Rules.upload_bytes)
READ = ("/health", "/load", "/metrics", "/ping", "/version", "/v1/models", "/v1/models/voxtral")
WRITTEN = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions")
LIVE = ("/v1/realtime", "/v1/audio/transcriptions/realtime")


def refusal(status: int, code: str) -> JSONResponse:
    headers = {"retry-after": "1"} if status in (429, 503) else {}
    return JSONResponse({"error": {"message": code, "code": code}}, status, headers)


class Replica:
    def __init__(self, delay_s: float, most: int, starting: bool) -> None:
        self.delay_s, self.most, self.starting = delay_s, most, starting
        self.in_flight = 0

    async def read(self, request: Request) -> Response:
        return JSONResponse({"path": request.url.path, "pid": os.getpid()})

    async def write(self, request: Request) -> Response:
        body = await request.body()
        if len(body) > MOST_BYTES and "chat" not in request.url.path:
            return refusal(413, "the_guard_s")
        if b'name="fatal"' in body:
            os._exit(1)
        if self.in_flight >= self.most:
            return refusal(429, "overloaded")
        if b'name="stream"' in body:
            return StreamingResponse(self.events(), media_type="text/event-stream")
        self.in_flight += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.in_flight -= 1
        return JSONResponse(
            {"path": request.url.path, "pid": os.getpid(), "text": hashlib.sha256(body).hexdigest(), "size": len(body)}
        )

    async def events(self) -> AsyncIterator[str]:
        for number in range(EVENTS):
            yield f"data: {json.dumps({'number': number, 'pid': os.getpid()})}\n\n"
            await asyncio.sleep(BETWEEN_S)

    async def live(self, socket: WebSocket) -> None:
        if "fatal" in socket.query_params:
            os._exit(1)
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await socket.send_json({"pid": os.getpid(), "path": socket.url.path})
            while True:
                await socket.send_text(await socket.receive_text())

    def app(self) -> Starlette:
        routes = [
            *(Route(path, self.read) for path in READ),
            *(Route(path, self.write, methods=["POST"]) for path in WRITTEN),
            *(WebSocketRoute(path, self.live) for path in LIVE),
        ]
        return Starlette(routes=routes, middleware=[Middleware(Ids, replica=self)])


class Ids:
    """Answers 503 while the replica starts, and puts the request's id among the headers of an answer."""

    def __init__(self, app: ASGIApp, replica: Replica) -> None:
        self.app, self.replica = app, replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_id(message):  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                given = dict(scope["headers"]).get(b"x-request-id", b"")
                message["headers"] = [*message["headers"], (b"x-request-id", given)]
            await send(message)

        if scope["type"] != "lifespan" and self.replica.starting:
            await refusal(503, "not_ready")(scope, receive, with_id)
        else:
            await self.app(scope, receive, with_id)


def main(port: str, delay_s: str = "0", most: str = "1000", starting: str = "") -> None:
    replica = Replica(float(delay_s), int(most), bool(starting))
    # Of vLLM: it waits 5 s for the next request of a connection, and lets running requests finish.
    uvicorn.run(
        replica.app(),
        port=int(port),
        timeout_keep_alive=5,
        timeout_graceful_shutdown=30,
        log_level="error",
        ws="websockets-sansio",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
