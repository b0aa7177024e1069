"""`voxtral-serve transcribe --live`: a microphone, or a file at the pace of speech, over a server's /v1/realtime.

One thread records, one sends, and the main thread receives. Audio that no text has answered stays on the tape: when the
connection is lost or the server is busy, it is sent again on another connection.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from voxtral_serve.client.captions import Captions
from voxtral_serve.client.dialects import (
    FAILED,
    Dialect,
    Event,
    OpenAIDialect,
    VllmDialect,
    code,
    harmless,
    is_openais,
    message,
    retry_after,
)
from voxtral_serve.client.errors import RequestError, UsageError, report_end
from voxtral_serve.client.jobs import LiveJob
from voxtral_serve.client.server import CONNECT_S, Server, api_key, said
from voxtral_serve.client.sound import POLL_S, microphone, spoken
from voxtral_serve.client.tape import Tape
from voxtral_serve.measure import events
from voxtral_serve.measure.events import PATH
from voxtral_serve.measure.sound import RATE_HZ
from voxtral_serve.measure.upload import RESENT, RETRIES, wait_s

PING_TIMEOUT_S = 60  # a busy server on a CPU may leave a ping unanswered for long
KEPT_S = 600  # seconds of audio without text that are kept for another connection
# What another connection may not meet: codes of error events of this project's server, and close codes (RFC 6455).
PASSING = (
    "too_many_sessions",
    "rate_limit_exceeded",
    "idle_timeout",
    "session_expired",
    "unread",
    "engine_stalled",
    "engine_dead",
)
RESTART, LATER = 1012, 1013


class CutError(Exception):
    """The connection is lost, or the server is busy. `retry_after` is the server's, or empty."""

    def __init__(self, why: str, retry_after: str = "") -> None:
        super().__init__(why)
        self.retry_after = retry_after


def run(job: LiveJob) -> int:
    """Exit status: 0 for a whole text, after Ctrl-C as well; 1 for an error; 2 for audio that cannot be used."""
    ending = threading.Event()
    try:
        server = Server(job.url, api_key(os.environ))
        with Captions(job.out, job.path, job.form, job.again) as captions:
            pieces = spoken(job.path, ending) if job.path else microphone(ending)
            _Live(server, job, captions, pieces, ending).hold()
    except (UsageError, RequestError, KeyboardInterrupt) as error:
        return report_end(error)
    return 0


