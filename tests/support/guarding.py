"""A guard in the test's process: forms and clips as clients send them, the rules, an application and an engine behind
it, its clients, its metrics and its log."""

import asyncio
import hashlib
import json
import logging
from fractions import Fraction
from typing import Any

import pytest
import soundfile
from engines import EngineClient, transcriber
from livefakes import FakeEngine, service
from places import DATA
from prometheus_client import REGISTRY
from requests import Request

from voxtral_serve.audio.decode import Bounds
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard import middleware
from voxtral_serve.guard.budget import Budget
from voxtral_serve.guard.decoders import Decoders
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.limits import Rules
from voxtral_serve.guard.server import ServerFacts
from voxtral_serve.logs import JsonLines

RATE = 16000
BOUNDS = Bounds(Fraction(4), "a test's limit", 1 << 28)
HOSTS = frozenset({"media.example.org", "other.example.org:8080"})
RULES = Rules(1 << 20, BOUNDS, BOUNDS, RATE, HOSTS, Fraction(37), True, frozenset())
SAMPLES = soundfile.read(DATA / "clips/010.opus", 2 * RATE, dtype="float32")[0]


def form(**fields: Any) -> tuple[bytes, str]:
    """A form as `requests` writes it, and its type."""
    prepared = Request("POST", "http://x", files=list(fields.items())).prepare()
    assert isinstance(prepared.body, bytes)
    return prepared.body, prepared.headers["Content-Type"]


def refusal(read: Any, *arguments: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        read(*arguments)
    return caught.value


DETECTOR = Detector()


class FakeApp:
    """What the application and the engine behind the guard got, and what a client of the guard was answered."""

    def __init__(self) -> None:
        self.engine = EngineClient()
        self.paths: list[str] = []
        self.status = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)


def guarded(**more: Any) -> tuple[middleware.Guard, FakeApp]:
    app = FakeApp()
    made = middleware.Guard(app)
    made.begin(facts(app.engine)._replace(**more))
    return made, app


def facts(engine: EngineClient) -> ServerFacts:
    rules = RULES._replace(bounds=BOUNDS._replace(seconds=Fraction(600)))
    decoders, budget = Decoders.of_process(1, rules), Budget.of_process(1, 16, rules)
    return ServerFacts(rules, DETECTOR, transcriber(engine), decoders, budget, 16, False, True, None)


async def post(made: middleware.Guard, app: FakeApp, body: bytes, kind: str, *more: tuple[bytes, bytes]) -> None:
    """In pieces of 64 KiB, as uvicorn hands them on."""
    pieces = [body[start : start + (1 << 16)] for start in range(0, len(body), 1 << 16)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    waiting = iter(messages)

    async def receive() -> Any:
        if (message := next(waiting, None)) is None:
            await asyncio.Event().wait()  # a client that stays
        return message

    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *more]
    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": headers}
    try:
        await made(scope, receive, app.send)
    finally:  # a test may run another event loop next
        if made.facts is not None:
            await made.facts.aclose()


KEY = "secret"


REALTIME, MISTRAL = "/v1/realtime", "/v1/audio/transcriptions/realtime"


def verify(headers: Any) -> bool:
    return bool(headers.get("authorization") == f"Bearer {KEY}")


async def connected(path: str, query: str = "", protocols: tuple[str, ...] = (), **headers: str) -> list[Any]:
    """What a client of a new server gets that connects and leaves at once."""
    made, _ = guarded(sessions=service(FakeEngine()), verify=verify)
    return await handshaken(made, path, query, protocols, **headers)


async def handshaken(
    made: middleware.Guard, path: str, query: str = "", protocols: tuple[str, ...] = (), **headers: str
) -> list[Any]:
    """The same of a server that is there."""
    inbox = [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}]
    sent: list[Any] = []

    async def receive() -> Any:
        return inbox.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "websocket", "path": path, "query_string": query.encode(), "headers": listed}
    await made({**scope, "subprotocols": [*protocols]}, receive, send)
    return sent


def status_of(sent: list[Any]) -> int:
    return 101 if sent[0]["type"] == "websocket.accept" else int(sent[0]["status"])


class Count:
    """By how much counters have grown since this was made."""

    def __init__(self) -> None:
        self.before = self.all()

    @staticmethod
    def all() -> dict[str, float]:
        found = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("voxtral_serve_") and not sample.name.endswith("_created"):
                    labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                    found[sample.name.removeprefix("voxtral_serve_") + (f"{{{labels}}}" if labels else "")] = (
                        sample.value
                    )
        return found

    def grown(self, name: str) -> dict[str, float]:
        """By labels, of those that have grown."""
        more = {key: value - self.before.get(key, 0) for key, value in self.all().items() if key.startswith(name)}
        return {key.removeprefix(name): value for key, value in more.items() if value}


class Lines(logging.Handler):
    """The lines of JSON of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


BILLING, CALLS = "billing-0123456789abcdef", "calls-fedcba9876543210"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def text(**limits: int) -> str:
    more = "".join(f"\n  {name}: {value}" for name, value in limits.items())
    return f"- name: billing\n  key: {BILLING}{more}\n- name: calls\n  sha256: {sha256(CALLS)}\n"


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()
