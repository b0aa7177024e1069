"""Live connections: how many, how many bytes wait, how one that has gone is seen, and what settings may hold."""

import asyncio
import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from clock import Clock
from guarding import guarded, handshaken, status_of
from livefakes import RATE, FakeClient, FakeEngine, OpenAiClient, noise, service, tokens_of

from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.live import commands
from voxtral_serve.guard.live import service as services
from voxtral_serve.guard.live.events import EventError, parsed, settings
from voxtral_serve.guard.live.handshake import UndecidedCodec
from voxtral_serve.guard.live.mistral_codec import MistralCodec, Update
from voxtral_serve.guard.live.openai_codec import OpenAiCodec
from voxtral_serve.guard.live.service import LiveService, most_sockets
from voxtral_serve.guard.live.socket import TURN_S

pytestmark = pytest.mark.usefixtures("turned_clock")


class FakeWire:
    """A connection whose client leaves when told."""

    def __init__(self) -> None:
        self.heard, self.arriving = time.monotonic(), 0
        self.left, self.beats = False, 0

    def gone(self) -> bool:
        return self.left

    def beat(self) -> None:
        self.beats += 1


async def leaves(client: FakeClient) -> None:
    client.leave()
    await client.gone()


# ---- How many


def test_the_limit_follows_from_the_sessions() -> None:
    assert [most_sockets(sessions) for sessions in (1, 16, 256)] == [64, 64, 1024]


def test_the_connection_that_is_idle_for_longest_makes_room() -> None:
    """One that has had audio is kept for longer, and one with a session for as long as it lives."""

    async def run() -> None:
        live = service(FakeEngine())
        live.most = 3
        speaking, spoken, idle = (FakeClient(live) for _ in range(3))
        for client in (speaking, spoken):
            client.begin()
            client.speak(noise(1))
            await client.until("delta")
        spoken.end()
        await spoken.until("done")
        await asyncio.sleep(0.02)
        for last in (idle, spoken):
            live.make_room()
            assert await last.gone() == (1008, "idle, and another connection needs the place")
            assert last.socket.reason == "idle"
            live.make_room()  # there is a place now
            newcomer = FakeClient(live)
            newcomer.begin()
            newcomer.speak(noise(1))
            await newcomer.until("delta")
        with pytest.raises(RefusedError, match="3 live connections are open and none is idle") as refused:
            live.make_room()
        assert (refused.value.status, refused.value.code) == (429, "too_many_connections")
        assert len(live.sockets) == 3 and speaking.closed is None

    asyncio.run(run())


def test_a_connection_whose_client_does_not_read_makes_room() -> None:
    """It is not idle in the sense of a limit of time, as an event of its is being answered."""

    async def run() -> None:
        live = service(FakeEngine())
        live.most = 2
        clients = [FakeClient(live) for _ in range(2)]
        for client in clients:
            await client.until("created")
            client.blocked = True
            client.send("nonsense")
        await asyncio.sleep(0.02)
        assert [client.socket.listening_since for client in clients] == [None, None]
        live.make_room()
        clients[0].blocked = False
        assert await clients[0].gone() == (1008, "idle, and another connection needs the place")
        assert clients[1].closed is None
        clients[1].blocked = False

    asyncio.run(run())


def test_connections_of_a_burst_each_make_room() -> None:
    """Before those that leave have gone, they are not counted."""

    async def run() -> None:
        live = service(FakeEngine())
        live.most = 4
        clients = []
        for _ in range(50):
            live.make_room()
            clients.append(FakeClient(live))
            await clients[-1].until("created")
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert [client.closed is None for client in clients] == [False] * 46 + [True] * 4

    asyncio.run(run())


def test_connections_hold_no_place_among_uploads() -> None:
    async def run() -> None:
        live = service(FakeEngine())
        made, _ = guarded(sessions=live, most_in_flight=1)
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        inbox.put_nowait({"type": "websocket.connect"})

        async def send(message: Any) -> None:
            pass

        scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "subprotocols": []}
        tasks = [asyncio.ensure_future(made(scope, inbox.get, send))]
        await asyncio.sleep(0.02)
        assert (len(live.sockets), made.in_flight) == (1, 0)
        live.most = 1
        next(iter(live.sockets)).listening_since = None  # it is not idle
        assert status_of(await handshaken(made, "/v1/realtime")) == 429
        inbox.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await asyncio.gather(*tasks)

    asyncio.run(run())


