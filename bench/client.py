"""Send clips to an OpenAI-compatible transcription server and time the answers.

A request is complete only when the server answered 200 with a JSON object whose `text` is a string;
everything else is a failure with its reason, never an empty transcript.
"""

import json
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from bench import BenchError
from bench.dataset import Clip

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Row:
    """What became of one request: a line of requests.jsonl.

    `start` and `end` are unix seconds; `status` is null when no answer came; `text` and `latency_ms` are null
    unless the request completed, and then `error` is null. `part` counts the invocations of a run: 1, and one
    more for every --resume that sent something.

    `load` is the level of load: "c16" for so many requests in flight, "r2.5" for Poisson arrivals of so many a
    second, of which `due` is the intended start. With --stream or --realtime, `first_text_ms` and `deltas_ms` are
    the arrivals of the first and of all pieces of text; `words_ms` is each recognised word's delay after its end.
    """

    id: str
    duration_s: float
    part: int
    start: float
    end: float
    latency_ms: float | None
    status: int | None
    text: str | None
    reference: str
    error: str | None
    load: str = "c1"
    due: float | None = None
    first_text_ms: float | None = None
    deltas_ms: list[float] | None = None
    words_ms: list[float] | None = None


def clean_url(url: str) -> str:
    """Return the server's root URL, without a trailing slash or /v1."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no number for a port, or an open bracket
        good = False
    if not good:
        raise BenchError(f"--url {url!r} must look like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise BenchError("--url is written to the results, so it must hold no password: use --api-key-env")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Client:
    """Talks to one server. Usable from many threads: each has a session, and so a connection, of its own.

    `timeout_s` bounds the time to connect and each wait for the server's next byte, not the whole request.
    """

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        self.model = ""
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._threads = threading.local()
        # Unix times are counted from here by the monotonic clock: a clock step cannot bend a run's length.
        self._epoch = time.time() - time.perf_counter()

    def get(self, path: str) -> Any:
        """The JSON answer of a GET, null if it is none. Raises BenchError if nobody answers at all."""
        try:
            return self._session().get(self.url + path, timeout=self._timeout_s).json()
        except requests.JSONDecodeError:
            return None
        except requests.RequestException as error:
            raise self.hopeless(f"GET {path}: {type(error).__name__}: {error}") from None

    def hopeless(self, error: str) -> BenchError:
        """The error for a server with which no request can succeed."""
        return BenchError(
            f"cannot transcribe with {self.url}\n  {error}\n"
            f"Is it up? `curl {self.url}/v1/models` should answer. Check --url, --model and --api-key-env."
        )

    def transcribe(self, clip: Clip, part: int, **fields: str) -> Row:
        """Send one clip, with form fields beyond the usual, and wait for its transcript.

        The latency runs from the first byte sent until the answer's body is read. Reading the file and
        building the multipart body come before it.
        """
        status = text = error = None
        session = self._session()
        request = requests.Request(
            "POST",
            f"{self.url}/v1/audio/transcriptions",
            files={"file": (clip.path.name, clip.path.read_bytes())},
            data={"model": self.model, "response_format": "json", "temperature": "0", **fields},
        )
        prepared = session.prepare_request(request)
        # Session.send, unlike Session.request, leaves proxies and certificates of the environment out.
        # stream=True hands the status over before the body, so a cut body still has its status.
        settings = session.merge_environment_settings(self.url, {}, True, None, None)
        start = time.perf_counter()
        try:
            response = session.send(prepared, timeout=self._timeout_s, allow_redirects=False, **settings)
            status = response.status_code
            body = response.content
            end = time.perf_counter()
            text, error = _read(status, body)
        except requests.RequestException as problem:
            end = time.perf_counter()
            error = f"{type(problem).__name__} after {end - start:.3f} s: {problem}"
        return Row(
            id=clip.id,
            duration_s=clip.duration_s,
            part=part,
            start=self._epoch + start,
            end=self._epoch + end,
            latency_ms=round((end - start) * 1000, 3) if error is None else None,
            status=status,
            text=text,
            reference=clip.text,
            error=error,
        )

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            # A proxy of the environment would look for 127.0.0.1 on its own machine.
            self._threads.session.trust_env = urlsplit(self.url).hostname not in LOOPBACK
            # As `auth` rather than as a header, which would silently yield to an entry in ~/.netrc.
            self._threads.session.auth = self._authorize
        session: requests.Session = self._threads.session
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._api_key:
            request.headers["Authorization"] = f"Bearer {self._api_key}"
        return request


def _read(status: int, body: bytes) -> tuple[str | None, str | None]:
    """Return (transcript, null) or (null, what is wrong with the answer)."""
    shown = body[:300].decode(errors="replace")
    if status != 200:
        return None, f"HTTP {status}: {shown}"
    try:
        text = json.loads(body)["text"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None, f"HTTP 200, but the body is no JSON object with a 'text': {shown!r}"
    return (text, None) if isinstance(text, str) else (None, f"HTTP 200, but 'text' is no string: {shown!r}")
