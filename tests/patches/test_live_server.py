"""What the guard sets on objects of a server: each on an object of its form, and why vLLM needs it."""

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvicorn
import yaml
from places import PICO, ROOT
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from bench.measure import engine
from voxtral_serve.patches.live_server import (
    ClientWatch,
    ConnectionHeaders,
    EngineDeadError,
    FileLimit,
    GracefulStop,
    HeaderLimit,
    NoCompression,
    Wire,
)
from voxtral_serve.shims import PatchError
from voxtral_serve.units import MIB

# Why they are needed: each of these fails once the patch can go


def test_vllm_limits_the_bytes_of_what_it_is_sent() -> None:
    """Of the audio of a chat."""
    from vllm.multimodal.media.audio import AudioMediaIO

    if version("vllm").startswith("0.20.0"):
        assert not hasattr(AudioMediaIO, "get_max_bytes")
    else:
        assert "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB" in inspect.getsource(AudioMediaIO.get_max_bytes)


@pytest.mark.slow
def test_vllm_ends_with_status_0_where_its_engine_has_died(tmp_path: Path) -> None:
    """Without the guard."""
    port, flags = engine.free_port(), ("--enforce-eager", "--gpu-memory-utilization", "0.3", "--api-server-count", "1")
    profile = yaml.safe_load((ROOT / "profiles/fast.yaml").read_text())
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({name: profile[name] for name in profile if name != "middleware"}))
    with engine.served(config, PICO, port, tmp_path / "log", *flags) as process:
        for each in psutil.Process(process.pid).children(recursive=True):
            if "EngineCore" in "".join(each.cmdline()):
                each.kill()
        assert process.wait(60) == 0


@pytest.mark.parametrize("name", ["httptools_impl.HttpToolsProtocol", "h11_impl.H11Protocol"])
def test_uvicorn_reads_the_last_connection_header(name: str) -> None:
    assert ConnectionHeaders().probe(config(name))


@contextmanager
def served(app: Any, settle: Callable[[Any], None] = lambda found: None, **options: Any) -> Iterator[int]:
    """The port of a real uvicorn, whose configuration `settle` may change once it is loaded."""
    found = uvicorn.Config(app, log_config=None, lifespan="off", **options)
    found.load()
    settle(found)
    server = uvicorn.Server(found)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def unread(settle: Callable[[Any], None] = lambda found: None) -> Iterator[Any]:
    """A client that answers pings, of a real uvicorn whose application leaves its message unread for 3 s, then says so.

    uvicorn demands a pong within 0.5 s; `settle` may change its configuration."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.sleep(3)
        await send({"type": "websocket.send", "text": "read"})

    with (
        served(app, settle, ws_ping_interval=0.2, ws_ping_timeout=0.5) as port,
        connect(f"ws://127.0.0.1:{port}", ping_interval=None, open_timeout=60) as client,
    ):
        for _ in range(2):
            client.send("waits")
        yield client


def test_uvicorn_reads_no_pong_while_a_message_waits() -> None:
    with unread() as client, pytest.raises(ConnectionClosed, match="keepalive ping timeout"):
        client.recv(timeout=60)


async def accepts(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await receive()


def extensions(settle: Callable[[Any], None] = lambda found: None) -> list[str]:
    """Those of a WebSocket whose client offers compression."""
    with served(accepts, settle) as port, connect(f"ws://127.0.0.1:{port}", open_timeout=60) as client:
        return [each.name for each in client.protocol.extensions]


def test_uvicorn_inflates_messages() -> None:
    assert extensions() == ["permessage-deflate"]


async def answers(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def status(port: int, *pieces: bytes) -> str:
    """That of the answer to a request; empty if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
            return client.recv(1 << 16).decode()[9:12]
        except ConnectionError:
            return ""


GET, POST = b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_uvicorn_takes_headers_without_limit() -> None:
    with served(answers) as port:
        assert status(port, GET, b"a: %s\r\n" % (b"a" * (1 << 20)), b"\r\n") == "200"


# What they do