# ---- How many bytes wait


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def set(socket_bytes: int, process_bytes: int) -> None:
        monkeypatch.setattr(services, "SOCKET_BYTES", socket_bytes)
        monkeypatch.setattr(services, "PROCESS_BYTES", process_bytes)

    return set


def held(engine: FakeEngine, live: LiveService, seconds: float) -> FakeClient:
    """A client whose engine has stopped, with a second of backlog and so much audio, an append each 80 ms."""
    engine.paused = True
    client = FakeClient(live)
    client.begin()
    client.speak(noise(seconds))
    return client


def test_what_waits_is_bounded_in_bytes_and_loses_nothing(narrow: Callable[[int, int], None]) -> None:
    """An append of 80 ms takes about 3.5 KB."""
    narrow(50_000, 1 << 30)

    async def run() -> None:
        engine = FakeEngine()
        live = service(engine, backlog_s=1)
        client = held(engine, live, 8)
        client.end()
        await asyncio.sleep(0.1)
        socket = client.socket
        assert socket.paused and 50_000 <= socket.waiting_bytes == live.waiting_bytes < 55_000
        assert client.inbox.qsize() > 50
        engine.paused = False
        engine.step()
        assert (await client.until("done"))["usage"]["completion_tokens"] == tokens_of(8 * RATE)
        assert bytes(engine.audio[engine.opened[0]]) == noise(8)
        assert (socket.paused, socket.waiting_bytes, live.waiting_bytes) == (False, 0, 0)
        await leaves(client)

    asyncio.run(run())


def test_each_connection_has_its_share(narrow: Callable[[int, int], None]) -> None:
    """One that fills what the process has leaves others their part of it, and gives its bytes back when it leaves."""
    narrow(1 << 30, 200_000)

    async def run() -> None:
        engine = FakeEngine()
        live = service(engine, backlog_s=1)
        greedy = held(engine, live, 10)
        await asyncio.sleep(0.05)
        assert greedy.socket.paused and greedy.socket.waiting_bytes >= 200_000
        other = held(engine, live, 10)
        await asyncio.sleep(0.05)
        assert other.socket.paused and 100_000 <= other.socket.waiting_bytes < 105_000
        greedy.socket.leave()
        await greedy.gone()
        assert live.waiting_bytes == other.socket.waiting_bytes
        await asyncio.sleep(0.6)
        assert other.socket.waiting_bytes > 150_000  # it is read on
        other.socket.leave()
        await other.gone()
        assert live.waiting_bytes == 0

    asyncio.run(run())


def test_audio_before_its_text_counts(narrow: Callable[[int, int], None]) -> None:
    narrow(1 << 30, 100_000)

    async def run() -> None:
        live = service(FakeEngine())
        client, other = FakeClient(live), FakeClient(live)
        for _ in range(5):
            client.speak(noise(1), 32_000)
        assert "fewer on a busy server" in (await client.until("error"))["error"]
        await asyncio.sleep(0.02)
        assert live.waiting_bytes == client.socket.waiting_bytes in (64_000, 96_000)
        other.speak(noise(1), 32_000)
        await asyncio.sleep(0.02)
        assert other.socket.waiting_bytes == 32_000
        client.begin()
        client.end()
        await client.until("done")
        assert live.waiting_bytes == 32_000
        await leaves(client)
        await leaves(other)
        assert live.waiting_bytes == 0

    asyncio.run(run())


