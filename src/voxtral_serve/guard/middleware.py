"""The middleware `Guard`: checks each request, runs uploads and chats through their stages, and logs one line each.

The guard rejects invalid requests with an error in OpenAI's format: unknown paths, a missing or wrong key, bodies that
are too large, files that are not audio or too long, URLs that vLLM would fetch, and requests that exceed the queue.
Other requests are passed to vLLM with their audio decoded. A request enters the queue when its body is complete; before
that, the limits of `body` apply.

vLLM runs a config's middleware before its own. Therefore the guard checks the key before it reads a body, with vLLM's
function; vLLM checks it again. `limits` describes the environment variables.
"""

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from voxtral_serve.guard import asgi, chat, page, upload
from voxtral_serve.guard.asgi import App, Message, Receive, Send
from voxtral_serve.guard.body import OpenBodies, discard, hold
from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.limits import LIMITS
from voxtral_serve.guard.live import handshake, whole_clips
from voxtral_serve.guard.live.socket import LiveSocket
from voxtral_serve.guard.metrics import code_counted, metrics
from voxtral_serve.guard.server import ServerFacts, attach, drifted
from voxtral_serve.logs import SERVED, fields
from voxtral_serve.patches.live_server import log

NAME = "voxtral_serve.guard"
RETRY_AFTER_S = 1
HELD = (401, 408)  # refusals of a body that is arriving that are held back (body.HOLD_S)
THREADS = 4  # for decoding; ten minutes of audio occupy one thread for a second
DISCONNECTED = 499  # in the log, as nginx has it
KEYLESS = {"/health", "/load", "/metrics", "/ping", "/version"}
MODELS, MODEL = "/v1/models", "/v1/models/"  # the list; one of it, whose name follows and may have slashes
SERVER = "/v1/server"  # guard.about
READ: dict[str, tuple[str, ...]] = dict.fromkeys((*KEYLESS, MODELS), ("GET",)) | {"/ping": ("GET", "POST")}
TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
CHAT = "/v1/chat/completions"
METHODS = READ | {SERVER: ("GET",)} | dict.fromkeys((*TASKS, CHAT), ("POST",))
PAGE = page.read() if LIMITS.page else {}
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Guard:
    """The middleware: one of each API process of vLLM. `facts` is None while vLLM starts and after it has stopped."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.facts: ServerFacts | None = None
        self.in_flight = 0
        self.metrics = metrics()
        self.bodies = OpenBodies()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="guard")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope.setdefault(NAME, self) is not self:  # named in the config and on the command line: the outer one acts
            await self.app(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        request = Request(self, scope, receive, send)
        before = SERVED.set(served := {"request_id": request.id})
        try:
            await request.serve()
        except RefusedError as error:
            await request.refuse(error)
        except asyncio.CancelledError:  # by uvicorn, once the grace period is over
            if request.answering:
                raise
            request.arriving = False  # there is no time to receive the rest
            await request.refuse(RefusedError(503, "the server is stopping: send this again", "stopping"))
        finally:
            request.report()
            served.clear()
            SERVED.reset(before)

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            self.facts = attach(scope["app"].state, self.app)
            self.metrics.most.set(self.facts.most_in_flight)
        except Exception as error:  # of a vLLM that is not as expected: uvicorn logs the message and exits
            await send({"type": "lifespan.startup.failed", "message": drifted(error)})
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self.facts = None
            self.threads.shutdown(wait=False)


class Request:
    """One request, HTTP or WebSocket, from its headers to its line in the log."""

    def __init__(self, guard: Guard, scope: Message, receive: Receive, send: Send) -> None:
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
        self.live: LiveSocket | None = None
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
        await self.client(message)

    @property
    def endpoint(self) -> str | None:
        """The path, if the API has it. One of few values."""
        if self.path in METHODS or self.path in handshake.PATHS or self.path in PAGE:
            return self.path
        return f"{MODEL}{{id}}" if self.path.startswith(MODEL) else None

    def report(self) -> None:
        """Count the request, and write its line to the log."""
        counted = self.guard.metrics
        counted.requests.labels(self.endpoint or "other", self.status).inc()
        if self.bytes:
            counted.bodies.inc(self.bytes)
        path = self.path if self.endpoint == self.path else ascii(self.path)[:80]
        if self.live is None:
            audio = f"{self.bytes} bytes, {self.seconds:.2f} s of audio"
            more = {"bytes": self.bytes, "audio_s": round(self.seconds, 3)}
        else:
            audio, more = self.live.report(), self.live.fields()
        spent_ms = 1000 * (time.monotonic() - self.start)
        head = {"method": self.method, "path": path, "status": self.status, "duration_ms": round(spent_ms)}
        line = "%s %s %d, %s, %.0f ms, id %s"
        log.info(line, self.method, path, self.status, audio, spent_ms, self.id, extra=fields(**head, **more))

    async def refuse(self, error: RefusedError) -> None:
        """Answer with an error in OpenAI's form. A connection whose body is still arriving is then closed."""
        websocket = self.scope["type"] == "websocket"
        code_counted(websocket, error.code)
        # A client that waits for `100 Continue` sends no body before, and none once it has this answer.
        if self.arriving and error.status in HELD and (error.status != 401 or b"expect" not in self.headers):
            self.arriving = not await hold(self.receive)
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        if error.status == 429:
            kind = "rate_limit_error"
        content = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
        body = json.dumps({"error": content}, ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.status in (429, 503):
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
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

    async def serve(self) -> None:
        """Answer the request or have vLLM answer it. Raises RefusedError."""
        if self.path in PAGE and self.scope["type"] == "http":
            await self._page()
            return
        facts = self.guard.facts
        if facts is None or (facts.sessions is not None and facts.sessions.stopping):
            raise RefusedError(503, "the server is starting or stopping", "not_ready")
        websocket = self.scope["type"] == "websocket"
        self._check_path(websocket)
        if self.method == "OPTIONS":  # of a browser, which asks before it sends the key
            await self.guard.app(self.scope, self.receive, self.send)
            return
        if not websocket and self.method not in self._methods():
            raise self._wrong_method()
        if websocket:
            handshake.check_origin(self.headers, LIMITS.live_origins)
            handshake.key_as_header(self.scope, self.headers)
        self._check_key(facts)
        if self.path in READ:
            await self.guard.app(self.scope, self.receive, self.send)
        elif self.path == SERVER:
            await self._json(facts.about)
        elif self.path.startswith(MODEL):
            await self._model()
        elif websocket:
            with self._place(facts):
                await self._live(facts)
        elif self.path == CHAT:
            await self._chat(facts)
        else:
            await self._upload(facts)

    async def _page(self) -> None:
        if self.method not in page.METHODS:
            raise self._wrong_method()
        for message in page.response(PAGE[self.path], self.method, self.headers):
            await self.send(message)

    def _wrong_method(self) -> RefusedError:
        methods = " or ".join(self._methods())
        return RefusedError(405, f"{self.path} takes {methods}, not {self.method}", "method_not_allowed")

    def _methods(self) -> tuple[str, ...]:
        """Those of the path; none for a path that is unknown."""
        if self.path in PAGE:
            return page.METHODS
        return ("GET",) if self.path.startswith(MODEL) else METHODS.get(self.path, ())

    def _check_path(self, websocket: bool) -> None:
        if websocket != (self.path in handshake.PATHS) or not (websocket or self._methods()):
            path = ascii(self.path)[1:-1][:80]
            raise RefusedError(404, f"there is no {path} here: this server has {', '.join(METHODS)}", "not_found")

    def _check_key(self, facts: ServerFacts) -> None:
        if self.path in KEYLESS or facts.verify is None:
            return
        from starlette.datastructures import Headers

        if not facts.verify(Headers(scope=self.scope)):
            what = "a key that this server does not know" if b"authorization" in self.headers else "no key"
            raise RefusedError(401, f"the request has {what}: expected Authorization: Bearer KEY", "invalid_api_key")

    def _check_queue(self, facts: ServerFacts) -> None:
        most = facts.most_in_flight
        if self.guard.in_flight >= most:
            raise RefusedError(
                429,
                f"{most} requests are in flight, as many as this server takes at a time: try again soon",
                "overloaded",
            )

    @contextlib.contextmanager
    def _place(self, facts: ServerFacts) -> Iterator[None]:
        """A place among the requests in flight. Raises RefusedError if there is none."""
        self._check_queue(facts)
        self.guard.in_flight += 1
        self.guard.metrics.in_flight.inc()
        try:
            yield
        finally:
            self.guard.in_flight -= 1
            self.guard.metrics.in_flight.dec()

    async def _model(self) -> None:
        """Answer `GET /v1/models/{id}`, which vLLM does not have, from its list of models."""
        name = self.path.removeprefix(MODEL)
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        path = self.scope.get("root_path", "") + MODELS
        await self.guard.app({**self.scope, "path": path, "raw_path": path.encode()}, self.receive, keep)
        models = json.loads(b"".join(message.get("body", b"") for message in messages[1:]))["data"]
        found = next((model for model in models if model["id"] == name), None)
        if found is None:
            names = ", ".join(model["id"] for model in models)
            raise RefusedError(
                404, f"the model {ascii(name)[:80]} does not exist: this server has {names}", "model_not_found", "model"
            )
        await self._json(found)

    async def _json(self, content: Mapping[str, Any]) -> None:
        body = json.dumps(dict(content), ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _live(self, facts: ServerFacts) -> None:
        if facts.sessions is not None:
            made = handshake.read(self.path, self.scope, self.headers)
            self.live = LiveSocket(facts.sessions, self.receive, self.send, self.id, made.dialect, made.subprotocol)
            await self.live.serve()
        elif self.path == handshake.MISTRAL_PATH:
            raise RefusedError(404, "this server has no live sessions: set max_live_sessions", "realtime_not_supported")
        else:
            if not facts.live:
                code_counted(True, whole_clips.ERROR["code"])
            app = self.guard.app if facts.live else whole_clips.WholeClipsOnly(self.guard.app)
            await app(self.scope, self.receive, self.send)

    async def _chat(self, facts: ServerFacts) -> None:
        body = await self._body(facts.rules.chat_bytes, facts)
        if body is None:
            return
        with self._place(facts):
            clean = await asyncio.get_running_loop().run_in_executor(self.guard.threads, chat.read, body, facts.rules)
            del body
            if not facts.chats:
                raise RefusedError(
                    400, "this model does not chat: send audio to /v1/audio/transcriptions", "no_chat", "model"
                )
            self._accept(clean.seconds, "chat")
            # After the body, the client's own messages: vLLM waits for its http.disconnect, to abort the request.
            request = asgi.request(self.scope, chat.CONTENT_TYPE, clean.content, self.id, self.receive)
            del clean
            await self.guard.app(*request, self.send)

    async def _upload(self, facts: ServerFacts) -> None:
        body = await self._body(facts.rules.upload_bytes, facts)
        if body is None:
            return
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        with self._place(facts):
            ready = await asyncio.get_running_loop().run_in_executor(
                self.guard.threads, upload.read, body, content_type, TASKS[self.path], facts.rules, facts.detector
            )
            del body
            self._accept(ready.audio.clip.seconds, "upload")
            await upload.answer(ready, self.guard.app, self.scope, self.receive, self.send, self.id, facts.stream)

    async def _body(self, most: int, facts: ServerFacts) -> bytes | None:
        """The body; None if the client has disconnected. Raises RefusedError, if the queue is full now as well: there
        is no use in receiving the body then."""
        declared = self.headers.get(b"content-length", b"").decode("latin-1")
        if declared.isdigit() and int(declared[:18]) > most:
            raise too_large("the body", int(declared[:18]), most)
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedError(415, "the body is compressed (Content-Encoding): send it as it is", "invalid_form")
        self._check_queue(facts)
        body = await self.guard.bodies.read(self.receive, most, facts.open, self._count)
        self.arriving = False
        return body

    def _accept(self, seconds: float, kind: str) -> None:
        self.seconds = seconds
        self.guard.metrics.audio.labels(kind).inc(seconds)

    def _count(self, size: int) -> None:
        self.bytes += size
