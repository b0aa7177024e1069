"""A speech server that answers with the benchmark's recordings: the text of a clip gives the clip. No model runs.

    python tests/support/speechserver.py --port 8099

It is a stand-in for tests of clients of /v1/audio/speech, and of the benchmark's round trip, whose words are those
of the recordings. Other texts are refused with HTTP 400. Tests may replace its replies.
"""

import argparse
import json
import re
import socket
import struct
import threading
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import soundfile
import soxr

MODEL, VOICE, RATE_HZ = "stand-in-recordings", "recordings", 24_000
PIECE_S = 0.4
MANIFEST = Path(__file__).parents[2] / "bench/data/manifest.jsonl"


@dataclass(frozen=True)
class Reply:
    """`pieces` of the body, each sent after so many seconds. With `sized`, its length is sent first, as of a file.

    With `drop`, the connection breaks after them.
    """

    pieces: Sequence[tuple[float, bytes]]
    status: int = 200
    kind: str = "audio/pcm"
    sized: bool = False
    drop: bool = False
    headers: tuple[tuple[str, str], ...] = ()


def plain(text: str) -> str:
    """Letters and digits alone: a text command before the server may change the others."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def clip_files() -> dict[str, Path]:
    """The recording of each reference of bench/data."""
    lines = [json.loads(line) for line in MANIFEST.read_text(encoding="utf-8").splitlines()]
    return {plain(line["text"]): MANIFEST.parent / line["path"] for line in lines}


def pcm(path: Path) -> bytes:
    """A recording as 24 kHz mono PCM16."""
    samples, rate = soundfile.read(path, dtype="float32")
    samples = soxr.resample(samples, rate, RATE_HZ)
    found: bytes = (samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes()
    return found


def header(size: int = 0xFFFFFFFF) -> bytes:
    """Of a WAV of so many bytes of samples; by default the placeholder of a stream."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE_HZ, 2 * RATE_HZ, 2, 16)
    return b"RIFF" + struct.pack("<I", min(size + 36, 0xFFFFFFFF)) + b"WAVE" + form + struct.pack("<4sI", b"data", size)


def recordings(pace: float = 0.0, first_s: float = 0.0) -> Callable[[dict[str, Any]], Reply]:
    """Replies that are recordings, in pieces of 0.4 s: the first after `first_s`, each after `pace` of its length."""
    files = clip_files()

    def reply(body: dict[str, Any]) -> Reply:
        path = files.get(plain(body["input"]))
        if path is None:
            said = json.dumps({"error": {"message": f"no recording of {body['input']!r}"}})
            return Reply([(0, said.encode())], 400, "application/json", sized=True)
        samples, size = pcm(path), 2 * round(PIECE_S * RATE_HZ)
        kind = f"audio/{body['response_format']}"
        streamed = body.get("stream", False)
        front = b"" if kind == "audio/pcm" else header() if streamed else header(len(samples))
        if not streamed:
            return Reply([(first_s, front + samples)], kind=kind, sized=True)
        cut = [samples[place : place + size] for place in range(0, len(samples), size)]
        pieces = [(first_s + pace * PIECE_S if not n else pace * PIECE_S, piece) for n, piece in enumerate(cut)]
        return Reply([*([(0.0, front)] if front else []), *pieces], kind=kind)

    return reply


def samples_of(content: bytes) -> np.ndarray[Any, Any]:
    """Those of a WAV file, int16."""
    with wave.open(BytesIO(content)) as audio:
        return np.frombuffer(audio.readframes(audio.getnframes()), dtype="<i2")


@dataclass
class SpeechServer:
    """`reply` makes the answer to the JSON of each request; `received` has them all, in order of arrival."""

    reply: Callable[[dict[str, Any]], Reply] = field(default_factory=recordings)
    voices: tuple[str, ...] | None = (VOICE,)
    port: int = 0
    received: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    max_in_flight: int = 0

    def __enter__(self) -> Self:
        self.lock, self.in_flight = threading.Lock(), 0
        self._server = _Server(("127.0.0.1", self.port), self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], speech: SpeechServer) -> None:
        super().__init__(address, _Handler)
        self.speech = speech


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        speech = self.server.speech
        known: dict[str, Any] = {"/v1/models": {"data": [{"id": MODEL}]}, "/version": {"version": "0.0.stand-in"}}
        if speech.voices is not None:
            known["/v1/audio/voices"] = {"voices": list(speech.voices)}
        found = known.get(self.path)
        body = json.dumps(found or {"detail": "Not Found"}).encode()
        self._send(Reply([(0, body)], 200 if found else 404, "application/json", sized=True))

    def do_POST(self) -> None:
        speech = self.server.speech
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with speech.lock:
            speech.received.append(body)
            speech.keys.append(self.headers["Authorization"])
            speech.in_flight += 1
            speech.max_in_flight = max(speech.max_in_flight, speech.in_flight)
        try:
            self._send(speech.reply(body) if self.path == "/v1/audio/speech" else Reply([], 404, sized=True))
        finally:
            with speech.lock:
                speech.in_flight -= 1

    def _send(self, reply: Reply) -> None:
        """Headers go out with the first piece, as vLLM-Omni's do."""
        head = [("Content-Type", reply.kind), *reply.headers]
        size = sum(len(piece) for _, piece in reply.pieces) + (100 if reply.drop else 0)
        head.append(("Content-Length", str(size)) if reply.sized else ("Transfer-Encoding", "chunked"))
        for number, (pause_s, piece) in enumerate(reply.pieces or [(0, b"")]):
            time.sleep(pause_s)
            if not number:
                self.send_response(reply.status)
                for name, value in head:
                    self.send_header(name, value)
                self.end_headers()
            if piece:
                self.wfile.write(piece if reply.sized else b"%x\r\n%s\r\n" % (len(piece), piece))
        if reply.drop:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif not reply.sized:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8099)
    flags = parser.parse_args()
    with SpeechServer(recordings(pace=0.1, first_s=0.05), port=flags.port) as server:
        print(f"{MODEL} at {server.url}", flush=True)
        threading.Event().wait()