def test_large_messages_that_never_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that are over their share; a client of small messages stays."""
    monkeypatch.setattr(services, "ARRIVING_BYTES", 3000)

    async def run() -> None:
        live = service(FakeEngine())
        clients = [FakeClient(live) for _ in range(3)]
        for client, arriving in zip(clients, (2500, 900, 100), strict=True):
            await client.until("created")
            client.socket.wire = FakeWire()  # type: ignore[assignment]
            assert client.socket.wire is not None
            client.socket.wire.arriving = arriving
        live.sweep(time.monotonic())
        code, reason = await clients[0].gone() or (0, "")
        assert code == 1013 and "send less audio at once" in reason
        assert clients[1].closed is clients[2].closed is None
        clients[1].send("session.update", model="voxtral")
        await asyncio.sleep(0.02)
        assert clients[1].socket.wire is not None and clients[1].socket.wire.arriving == 0  # a whole message

    asyncio.run(run())


# ---- Who has gone


@pytest.mark.parametrize("seen", ["read", "while it is not read"])
def test_a_client_that_goes_with_a_full_backlog_ends_its_request(seen: str, narrow: Callable[[int, int], None]) -> None:
    narrow(1 << 30 if seen == "read" else 10_000, 1 << 30)

    async def run() -> None:
        engine = FakeEngine()
        live = service(engine, backlog_s=1)
        client = held(engine, live, 20)
        wire = client.socket.wire = FakeWire()  # type: ignore[assignment]
        await asyncio.sleep(0.1)
        assert engine.requests and not engine.aborted
        if seen == "read":
            client.leave()
        else:
            assert client.socket.paused
            live.sweep(time.monotonic())
            assert wire.beats and client.socket in live.sockets
            wire.left = True
            live.sweep(time.monotonic())
        start = time.monotonic()
        await client.gone()
        await asyncio.sleep(0.02)
        assert time.monotonic() - start < 0.5
        assert engine.aborted == engine.requests and engine.closed == set(engine.opened)
        assert client.socket.reason == "client" and live.waiting_bytes == 0

    asyncio.run(run())


def test_a_client_of_which_nothing_comes_is_ended() -> None:
    """Also one that waits for its text, but not one that is not read."""

    async def run() -> None:
        live = service(FakeEngine(), idle_s=1000)
        client = FakeClient(live)
        wire = client.socket.wire = FakeWire()  # type: ignore[assignment]
        await client.until("created")
        live.sweep(wire.heard + services.SILENT_S - 1)
        client.socket.paused = True
        live.sweep(wire.heard + services.SILENT_S + 1)
        client.socket.paused = False
        assert client.socket.ending is None
        live.sweep(wire.heard + services.SILENT_S + 1)
        assert await client.gone() == (1008, "nothing, and no pong, has come from the client for 50 s")
        assert client.socket.reason == "vanished" and client.kinds() == ["created"]

    asyncio.run(run())


def test_a_revoked_key_ends_its_sessions() -> None:
    async def run() -> None:
        live = service(FakeEngine())
        client = FakeClient(live)
        valid = [True]
        client.socket.valid = lambda: valid[0]
        client.begin()
        client.speak(noise(1))
        await client.until("delta")
        live.sweep(time.monotonic())
        valid[0] = False
        live.sweep(time.monotonic())
        assert await client.gone() == (1008, "the key is no longer valid")
        assert client.events[-1]["code"] == "invalid_api_key"

    asyncio.run(run())


# ---- What settings and events may hold


def transcription(**fields: Any) -> dict[str, Any]:
    return {"audio": {"input": {"transcription": fields}}}


@contextlib.contextmanager
def allocated(most: int) -> Iterator[None]:
    """Within it, at most so many bytes are allocated at a time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most


def test_audio_before_its_text_takes_no_more_memory_than_its_bytes() -> None:
    """Appends of one sample: as objects of their own they would take some twenty times as much."""

    async def run() -> None:
        client = FakeClient(service(FakeEngine()))
        append = commands.Append(bytes(2))
        with allocated(3 * 100_000):
            for _ in range(50_000):
                await client.socket.conversation.run(append)
        assert client.socket.conversation.early_bytes == 100_000
        client.leave()
        await client.gone()

    asyncio.run(run())


