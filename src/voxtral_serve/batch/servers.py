"""The servers that a worker sends audio to: an engine of its own, or servers that are up."""

import io
import tempfile
import threading
import time
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from voxtral_serve.batch.engine import Engine, health
from voxtral_serve.batch.job import JobError
from voxtral_serve.client.errors import RequestError
from voxtral_serve.client.server import Server

RESTARTS = 3  # of an engine that dies, until it has transcribed something
SICK_S = 120.0  # after which an engine that runs but does not answer is ended
TIMES = (("word", "segment"), ("segment",))  # the second for models without times of words
WAIT_S = 5.0  # before a server that did not answer is tried again


class Servers(Protocol):
    """All methods may be called by several threads."""

    def take(self) -> Server:
        """A server for one request; waits until there is one. Raises JobError."""

    def give(self, server: Server, worked: bool) -> None:
        """The request has ended; `worked` if the server answered it."""

    def lost(self, server: Server) -> bool:
        """After a request without a transcript: whether it is the server that does not work."""


class OwnEngine:
    """One engine, which is started when it is first needed, and again when it has ended."""

    def __init__(self, config: str, directory: Path, arguments: Sequence[str]) -> None:
        self._how = (config, directory, arguments)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._server: Server | None = None
        self._deaths = 0
        self._sick_since: float | None = None

    def take(self) -> Server:
        with self._lock:
            while self._engine is None or self._engine.ended():
                self._start()
            assert self._server is not None
            return self._server

    def _start(self) -> None:
        if self._engine is not None:
            words = self._engine.last_words()
            self._engine.stop()
            self._engine = None
            self._deaths += 1
            if self._deaths > RESTARTS:
                raise JobError(f"vllm serve ended {self._deaths} times without a transcript in between.\n{words}")
        engine = Engine(*self._how)
        try:
            engine.wait_until_up()
        except BaseException:
            engine.stop()
            raise
        self._engine, self._server = engine, Server(engine.url, engine.key)

    def give(self, server: Server, worked: bool) -> None:
        if worked and (self._deaths or self._sick_since is not None):
            with self._lock:
                self._deaths, self._sick_since = 0, None

    def lost(self, server: Server) -> bool:
        with self._lock:
            engine = self._engine
            if engine is None or engine.url != server.url:
                return True  # another thread has found it, and there is a new one
        # An engine that dies answers with errors for a moment, and ends then.
        if engine.healthy():
            return False
        with self._lock:
            now = time.monotonic()
            self._sick_since = self._sick_since or now
            if now - self._sick_since > SICK_S and engine is self._engine and not engine.ended():
                engine.stop()
                self._sick_since = None
        return True


class Given:
    """Servers at URLs. A request goes to the one with the fewest of them."""

    def __init__(self, urls: Sequence[str], key: str | None, patience_s: float) -> None:
        self._servers = [Server(url, key) for url in urls]
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._busy = dict.fromkeys(self._servers, 0)
        self._down: dict[Server, float] = {}  # until when none of them is tried
        self._lost_since: float | None = None

    def take(self) -> Server:
        with self._changed:
            while True:
                now = time.monotonic()
                up = [each for each in self._servers if self._down.get(each, 0) <= now]
                if up:
                    server = min(up, key=self._busy.__getitem__)
                    self._busy[server] += 1
                    return server
                if self._lost_since is not None and now - self._lost_since > self._patience_s:
                    names = ", ".join(each.url for each in self._servers)
                    raise JobError(f"cannot connect to {names} (tried for {self._patience_s:.0f} s)")
                self._changed.wait(1)

    def give(self, server: Server, worked: bool) -> None:
        with self._changed:
            self._busy[server] -= 1
            if worked:
                self._lost_since = None
                self._down.pop(server, None)
            self._changed.notify_all()

    def lost(self, server: Server) -> bool:
        status = health(server)
        if status is not None and status < 500:  # 404: it has no such route
            return False
        with self._changed:
            now = time.monotonic()
            self._down[server] = now + WAIT_S
            self._lost_since = self._lost_since or now
        return True


def times(server: Server, model: str, language: str | None) -> tuple[str, ...]:
    """The times that the server gives, found with a second of silence. Raises JobError if it gives none."""
    content = io.BytesIO()
    with wave.open(content, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(16000)
        audio.writeframes(bytes(2 * 16000))
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        file.write(content.getvalue())
        file.flush()
        for each in TIMES:
            try:
                server.transcribe(Path(file.name), model, "verbose_json", language, each)
                return each
            except RequestError as error:
                said = error
                if error.status != 400:
                    raise
    raise JobError(
        f"the server has no response_format verbose_json, which has the times ({said}): use a config with "
        "`middleware: voxtral_serve.guard.Guard`"
    )
