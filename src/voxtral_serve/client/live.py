"""`voxtral-serve transcribe --live`: a microphone, or a file at the pace of speech, over vLLM's /v1/realtime.

The session: session.created by the server; session.update with the model, input_audio_buffer.commit to begin, then
input_audio_buffer.append with base64 of PCM16 at 16 kHz, and a commit that is `final`; transcription.delta whenever a
token came, transcription.done at the end, or error. A delta is never taken back, so it is printed as it comes.
"""

import base64
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from voxtral_serve.client.errors import RequestError, UsageError, report_end
from voxtral_serve.client.jobs import LiveJob
from voxtral_serve.client.server import CONNECT_S, RESENT, RETRIES, Server, api_key, said, wait_s
from voxtral_serve.client.sound import POLL_S, microphone, spoken

PING_TIMEOUT_S = 60  # a busy server on a CPU may leave a ping unanswered for long


def run(job: LiveJob) -> int:
    """Exit status: 0 for a whole text, after Ctrl-C as well; 1 for an error; 2 for audio that cannot be used."""
    ending = threading.Event()
    try:
        server = Server(job.url, api_key(os.environ))
        pieces = spoken(job.path, ending) if job.path else microphone(ending)
        hold(server, job.model or server.model(), pieces, ending, listens=not job.path)
    except (UsageError, RequestError, KeyboardInterrupt) as error:
        return report_end(error)
    return 0


def hold(server: Server, model: str, pieces: Iterator[bytes], ending: threading.Event, *, listens: bool) -> None:
    """One session, from its beginning to the final text. Raises RequestError, and what `pieces` raises."""
    printer = _Printer()
    try:
        with _connected(server) as socket:
            if (created := receive(socket))["type"] != "session.created":
                raise RequestError(f"expected session.created, received {json.dumps(created)[:300]}")
            send(socket, "session.update", model=model)
            send(socket, "input_audio_buffer.commit")
            if listens:
                print("Listening. Ctrl-C ends.", file=sys.stderr)
            _talk(socket, pieces, ending, printer)
    except InvalidStatus as error:
        response = error.response
        told = said(bytes(response.body or b"")) or "does it serve profiles/fast.yaml or profiles/realtime.yaml?"
        raise RequestError(f"{response.status_code} instead of a WebSocket: {told}") from None
    except ConnectionClosed as error:
        raise RequestError(f"the connection was closed before the text's end: {error}") from None
    except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
        if isinstance(error, BrokenPipeError):
            raise
        raise RequestError(f"no WebSocket at {server.url}/v1/realtime: {error}") from None
    finally:
        printer.end()


def _connected(server: Server) -> ClientConnection:
    """A WebSocket. While the server is busy it is asked again, as for a file."""
    for attempt in itertools.count():
        try:
            # Base64 of sound hardly shrinks.
            return connect(
                "ws" + server.url.removeprefix("http") + "/v1/realtime",
                additional_headers=server.headers,
                compression=None,
                open_timeout=CONNECT_S,
                close_timeout=1,
                ping_timeout=PING_TIMEOUT_S,
                proxy=True if server.proxied else None,
            )
        except InvalidStatus as error:
            if error.response.status_code not in RESENT or attempt == RETRIES:
                raise
            time.sleep(wait_s(error.response.headers.get("Retry-After", ""), attempt))
    raise AssertionError


def _talk(socket: ClientConnection, pieces: Iterator[bytes], ending: threading.Event, printer: "_Printer") -> None:
    """Send in a thread, print in this one. The first Ctrl-C ends the audio, a second one the command."""
    speaker = _Speaker(socket, pieces)

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ending.set()

    before = signal.signal(signal.SIGINT, end)
    try:
        speaker.start()
        while (event := receive(socket))["type"] != "transcription.done":
            if event["type"] == "transcription.delta":
                printer.show(str(event.get("delta", "")))
    except ConnectionClosed:
        if not speaker.silent:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
        whole = speaker.ended
        ending.set()
        speaker.join(5 * POLL_S)
    if speaker.error is not None:
        raise speaker.error
    if not whole:
        raise RequestError("the server ended the session before the audio's end: it may be longer than a session")


class _Speaker(threading.Thread):
    """Sends the audio as it comes, and then that this was all, or closes the session if there was none.

    `ended` and `silent` say so; `error` is what kept it from the rest of the audio.
    """

    def __init__(self, socket: ClientConnection, pieces: Iterator[bytes]) -> None:
        super().__init__(daemon=True)
        self.socket, self.pieces = socket, pieces
        self.error: Exception | None = None
        self.ended = self.silent = False

    def run(self) -> None:
        sent = 0
        try:
            for piece in self.pieces:
                send(self.socket, "input_audio_buffer.append", audio=base64.b64encode(piece).decode())
                sent += 1
        except ConnectionClosed:
            return  # the other thread sees it, too
        except Exception as error:  # that the other thread raises, instead of waiting for ever
            self.error = error
        self.ended, self.silent = True, not sent
        with contextlib.suppress(ConnectionClosed):
            if sent:
                send(self.socket, "input_audio_buffer.commit", final=True)
            else:
                self.socket.close()


class _Printer:
    """Words on stdout as they come, in one line."""

    def __init__(self) -> None:
        self.begun = False

    def show(self, text: str) -> None:
        text = text if self.begun else text.lstrip()
        if text:
            self.begun = True
            print(text, end="", flush=True)

    def end(self) -> None:
        if self.begun:
            print(flush=True)


def receive(socket: ClientConnection) -> dict[str, Any]:
    """The next event. Raises RequestError for `error`, and for what is no event."""
    message = socket.recv()
    try:
        event: dict[str, Any] = json.loads(message)
        kind = event["type"]
        problem = event["error"] if kind == "error" else None
    except (ValueError, LookupError, TypeError):
        raise RequestError(f"a message of /v1/realtime is no event: {message[:300]!r}") from None
    if problem is not None:
        raise RequestError(f"the server says: {' '.join(str(problem).split())}")
    return event


def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))
