"""The requests of a server of speech-to-text: uploads, chats, live audio and the page."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from voxtral_serve.audio.decode import NO_CHANNEL, SEPARATE, Clip
from voxtral_serve.guard import asgi, chat, fields, form, page, pieces
from voxtral_serve.guard.answer import answered, naming, unlabelled
from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.budget import Reservation
from voxtral_serve.guard.errors import RefusedError, refusing
from voxtral_serve.guard.keyring import CHECK_S, IN_FLIGHT, LIVE, KeyAudio
from voxtral_serve.guard.labeller import KnownVoice, LabelError, Labels, no_labels
from voxtral_serve.guard.limits import LIMITS
from voxtral_serve.guard.live import handshake, whole_clips
from voxtral_serve.guard.live.endings import LATER, POLICY, REFUSED, Ending
from voxtral_serve.guard.live.socket import LAST_WORD_S, LiveSocket
from voxtral_serve.guard.metrics import code_counted
from voxtral_serve.guard.request import MODELS, SERVER, Frontend, Request
from voxtral_serve.guard.server import ServerFacts
from voxtral_serve.guard.timing import HEADER, UploadTiming
from voxtral_serve.patches.live_server import ClientWatch
from voxtral_serve.speakers.known import LONGEST_S, KnownSpeakerError, check_clip

KEYLESS = frozenset({"/health", "/load", "/metrics", "/ping", "/version"})
READ: dict[str, tuple[str, ...]] = dict.fromkeys((*sorted(KEYLESS), MODELS), ("GET",)) | {"/ping": ("GET", "POST")}
TASKS = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
CHAT = "/v1/chat/completions"
METHODS = READ | {SERVER: ("GET",)} | dict.fromkeys((*TASKS, CHAT), ("POST",))


class TranscriptionRequest(Request):
    """`live` is the session of a live connection, `timing` that of an upload."""

    METHODS = METHODS
    SOCKETS = frozenset(handshake.PATHS)
    PAGES = page.read() if LIMITS.page else {}
    READ = frozenset(READ)
    KEYLESS = KEYLESS

    def __init__(self, guard: Frontend, scope: Message, receive: Receive, send: Send) -> None:
        super().__init__(guard, scope, receive, send)
        self.live: LiveSocket | None = None
        self.timing = UploadTiming(self.start)

    async def send(self, message: Message) -> None:
        facts = self.guard.facts
        if message["type"] == "http.response.start" and (stages := self.timing.header()):
            message["headers"] = [*message.get("headers", []), (HEADER, stages)]
        if message["type"] == "http.response.start" and b"origin" in self.headers and isinstance(facts, ServerFacts):
            headers = message.get("headers", [])
            if not any(name.lower() == b"access-control-allow-origin" for name, _ in headers):  # vLLM's own have it
                message["headers"] = [*headers, *facts.cors(self.headers[b"origin"].decode("latin-1"))]
        await super().send(message)

    def _described(self) -> tuple[str, dict[str, Any]]:
        if self.live is not None:
            return self.live.report(), self.live.fields()
        line, more = super()._described()
        stages = self.timing.milliseconds()
        return line, more | ({"timing_ms": stages} if stages else {})

    def _check_handshake(self) -> None:
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
            with self._socket_place(facts):
                async with self._key_place(facts, LIVE):
                    await self._vllms_live(facts)
            return
        made = handshake.read(self.path, self.scope, self.headers)
        wire = self.scope.get("extensions", {}).get(ClientWatch.EXTENSION)
        socket = LiveSocket(facts.sessions, self.receive, self.send, self.id, made.codec, made.subprotocol, wire)
        async with contextlib.AsyncExitStack() as places:
            if facts.keys is not None and self.key is not None:
                socket.audio = KeyAudio(facts.keys, self.key)
                socket.valid = functools.partial(facts.keys.valid, self.key)
                try:
                    await places.enter_async_context(facts.keys.place(self.key, LIVE))
                    await facts.keys.check_audio(self.key)
                except RefusedError as error:  # a browser does not show a page the answer to a handshake
                    socket.refusal = Ending(REFUSED, LATER, str(error), error.code)
            facts.sessions.make_room()  # nothing is awaited until `serve` has taken the place
            self.live = socket
            await socket.serve()

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
        heard_s = time.monotonic()  # when the last message came or went

        async def receive() -> Message:
            nonlocal heard_s
            message = await self.receive()
            heard_s = time.monotonic()
            return message

        async def send(message: Message) -> None:
            nonlocal heard_s
            heard_s = time.monotonic()
            await self.send(message)

        session = asyncio.ensure_future(app(self.scope, receive, send))
        try:
            while not (await asyncio.wait({session}, timeout=CHECK_S))[0]:
                reason = None
                if facts.keys is not None and self.key is not None and not facts.keys.valid(self.key):
                    reason = "the key is no longer valid"
                elif time.monotonic() - heard_s > LIMITS.live_idle_s:
                    reason = f"no audio and no event for {LIMITS.live_idle_s} s"
                if reason is not None:
                    await self._end_vllms_live(session, reason)
                    return
            await session
        finally:
            session.cancel()

    async def _end_vllms_live(self, session: asyncio.Future[None], reason: str) -> None:
        session.cancel()
        await asyncio.wait({session}, timeout=LAST_WORD_S)
        with contextlib.suppress(OSError, RuntimeError):  # its client may have left, or may not read
            async with asyncio.timeout(LAST_WORD_S):
                await self.send({"type": "websocket.close", "code": POLICY, "reason": reason})

    async def _chat(self, facts: ServerFacts) -> None:
        if not facts.chats:
            raise RefusedError(
                400, "this model does not chat: send audio to /v1/audio/transcriptions", "no_chat", "model"
            )
        with facts.budget.hold() as held:
            body = await self._body(facts.rules.chat_bytes, facts, held=held)
            if body is None:
                return
            async with self._place(facts), self._key_place(facts, IN_FLIGHT):
                async with asgi.connected(self.receive):
                    ignored, content = await self._read_chat(body, facts, held)
                del body
                # After the body, the client's own messages: vLLM waits for its http.disconnect, to abort the request.
                request = asgi.request(self.scope, chat.CONTENT_TYPE, content, self.id, self.receive)
                del content
                await self.guard.app(*request, naming(ignored, self.send))

    async def _read_chat(self, body: bytes, facts: ServerFacts, held: Reservation) -> tuple[tuple[str, ...], bytes]:
        """(names of fields without effect, the JSON for vLLM) of a chat. Raises RefusedError."""
        run = functools.partial(asyncio.get_running_loop().run_in_executor, self.guard.threads)
        request = await run(chat.read, body, facts.rules)
        clips, seconds = list[Clip](), Fraction(0)
        for audio in request.audio:
            bounds = chat.bounds(facts.rules, seconds)
            clip = await facts.decoders.decode(audio.data, bounds, facts.rules.rate, audio.where, held, last=False)
            await held.add_clip(clip.samples.nbytes)  # of its WAV file, in base64 and in JSON
            clips.append(clip)
            seconds += Fraction(len(clip.samples), clip.rate)
        await self._accept(facts, float(seconds), "chat")
        return request.ignored, await run(chat.written, request, clips)

    async def _upload(self, facts: ServerFacts) -> None:
        task = TASKS[self.path]
        fields.check_task(task, facts.rules.can)
        content_type = self.headers.get(b"content-type", b"").decode("latin-1")
        with facts.budget.hold() as held:
            body = await self._body(facts.rules.upload_bytes, facts, held=held)
            if body is None:
                return
            self.timing.end("receive")
            async with self._place(facts), self._key_place(facts, IN_FLIGHT):
                async with asgi.connected(self.receive):
                    read = functools.partial(_read_form, body, content_type, task, facts)
                    request, file = await asyncio.get_running_loop().run_in_executor(self.guard.threads, read)
                    del body, read  # the decoder releases `file`, the last view of it
                    known, request = [*request.known], request._replace(known=())
                    last = await self._transcribe(request, file, known, facts, held)
                    self.timing.end("text")
                for message in last:
                    await self.send(message)

    async def _transcribe(
        self,
        request: fields.TranscriptRequest,
        file: Any,
        known: list[fields.KnownSpeaker],
        facts: ServerFacts,
        held: Reservation,
    ) -> list[Message]:
        """The messages that end the answer to an upload; those before are sent. `known` is emptied.

        Raises RefusedError.
        """
        language = facts.transcriber.check(request)
        async with contextlib.AsyncExitStack() as work:
            labels = await self._place_for_labels(request, facts, work)
            if labels is not None:
                known.clear()
            voices = await self._known_voices(known, facts, held)
            clips = await self._clips(request, file, facts, held)
            self.timing.end("decode")
            parts = [
                await asyncio.get_running_loop().run_in_executor(
                    self.guard.threads,
                    pieces.split,
                    *(clip, request.form.with_times, facts.rules, facts.detector),
                    request.form.speakers and labels is None,
                    request.shape,
                )
                for clip in clips
            ]
            audio, clip = pieces.joined(parts) if request.form.channels else parts[0], clips[0]
            self.timing.end("speech")
            heard = [*clips, *(voice.clip for voice in voices)]
            await self._accept(facts, sum(each.seconds for each in heard), "upload")
            if request.form.speakers and labels is None and not audio.silent:
                assert facts.labeller is not None  # as `rules.unlabelled` is None
                labels = await work.enter_async_context(
                    facts.labeller.listening(clip, audio.speech, request.number, voices)
                )
            return await answered(
                facts.transcriber, request, audio, language, facts.stream, self.id, self.send, self.timing, labels
            )

    async def _clips(
        self, request: fields.TranscriptRequest, file: bytes | memoryview, facts: ServerFacts, held: Reservation
    ) -> list[Clip]:
        """The decoded file; each of its channels, if they are to be separate. Raises RefusedError."""
        bounds, decode = facts.rules.bounds, functools.partial(facts.decoders.decode, file)
        if not request.form.channels:
            return [await decode(bounds, facts.rules.rate, "file", held)]
        clips: list[Clip] = []
        try:
            for channel in range(SEPARATE):
                within = bounds._replace(
                    seconds=bounds.seconds / (channel + 1),
                    because=f"{bounds.because}, of all channels together",
                    most_bytes=bounds.most_bytes // (channel + 1),
                )
                clips.append(await decode(within, facts.rules.rate, "file", held, last=False, channel=channel))
        except RefusedError as error:
            if error.code != NO_CHANNEL:
                raise
        if isinstance(file, memoryview):
            file.release()
        held.drop_body()
        return clips

    async def _known_voices(
        self, known: list[fields.KnownSpeaker], facts: ServerFacts, held: Reservation
    ) -> list[KnownVoice]:
        """The clips of known speakers, decoded and checked; `known` is emptied. Raises RefusedError."""
        bounds = facts.rules.bounds._replace(seconds=Fraction(LONGEST_S), because="as a clip of a known speaker")
        voices = []
        while known:
            name, audio, where = known.pop(0)
            clip = await facts.decoders.decode(audio, bounds, facts.rules.rate, where, held, last=False)
            speech = await asyncio.get_running_loop().run_in_executor(
                self.guard.threads, facts.detector.stretches, clip
            )
            with refusing(KnownSpeakerError, where):
                check_clip(name, clip.seconds, speech)
            voices.append(KnownVoice(name, clip, speech, where))
        return voices

    async def _place_for_labels(
        self, request: fields.TranscriptRequest, facts: ServerFacts, work: contextlib.AsyncExitStack
    ) -> Labels | None:
        """Take a place among the requests that ask for speakers, until `work` ends, if this one asks for them.

        Returns labels that fail if there is none and the request does not need them. Raises RefusedError.
        """
        if not request.form.speakers:
            return None
        assert facts.labeller is not None
        try:
            await work.enter_async_context(facts.labeller.place())
        except LabelError as error:
            if not request.optional:
                raise unlabelled(error) from error
            return no_labels(error)
        return None

    async def _accept(self, facts: ServerFacts, seconds: float, kind: str) -> None:
        """Count the audio before vLLM gets it. Raises RefusedError if the key has not so much left."""
        if facts.keys is not None and self.key is not None:
            await facts.keys.spend(self.key, seconds, kind)
        self.seconds = seconds
        self.guard.metrics.audio.labels(kind).inc(seconds)


def _read_form(
    body: bytes, content_type: str, task: str, facts: ServerFacts
) -> tuple[fields.TranscriptRequest, bytes | memoryview]:
    """(request, audio file) in the body of an upload. Raises RefusedError. For a thread: it takes milliseconds."""
    return fields.read(form.parse(body, content_type), task, facts.rules, facts.transcriber.serves)