@pytest.mark.parametrize("place", ["x", "session", "event_id", "model"])
def test_an_event_takes_no_more_memory_than_its_text(place: str) -> None:
    """A list of two million lists would take 150 MB."""
    content = '{"type":"session.update","' + place + '":[' + "[]," * 2_000_000 + "[]]}"
    with allocated(2 * len(content)):
        event = parsed(content)
        if place == "session":
            with pytest.raises(EventError, match="session has 6000004 bytes: expected at most 1048576"):
                settings(event.session)
    assert event.type == "session.update"


@pytest.mark.parametrize("place", ["type", "audio"])
def test_an_event_of_a_wrong_type_is_none_of_the_others(place: str) -> None:
    event = parsed('{"type":"a","event_id":"mine","' + place + '":[1]}')
    assert (event.type, event.audio) == ("[1]" if place == "type" else "a", None)
    assert isinstance(event.event_id, msgspec.Raw) and bytes(event.event_id) == b'"mine"'


STRANGE = [
    *(
        "null",
        "true",
        "7",
        "-1",
        "1e999",
        "1" * 5000,
        '""',
        '"x"',
        '"\\u0000"',
        '"\\ud800"',
        "[]",
        "[1]",
        "[null]",
        "{}",
    ),
    *('{"a":{}}', '{"type":1}', '{"type":"server_vad"}', '{"type":"audio/pcm","rate":1e999}'),
    *("[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 400 + "1" + "}" * 400, '"' + "y" * 300 + '"'),
]
INPUT = {
    **{"format": ("type", "rate"), "transcription": ("model", "prompt", "keywords", "language", "delay")},
    **{"noise_reduction": ("type", "strength"), "turn_detection": ("type", "threshold", "idle_timeout_ms", "x")},
}
PLACES = [
    *(("type",), ("audio",), ("event_id",), ("model",), ("final",), ("x",), ("session",), ("session", "audio")),
    *(("session", "audio", "input"), ("session", "type"), ("session", "include")),
    *(("session", "audio", "input", part) for part in INPUT),
    *(("session", "audio", "input", part, name) for part, names in INPUT.items() for name in names),
    *(("session", name) for name in Update.model_fields),
    *(("session", "audio_format", name) for name in ("encoding", "sample_rate")),
    *(("session", "turn_detection", name) for name in ("start_threshold", "min_silence_ms", "end_timeout_ms")),
]


@pytest.mark.parametrize("codec", [OpenAiCodec, lambda context: MistralCodec(context, None), UndecidedCodec])
@pytest.mark.parametrize("kind", ["session.update", "input_audio_buffer.append", "input_audio.append", "hello"])
def test_no_value_at_any_place_ends_a_connection(kind: str, codec: Any) -> None:
    """And no answer is long."""

    async def run() -> None:
        client = FakeClient(service(FakeEngine()), codec)
        for place in PLACES:
            for value in STRANGE:
                for name in reversed(place):
                    value = f'{{"{name}":{value}}}'
                client.raw('{"type":"' + kind + '",' + value[1:])
        client.raw("{")
        while "Invalid JSON" not in str(client.events[-1:]) or client.inbox.qsize() or client.socket.waiting_bytes:
            assert client.closed is None and not client.task.done()
            await asyncio.sleep(0.01)
        assert len(client.events) > len(PLACES)
        assert max(len(json.dumps(event)) for event in client.events) < 2000
        await leaves(client)

    asyncio.run(run())


def test_a_flood_of_events_gives_others_their_turn(turned_clock: Clock) -> None:
    """2,000 settings that were read at once, none of which waits for anything. An answer takes 30 us."""

    class SlowClient(OpenAiClient):
        async def _take(self, message: Any) -> None:
            turned_clock.now += 30e-6
            await super()._take(message)

    async def run() -> None:
        client = SlowClient(service(FakeEngine()))
        await client.until("created")
        client.send("session.update", session=transcription(prompt="x" * 4096))
        for _ in range(2000):
            client.send("session.update", session={})
        turns = 0
        while len(client.of("session.updated")) < 2001:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 2000 * 30e-6 / TURN_S / 2
        await leaves(client)

    asyncio.run(run())
