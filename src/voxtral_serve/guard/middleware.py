"""ASGI middleware that stands between the network and vLLM: `middleware: voxtral_serve.guard.Guard` in a config.

It answers by itself whatever should not reach vLLM, in OpenAI's form of an error: unknown paths, requests without the
key, bodies that are too large, audio that is none or too long, URLs that vLLM would fetch, and requests beyond what the
queue holds. The rest goes on with its audio decoded already. It writes one line to the log for each request, and sees
to it that SIGTERM lets running requests finish and that a server whose engine has died ends with a non-zero status.

vLLM puts a config's middleware around its own, so the key is checked here, before a body is read, with the keys that
vLLM holds; vLLM checks it again.

Environment variables, read when this module is imported; a wrong value ends the server:
  VLLM_MAX_AUDIO_CLIP_FILESIZE_MB   MiB of one audio file (25)
  VLLM_MAX_AUDIO_DECODE_DURATION_S  seconds of one clip (600)
  VLLM_MAX_AUDIO_DECODE_BYTES       bytes of one clip's decoded samples (268435456)
  VOXTRAL_SERVE_MAX_IN_FLIGHT       requests at a time, waiting ones included (4 x max_num_seqs, at least 16); each
                                    of `api_server_count` processes takes its share
  VOXTRAL_SERVE_MEDIA_HOSTS         hosts, separated by commas, whose URLs vLLM may fetch audio from (none)
"""

import asyncio
import json
import logging
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NamedTuple

from voxtral_serve import shims
from voxtral_serve.audio import decode as audio
from voxtral_serve.audio import speech
from voxtral_serve.guard import asgi
from voxtral_serve.guard import forms as bodies
from voxtral_serve.guard import live as realtime
from voxtral_serve.guard import uploads as transcription
from voxtral_serve.guard.asgi import App, Message, Receive, Send
from voxtral_serve.guard.forms import RefusedError
from voxtral_serve.guard.server import recording
from voxtral_serve.patches import clip_end
from voxtral_serve.transcript.words import TokenStream

NAME = "voxtral_serve.guard"
MIB = 1 << 20
LEAST_IN_FLIGHT = 16
STALL_S = 30  # without a byte of a body that is not whole
RETRY_AFTER_S = 1
THREADS = 4  # that decode; ten minutes take one for a second
DISCONNECTED = 499  # in the log, as nginx has it
KEYLESS = {"/health", "/load", "/metrics", "/ping", "/version"}
READ: dict[str, tuple[str, ...]] = dict.fromkeys((*KEYLESS, "/v1/models"), ("GET",)) | {"/ping": ("GET", "POST")}
BODIES: dict[str, Callable[[bytes, str, bodies.Rules], bodies.Body | bodies.Upload]] = {
    "/v1/audio/transcriptions": bodies.upload,
    "/v1/audio/translations": bodies.translation,
    "/v1/chat/completions": bodies.chat,
}
METHODS = READ | dict.fromkeys(BODIES, ("POST",))
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
log = logging.getLogger("vllm.voxtral_serve.guard")  # under vLLM's own, whose handler and format it then has


class Limits(NamedTuple):
    """What the environment says, see above; `in_flight` is None where it says nothing."""

    file_bytes: int
    decode_s: int
    decode_bytes: int
    in_flight: int | None
    hosts: frozenset[str]


class LimitError(ValueError):
    """An environment variable has a value that is none. The message names both."""


