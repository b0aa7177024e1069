"""Clients that try to end, stall or fill a server. Each takes the server's address and works until it is told to stop.

tests/server/test_hostile.py runs each of them beside a good client, tests/support/soak.py all of them among its own.
"""

import base64
import contextlib
import functools
import io
import json
import os
import socket as socketlib
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
import soundfile
from inputs import CHAT, KEY, UPLOAD, encoded

from bench import prometheus
from voxtral_serve.units import MIB

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
CLIP = Path(__file__).parents[2] / "bench/data/clips/001.opus"  # 7.35 s of speech
OPENAI, VLLM = "/v1/realtime?intent=transcription", "/v1/realtime"
MISTRAL = "/v1/audio/transcriptions/realtime?model=voxtral"
PATHS = (OPENAI, VLLM, MISTRAL)
VLLM_BEGIN: list[dict[str, Any]] = [
    {"type": "session.update", "model": "voxtral"},
    {"type": "input_audio_buffer.commit"},
]
TIMEOUT_S = 60.0
CONNECTED = 256  # sockets that only connect
BACKLOGS, BACKLOG_S = 8, 480  # sockets, and seconds of audio that each sends at once
APPEND_BYTES = 7 * MIB  # of PCM in one event: below the 15 MiB of base64 that an event may have
LARGE_PROMPT = 12_000_000  # characters of one session.update
SMALL_UPDATES = 60  # that follow it
STEREO_HZ, STEREO_S, STEREO_UPLOADS = 48_000, 600, 24
TRICKLERS = 64  # connections that send one byte a second
BOMB_HZ, BOMB_BYTES = 700, 10_000_000  # of one Matroska block: 0.9 GB as 32 bits at 16 kHz
SESSION_OPTION = "voxtral_serve_session"  # by which a request of the engine names its live session
Attack = Callable[[str, threading.Event], None]

# ---- Files


@functools.cache
def stereo() -> bytes:
    """A FLAC file of ten minutes at 48 kHz with two channels: a sentence, then silence. 115 MB as 32 bits of one."""
    import soxr

    samples, rate = soundfile.read(CLIP, dtype="float32")
    heard = soxr.resample(samples, rate, STEREO_HZ)
    both = np.zeros((STEREO_S * STEREO_HZ, 2), np.int16)
    both[: len(heard)] = (heard[:, None] * 32767).astype(np.int16)
    return encoded(both, STEREO_HZ, "FLAC")


def element(name: str, content: bytes) -> bytes:
    """An element of EBML: its id in hex, its size in 8 bytes, its content."""
    return bytes.fromhex(name) + struct.pack(">Q", len(content) | 1 << 56) + content


@functools.cache
def matroska(rate: int = BOMB_HZ, channels: int = 1, size: int = BOMB_BYTES) -> bytes:
    """A Matroska file of one block of `size` bytes, which are samples of 8 bits."""
    head = element("1a45dfa3", element("4282", b"matroska") + element("4287", b"\x04") + element("4285", b"\x02"))
    audio = element("b5", struct.pack(">d", rate)) + element("9f", bytes([channels])) + element("6264", b"\x08")
    track = element("d7", b"\x01") + element("73c5", b"\x01") + element("83", b"\x02")
    track += element("86", b"A_PCM/INT/LIT") + element("e1", audio)
    block = element("a3", b"\x81\x00\x00\x80" + b"\x80" * size)
    info = element("1549a966", element("2ad7b1", struct.pack(">I", 1_000_000)))
    parts = info + element("1654ae6b", element("ae", track)) + element("1f43b675", element("e7", b"\x00") + block)
    return head + element("18538067", parts)


def bombs() -> dict[str, bytes]:
    """Files that are small, and large once they are decoded, by what they are."""
    wide = io.BytesIO()
    soundfile.write(wide, np.zeros((100_000, 33), np.int16), 8000, format="WAV")
    return {
        "a Matroska block of 10 MB at 700 Hz": matroska(),
        "Matroska with 33 channels": matroska(8000, 33, 3_300_000),
        "a WAV file with 33 channels": wide.getvalue(),
    }


# ---- Connections