def test_headers_are_limited_and_bodies_are_not() -> None:
    large = b"a" * (1 << 20)
    with served(answers, HeaderLimit().settle_on) as port:
        assert status(port, GET, b"a: %s\r\n\r\n" % (b"a" * 60_000)) == "200"
        assert status(port, POST, b"100000\r\n" + large + b"\r\n", b"0\r\na: b\r\n\r\n") == "200"
        assert status(port, POST, b"1\r\na\r\n" * (1 << 15), b"0\r\n\r\n") == "200"
        for endless in (
            (GET, b"a: ", large),
            (GET, b"a: b\r\n" * (1 << 18)),
            (b"GET /", large),
            (POST, b"1\r\na\r\n0\r\n", b"a: b\r\n" * (1 << 18)),
            (POST, b"1;", large),
        ):
            assert status(port, *endless) in ("400", "")
        assert status(port, GET + b"\r\n") == "200"


def test_headers_have_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeaderLimit, "MOST_S", 0.3)
    with served(answers, HeaderLimit().settle_on) as port:
        for begun in (b"", GET, GET + b"\r\n" + GET):
            start = time.monotonic()
            assert status(port, begun) == ("200" if begun.startswith(GET + b"\r") else "")
            if not begun.startswith(GET + b"\r"):
                assert 0.2 < time.monotonic() - start < 5


def test_no_pong_is_demanded() -> None:
    with unread(ClientWatch().settle_on) as client:
        assert client.recv(timeout=60) == "read"


def test_no_message_is_inflated() -> None:
    assert extensions(NoCompression().settle_on) == []


class Full:
    """An application that reads one message and then none, as one whose backlog is full. It asks the wire."""

    def __init__(self) -> None:
        self.wire: Any = None
        self.gone_at: float | None = None
        self.over = False  # the test

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wire = scope["extensions"][ClientWatch.EXTENSION]
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        self.wire = wire
        while not (self.over or wire.gone()):
            wire.beat()
            await asyncio.sleep(0.1)
        self.gone_at = time.monotonic()


def fill(client: socket.socket) -> None:
    """Send until neither side's system takes more."""
    client.setblocking(False)
    message = struct.pack("!BBQ4s", 0x81, 0xFF, 1 << 16, bytes(4)) + b"a" * (1 << 16)  # a frame, masked by zeros
    start = blocked = time.monotonic()
    while time.monotonic() - blocked < 0.5:
        assert time.monotonic() - start < 30
        try:
            sent = client.send(message)
            message = message[sent:] + message[:sent]
            blocked = time.monotonic()
        except BlockingIOError:
            time.sleep(0.01)


def silent(client: socket.socket) -> None:
    """As a machine whose network has gone: it receives nothing, and so acknowledges nothing."""
    drop = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF: ret 0
    program = ctypes.create_string_buffer(drop)
    client.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


LEAVES = {"FIN": socket.socket.close, "RST": reset, "silent": silent}
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
SHORT = b"\x81\x84" + bytes(4) + b"text"  # a frame, masked by zeros