def limits(environ: Mapping[str, str]) -> Limits:
    """Raises LimitError."""

    def number(name: str, default: int | None) -> Any:
        text = environ.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
            raise LimitError(f"{name} is {text!r}: expected a whole number of 1 or more")
        return int(text)

    hosts = {host.strip().lower() for host in environ.get("VOXTRAL_SERVE_MEDIA_HOSTS", "").split(",") if host.strip()}
    if wrong := sorted(
        host for host in hosts if not re.fullmatch(r"[a-z0-9.-]+(:[0-9]+)?|\[[0-9a-f:]+\](:[0-9]+)?", host)
    ):
        raise LimitError(f"VOXTRAL_SERVE_MEDIA_HOSTS has {wrong[0]!r}: expected hosts, such as media.example.org")
    if hosts and environ.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS") != "0":
        raise LimitError(
            "VOXTRAL_SERVE_MEDIA_HOSTS allows hosts, which could redirect vLLM to any other: set "
            "VLLM_MEDIA_URL_ALLOW_REDIRECTS=0 as well"
        )
    return Limits(
        number("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", 25) * MIB,
        number("VLLM_MAX_AUDIO_DECODE_DURATION_S", 600),
        number("VLLM_MAX_AUDIO_DECODE_BYTES", 256 * MIB),
        number("VOXTRAL_SERVE_MAX_IN_FLIGHT", None),
        frozenset(hosts),
    )


LIMITS = limits(os.environ)
BOUNDS = audio.Bounds(
    Fraction(LIMITS.decode_s),
    "its VLLM_MAX_AUDIO_DECODE_DURATION_S, or 600 where that is not set",
    LIMITS.decode_bytes,
)
if not (audio.PYAV or audio.SOXR):
    raise ImportError(
        "neither av nor soxr is installed, so only audio at the model's own rate could be served: install av"
    )


class EngineDeadError(RuntimeError):
    """Raised out of the server when it has stopped, so that the process ends with a non-zero status."""


class Settled(NamedTuple):
    """What is known once vLLM is up."""

    rules: bodies.Rules
    most: int  # requests in flight, of this process
    live: bool  # whether vLLM serves /v1/realtime
    chats: bool  # whether the model can chat; one that only transcribes would take the engine down
    verify: Callable[[Any], bool] | None  # of a request's headers: whether they hold a key; None where none is needed
    stream: TokenStream | None = None  # None for a model whose tokens have no times