def post(
    url: str, file: bytes, timeout_s: float = 600, session: requests.Session | None = None, **fields: str
) -> requests.Response:
    return (session or requests.Session()).post(
        url + UPLOAD,
        files={"file": ("clip", file)},
        data={"model": "voxtral", **fields},
        headers=AUTHORIZED,
        timeout=timeout_s,
    )


def connection(url: str) -> socketlib.socket:
    parts = urlsplit(url)
    return socketlib.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S)


def websocket(url: str, path: str = OPENAI, extensions: str = "") -> tuple[socketlib.socket, str]:
    """(a WebSocket that has been accepted, the head of the answer in small letters). Raises OSError if it was not."""
    socket = connection(url)
    lines = [f"GET {path} HTTP/1.1", "Host: " + url.partition("://")[2], "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: " + base64.b64encode(os.urandom(16)).decode()]
    lines += [f"Authorization: Bearer {KEY}", *([f"Sec-WebSocket-Extensions: {extensions}"] if extensions else [])]
    socket.sendall("\r\n".join([*lines, "", ""]).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := socket.recv(1)):
            raise ConnectionError(f"the server closed the connection at the handshake: {head!r}")
        head += byte
    if not head.startswith(b"HTTP/1.1 101"):
        socket.close()
        raise ConnectionError(f"the server refused the handshake: {head!r}")
    return socket, head.decode("latin-1").lower()


def frame(event: dict[str, Any], deflate: bool = False) -> bytes:
    """One event as a WebSocket's text message, under a mask of zeros; `deflate` compresses it (RFC 7692)."""
    content, first = json.dumps(event).encode(), 0x81
    if deflate:
        packer = zlib.compressobj(wbits=-15)
        content, first = (packer.compress(content) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4], 0xC1
    return struct.pack(">BBQ", first, 0xFF, len(content)) + bytes(4) + content


@functools.cache
def backlog(path: str, deflate: bool) -> bytes:
    """Frames that begin a live session, and BACKLOG_S of speech in it, over and over the same."""
    samples, _ = soundfile.read(CLIP, dtype="int16")
    pcm = np.resize(samples, BACKLOG_S * (24_000 if path == OPENAI else 16_000)).tobytes()
    pieces = [pcm[place : place + APPEND_BYTES] for place in range(0, len(pcm), APPEND_BYTES)]
    kind = "input_audio.append" if path == MISTRAL else "input_audio_buffer.append"
    begin: dict[str, list[dict[str, Any]]]
    begin = {OPENAI: [{"type": "session.update", "session": {"type": "transcription"}}], VLLM: VLLM_BEGIN, MISTRAL: []}
    appends = [{"type": kind, "audio": base64.b64encode(piece).decode()} for piece in pieces]
    return b"".join(frame(event, deflate) for event in begin[path] + appends)


def fill(url: str, within_s: float, path: str = OPENAI) -> socketlib.socket:
    """A live session that has sent BACKLOG_S of audio, or as much of it as the server took in the time."""
    socket, head = websocket(url, path, "permessage-deflate")
    socket.settimeout(within_s)
    with contextlib.suppress(TimeoutError, ConnectionError):
        socket.sendall(backlog(path, "permessage-deflate" in head))
    return socket


def end(socket: socketlib.socket, way: int) -> None:
    """The connection: 0 closes one direction of it (FIN), 1 both, 2 resets it."""
    if way == 0:
        with contextlib.suppress(OSError):
            socket.shutdown(socketlib.SHUT_WR)
        return
    if way == 2:
        socket.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_LINGER, struct.pack("ii", 1, 0))
    socket.close()


# ---- Attackers


def vllm_options(url: str, stop: threading.Event) -> None:
    """Uploads that name a live session of the engine."""
    clip = CLIP.read_bytes()
    while not stop.is_set():
        for value in (["x"], "x", "0", {"x": 1}):
            post(url, clip, vllm_xargs=json.dumps({SESSION_OPTION: value}))


def connect_only(url: str, stop: threading.Event) -> None:
    with contextlib.ExitStack() as sockets:
        for number in range(CONNECTED):
            if stop.is_set():
                return
            sockets.enter_context(websocket(url, PATHS[number % 3])[0])
        stop.wait()


