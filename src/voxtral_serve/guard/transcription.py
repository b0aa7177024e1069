"""The requests of a server of speech-to-text: uploads, chats, live audio and the page."""

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from voxtral_serve.guard import asgi, chat, page, upload
from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.keyring import IN_FLIGHT, LIVE, KeyAudio
from voxtral_serve.guard.limits import LIMITS
from voxtral_serve.guard.live import handshake, whole_clips
from voxtral_serve.guard.live.service import LATER, REFUSED, Ending
from voxtral_serve.guard.live.socket import LiveSocket
from voxtral_serve.guard.metrics import code_counted
from voxtral_serve.guard.request import MODELS, SERVER, Frontend, Request
from voxtral_serve.guard.server import ServerFacts
from voxtral_serve.patches.live_server import ClientWatch

KEYLESS = frozenset({"/health", "/load", "/metrics", "/ping", "/version"})
READ: dict[str, tuple[str, ...]] = dict.fromkeys((*sorted(KEYLESS), MODELS), ("GET",)) | {"/ping": ("GET", "POST")}
TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
CHAT = "/v1/chat/completions"
METHODS = READ | {SERVER: ("GET",)} | dict.fromkeys((*TASKS, CHAT), ("POST",))


class TranscriptionRequest(Request):
    """`live` is the session of a live connection."""

    METHODS = METHODS
    SOCKETS = frozenset(handshake.PATHS)
    PAGES = page.read() if LIMITS.page else {}
    READ = frozenset(READ)
    KEYLESS = KEYLESS

    def __init__(self, guard: Frontend, scope: Message, receive: Receive, send: Send) -> None:
        super().__init__(guard, scope, receive, send)
        self.live: LiveSocket | None = None

    def _described(self) -> tuple[str, dict[str, Any]]:
        return super()._described() if self.live is None else (self.live.report(), self.live.fields())

    def _check_handshake(self) -> None:
        handshake.check_origin(self.headers, LIMITS.live_origins)
        handshake.key_as_header(self.scope, self.headers)

    async def _answer(self, facts: ServerFacts) -> None:
        if self.path in self.SOCKETS:
            await self._live(facts)
        elif self.path == CHAT:
            await self._chat(facts)
        else:
            await self._upload(facts)

    async def _live(self, facts: ServerFacts) -> None:
        if facts.sessions is None:
            with self._socket_place(facts), self._key_place(facts, LIVE):
                await self._vllms_live(facts)
            return
        facts.sessions.make_room()
        made = handshake.read(self.path, self.scope, self.headers)
        wire = self.scope.get("extensions", {}).get(ClientWatch.EXTENSION)
        self.live = LiveSocket(facts.sessions, self.receive, self.send, self.id, made.dialect, made.subprotocol, wire)
        with contextlib.ExitStack() as places:
            if facts.keys is not None and self.key is not None:
                self.live.audio = KeyAudio(facts.keys, self.key)
                self.live.valid = functools.partial(facts.keys.valid, self.key)
                try:
                    places.enter_context(facts.keys.place(self.key, LIVE))
                    facts.keys.check_audio(self.key)
                except RefusedError as error:  # a browser does not show a page the answer to a handshake
                    self.live.refusal = Ending(REFUSED, LATER, str(error), error.code)
            await self.live.serve()

    @contextlib.contextmanager
    def _socket_place(self, facts: ServerFacts) -> Iterator[None]:
        """A place among the sockets of vLLM's own live sessions. Raises RefusedError if there is none."""
        if self.guard.sockets >= facts.most_in_flight:
            raise RefusedError(
                429,
                f"{facts.most_in_flight} live connections are open, as many as this server takes: try again soon",
                "too_many_connections",
            )
        self.guard.sockets += 1
        try:
            yield
        finally:
            self.guard.sockets -= 1

    async def _vllms_live(self, facts: ServerFacts) -> None:
        """Live audio on a server without sessions of the encode-once model."""
        if self.path == handshake.MISTRAL_PATH:
            raise RefusedError(404, "this server has no live sessions: set max_live_sessions", "realtime_not_supported")
        if facts.live and self.key is not None and self.key.audio_seconds_per_minute is not None:
            raise RefusedError(
                404,
                f"this server has no live sessions for the key {self.key.name}, which has audio_seconds_per_minute: "
                "it does not count the audio of vLLM's own sessions",
                "realtime_not_supported",
            )
        if not facts.live:
            code_counted(True, whole_clips.ERROR["code"])
        app = self.guard.app if facts.live else whole_clips.WholeClipsOnly(self.guard.app)
        await app(self.scope, self.receive, self.send)

    async def _chat(self, facts: ServerFacts) -> None:
        body = await self._body(facts.rules.chat_bytes, facts)
        if body is None:
            return
        with self._place(facts), self._key_place(facts, IN_FLIGHT):
            clean = await asyncio.get_running_loop().run_in_executor(self.guard.threads, chat.read, body, facts.rules)
            del body
            if not facts.chats:
                raise RefusedError(
                    400, "this model does not chat: send audio to /v1/audio/transcriptions", "no_chat", "model"
                )
            self._accept(facts, clean.seconds, "chat")
            # After the body, the client's own messages: vLLM waits for its http.disconnect, to abort the request.
            request = asgi.request(self.scope, chat.CONTENT_TYPE, clean.content, self.id, self.receive)
            del clean
            await self.guard.app(*request, self.send)

    async def _upload(self, facts: ServerFacts) -> None:
        body = await self._body(facts.rules.upload_bytes, facts)
        if body is None:
            return
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        with self._place(facts), self._key_place(facts, IN_FLIGHT):
            ready = await asyncio.get_running_loop().run_in_executor(
                self.guard.threads, upload.read, body, content_type, TASKS[self.path], facts.rules, facts.detector
            )
            del body
            self._accept(facts, ready.audio.clip.seconds, "upload")
            await upload.answer(ready, self.guard.app, self.scope, self.receive, self.send, self.id, facts.stream)

    def _accept(self, facts: ServerFacts, seconds: float, kind: str) -> None:
        """Count the audio before vLLM gets it. Raises RefusedError if the key has not so much left."""
        if facts.keys is not None and self.key is not None:
            facts.keys.spend(self.key, seconds, kind)
        self.seconds = seconds
        self.guard.metrics.audio.labels(kind).inc(seconds)
