"""The servers that a worker sends audio to: an engine of its own, or servers that are up."""

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import requests
import soundfile

from voxtral_serve.batch.job import JobError
from voxtral_serve.client.errors import RequestError
from voxtral_serve.client.server import Server
from voxtral_serve.measure import log as logs
from voxtral_serve.measure.engine import Engine, free_port
from voxtral_serve.measure.errors import MeasureError
from voxtral_serve.measure.sound import RATE_HZ

RESTARTS = 3  # of an engine that dies, until it has transcribed something
SICK_S = 120.0  # after which an engine that runs but does not answer is ended
TIMES = (("word", "segment"), ("segment",))  # the second for models without times of words
HEALTH_S = 10.0  # for an answer to GET /health
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
    """One engine, which is started when it is first needed, and again when it has ended.

    It sees the GPU that CUDA_VISIBLE_DEVICES names, which Ray sets in the worker; it ends with the worker.
    """

    def __init__(self, config: str, directory: Path, arguments: Sequence[str]) -> None:
        """`config` is the content of the YAML, and `directory` the one to start in."""
        self._folder = tempfile.TemporaryDirectory(prefix="voxtral-batch-")
        self._config, self._directory, self._arguments = Path(self._folder.name, "config.yaml"), directory, arguments
        self._config.write_text(config, encoding="utf-8")
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._server: Server | None = None
        self._deaths = 0
        self._sick_since: float | None = None

    def take(self) -> Server:
        with self._lock:
            while self._engine is None or self._engine.poll() is not None:
                self._start()
            assert self._server is not None
            return self._server

    def _start(self) -> None:
        if self._engine is not None:
            status, last = self._engine.poll(), logs.end(self._engine.log)
            self._engine.stop()
            self._engine = None
            self._deaths += 1
            if self._deaths > RESTARTS:
                raise JobError(
                    f"vllm serve ended {self._deaths} times without a transcript in between, at last with status "
                    f"{status}.\n{last}"
                )
        log = Path(self._folder.name, "vllm.log")
        try:
            with contextlib.ExitStack() as stack:
                key, port = secrets.token_hex(16), free_port()
                engine = Engine(self._config, self._directory, port, log, *self._arguments, key=key)
                stack.callback(engine.stop)
                engine.wait_until_up(show=False)
                stack.pop_all()
        except MeasureError as error:
            raise JobError(str(error)) from None
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
        if engine.healthy(HEALTH_S):
            return False
        with self._lock:
            now = time.monotonic()
            self._sick_since = self._sick_since or now
            if now - self._sick_since > SICK_S and engine is self._engine and engine.poll() is None:
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


def health(server: Server) -> int | None:
    """The status of GET /health, None without an answer."""
    try:
        return server.http.get("/health", HEALTH_S).status_code
    except requests.RequestException:
        return None


def times(
    server: Server,
    model: str,
    language: str | None,
    speakers: int | None = None,
    delay_ms: int | None = None,
    keywords: Sequence[str] = (),
) -> tuple[str, ...]:
    """The times that the server gives, found with a second of silence. Raises JobError if it gives none.

    The last three are those of Server.transcribe; it is also an error if the server refuses them.
    """
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        soundfile.write(file.name, np.zeros(RATE_HZ, np.int16), RATE_HZ)
        for each in TIMES:
            try:
                asked = speakers, delay_ms, keywords
                server.transcribe(Path(file.name), model, "verbose_json", language, each, *asked)
                return each
            except RequestError as error:
                said = error
                if error.status != 400:
                    raise
    what = "the times" if speakers is None else "the times and speakers"
    raise JobError(
        f"the server has no response_format verbose_json, which has {what} ({said}): use a config with "
        "`middleware: voxtral_serve.guard.Guard`"
    )
