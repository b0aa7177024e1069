"""A /v1/realtime that says prepared words at prepared points of the audio, with what it received and when.

with FakeRealtime([(0.4, "alpha "), (0.8, "beta")]) as server:
    ... a session at server.url
assert server.sessions[0].seconds() == 1.0
"""

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from websockets.asyncio import server as asyncio_server
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

RATE = 16000


@dataclass
class Session:
    """The events of one session, and the arrivals and sizes in samples of its audio, on time.perf_counter."""

    headers: dict[str, str]
    kinds: list[str] = field(default_factory=list)
    model: str | None = None
    arrivals: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    audio: bytes = b""
    final: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class FakeRealtime:
    """Says each piece of `words` (seconds of audio received, text), and at the end transcription.done after `late_s`.

    `refuses`: an error event in place of session.created. `dies` closes the connection after so many seconds of audio,
    `ends` says transcription.done then, and `deaf` reads nothing of the session. So many handshakes as `busy` says are
    answered with 429 first.
    """

    words: Sequence[tuple[float, str]] = ()
    late_s: float = 0.0
    deaf: bool = False
    refuses: str | None = None
    dies: float | None = None
    ends: float | None = None
    busy: int = 0
    sessions: list[Session] = field(default_factory=list)
    models: tuple[str, ...] = ("fake-voxtral",)

    def __enter__(self) -> Self:
        # So little is kept unread that a session's audio soon fills it.
        settings = {"max_queue": 1} if self.deaf else {}
        self._ended = threading.Event()
        self._server: Server = serve(self._talk, "127.0.0.1", 0, process_request=self._http, **settings)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()

    def _http(self, socket: ServerConnection, request: Any) -> Any:
        if request.path.partition("?")[0] == "/v1/realtime":
            if not self.busy:
                return None
            self.busy -= 1
            response = socket.respond(429, "busy")
            response.headers["Retry-After"] = "0"
            return response
        answer = {"data": [{"id": model} for model in self.models]} if request.path == "/v1/models" else {}
        return socket.respond(200 if answer else 404, json.dumps(answer))

    def _talk(self, socket: ServerConnection) -> None:
        assert socket.request
        session = Session(dict(socket.request.headers.raw_items()))
        self.sessions.append(session)

        def say(kind: str, **fields: Any) -> None:
            socket.send(json.dumps({"type": kind, **fields}))

        if self.refuses:
            say("error", error=self.refuses, code="refused")
            socket.close(1008)
            return
        say("session.created", id="1")
        if self.deaf:
            self._ended.wait()
            return
        waiting = list(self.words)
        try:
            for message in socket:
                event = json.loads(message)
                session.kinds.append(event["type"])
                if event["type"] == "session.update":
                    session.model = event["model"]
                elif event["type"] == "input_audio_buffer.append":
                    audio = base64.b64decode(event["audio"])
                    session.arrivals.append(time.perf_counter())
                    session.sizes.append(len(audio) // 2)
                    session.audio += audio
                    heard = sum(session.sizes) / RATE
                    if self.dies is not None and heard >= self.dies:
                        socket.close(1011)
                        return
                    if self.ends is not None and heard >= self.ends:
                        say("transcription.done", text="", usage=None)
                        return
                    say("transcription.delta", delta="")  # as vLLM does for a token without text
                    while waiting and waiting[0][0] <= heard:
                        say("transcription.delta", delta=waiting.pop(0)[1])
                elif event.get("final"):
                    session.final = time.perf_counter()
                    self._ended.wait(self.late_s)
                    for _, text in waiting:
                        say("transcription.delta", delta=text)
                    say("transcription.done", text="".join(text for _, text in self.words), usage=None)
        except ConnectionClosed:
            pass


BLOCK = 1280  # samples


def blocks(numbers: Sequence[int]) -> np.ndarray:
    """float64 [n]: 80 ms of each number, at the level that a client sends as that number."""
    return np.repeat(np.asarray(numbers) / 32767, BLOCK)


@dataclass
class FakeTurns:
    """A /v1/realtime in OpenAI's protocol that hears words in the audio itself: so it hears them again if sent again.

    Each block of 80 ms that holds `number` says `words[number]`; a block of zeros after a word ends a turn, whose
    segment lasts from its first word's block to its last. Connection number i is cut after `cuts[i]` seconds of audio,
    or gets the error event of code `refuses[i]` in place of session.created. Of its turns, number `fails[i]` (from 1)
    fails. Without `segments` there are none.
    """

    words: Mapping[int, str] = field(default_factory=dict)
    cuts: Mapping[int, float] = field(default_factory=dict)
    refuses: Mapping[int, str] = field(default_factory=dict)
    fails: Mapping[int, int] = field(default_factory=dict)
    segments: bool = True
    prefers_words: bool = True
    sessions: list[Session] = field(default_factory=list)

    def __enter__(self) -> Self:
        options: Any = {"process_request": self._http, "select_subprotocol": subprotocol}
        self._server: Server = serve(self._talk, "127.0.0.1", 0, **options)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _http(self, socket: ServerConnection, request: Any) -> Any:
        if request.path == "/v1/realtime?intent=transcription":
            return None
        about = {"object": "server", "capabilities": {"keywords": self.prefers_words}}
        answer = {"/v1/models": {"data": [{"id": "fake-voxtral"}]}, "/v1/server": about}.get(request.path)
        return socket.respond(200 if answer else 404, json.dumps(answer))

    def _talk(self, socket: ServerConnection) -> None:
        number = len(self.sessions)
        self.sessions.append(session := Session({}))
        with contextlib.suppress(ConnectionClosed):
            if code := self.refuses.get(number):
                say(socket, "error", error={"type": "server_error", "code": code, "message": "not now"})
                socket.close(1013)
                return
            say(socket, "session.created", session={"type": "transcription"})
            hearing = _Hearing(self, socket, self.fails.get(number))
            for message in socket:
                event = json.loads(message)
                session.kinds.append(event["type"])
                if event["type"] == "session.update":
                    session.settings = event["session"]
                    say(socket, "session.updated", session=session.settings)
                elif event["type"] == "input_audio_buffer.append":
                    session.audio += base64.b64decode(event["audio"])
                    hearing.hear(np.frombuffer(session.audio, "<i2"))
                    if len(session.audio) / 2 / RATE >= self.cuts.get(number, float("inf")):
                        socket.socket.shutdown(2)
                        return
                elif event["type"] == "input_audio_buffer.commit":
                    hearing.commit(event.get("event_id"))
                elif event["type"] == "input_audio_buffer.clear":
                    say(socket, "input_audio_buffer.cleared")


class _Hearing:
    """The turns of one connection of FakeTurns."""

    def __init__(self, server: FakeTurns, socket: ServerConnection, fails: int | None) -> None:
        self.server, self.socket, self.fails = server, socket, fails
        self.heard = self.turns = 0  # blocks; turns that were begun
        self.words: list[str] = []
        self.begin = self.end = 0  # blocks

    def hear(self, samples: np.ndarray) -> None:
        while (self.heard + 1) * BLOCK <= len(samples):
            number = int(samples[self.heard * BLOCK + BLOCK // 2])
            self.heard += 1
            if word := self.server.words.get(number):
                if not self.words:
                    self.turns += 1
                    self.begin = self.heard - 1
                    self.say("input_audio_buffer.speech_started", audio_start_ms=self.begin * 80)
                self.end = self.heard
                self.words.append(word)
                self.say("conversation.item.input_audio_transcription.delta", delta=word)
            elif number == 0 and self.words:
                self.say("input_audio_buffer.speech_stopped", audio_end_ms=self.heard * 80)
                self.complete()

    def commit(self, event_id: str | None) -> None:
        if self.words:
            self.complete()
        else:
            problem = {"type": "invalid_request_error", "code": "input_audio_buffer_commit_empty", "message": "empty"}
            say(self.socket, "error", error={**problem, "event_id": event_id})

    def complete(self) -> None:
        text, self.words = "".join(self.words), []
        self.say("input_audio_buffer.committed")
        if self.turns == self.fails:
            self.say("conversation.item.input_audio_transcription.failed", error={"message": "it failed"})
            return
        if self.server.segments:
            start_s, end_s = self.begin * 0.08, self.end * 0.08
            kind = "conversation.item.input_audio_transcription.segment"
            self.say(kind, id=f"{self.turns}", start=start_s, end=end_s, text=text)
        self.say("conversation.item.input_audio_transcription.completed", transcript=text, usage={})

    def say(self, kind: str, **fields: Any) -> None:
        say(self.socket, kind, item_id=f"item-{self.turns}", **fields)


def subprotocol(socket: Any, offered: Sequence[str]) -> str | None:
    """`realtime`, with which browsers send the key; other clients offer none."""
    return "realtime" if "realtime" in offered else None


def say(socket: ServerConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


@dataclass
class FakeLive:
    """A server of many sessions: one delta for each token, `lag_s` after the audio that its row needs, as vLLM's.

    Beyond `holds` sessions at a time each further token is later than the one before it, by `slower_s`. With `merges`,
    a delta has the text of so many tokens. Session number `dies` (from 1) is closed after 0.5 s of audio. Without
    `counts`, transcription.done has no usage. `most` is the highest number of sessions that were open at a time.
    """

    lag_s: float = 0.0
    holds: int = 10**6
    slower_s: float = 0.2
    merges: int = 1
    dies: int | None = None
    counts: bool = True
    port: int = 0
    models: tuple[str, ...] = ("fake-voxtral",)
    sessions: list[Session] = field(default_factory=list)
    most: int = 0

    def __enter__(self) -> Self:
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        async with asyncio_server.serve(self._talk, "127.0.0.1", self.port, process_request=self._http) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._end.wait()

    def _http(self, socket: asyncio_server.ServerConnection, request: Any) -> Any:
        if request.path.partition("?")[0] == "/v1/realtime":
            return None
        models = [{"id": model} for model in self.models]
        answers = {"/v1/models": {"data": models}, "/health": {}, "/version": {"version": "0.0.fake"}}
        return socket.respond(200 if request.path in answers else 404, json.dumps(answers.get(request.path)))

    async def _talk(self, socket: asyncio_server.ServerConnection) -> None:
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            await self._hold(socket)
        except ConnectionClosed:
            pass
        finally:
            self._open -= 1

    async def _hold(self, socket: asyncio_server.ServerConnection) -> None:
        session, number = Session({}), len(self.sessions) + 1
        self.sessions.append(session)
        await socket.send(json.dumps({"type": "session.created", "id": "1"}))
        samples = made = told = 0
        queue: asyncio.Queue[tuple[float, int] | None] = asyncio.Queue()

        async def tell() -> None:
            nonlocal told
            last = 0.0
            while (due := await queue.get()) is not None:
                late = self.slower_s if self._open > self.holds else 0.0
                last = max(due[0], last + late)
                await asyncio.sleep(max(0.0, last - time.perf_counter()))
                told += due[1]
                await socket.send(json.dumps({"type": "transcription.delta", "delta": "a " * due[1]}))

        teller = asyncio.create_task(tell())

        def add(tokens: int) -> None:
            nonlocal made
            while made + self.merges <= tokens:
                queue.put_nowait((time.perf_counter() + self.lag_s, self.merges))
                made += self.merges

        try:
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "input_audio_buffer.append":
                    session.arrivals.append(time.perf_counter())
                    session.sizes.append(len(base64.b64decode(event["audio"])) // 2)
                    samples += session.sizes[-1]
                    if number == self.dies and samples >= RATE / 2:
                        await socket.close(1011)
                        return
                    add((samples - 40) // 1280 - 6)
                elif event.get("final"):
                    session.final = time.perf_counter()
                    add((samples - 40) // 1280 - 6 + 17)
                    queue.put_nowait(None)
                    await teller
                    usage = {"completion_tokens": made} if self.counts else None
                    await socket.send(json.dumps({"type": "transcription.done", "text": "a " * made, "usage": usage}))
        finally:
            teller.cancel()