def settle(state: Any, app: Any) -> Settled:
    """Raises AttributeError, or another error, where vLLM is not as expected: nothing is served then."""
    config = state.engine_client.vllm_config
    per_process = config.parallel_config._api_process_count
    in_flight = LIMITS.in_flight or max(LEAST_IN_FLIGHT, 4 * config.scheduler_config.max_num_seqs)
    verify = None
    if [key for key in (state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]:
        while type(app).__name__ != "AuthenticationMiddleware":
            app = app.app
        verify = app.verify_token
    engine = state.engine_client
    rate, chat_bounds, piece_s = _longest(state)
    ours = config.model_config.architecture in clip_end.ARCHITECTURES
    # vLLM's handlers, each there for a model that can. The application's routes do not tell: newer FastAPI nests them.
    live, chats = (getattr(state, f"openai_serving_{name}", None) is not None for name in ("realtime", "chat"))
    stream = None
    if ours:
        stream = TokenStream.of_tokenizer(engine.input_processor.tokenizer)
        engine.generate = recording(engine.generate)
    can = frozenset({} if ours else {"language"})
    if "Whisper" in config.model_config.architecture:
        can |= {"prompt", "translate"}
    return Settled(
        bodies.Rules(LIMITS.file_bytes, BOUNDS, chat_bounds, rate, LIMITS.hosts, piece_s, ours, can, speech.Detector()),
        -(-in_flight // per_process),
        live,
        chats and not ours,  # vLLM would take chats for ours, too
        verify,
        stream,
    )


def _longest(state: Any) -> tuple[int, audio.Bounds, Fraction]:
    """(the model's rate in Hz, the longest clips of a chat, seconds that a transcription takes at once)."""
    engine, served = state.engine_client, state.openai_serving_transcription.asr_config
    model = engine.vllm_config.model_config
    rate = int(served.sample_rate)
    if served.allow_audio_chunking:  # Whisper, which hears one piece after another
        return rate, BOUNDS, Fraction(served.max_audio_clip_s)
    heard = engine.input_processor.tokenizer.instruct.audio_encoder.audio_config
    if model.architecture in clip_end.ARCHITECTURES:
        padding = heard.n_left_pad_tokens + heard.n_right_pad_tokens()
        return rate, BOUNDS, Fraction((model.max_model_len - padding) * heard.raw_audio_length_per_tok, rate)
    piece = round(heard.chunk_length_s * heard.frame_rate)
    longest = model.max_model_len // piece * Fraction(heard.chunk_length_s)
    because = (
        f"its max_model_len is {model.max_model_len} tokens, and audio takes {piece} for each "
        f"{heard.chunk_length_s:g} s that it has begun"
    )
    chat_bounds = BOUNDS._replace(seconds=longest, because=because) if longest < BOUNDS.seconds else BOUNDS
    # Half of the context is for the text: what is said in a piece is never more.
    return rate, chat_bounds, max(model.max_model_len // 2 // piece, 1) * Fraction(heard.chunk_length_s)


def lift(state: Any) -> None:
    """Have vLLM's own limit on a file's bytes, which a client's file has passed here, allow for its decoded samples."""
    most = max(LIMITS.file_bytes, LIMITS.decode_bytes) // MIB + 1
    os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] = str(most)  # which vLLM 0.32.0 reads for each file
    for name in ("openai_serving_transcription", "openai_serving_translation"):
        handler: Any = getattr(state, name, None)
        if hasattr(handler, "max_audio_filesize_mb"):  # which 0.20.0 has read already
            handler.max_audio_filesize_mb = most


def watch(server: Any, engine: Any) -> None:
    """Have uvicorn's `server` drain on SIGTERM within vLLM's --shutdown-timeout, and tell if its engine has died.

    vLLM itself stops the engine first, under the requests that it works for, and a server without an engine ends with
    status 0. Here uvicorn stops listening and waits for the requests; the engine is stopped by vLLM after that.
    """
    grace_s = engine.vllm_config.shutdown_timeout
    server.config.timeout_graceful_shutdown = grace_s
    stock, errored = server.shutdown, lambda: engine.errored
    errored()  # an AttributeError is for now, not for then

    async def shutdown(*args: Any, **kwargs: Any) -> None:
        died = errored()
        await stock(*args, **kwargs)
        if died:
            raise EngineDeadError("vLLM's engine has died (the lines above may say why): the server ends with it")

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
            return
        log.info("told to stop: %d s for the requests that run (--shutdown-timeout)", grace_s)
        server.should_exit = True

    server.shutdown = shutdown
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


class Guard:
    """See above. One of each API process of vLLM."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.settled: Settled | None = None
        self.in_flight = 0
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="guard")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope.setdefault(NAME, self) is not self:  # named in the config and on the command line: the outer one acts
            await self.app(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        request = Request(self, scope, receive, send)
        try:
            await request.serve()
        except RefusedError as error:
            await request.refuse(error)
        except asyncio.CancelledError:  # by uvicorn, once the grace period is over
            if request.answering:
                raise
            await request.refuse(RefusedError(503, "the server is stopping: send this again", "stopping"))
        finally:
            request.report()

    async def _live(self, scope: Message, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        server, engine = state.server, state.engine_client
        try:
            watch(server, engine)
            lift(state)
            self.settled = settle(state, self.app)
        except Exception as error:
            server.should_exit = True
            stock, problem = server.shutdown, f"{type(error).__name__}: {error}"

            async def shutdown(*args: Any, **kwargs: Any) -> None:
                await stock(*args, **kwargs)
                raise shims.PatchError(
                    f"voxtral_serve.guard has drifted on vllm {shims.installed('vllm')}: {problem}. {shims.ADVICE}"
                )

            server.shutdown = shutdown
        try:
            await self.app(scope, receive, send)
        finally:
            self.settled = None
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

    async def send(self, message: Message) -> None:
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

    def report(self) -> None:
        known = self.path in METHODS or self.path == realtime.PATH
        log.info(
            "%s %s %d, %d bytes, %.2f s of audio, %.0f ms, id %s",
            self.method,
            self.path if known else ascii(self.path)[:80],
            self.status,
            self.bytes,
            self.seconds,
            1000 * (time.monotonic() - self.start),
            self.id,
        )

    async def refuse(self, error: RefusedError) -> None:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        content = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
        body = json.dumps({"error": content}, ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.status == 503:
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        elif error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        elif error.status == 405:
            headers.append((b"allow", ", ".join(METHODS[self.path]).encode()))
        if error.status in (408, 413) and b"content-length" not in self.headers:
            headers.append((b"connection", b"close"))  # what is still to come of the body has no known end
        kind = "websocket.http.response" if self.scope["type"] == "websocket" else "http.response"
        await self.send({"type": f"{kind}.start", "status": error.status, "headers": headers})
        await self.send({"type": f"{kind}.body", "body": body})

    async def serve(self) -> None:
        settled = self.guard.settled
        if settled is None:
            raise RefusedError(503, "the server is starting or stopping", "not_ready")
        websocket = self.scope["type"] == "websocket"
        if websocket != (self.path == realtime.PATH) or not (websocket or self.path in METHODS):
            asked = ascii(self.path)[1:-1][:80]
            raise RefusedError(404, f"there is no {asked} here: this server has {', '.join(METHODS)}", "not_found")
        if self.method == "OPTIONS":  # of a browser, which asks before it sends the key
            await self.guard.app(self.scope, self.receive, self.send)
            return
        if not websocket and self.method not in METHODS[self.path]:
            raise RefusedError(
                405, f"{self.path} takes {' or '.join(METHODS[self.path])}, not {self.method}", "method_not_allowed"
            )
        if self.path not in KEYLESS and settled.verify is not None:
            from starlette.datastructures import Headers

            if not settled.verify(Headers(scope=self.scope)):
                what = "a key that this server does not know" if b"authorization" in self.headers else "no key"
                raise RefusedError(
                    401, f"the request has {what}: expected Authorization: Bearer KEY", "invalid_api_key"
                )
        if self.path in READ:
            await self.guard.app(self.scope, self.receive, self.send)
            return
        if self.guard.in_flight >= settled.most:
            raise RefusedError(
                503,
                f"{settled.most} requests are in flight, as many as this server takes at a time: try again soon",
                "overloaded",
            )
        self.guard.in_flight += 1
        try:
            await self._work(settled, websocket)
        finally:
            self.guard.in_flight -= 1

    async def _work(self, settled: Settled, websocket: bool) -> None:
        if websocket:
            app = self.guard.app if settled.live else realtime.WholeClipsOnly(self.guard.app)
            await app(self.scope, self.receive, self.send)
            return
        read = BODIES[self.path]
        body = await self._body(settled.rules.chat_bytes if read is bodies.chat else settled.rules.upload_bytes)
        if body is None:
            return
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        loop = asyncio.get_running_loop()
        new = await loop.run_in_executor(self.guard.threads, read, body, content_type, settled.rules)
        del body
        if read is bodies.chat and not settled.chats:
            raise RefusedError(
                400, "this model does not chat: send audio to /v1/audio/transcriptions", "no_chat", "model"
            )
        self.seconds = new.seconds
        if isinstance(new, bodies.Upload):
            upload = transcription.Transcription(self.guard.app, self.scope, self.receive, new, self.id)
            await upload.answer(settled.stream, self.send)
            return
        # After the body, the client's own messages: vLLM waits for its http.disconnect, to abort the request.
        request = asgi.request(self.scope, new.content_type.encode(), new.content, self.id, self.receive)
        del new
        await self.guard.app(*request, self.send)

    async def _body(self, most: int) -> bytes | None:
        """None if the client has gone. Raises RefusedError as soon as there is more than `most` bytes."""
        told = self.headers.get(b"content-length", b"").decode("latin-1")
        if told.isdigit() and int(told[:18]) > most:
            raise bodies.too_large("the body", int(told[:18]), most)
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedError(415, "the body is compressed (Content-Encoding): send it as it is", "invalid_form")
        pieces = []
        while True:
            try:
                message = await asyncio.wait_for(self.receive(), STALL_S)
            except TimeoutError:
                raise RefusedError(408, f"no byte of the body came for {STALL_S} s", "stalled") from None
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            self.bytes += len(pieces[-1])
            if self.bytes > most:
                raise bodies.too_large("the body", f"more than {most}", most)
            if not message.get("more_body", False):
                return b"".join(pieces)
