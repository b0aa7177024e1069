"""A client of `/v1/realtime`, as vLLM's documents tell one to write it."""

import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests
import soundfile
from uploads import AUTHORIZED, upload
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

TIMEOUT_S = 60


def session(url: str) -> ClientConnection:
    return connect(url.replace("http://", "ws://") + "/v1/realtime", additional_headers=AUTHORIZED)


def receive(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(socket.recv(timeout=TIMEOUT_S))
    return event


def send(socket: ClientConnection, kind: str, **fields: object) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def pcm16(audio: np.ndarray) -> bytes:
    return (audio.clip(-1, 1) * 32767).astype("<i2").tobytes()


def transcribe(url: str, audio: np.ndarray, piece: int) -> Iterator[dict[str, Any]]:
    """All events of one session that sends `audio`, at 16 kHz, in pieces of so many samples."""
    with session(url) as socket:
        yield receive(socket)
        send(socket, "session.update", model="voxtral")
        send(socket, "input_audio_buffer.commit")
        for start in range(0, len(audio), piece):
            sent = base64.b64encode(pcm16(audio[start : start + piece])).decode()
            send(socket, "input_audio_buffer.append", audio=sent)
        send(socket, "input_audio_buffer.commit", final=True)
        while (event := receive(socket))["type"] == "transcription.delta":
            yield event
        yield event


# Clips whose text may differ: the two likeliest words to begin 432 have logits of 16.03 and 15.90, one bfloat16 step.
CLOSE = {"432"}


def uploaded(url: str, audio: np.ndarray, **fields: str) -> str:
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(pcm16(audio), "<i2"), 16000, format="WAV", subtype="PCM_16")
    text: str = upload(url, file.getvalue(), **fields).json()["text"]
    return text.strip()


def metric(url: str, name: str) -> float:
    lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
    found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"voxtral_serve_live_{name}")]
    assert found, name
    return sum(found)


def close_of(socket: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=30)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


RATE = 16000


TEXT = "conversation.item.input_audio_transcription"


INPUT = "input_audio_buffer"


COMPLETED = f"{TEXT}.completed"


PCM = {"type": "audio/pcm", "rate": RATE}


def opened(url: str, query: str = "intent=transcription", path: str = "/v1/realtime", **more: Any) -> ClientConnection:
    address = url.replace("http://", "ws://") + path + (f"?{query}" if query else "")
    return connect(address, **{"additional_headers": AUTHORIZED, **more})


def append(socket: ClientConnection, content: bytes, piece: int = 2560, kind: str = f"{INPUT}.append") -> None:
    for start in range(0, len(content), piece):
        send(socket, kind, audio=base64.b64encode(content[start : start + piece]).decode())


def until_free(url: str) -> None:
    start = time.monotonic()
    while metric(url, "sessions "):
        assert time.monotonic() - start < 60
        time.sleep(0.05)