class _Live:
    """One recording, over as many connections as it takes."""

    def __init__(
        self, server: Server, job: LiveJob, captions: Captions, pieces: Iterator[bytes], ending: threading.Event
    ) -> None:
        """`ending` ends `pieces`."""
        self.server, self.job, self.captions, self.pieces, self.ending = server, job, captions, pieces, ending
        self.model = job.model or server.model()
        self.tape = Tape(KEPT_S * RATE_HZ)
        self.recorder: threading.Thread | None = None  # once there was a connection
        self.error: Exception | None = None  # that ended the recording

    def hold(self) -> None:
        """From the first connection to the final text. Raises RequestError, UsageError, and what `pieces` raises."""
        before = signal.getsignal(signal.SIGINT)
        attempt = 0
        try:
            while True:
                answered = self.tape.first
                try:
                    self._connection()
                    break
                except CutError as cut:
                    attempt = 0 if self.tape.first > answered else attempt
                    if attempt == RETRIES:
                        raise RequestError(str(cut)) from None
                    pause_s = wait_s(cut.retry_after, attempt)
                    if self.recorder:
                        print(f"voxtral-serve: {cut}; connecting again in {pause_s:.0f} s", file=sys.stderr)
                    time.sleep(pause_s)
                    attempt += 1
        finally:
            signal.signal(signal.SIGINT, before)
            self.ending.set()
        if self.error is not None:
            raise self.error
        if self.tape.lost:
            lost_s = self.tape.lost / RATE_HZ
            raise RequestError(f"{lost_s:.0f} s of audio are lost: the server was away for longer than {KEPT_S} s")

    def _connection(self) -> None:
        """One connection, to the final text. Raises CutError if another one may go on from there."""
        try:
            with connect(
                f"{events.address(self.server.url)}?intent=transcription",
                additional_headers=self.server.http.headers,
                compression=None,  # base64 of sound hardly shrinks
                open_timeout=CONNECT_S,
                close_timeout=1,
                ping_timeout=PING_TIMEOUT_S,
                proxy=True if self.server.http.proxied else None,
            ) as socket:
                self._talk(socket)
        except InvalidStatus as error:
            response = error.response
            told = said(bytes(response.body or b"")) or "does it serve profiles/fast.yaml or profiles/realtime.yaml?"
            problem = f"{response.status_code} instead of a WebSocket: {told}"
            if response.status_code in RESENT:
                raise CutError(problem, response.headers.get("Retry-After", "")) from None
            raise RequestError(problem) from None
        except ConnectionClosed as error:
            problem = f"the connection was closed before the text's end: {error}"
            if self.recorder or (error.rcvd and error.rcvd.code in (RESTART, LATER)):
                raise CutError(problem) from None
            raise RequestError(problem) from None
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            if isinstance(error, BrokenPipeError):  # the screen's
                raise
            problem = f"no WebSocket at {self.server.url}{PATH}: {error}"
            if self.recorder:
                raise CutError(problem) from None
            raise RequestError(problem) from None

    def _talk(self, socket: ClientConnection) -> None:
        """Send in a thread, receive in this one."""
        dialect = self._dialect(receive(socket))
        for event in dialect.opening():
            send(socket, event)
        self._begin()
        speaker = _Speaker(socket, self.tape, dialect)
        speaker.start()
        try:
            while not dialect.done:
                for each in dialect.take(receive(socket)):
                    if isinstance(each, str):
                        self.captions.delta(each)
                        continue
                    self.captions.turn(each)
                    if each.end is not None:
                        self.tape.answered(each.end)
        except ConnectionClosed:
            if not speaker.silent:
                raise
        finally:
            speaker.stop()
        if not speaker.ended:
            raise RequestError("the server ended the session before the audio's end: it may be longer than a session")

    def _dialect(self, created: Event) -> Dialect:
        """The server's. Raises UsageError if it cannot do what the job asks for."""
        if created["type"] != events.CREATED:
            raise RequestError(f"expected session.created, received {json.dumps(created)[:300]}")
        first = self.tape.rewind()
        if is_openais(created):
            if self.job.keywords and not self.server.prefers_words:
                raise UsageError("--keyword has no effect: this server's model does not prefer words")
            return OpenAIDialect(self.model, first, self.job.delay_ms, self.job.keywords)
        for option, given in (
            ("--format srt", self.job.form == "srt"),
            ("--delay", self.job.delay_ms is not None),
            ("--keyword", bool(self.job.keywords)),
        ):
            if given:
                raise UsageError(
                    f"{option} needs OpenAI's protocol, and this server speaks vLLM's own, which has no times and no "
                    "settings: serve profiles/fast.yaml or profiles/realtime.yaml"
                )
        return VllmDialect(self.model, first)

    def _begin(self) -> None:
        """With the first connection, start to record; the first Ctrl-C ends the audio, a second one the command."""
        if self.recorder:
            kept_s = (self.tape.end - self.tape.first) / RATE_HZ
            print(f"voxtral-serve: connected again, with {kept_s:.0f} s of audio to send", file=sys.stderr)
            self.captions.again()
            return

        def end(number: int, frame: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.ending.set()

        self.captions.begin()
        signal.signal(signal.SIGINT, end)
        self.recorder = threading.Thread(target=self._record, daemon=True)
        self.recorder.start()
        if not self.job.path:
            print("Listening. Ctrl-C ends.", file=sys.stderr)

    def _record(self) -> None:
        try:
            for piece in self.pieces:
                self.tape.record(piece)
        except Exception as error:  # raised by `hold`, once the text of the audio before it has come
            self.error = error
        finally:
            self.tape.finish()


class _Speaker(threading.Thread):
    """Sends what is on the tape, and then that this was all, or closes the connection if there was none.

    `ended` and `silent` say so.
    """

    def __init__(self, socket: ClientConnection, tape: Tape, dialect: Dialect) -> None:
        super().__init__(daemon=True)
        self.socket, self.tape, self.dialect = socket, tape, dialect
        self.ended = self.silent = False
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            while (piece := self.tape.take(self.stopping)) is not None:
                self.socket.send(events.append(piece))
            if self.stopping.is_set():
                return
            self.ended, self.silent = True, not self.tape.end
            if self.silent:
                self.socket.close()
                return
            for event in self.dialect.closing():
                send(self.socket, event)
        except ConnectionClosed:  # the other thread sees it, too
            pass

    def stop(self) -> None:
        self.stopping.set()
        self.tape.wake()
        self.join(5 * POLL_S)


def receive(socket: ClientConnection) -> Event:
    """The next event. Raises RequestError for `error` and for what is no event, CutError for an error that may pass and
    for a turn that failed: its audio is kept."""
    text = socket.recv()
    event = events.read(text)
    kind = event and event.get("type")
    if event is None or kind is None:
        raise RequestError(f"a message of /v1/realtime is no event: {text[:300]!r}")
    if kind in (events.ERROR, FAILED) and not harmless(event):
        problem = f"the server says: {message(event)}"
        if kind == FAILED or code(event) in PASSING:
            raise CutError(problem, retry_after(event))
        raise RequestError(problem)
    return event


def send(socket: ClientConnection, event: Event) -> None:
    socket.send(json.dumps(event))
