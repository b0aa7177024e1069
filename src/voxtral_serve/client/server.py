"""A transcription server over HTTP: its model, its transcripts; a request that may succeed later is sent again."""

import contextlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import requests
import urllib3

from voxtral_serve.client.errors import GoneError, RequestError, StoppedError, UsageError
from voxtral_serve.client.text import plain, shown

LOOPBACK = ("localhost", "127.0.0.1", "::1")
RESENT = (429, 502, 503, 504)  # statuses after which a request is sent again; so is one whose connection was dropped
RETRIES = 7  # of one request, two minutes in all if the server does not say how long to wait
WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before the first retry, if the server does not say; before any
CONNECT_S = 10
ANSWER_S = 3600  # an hour of audio takes a small machine many minutes, and no byte comes before the end
BLOCK_BYTES = 1 << 16  # of an upload, read at a time
ERROR_BYTES = 1 << 20  # of an answer, searched for an error's message
SHOWN = 300  # characters of an answer that is not an error in OpenAI's form


def api_key(environ: Mapping[str, str]) -> str | None:
    """The key in OPENAI_API_KEY, None if there is none. Raises UsageError, which does not show the key."""
    key = environ.get("OPENAI_API_KEY", "").strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise UsageError("OPENAI_API_KEY contains a space or another invalid character")
    return key or None


def root(url: str) -> str:
    """The server's root URL, without a trailing slash or /v1. Raises UsageError for one that is not valid."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # no number for a port, or an open bracket
        good = False
    if not good:
        raise UsageError(f"--url {url!r} must look like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError(
            "--url must not contain a password, which other users can see in the list of processes: use OPENAI_API_KEY"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Upload:
    """A multipart request body with one file, read while it is sent. requests alone would read all of it first."""

    def __init__(self, file: BinaryIO, name: str, fields: Sequence[tuple[str, str]]) -> None:
        empty, self.content_type = urllib3.encode_multipart_formdata([*fields, ("file", (name, b""))])
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


class Server:
    """A transcription server. Thread-safe: each thread has its own session and connection.

    All methods raise RequestError, and StoppedError once `stop` is set.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = root(url)
        self.stop = threading.Event()
        # A proxy must not be used for a server on this machine: its 127.0.0.1 is another machine.
        self.proxied = urlsplit(self.url).hostname not in LOOPBACK
        self._key = key
        self._threads = threading.local()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def model(self) -> str:
        """The first model that the server lists."""

        def send() -> requests.Response:
            return self._session().get(f"{self.url}/v1/models", timeout=CONNECT_S, allow_redirects=False)

        response = self._answer(send)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RequestError(f"{self.url}/v1/models lists no model: {_start(response)}: use --model") from None

    def transcribe(self, path: Path, model: str, form: str, language: str | None, times: Sequence[str] = ()) -> bytes:
        """The file's transcript in the format `form`. `times` are "word" and "segment", for verbose_json."""
        # `text` is taken from `json`: stock vLLM returns JSON for both.
        fields = [("model", model), ("response_format", "json" if form == "text" else form)]
        if language:
            fields.append(("language", language))
        fields += [("timestamp_granularities[]", each) for each in times]

        def send() -> requests.Response:
            with path.open("rb") as file:
                upload = Upload(file, shown(Path(path.name)), fields)
                return self._session().post(
                    f"{self.url}/v1/audio/transcriptions",
                    data=upload,
                    headers={"Content-Type": upload.content_type},
                    timeout=(CONNECT_S, ANSWER_S),
                    allow_redirects=False,
                )

        response = self._answer(send)
        told_json = response.headers.get("Content-Type", "").startswith("application/json")
        if form in ("srt", "vtt"):
            if told_json:
                raise RequestError(f"200, but JSON instead of {form}: {_start(response)}")
            return response.content
        try:
            text = response.json()["text"]
        except (ValueError, LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RequestError(f"200, but not a JSON object with 'text': {_start(response)}")
        return f"{text.strip()}\n".encode() if form == "text" else response.content

    def _answer(self, send: Callable[[], requests.Response]) -> requests.Response:
        """The response with status 200. After a status in RESENT or a dropped connection, the request is sent again.
        The wait is the server's Retry-After, or WAIT_S, and doubles each time."""
        for attempt in itertools.count():
            told = ""
            try:
                response = send()
            except requests.RequestException as error:
                cause = _cause(error)
                if _unreached(error):
                    raise GoneError(f"cannot connect to {self.url}: {cause}") from None
                if not _dropped(error) or attempt == RETRIES:
                    raise RequestError(f"no response: {cause}") from None
            except OSError as error:
                raise RequestError(f"cannot be read: {error.strerror or error}") from None
            else:
                if response.status_code not in RESENT or attempt == RETRIES:
                    break
                told = response.headers.get("Retry-After", "")
            if self.stop.wait(wait_s(told, attempt)):
                raise StoppedError
        if response.status_code != 200:
            what = said(response.content) or response.reason
            raise RequestError(f"{response.status_code}: {what}", response.status_code)
        return response

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            self._threads.session.trust_env = self.proxied
            # As `auth`, because an entry in ~/.netrc would silently replace a header.
            self._threads.session.auth = self._authorize
        session: requests.Session = self._threads.session
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers.update(self.headers)
        return request


def wait_s(told: str, attempt: int) -> float:
    """Seconds before a request is sent again after `attempt` retries; `told` is the answer's Retry-After, or empty."""
    first_s = float(told) if re.fullmatch(r"[0-9]{1,6}", told) else WAIT_S
    return min(first_s * 2**attempt, LONGEST_WAIT_S)


def said(body: bytes) -> str:
    """One line from an answer: the message of an error in OpenAI's form, else the first characters."""
    text = body[:ERROR_BYTES].decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return plain(" ".join(str(json.loads(text)["error"]["message"]).split()))
    return plain(" ".join(text[:SHOWN].split()))


def _start(response: requests.Response) -> str:
    return repr(response.content[:SHOWN].decode(errors="replace"))


def _cause(error: BaseException) -> str:
    """The message of the innermost error."""
    *_, under = _chain(error)
    return getattr(under, "strerror", None) or str(under) or type(under).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unreached(error: requests.RequestException) -> bool:
    """Whether there was no connection to send anything over."""
    under = error.args[0] if error.args else None
    never = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
    return isinstance(error, requests.ConnectTimeout) or isinstance(getattr(under, "reason", None), never)


def _dropped(error: requests.RequestException) -> bool:
    """Whether the connection ended before the answer did. A file that cannot be read looks the same to `requests`."""
    kinds = (ConnectionError, requests.exceptions.ChunkedEncodingError)
    return any(isinstance(each, kinds) for each in _chain(error))
