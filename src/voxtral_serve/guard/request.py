"""A request from its headers to its line in the log: what is the same for every kind of server.

Its path, its key, the limits of the queue and of bodies, and errors in OpenAI's form. `transcription` and
`speech.request` have the paths of each kind of server, and what vLLM gets of them.
"""

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from voxtral_serve.guard import asgi, origins, page
from voxtral_serve.guard.asgi import App, Message, Receive, Send
from voxtral_serve.guard.body import OpenBodies, discard, hold
from voxtral_serve.guard.budget import Reservation
from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.keyring import IN_FLIGHT
from voxtral_serve.guard.limits import LIMITS
from voxtral_serve.guard.metrics import code_counted, key_metrics, metrics, without_keys
from voxtral_serve.guard.page import PageFile
from voxtral_serve.guard.server import ServerFacts
from voxtral_serve.guard.speech.facts import SpeechFacts
from voxtral_serve.keys import Key
from voxtral_serve.logs import SERVED, fields
from voxtral_serve.patches.live_server import log

HELD = (401, 408)  # refusals of a body that is arriving that are held back (body.HOLD_S)
SEND_S = 60  # the longest wait for a client that does not read its answer, as deploy/nginx has it
THREADS = 4  # for decoding; ten minutes of audio occupy one thread for a second
DISCONNECTED = 499  # in the log, as nginx has it
FAILED = 500
MODELS, MODEL = "/v1/models", "/v1/models/"  # the list; one of it, whose name follows and may have slashes
SERVER = "/v1/server"  # guard.about
METRICS = "/metrics"
PREFLIGHT = {b"origin", b"access-control-request-method"}  # headers of a request that vLLM's CORS middleware answers
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
Facts = ServerFacts | SpeechFacts


