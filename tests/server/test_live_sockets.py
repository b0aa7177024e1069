"""Clients of a real server that connect and say nothing, or send far more than speech and then go: they harm nobody."""

import base64
import ctypes
import json
import os
import socket as socketlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import live
import numpy as np
import pytest
import requests
from live import CLOSE, metric, uploaded
from places import DATA
from servers import MOST_LIVE, Server
from uploads import KEY
from websockets.sync.client import ClientConnection

from bench import dataset
from pico import evaluate
from voxtral_serve.guard.live.service import most_sockets

RATE = 16000
BACKLOG_S = 480.0
GONE_S = 20.0  # in which a client that closes is to be gone; its backlog would take longer by far


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    found = dataset.select(dataset.load(DATA)[0], 30, seed=0)
    return evaluate.read_audio(min((clip for clip in found if clip.id not in CLOSE), key=lambda c: c.duration_s).path)


def frame(text: bytes) -> bytes:
    """A WebSocket message of a client, masked by zeros."""
    length = struct.pack("!BQ", 0xFF, len(text)) if len(text) > 0xFFFF else struct.pack("!BH", 0xFE, len(text))
    return b"\x81" + length + bytes(4) + text


def event(kind: str, **fields: Any) -> bytes:
    return frame(json.dumps({"type": kind, **fields}).encode().ljust(126))


def opened(url: str, query: str = "?intent=transcription") -> socketlib.socket:
    """A WebSocket of which nobody reads and nobody answers a ping, unless the test does."""
    place = urlsplit(url)
    client = socketlib.create_connection((place.hostname, place.port), 60)
    head = f"GET /v1/realtime{query} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
    more = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
    client.sendall(f"{head}{more}{base64.b64encode(os.urandom(16)).decode()}\r\n\r\n".encode())
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 101")
    return client


def running(url: str) -> float:
    """Requests that the engine has, waiting ones too, of uploads and of live sessions."""
    lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def until(true: Callable[[], bool], seconds: float) -> None:
    """Wait until it is true, at most so long."""
    start = time.monotonic()
    while not true():
        assert time.monotonic() - start < seconds
        time.sleep(0.05)


@contextmanager
def session(url: str, audio: np.ndarray) -> Iterator[ClientConnection]:
    """A client of vLLM's protocol that has sent a clip."""
    with live.session(url) as socket:
        live.receive(socket)
        live.send(socket, "session.update", model="voxtral")
        live.send(socket, "input_audio_buffer.commit")
        content = base64.b64encode(live.pcm16(audio)).decode()
        live.send(socket, "input_audio_buffer.append", audio=content)
        assert live.receive(socket)["type"] == "transcription.delta"
        yield socket


def finished(socket: ClientConnection) -> str:
    """Its text."""
    live.send(socket, "input_audio_buffer.commit", final=True)
    while (last := live.receive(socket))["type"] == "transcription.delta":
        pass
    text: str = last["text"]
    return text.strip()


def received(client: socketlib.socket) -> bytes:
    """All that has come until the server closes the connection, which it does once it has the client's close."""
    content = b""
    while b"\x88" not in content:
        content += client.recv(1 << 16)
    return content


@pytest.fixture
def url(fast: Server) -> Iterator[str]:
    """With nothing left before and after the test."""
    until(lambda: metric(fast.url, "sessions ") + running(fast.url) == 0, 30)
    yield fast.url
    until(lambda: metric(fast.url, "sessions ") + running(fast.url) == 0, 30)