def prompt_bombs(url: str, stop: threading.Event) -> None:
    """A prompt of 12 MB, and many updates that would be answered with it."""

    def update(prompt: str) -> bytes:
        transcription = {"prompt": prompt}
        return frame({"type": "session.update", "session": {"audio": {"input": {"transcription": transcription}}}})

    while not stop.is_set():
        socket, _ = websocket(url)
        with socket, contextlib.suppress(OSError):
            socket.sendall(update("x" * LARGE_PROMPT) + update("small") * SMALL_UPDATES)
            socket.settimeout(5)
            while not stop.is_set() and socket.recv(MIB):
                pass


def backlogs(url: str, stop: threading.Event) -> None:
    """Live sessions that send eight minutes at once, read nothing, and close in one of three ways; then again."""
    while not stop.is_set():
        sockets = [fill(url, 1.0) for _ in range(BACKLOGS)]
        stop.wait(1)
        for number, socket in enumerate(sockets):
            end(socket, number % 3)
            socket.close()


def tricklers(url: str, stop: threading.Event) -> None:
    """Bodies that are refused, and bodies with the key, of which a byte a second arrives."""
    head = f"POST {UPLOAD} HTTP/1.1\r\nHost: here\r\nContent-Length: 1000000\r\nContent-Type: multipart/form-data; "
    heads = [f"{head}boundary=b\r\n\r\n", f"{head}boundary=b\r\nAuthorization: Bearer {KEY}\r\n\r\n"]
    sockets: dict[int, socketlib.socket] = {}
    try:
        while not stop.is_set():
            for number in range(TRICKLERS):
                if number not in sockets:
                    sockets[number] = connection(url)
                    sockets[number].sendall(heads[number % 2].encode())
                try:
                    sockets[number].sendall(b"a")
                except OSError:
                    sockets.pop(number).close()
            stop.wait(1)
    finally:
        for socket in sockets.values():
            socket.close()


def together(url: str, stop: threading.Event, count: int, send: Callable[[str], object]) -> None:
    """`count` clients, each of which sends again and again."""

    def client() -> None:
        while not stop.is_set():
            with contextlib.suppress(requests.RequestException):
                send(url)

    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def long_stereo(url: str, stop: threading.Event) -> None:
    together(url, stop, STEREO_UPLOADS, lambda url: post(url, stereo()))


def decoder_bombs(url: str, stop: threading.Event) -> None:
    files = bombs()
    together(url, stop, len(files), lambda url: [post(url, file) for file in files.values()])


def chats(url: str, stop: threading.Event) -> None:
    """Chats with ten minutes of audio, on a server whose model does not chat."""
    body = chat(stereo())
    together(url, stop, 4, lambda url: requests.post(url + CHAT, data=body, headers=AUTHORIZED, timeout=TIMEOUT_S))


def chat(file: bytes) -> bytes:
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "flac"}}
    return json.dumps({"model": "voxtral", "messages": [{"role": "user", "content": [audio]}]}).encode()


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        vllm_options,
        connect_only,
        prompt_bombs,
        backlogs,
        tricklers,
        long_stereo,
        decoder_bombs,
        chats,
    )
}


@contextlib.contextmanager
def attacked(url: str, attack: Attack) -> Iterator[None]:
    """With one attacker at work, which is told to stop at the end and has gone then."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):  # a refusal, or a connection that was closed: come again
                attack(url, stop)
            stop.wait(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


GAUGES = ("voxtral_serve_requests_in_flight", "voxtral_serve_live_sessions", "vllm:num_requests_running")


def gauge(url: str, name: str) -> float:
    total = prometheus.total(requests.get(f"{url}/metrics", headers=AUTHORIZED, timeout=60).text, name)
    assert total is not None, name
    return total


def until_free(url: str, within_s: float) -> None:
    """Until no request, session or place is left."""
    start = time.monotonic()
    while left := {name: value for name in GAUGES if (value := gauge(url, name))}:
        assert time.monotonic() - start < within_s, left
        time.sleep(0.05)
