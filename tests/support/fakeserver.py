"""A transcription server that misbehaves on demand, for tests of its clients. Standard library only.

with FakeServer({"a.wav": Answer("hello"), "b.wav": Answer(status=500)}) as server:
    requests.post(server.url + "/v1/audio/transcriptions", ...)
assert server.sent() == ["a.wav"]
"""

import base64
import hashlib
import json
import socket
import struct
import threading
import time
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MODEL = "fake-voxtral"


def write_dataset(directory: Path, texts: Mapping[str, str], seconds: float = 0.05) -> Path:
    """Make a dataset of silent WAV files, one per id and reference; the n-th (from 1) lasts n * `seconds`."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (clip, text) in enumerate(texts.items(), 1):
        path = directory / f"{clip}.wav"
        with wave.open(str(path), "wb") as audio:
            audio.setnchannels(1)
            audio.setsampwidth(2)
            audio.setframerate(8000)
            audio.writeframes(bytes(2 * round(8000 * seconds * number)))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        entry = {"path": path.name, "text": text, "duration": round(seconds * number, 6), "sha256": digest}
        lines.append(json.dumps(entry) + "\n")
    (directory / "manifest.jsonl").write_text("".join(lines), encoding="utf-8")
    return directory


@dataclass(frozen=True)
class Answer:
    """How one file is answered; of several answers each is for one request, and the last for all that follow.

    `body` replaces the JSON; `drop` breaks the connection "before" the status line or "inside" the body. `events` is a
    stream in its place: pieces of it, each sent after so many seconds, in chunks unless the connection's end is theirs.
    With `together`, an answer waits until as many requests wait as the barrier has parties.
    """

    text: str = ""
    status: int = 200
    delay_s: float = 0.0
    body: bytes | None = None
    drop: str | None = None
    events: tuple[tuple[float, bytes], ...] | None = None
    chunked: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    together: threading.Barrier | None = None


@dataclass
class Received:
    """One transcription request, with times on the monotonic clock; `end` is 0 while it is in flight.

    `fields` are those of the form; of a chat they are the JSON, and `name` and `size` are of the data: URL.
    """

    name: str
    fields: dict[str, Any]
    authorization: str | None
    size: int
    start: float
    end: float = 0.0


@dataclass
class FakeServer:
    """Answers by file name; files without an answer get `default`."""

    answers: Mapping[str, Answer | list[Answer]] = field(default_factory=dict)
    default: Answer = field(default_factory=Answer)
    version: str | None = "0.0.fake"
    models: tuple[str, ...] | None = (MODEL,)
    metrics: Callable[[], str] | None = None
    is_guarded: bool = True
    received: list[Received] = field(default_factory=list)
    max_in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sent(self) -> list[str]:
        """The file names received so far, in order of arrival."""
        with self._lock:
            return [received.name for received in self.received]

    def answer(self, name: str) -> Answer:
        answers = self.answers.get(name, self.default)
        if isinstance(answers, Answer):
            return answers
        with self._lock:
            return answers.pop(0) if len(answers) > 1 else answers[0]

    def begin(self, received: Received) -> None:
        with self._lock:
            self.received.append(received)
            self.max_in_flight = max(self.max_in_flight, sum(not each.end for each in self.received))

    def finish(self, received: Received) -> None:
        with self._lock:
            received.end = time.monotonic()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a handler may still sleep out its delay
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], fake: FakeServer) -> None:
        super().__init__(address, _Handler)
        self.fake = fake

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay quiet about clients that left: tests kill them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections, as real servers do
    disable_nagle_algorithm = True  # or a body sent after its headers waits 40 ms for their acknowledgement
    server: _Server

    def do_GET(self) -> None:
        fake = self.server.fake
        if self.path == "/v1/models" and fake.models is not None:
            self._send(200, json.dumps({"data": [{"id": model} for model in fake.models]}).encode())
        elif self.path == "/version" and fake.version is not None:
            self._send(200, json.dumps({"version": fake.version}).encode())
        elif self.path == "/v1/server" and fake.is_guarded:
            self._send(200, b'{"object": "server"}')
        elif self.path == "/metrics" and fake.metrics is not None:
            self._send(200, fake.metrics().encode())
        else:
            self._send(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        received = Received("", {}, self.headers["Authorization"], 0, time.monotonic())
        chat = self.path == "/v1/chat/completions"
        if chat:
            received.fields = json.loads(body)
            url = received.fields["messages"][0]["content"][0]["audio_url"]["url"]
            received.name, _, content = url.partition(",")
            received.size = len(base64.b64decode(content))
        else:
            self._form(body, received)
        fake = self.server.fake
        answer = fake.answer(received.name)
        fake.begin(received)
        try:
            if not chat and self.path != "/v1/audio/transcriptions":
                answer = Answer(status=404)
            time.sleep(answer.delay_s)
            if answer.together:
                answer.together.wait(60)
            payload = answer.body
            if payload is None:
                message = {"choices": [{"message": {"content": answer.text}, "finish_reason": "stop"}]}
                said = message if chat else {"text": answer.text}
                said = said if answer.status == 200 else {"error": "made to fail"}
                payload = json.dumps(said).encode()
        finally:
            fake.finish(received)
        if answer.drop == "before":
            self._reset()
        elif answer.events is not None:
            self._stream(answer)
        else:
            self._send(answer.status, payload, len(payload) + (100 if answer.drop else 0), answer.headers)
            if answer.drop:
                self._reset()

    def _form(self, body: bytes, received: Received) -> None:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        for part in BytesParser(policy=HTTP).parsebytes(head + body).iter_parts():
            content: Any = part.get_payload(decode=True)
            if name := part.get_filename():
                received.name, received.size = name, len(content)
            else:
                received.fields[str(part.get_param("name", header="content-disposition"))] = content.decode()

    def _stream(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header(*(("Transfer-Encoding", "chunked") if answer.chunked else ("Connection", "close")))
        self.end_headers()
        for pause_s, piece in answer.events or ():
            time.sleep(pause_s)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if answer.chunked else piece)
        if answer.drop:
            self._reset()
        elif answer.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _send(
        self, status: int, body: bytes, promised: int | None = None, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **dict(headers)}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if promised is None else promised))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        """Close without a goodbye: a zero linger time makes the kernel send RST."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: pytest shows the server's record instead."""