@pytest.mark.parametrize("ws", ["websockets-sansio", "websockets"])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(("leave", "full"), [("FIN", True), ("FIN", False), ("RST", True), ("silent", True)])
@pytest.mark.filterwarnings("ignore:The `websockets` implementation is deprecated")
def test_a_client_that_leaves_is_seen_while_nothing_is_read(
    leave: str, full: bool, loop: Any, ws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a FIN that the client's system holds back, behind bytes that have no room."""
    monkeypatch.setattr(Wire, "UNACKNOWLEDGED_MS", 1500)
    app = Full()
    with (
        served(app, ClientWatch().settle_on, loop=loop, ws=ws) as port,
        socket.create_connection(("127.0.0.1", port), 10) as client,
    ):
        client.sendall(HANDSHAKE)
        assert b"101" in client.recv(4096)
        client.sendall(3 * SHORT)
        while app.wire is None:
            time.sleep(0.01)
        if full:
            fill(client)
        time.sleep(0.5)
        assert app.gone_at is None
        start = time.monotonic()
        LEAVES[leave](client)
        while app.gone_at is None and time.monotonic() - start < 10:
            time.sleep(0.01)
        app.over = True
        assert app.gone_at is not None and app.gone_at - start < (4 if leave == "silent" else 1)


def config(name: str) -> Any:
    """Of the form of uvicorn's."""
    module, _, kind = name.partition(".")
    return SimpleNamespace(http_protocol_class=getattr(import_module(f"uvicorn.protocols.http.{module}"), kind))


UPGRADE, OTHER, ALIVE = (b"connection", b"Upgrade"), (b"upgrade", b"websocket"), (b"connection", b"keep-alive")


@pytest.mark.parametrize("name", ["httptools_impl.HttpToolsProtocol", "h11_impl.H11Protocol"])
@pytest.mark.parametrize(
    ("headers", "upgrades"),
    [
        ([UPGRADE, OTHER], True),
        ([UPGRADE, OTHER, ALIVE], True),
        ([ALIVE, OTHER, UPGRADE], True),
        ([(b"connection", b"keep-alive, Upgrade"), OTHER], True),
        ([OTHER, ALIVE], False),
        ([OTHER], False),
        ([UPGRADE], False),
    ],
)
def test_all_connection_headers_are_one_list(name: str, headers: list[tuple[bytes, bytes]], upgrades: bool) -> None:
    stock = (found := config(name)).http_protocol_class
    ConnectionHeaders().settle_on(found)
    protocol: Any = found.http_protocol_class.__new__(found.http_protocol_class)
    protocol.headers = headers
    assert isinstance(protocol, stock)
    assert protocol._get_upgrade() == (b"websocket" if upgrades else None)


class Engine:
    def __init__(self, grace_s: int = 7) -> None:
        self.errored = False
        self.vllm_config = SimpleNamespace(shutdown_timeout=grace_s)


def test_the_limit_is_that_of_decoded_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "25")
    limit = FileLimit(25 * MIB, 256 * MIB)
    limit.settle_on(SimpleNamespace())
    needed = not version("vllm").startswith("0.20.0")
    assert os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] == ("257" if needed else "25")
    assert not limit.probe(SimpleNamespace())


class Server:
    """Of the form of uvicorn's."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(timeout_graceful_shutdown=None)
        self.should_exit = self.force_exit = False
        self.stopped = 0

    async def shutdown(self, sockets: Any = None) -> None:
        self.stopped += 1


@pytest.mark.parametrize("dies", [False, True])
def test_a_stop_drains_and_tells_a_dead_engine(dies: bool) -> None:
    server: Any = Server()
    engine = Engine()

    async def run() -> None:
        GracefulStop(engine).settle_on(server)
        assert server.config.timeout_graceful_shutdown == 7
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert (server.should_exit, server.force_exit) == (True, False)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        assert server.force_exit
        engine.errored = dies
        await server.shutdown()

    if dies:
        with pytest.raises(EngineDeadError, match="engine has died"):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert server.stopped == 1


@pytest.mark.parametrize("told_twice", [False, True])
def test_a_stop_waits_for_what_drains_and_takes_its_time_from_the_grace_period(told_twice: bool) -> None:
    """uvicorn closes WebSockets at once: live sessions are ended before."""
    server: Any = Server()
    order: list[object] = []
    server.servers = [SimpleNamespace(close=lambda: order.append("listens no more"))]
    seconds = 30.0 if told_twice else 0.3

    async def drain(grace_s: float) -> None:
        order.append(grace_s)
        await asyncio.sleep(seconds)
        order.append("drained")

    async def run() -> None:
        GracefulStop(Engine(), drain).settle_on(server)
        if told_twice:
            asyncio.get_running_loop().call_later(0.1, setattr, server, "force_exit", True)
        await asyncio.wait_for(server.shutdown(), 2)

    asyncio.run(run())
    assert server.stopped == 1
    assert order == ["listens no more", 7, *([] if told_twice else ["drained"])]
    assert 6 < server.config.timeout_graceful_shutdown <= 6.9 + told_twice * 0.2


def test_an_engine_that_does_not_tell_whether_it_lives_has_drifted() -> None:
    engine: Any = SimpleNamespace(vllm_config=SimpleNamespace(shutdown_timeout=7))
    server: Any = Server()
    stock = server.shutdown

    async def run() -> None:
        GracefulStop(engine).settle_on(server)

    with pytest.raises(PatchError, match=r"patch graceful_stop .*AttributeError.*errored"):
        asyncio.run(run())
    assert server.shutdown == stock and server.config.timeout_graceful_shutdown is None
