"""A client of `/v1/realtime`, as vLLM's documents tell one to write it."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from uploads import AUTHORIZED
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