@pytest.mark.parametrize("number", [256, pytest.param(1000, marks=pytest.mark.slow)])
def test_connections_without_audio_leave_uploads_alone(url: str, audio: np.ndarray, number: int) -> None:
    """More than the server takes: the last ones stay, and a session beside them has its text."""
    alone = uploaded(url, audio)
    with ExitStack() as stack:
        begun = stack.enter_context(session(url, audio))
        sockets = [stack.enter_context(opened(url)) for _ in range(number)]
        close = received(sockets[0])
        assert close.endswith(b"idle, and another connection needs the place") and struct.pack("!H", 1008) in close
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: uploaded(url, audio), range(16))) == {alone}
        staying = sockets[-most_sockets(MOST_LIVE) // 2]
        staying.recv(1 << 16)
        staying.sendall(event("session.update", session={}))
        assert b"session.updated" in staying.recv(1 << 16)
        assert finished(begun) == alone


def test_messages_are_not_compressed(url: str) -> None:
    with live.session(url) as socket:  # its library offers it
        assert socket.protocol.extensions == []


def spoken(client: socketlib.socket, audio: np.ndarray, seconds: float) -> None:
    """Settings, and a clip again and again for so many seconds, in appends of a second."""
    form = {"type": "audio/pcm", "rate": RATE}
    client.sendall(event("session.update", session={"audio": {"input": {"format": form, "turn_detection": None}}}))
    content = live.pcm16(np.resize(audio, RATE))
    append = event("input_audio_buffer.append", audio=base64.b64encode(content).decode())
    for _ in range(round(seconds)):
        client.sendall(append)


def blocked(client: socketlib.socket, audio: np.ndarray) -> None:
    """Send until the server's bounds and both systems' buffers are full."""
    spoken(client, audio, 1)
    append = event(
        "input_audio_buffer.append", audio=base64.b64encode(live.pcm16(np.resize(audio, RATE * 60))).decode()
    )
    client.settimeout(5)
    start = time.monotonic()
    try:
        while time.monotonic() - start < 120:
            client.sendall(append)
    except TimeoutError:
        return
    raise AssertionError("the server took two minutes of sending")


def reset(client: socketlib.socket) -> None:
    client.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def end(client: socketlib.socket) -> None:
    """A close frame; the connection stays."""
    client.sendall(b"\x88\x82" + bytes(4) + struct.pack("!H", 1000))


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(socketlib.socket.close, id="FIN"),
        pytest.param(reset, id="RST", marks=pytest.mark.slow),
        pytest.param(end, id="close frame", marks=pytest.mark.slow),
    ],
)
def test_clients_that_go_with_minutes_of_backlog_are_gone_at_once(
    url: str, audio: np.ndarray, leave: Callable[[socketlib.socket], None]
) -> None:
    """All of the server's sessions, each with eight minutes. Their requests in the engine end with them."""
    clients = [opened(url) for _ in range(MOST_LIVE)]
    with ThreadPoolExecutor(MOST_LIVE) as pool:
        list(pool.map(lambda client: spoken(client, audio, BACKLOG_S), clients))
    until(lambda: metric(url, "sessions ") == MOST_LIVE and running(url) > 0, 60)
    for client in clients:
        leave(client)
    until(lambda: metric(url, "sessions ") == 0 and running(url) == 0, GONE_S)
    for client in clients:
        client.close()
    assert uploaded(url, audio)


@pytest.mark.slow
@pytest.mark.parametrize("leave", [socketlib.socket.close, reset], ids=["FIN", "RST"])
def test_a_client_that_goes_while_nothing_is_read_is_gone_at_once(
    url: str, audio: np.ndarray, leave: Callable[[socketlib.socket], None]
) -> None:
    """Its FIN is behind bytes that have no room on either side."""
    client = opened(url)
    blocked(client, audio)
    assert metric(url, "sessions ") == 1
    leave(client)
    until(lambda: metric(url, "sessions ") == 0 and running(url) == 0, GONE_S)


def deaf(client: socketlib.socket) -> None:
    """As a machine whose network has gone: it receives nothing, and acknowledges nothing."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: ret 0
    client.setsockopt(socketlib.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER


@pytest.mark.slow
@pytest.mark.parametrize("state", ["stopped", "deaf", "deaf and blocked"])
def test_a_client_that_vanishes_is_gone_within_a_minute(url: str, audio: np.ndarray, state: str) -> None:
    """A process that is stopped, whose system acknowledges what comes; and a system that does not, with a backlog that
    is read and with one that is not. A client beside it that only answers pings stays."""
    with session(url, audio) as beside, opened(url) as client:
        if state == "deaf and blocked":
            blocked(client, audio)
        else:
            spoken(client, audio, BACKLOG_S)
        until(lambda: metric(url, "sessions ") == 2, 10)
        if state != "stopped":
            deaf(client)
        over = threading.Event()

        def speak() -> None:
            while not over.wait(5):
                live.send(beside, "input_audio_buffer.append", audio=base64.b64encode(bytes(3200)).decode())

        speaker = threading.Thread(target=speak)
        speaker.start()
        try:
            until(lambda: metric(url, "sessions ") == 1, 60)
        finally:
            over.set()
            speaker.join()
        assert finished(beside)