class Frontend:
    """What the requests of an API process share. `facts` is None while vLLM starts and after it has stopped."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.facts: Facts | None = None
        self.in_flight = 0
        self.sockets = 0  # of vLLM's own live sessions
        self.metrics = metrics()
        self.bodies = OpenBodies()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="guard")


class Request:
    """One request, HTTP or WebSocket. The subclass is that of the kind of server.

    METHODS  those of each path of the API that is HTTP
    SOCKETS  paths of WebSockets
    PAGES    files by their paths
    READ     paths that vLLM answers without a body
    KEYLESS  paths without a key
    """

    METHODS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    SOCKETS: ClassVar[frozenset[str]] = frozenset()
    PAGES: ClassVar[Mapping[str, PageFile]] = {}
    READ: ClassVar[frozenset[str]] = frozenset()
    KEYLESS: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, guard: Frontend, scope: Message, receive: Receive, send: Send) -> None:
        self.guard, self.scope, self.receive, self.client = guard, scope, receive, send
        self.headers = {name.lower(): value for name, value in scope["headers"]}  # the last of each, as bytes
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.method: str = scope.get("method", "WEBSOCKET")
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.start = time.monotonic()
        self.status = DISCONNECTED
        self.bytes, self.seconds = 0, 0.0
        self.answering = False
        self.gone = False  # whether the client has left, as `send` has found
        self.key: Key | None = None
        # Whether the client may still be sending a body
        self.arriving = self.headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self.headers

    async def send(self, message: Message) -> None:
        """Send the client a message, with the request id among its headers; keep the status for the log."""
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            self.status, self.answering = message["status"], True
            names = {name.lower() for name, _ in message.get("headers", ())}
            if b"x-request-id" not in names:
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        elif message["type"] == "websocket.accept":
            self.status, self.answering = 101, True
        elif message["type"] == "websocket.close" and not self.answering:
            self.status = 403
        websocket = self.scope["type"] == "websocket"  # the sessions of each kind have their own deadlines
        try:
            async with asyncio.timeout(None if websocket else SEND_S):
                await self.client(message)
        except OSError:  # uvicorn's ClientDisconnected, and TimeoutError
            self.gone = True
            raise

    @property
    def endpoint(self) -> str | None:
        """The path, if the API has it. One of few values."""
        if self.path in self.METHODS or self.path in self.SOCKETS or self.path in self.PAGES:
            return self.path
        return f"{MODEL}{{id}}" if self.path.startswith(MODEL) else None

    def report(self) -> None:
        """Count the request, and write its line to the log."""
        counted = self.guard.metrics
        counted.requests.labels(self.endpoint or "other", self.status).inc()
        if self.bytes:
            counted.bodies.inc(self.bytes)
        path = self.path if self.endpoint == self.path else ascii(self.path)[:80]
        audio, more = self._described()
        spent_ms = 1000 * (time.monotonic() - self.start)
        head = {"method": self.method, "path": path, "status": self.status, "duration_ms": round(spent_ms)}
        line, values = "%s %s %d, %s, %.0f ms, id %s", [self.method, path, self.status, audio, spent_ms, self.id]
        if self.key is not None:
            key_metrics().requests.labels(self.key.name, self.status).inc()
            line, values = f"{line}, key %s", [*values, self.key.name]
        log.info(line, *values, extra=fields(**head, **more))

    def _described(self) -> tuple[str, dict[str, Any]]:
        """What the line in the log says of the content: as text, and as fields of a line of JSON."""
        more = {"bytes": self.bytes, "audio_s": round(self.seconds, 3)}
        return f"{self.bytes} bytes, {self.seconds:.2f} s of audio", more

    async def refuse(self, error: RefusedError) -> None:
        """Answer with an error in OpenAI's form. A connection whose body is still arriving is then closed."""
        websocket = self.scope["type"] == "websocket"
        code_counted(websocket, error.code)
        # A client that waits for `100 Continue` sends no body before, and none once it has this answer.
        if self.arriving and error.status in HELD and (error.status != 401 or b"expect" not in self.headers):
            self.arriving = not await hold(self.receive)
        body = json.dumps({"error": error.content}, ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.status in (429, 503):
            headers.append((b"retry-after", b"%d" % error.retry_s))
        elif error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        elif error.status == 405:
            headers.append((b"allow", ", ".join(self._methods()).encode()))
        closing = self.arriving and not websocket
        if closing:
            headers.append((b"connection", b"close"))
        kind = "websocket.http.response" if websocket else "http.response"
        await self.send({"type": f"{kind}.start", "status": error.status, "headers": headers})
        await self.send({"type": f"{kind}.body", "body": body, "more_body": closing})
        if closing:
            await discard(self.receive)
            await self.send({"type": f"{kind}.body", "body": b""})

    async def crash(self) -> None:
        """Answer with status 500 what ended with an exception that is none of the client's; it is in the log.

        An answer that has begun stays incomplete: the server closes its connection.
        """
        log.exception("a request failed, id %s", self.id)
        if self.answering:
            self.status = FAILED
        else:
            message = f"the server failed at this request: its log has the reason, with the id {self.id}"
            await self.refuse(RefusedError(FAILED, message, "internal_error"))

    async def serve(self) -> None:
        """Answer the request or have vLLM answer it. Raises RefusedError."""
        if self.path in self.PAGES and self.scope["type"] == "http":
            await self._page()
            return
        facts = self.guard.facts
        if facts is None or facts.stopping:
            raise RefusedError(503, "the server is starting or stopping", "not_ready")
        websocket = self.scope["type"] == "websocket"
        self._check_path(websocket)
        if self.method == "OPTIONS" and self.headers.keys() >= PREFLIGHT:  # of a browser, before it sends the key
            await self.guard.app(self.scope, asgi.receiving(b"", self.receive), self.send)
            return
        if not websocket and self.method not in self._methods():
            raise self._wrong_method()
        keyless = facts.verify is None and facts.keys is None
        if websocket or keyless:
            origins.check(self.headers, LIMITS.live_origins, keyless)
        if websocket:
            self._check_handshake()
        self._check_key(facts)
        if self.path == METRICS and facts.keys is not None and self.key is None:
            await self._metrics()
        elif self.path in self.READ:
            await self.guard.app(self.scope, asgi.receiving(b"", self.receive), self.send)
        elif self.path == SERVER:
            await self._json(facts.about)
        elif self.path.startswith(MODEL):
            await self._model()
        else:
            await self._answer(facts)

    async def _answer(self, facts: Any) -> None:
        """Answer a request of the kind of server, whose facts these are. Raises RefusedError."""
        raise NotImplementedError

    def _check_handshake(self) -> None:
        """Of a WebSocket, before its key is checked. Raises RefusedError."""

    async def _page(self) -> None:
        if self.method not in page.METHODS:
            raise self._wrong_method()
        for message in page.response(self.PAGES[self.path], self.method, self.headers):
            await self.send(message)

    def _wrong_method(self) -> RefusedError:
        methods = " or ".join(self._methods())
        return RefusedError(405, f"{self.path} takes {methods}, not {self.method}", "method_not_allowed")

    def _methods(self) -> tuple[str, ...]:
        """Those of the path; none for a path that is unknown."""
        if self.path in self.PAGES:
            return page.METHODS
        return ("GET",) if self.path.startswith(MODEL) else self.METHODS.get(self.path, ())

    def _check_path(self, websocket: bool) -> None:
        if websocket != (self.path in self.SOCKETS) or not (websocket or self._methods()):
            path = ascii(self.path)[1:-1][:80]
            raise RefusedError(404, f"there is no {path} here: this server has {', '.join(self.METHODS)}", "not_found")

    def _check_key(self, facts: Facts) -> None:
        if facts.keys is not None:
            self.key = facts.keys.find(self.headers.get(b"authorization", b""))
            if self.key is not None and (served := SERVED.get()) is not None:
                served["key"] = self.key.name
        if self.path in self.KEYLESS or (facts.verify is None and facts.keys is None):
            return
        if self.key is None and not self._is_vllms_key(facts):
            what = "a key that this server does not know" if b"authorization" in self.headers else "no key"
            raise RefusedError(401, f"the request has {what}: expected Authorization: Bearer KEY", "invalid_api_key")

    def _is_vllms_key(self, facts: Facts) -> bool:
        from starlette.datastructures import Headers

        return facts.verify is not None and facts.verify(Headers(scope=self.scope))

    def _check_queue(self, facts: Facts) -> None:
        most = facts.most_in_flight
        if self.guard.in_flight >= most:
            raise RefusedError(
                429,
                f"{most} requests are in flight, as many as this server takes at a time: try again soon",
                "overloaded",
            )

    @contextlib.asynccontextmanager
    async def _place(self, facts: Facts) -> AsyncIterator[None]:
        """A place among the requests in flight. Raises RefusedError if there is none."""
        self._check_queue(facts)
        self.guard.in_flight += 1
        self.guard.metrics.in_flight.inc()
        try:
            yield
        finally:
            self.guard.in_flight -= 1
            self.guard.metrics.in_flight.dec()

    def _key_place(self, facts: Facts, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        """A place among those of the request's key. Raises RefusedError if there is none."""
        if facts.keys is None or self.key is None:
            return contextlib.nullcontext()
        return facts.keys.place(self.key, what)

    async def _model(self) -> None:
        """Answer `GET /v1/models/{id}`, which vLLM does not have, from its list of models."""
        name = self.path.removeprefix(MODEL)
        _, body = await self._vllms(MODELS)
        models = json.loads(body)["data"]
        found = next((model for model in models if model["id"] == name), None)
        if found is None:
            names = ", ".join(model["id"] for model in models)
            raise RefusedError(
                404, f"the model {ascii(name)[:80]} does not exist: this server has {names}", "model_not_found", "model"
            )
        await self._json(found)

    async def _metrics(self) -> None:
        """Answer `GET /metrics` to a client without a key: with no series of a key, whose label is its name."""
        start, body = await self._vllms(METRICS)
        body = without_keys(body)
        kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await self.send({**start, "headers": [*kept, (b"content-length", b"%d" % len(body))]})
        await self.send({"type": "http.response.body", "body": body})

    async def _vllms(self, path: str) -> tuple[Message, bytes]:
        """vLLM's answer to a GET of this path: its start and its body, which is not compressed."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        path = self.scope.get("root_path", "") + path
        headers = [(name, value) for name, value in self.scope["headers"] if name.lower() != b"accept-encoding"]
        scope = {**self.scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self.guard.app(scope, asgi.receiving(b"", self.receive), keep)
        start, *rest = messages
        return start, b"".join(message.get("body", b"") for message in rest)

    async def _json(self, content: Mapping[str, Any]) -> None:
        body = json.dumps(dict(content), ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _body(
        self,
        most: int,
        facts: Facts,
        large: Callable[[str, int | str, int], RefusedError] = too_large,
        held: Reservation | None = None,
    ) -> bytes | None:
        """The body, whose bytes `held` then has; None if the client has disconnected. Raises RefusedError, if the queue
        is full now as well: there is no use in receiving the body then. `large` makes the error of a body of more than
        `most` bytes."""
        declared = self.headers.get(b"content-length", b"").decode("latin-1")
        if declared.isdigit() and int(declared[:18]) > most:
            raise large("the body", int(declared[:18]), most)
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedError(415, "the body is compressed (Content-Encoding): send it as it is", "invalid_form")
        self._check_queue(facts)
        if facts.keys is not None and self.key is not None:
            await facts.keys.check_place(self.key, IN_FLIGHT)
            await facts.keys.check_audio(self.key)
        body = await self.guard.bodies.read(self.receive, most, facts.open, self._count, large, held)
        self.arriving = False
        return body

    def _count(self, size: int) -> None:
        self.bytes += size
