"""Requests to a transcription server over HTTP, timed: an upload and its transcript, whole or streamed.

A request completes only with a valid and complete response: HTTP 200 and a JSON object whose `text` is a string, or a
stream to its end (sse.py). Anything else is a failure with a reason, never an empty transcript.

`until_answered` sends a request again after HTTP 429, 502, 503 or 504 and after a dropped connection, at most RETRIES
times, and never after another status.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

import requests
import urllib3

from . import sse
from .errors import MeasureError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
RESENT = (429, 502, 503, 504)
RETRIES = 7  # of one request, two minutes in all if the server does not say how long to wait
WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before the first retry without Retry-After, doubled each time; before any
BLOCK_BYTES = 1 << 16  # of a file, read at a time
SHOWN = 300  # bytes of a response in a message
DURATION = re.compile(r"dur=([0-9]{1,12}(?:\.[0-9]{1,12})?)")


def root(url: str, flag: str, instead: str) -> str:
    """The server's root URL, without a trailing slash or /v1.

    Raises MeasureError, which names the `flag`, for a URL that is not valid, and for one with a password: `instead`
    says why it must not have one, and what to use.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number, or a bracket is not closed
        good = False
    if not good:
        raise MeasureError(f"{flag} {url!r} must look like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise MeasureError(f"{flag} {instead}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


# ---- What came of a request


@dataclass
class Attempt:
    """The outcome of a request. Times are in seconds on the clock of time.perf_counter.

    start, end   from the first byte sent until the response's body was read; `start` is that of the first of `sends`
    status       the HTTP status; None without a response
    error        why the request did not complete; None if it did
    problem      the error of the connection, if there was one
    retry_after  the response's Retry-After, or empty, if the request may succeed later; None if not
    """

    start: float = 0.0
    end: float = 0.0
    status: int | None = None
    error: str | None = None
    problem: Exception | None = None
    sends: int = 1
    retry_after: str | None = None


@dataclass
class Answer(Attempt):
    """The response to a request.

    reason  the phrase of the status
    body    of a response that is no stream
    kind    its Content-Type
    text    the transcript; None unless the request completed
    pieces  (arrival, text) of each piece of text that is not empty; None where the transcript came whole
    stages  milliseconds of each part of the server's work, as its header Server-Timing says; None without one
    ignored  the request's fields without effect, as the guard's header x-voxtral-ignored names them
    """

    reason: str = ""
    body: bytes = b""
    kind: str = "none"
    text: str | None = None
    pieces: list[tuple[float, str]] | None = None
    stages: dict[str, float] | None = None
    ignored: tuple[str, ...] = ()


Sent = TypeVar("Sent", bound=Attempt)


def until_answered(once: Callable[[bool], Sent], pause: Callable[[float], object] = time.sleep) -> Sent:
    """Send a request with `once` until it need not be sent again, at most 1 + RETRIES times. Returns the last attempt.

    `once` is told whether it is the first time. `pause` waits for so many seconds, and may raise to give up.
    """
    start = None
    for number in range(RETRIES + 1):
        attempt = once(number == 0)
        start = attempt.start if start is None else start
        attempt.start, attempt.sends = start, number + 1
        if attempt.retry_after is None or number == RETRIES:
            break
        pause(wait_s(attempt.retry_after, number))
    return attempt


def wait_s(told: str, retries: int) -> float:
    """Seconds before a request is sent again after so many retries; `told` is the answer's Retry-After, or empty."""
    first_s = float(told) if re.fullmatch(r"[0-9]{1,6}", told) else WAIT_S
    return min(first_s * 2**retries, LONGEST_WAIT_S)


# ---- The server


class Bearer(requests.auth.AuthBase):
    """A key as `auth`, because an entry in ~/.netrc would silently replace a header. None for no key."""

    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request


class Server:
    """A server at the root URL `url`. Thread-safe: each thread has its own session and connection.

    `timeout_s` bounds the time to connect and each wait for the server's next byte, not the whole request; a pair
    bounds them separately. `proxied` is whether a proxy of the environment is used.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float | tuple[float, float]) -> None:
        self.url, self.key, self.timeout_s = url, key, timeout_s
        # A proxy must not be used for a server on this machine: its 127.0.0.1 is another machine.
        self.proxied = urlsplit(url).hostname not in LOOPBACK
        self._threads = threading.local()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str, timeout_s: float) -> requests.Response:
        """Raises requests.RequestException."""
        return self._session().get(self.url + path, timeout=timeout_s, allow_redirects=False)

    def transcription(
        self, name: str, content: bytes | BinaryIO, fields: Sequence[tuple[str, str]]
    ) -> requests.Request:
        """A request for the transcript of one file, which is read while it is sent if it is open."""
        part = urllib3.fields.RequestField("file", b"", filename=name)
        part.make_multipart()
        url = f"{self.url}/v1/audio/transcriptions"
        if isinstance(content, bytes):
            part.data = content
            body, kind = urllib3.encode_multipart_formdata([*fields, part])
            return requests.Request("POST", url, data=body, headers={"Content-Type": kind})
        upload = FileUpload(content, part, fields)
        return requests.Request("POST", url, data=upload, headers={"Content-Type": upload.kind})

    def transcribe(
        self, request: requests.Request, streamed: bool = False, chat: bool = False, due: float | None = None
    ) -> Answer:
        """Send a request for a transcript once. Building the request is not in its time.

        `streamed` says that the answer is to be a stream, and `chat` that it is one of /v1/chat/completions. With
        `due`, a time of time.perf_counter, the request waits for that. Raises OSError for a file that cannot be opened.
        """
        answer = Answer()

        def take(response: requests.Response) -> None:
            answer.kind, answer.reason = response.headers.get("Content-Type", "none"), response.reason
            answer.stages = _stages(response.headers.get("Server-Timing", ""))
            names = response.headers.get("x-voxtral-ignored", "").split(",")
            answer.ignored = tuple(filter(None, map(str.strip, names)))
            if streamed and answer.status == 200 and answer.kind.startswith("text/event-stream"):
                answer.text, answer.pieces, answer.end = sse.read(response.raw.read1, chat)
                return
            answer.body = response.content
            answer.end = time.perf_counter()
            answer.text, answer.error = _read(response.status_code, answer.body, chat)
            if streamed and answer.status == 200:
                answer.text = None
                answer.error = (
                    f"HTTP 200, but the Content-Type is {answer.kind} instead of text/event-stream: "
                    f"{shown(answer.body)!r}"
                )

        self.exchange(request, answer, take, due)
        return answer

    def ask(self, request: requests.Request, timeout_s: float) -> Answer:
        """Send any request once; the answer has no text, and no error with any status."""
        answer = Answer()

        def take(response: requests.Response) -> None:
            answer.kind, answer.reason = response.headers.get("Content-Type", "none"), response.reason
            answer.body, answer.end = response.content, time.perf_counter()

        self.exchange(request, answer, take, timeout_s=timeout_s)
        return answer

    def exchange(
        self,
        request: requests.Request,
        attempt: Attempt,
        take: Callable[[requests.Response], None],
        due: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a request, and fill in the attempt. `take` reads the response, and sets the attempt's `end`.

        A MeasureError that `take` raises is a response that is not complete.
        """
        session = self._session()
        prepared = session.prepare_request(request)
        # Session.send, unlike Session.request, ignores proxies and certificates of the environment.
        # stream=True returns the status before the body, so that a truncated body still has its status.
        settings = session.merge_environment_settings(self.url, {}, True, None, None)
        wait_until(due)
        attempt.start = time.perf_counter()
        try:
            timeout = timeout_s or self.timeout_s
            with session.send(prepared, timeout=timeout, allow_redirects=False, **settings) as response:
                attempt.status = response.status_code
                take(response)
            if attempt.status in RESENT:
                attempt.retry_after = response.headers.get("Retry-After", "")
        except MeasureError as problem:
            attempt.end = time.perf_counter()
            attempt.error = f"HTTP 200, but {problem}"
        # urllib3's own errors come only from streams: requests does not translate them when a body is read in pieces.
        except (requests.RequestException, urllib3.exceptions.HTTPError) as problem:
            attempt.end, attempt.problem = time.perf_counter(), problem
            attempt.error = f"{type(problem).__name__} after {attempt.end - attempt.start:.3f} s: {problem}"
            attempt.retry_after = "" if dropped(problem) else None

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            self._threads.session.trust_env = self.proxied
            self._threads.session.auth = Bearer(self.key)
        session: requests.Session = self._threads.session
        return session


class FileUpload:
    """A multipart request body with one file, read while it is sent. requests alone would read all of it first."""

    def __init__(self, file: BinaryIO, part: urllib3.fields.RequestField, fields: Sequence[tuple[str, str]]) -> None:
        """`part` is the file's field, without its content."""
        empty, self.kind = urllib3.encode_multipart_formdata([*fields, part])
        end = empty.rindex(b"\r\n--")  # where the file's content belongs
        self._parts = [empty[:end], empty[end:]]
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._length = len(empty) + self._left

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        yield self._parts[0]
        while self._left:
            block = self._file.read(min(self._left, BLOCK_BYTES))
            if not block:
                raise OSError("the file became shorter while it was read")
            self._left -= len(block)
            yield block
        yield self._parts[1]


# ---- Helpers


def wait_until(due: float | None) -> None:
    """Sleep until this time of time.perf_counter, if it is still to come."""
    if due is not None and (left := due - time.perf_counter()) > 0:
        time.sleep(left)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def dropped(error: BaseException) -> bool:
    """Whether an established connection ended before the response did."""
    kinds = (
        *(ConnectionError, requests.exceptions.ChunkedEncodingError),
        *(urllib3.exceptions.IncompleteRead, urllib3.exceptions.InvalidChunkLength),
    )
    causes = list(chain(error))
    return any(isinstance(cause, kinds) for cause in causes) and not any(
        isinstance(cause, ConnectionRefusedError) for cause in causes
    )


def shown(body: bytes) -> str:
    """The beginning of a body, for a message."""
    return body[:SHOWN].decode(errors="replace")


def _stages(header: str) -> dict[str, float] | None:
    """What Server-Timing has of durations, as in `decode;dur=2.5, speech;desc=beside;dur=3`."""
    stages: dict[str, float] = {}
    for stage in header.split(","):
        name, *more = map(str.strip, stage.split(";"))
        for each in more:
            if found := DURATION.fullmatch(each):
                stages[name] = float(found[1])
    return stages or None


def _read(status: int, body: bytes, chat: bool) -> tuple[str | None, str | None]:
    """(transcript, None) or (None, what is wrong with the response)."""
    said = shown(body)
    if status != 200:
        return None, f"HTTP {status}: {said}"
    where = "'choices[0].message.content'" if chat else "'text'"
    cut = False
    try:
        answer = json.loads(body)
        if chat:
            text = answer["choices"][0]["message"]["content"]
            cut = answer["choices"][0].get("finish_reason") == "length"
        else:
            text = answer["text"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, f"HTTP 200, but the body is not a JSON object with {where}: {said!r}"
    if cut:
        return None, f"HTTP 200, but the text was cut off at max_tokens: {said!r}"
    return (text, None) if isinstance(text, str) else (None, f"HTTP 200, but {where} is not a string: {said!r}")
