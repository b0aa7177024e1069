"""The server under proof, and uploads to it. An upload is sent once: a refusal is an answer, too."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import requests

from voxtral_serve.client.errors import RequestError
from voxtral_serve.client.server import CONNECT_S, Server, said
from voxtral_serve.client.sound import RATE_HZ
from voxtral_serve.prove.clips import Clip

ANSWER_S = 600  # the longest wait for a part of an answer
TOKEN = 1280  # samples of audio for a token
RIGHT_PADDING = 17  # tokens behind a clip at the published delay of 480 ms
DELTA, DONE = "transcript.text.delta", "transcript.text.done"
ROLLOVERS = "voxtral_serve_live_rollovers_total"


class Answer(NamedTuple):
    """Of one upload. `text` is the transcript of a 200, else the error's message.

    seconds  from the beginning of the request to its end
    first_s  to the first delta of a stream; None for others
    """

    status: int
    text: str
    seconds: float
    first_s: float | None = None


@dataclass(frozen=True)
class Upload:
    """What to send as a file, and the form's other fields."""

    content: bytes
    name: str = "clip.wav"
    fields: tuple[tuple[str, str], ...] = ()
    key: str | None = None  # in place of the target's


class Target:
    """A server that is up. Thread-safe.

    about      what its `GET /v1/server` says; None for a server without the guard
    model      the first that it lists
    context_s  seconds of audio that one request takes, padding included; None if it does not say
    """

    def __init__(self, url: str, key: str | None, capped: bool = False) -> None:
        """`capped` limits a transcript's tokens to the clip's: random weights may not end by themselves. Raises
        RequestError if the server lists no model."""
        self.server = Server(url, key)
        self.key, self.capped = key, capped
        self._threads = threading.local()
        self.model = self.server.model()
        listed = self._get("/v1/models") or {}
        longest = next((each.get("max_model_len") for each in listed.get("data", [])), None)
        self.context_s = longest * TOKEN / RATE_HZ if isinstance(longest, int) else None
        self.about = self._get("/v1/server")
        self.version = (self._get("/version") or {}).get("version")

    @property
    def is_local(self) -> bool:
        return not self.server.proxied

    def limit(self, name: str) -> Any:
        """One of the limits that the server names, None if it does not."""
        return (self.about or {}).get("limits", {}).get(name)

    def rollovers(self) -> int | None:
        """Times that live sessions went over to another request, since the server's start; None if it does not say."""
        try:
            lines = self._session().get(f"{self.server.url}/metrics", timeout=CONNECT_S).text.splitlines()
        except requests.RequestException:
            return None
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(ROLLOVERS)]
        return round(sum(found)) if found else None

    def clip(self, clip: Clip, stream: bool = False) -> Upload:
        fields = [("stream", "true")] if stream else []
        if self.capped:
            tokens = -(-len(clip.samples) // TOKEN) + RIGHT_PADDING
            fields.append(("max_completion_tokens", str(tokens)))
        return Upload(clip.wav, fields=tuple(fields))

    def send(self, upload: Upload) -> Answer:
        """Raises RequestError if there is no answer, or a 200 without a transcript."""
        fields = dict((("model", self.model), *upload.fields))
        key = upload.key or self.key
        started = time.perf_counter()
        try:
            with self._session().post(
                f"{self.server.url}/v1/audio/transcriptions",
                files={"file": (upload.name, upload.content)},
                data=fields,
                auth=_Bearer(key),
                stream=True,
                timeout=(CONNECT_S, ANSWER_S),
                allow_redirects=False,
            ) as response:
                first_s = None
                if response.status_code != 200:
                    text = said(response.content)
                elif "stream" in fields:
                    text, first_s = _streamed(response, started)
                else:
                    text = str(response.json()["text"])
        except (ValueError, LookupError, TypeError) as error:  # requests' JSONDecodeError is a ValueError, too
            raise RequestError(f"an upload's answer is no transcript: {type(error).__name__} {error}", 200) from None
        except requests.RequestException as error:
            raise RequestError(f"an upload has no answer: {type(error).__name__}") from None
        return Answer(response.status_code, text.strip(), time.perf_counter() - started, first_s)

    def send_all(self, uploads: Sequence[Upload], in_flight: int) -> list[Answer]:
        """Answers in the order of the uploads. Raises as `send`, and RequestError for a status other than 200."""
        with threads(in_flight) as pool:
            answers = list(pool.map(self.send, uploads))
        for answer in answers:
            if answer.status != 200:
                raise RequestError(f"{answer.status}: {answer.text}", answer.status)
        return answers

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            self._threads.session.trust_env = self.server.proxied
        session: requests.Session = self._threads.session
        return session

    def _get(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path; None for any other answer."""
        try:
            response = self._session().get(
                self.server.url + path, auth=_Bearer(self.key), timeout=CONNECT_S, allow_redirects=False
            )
            found = response.json()
        except (requests.RequestException, ValueError):
            return None
        return found if response.status_code == 200 and isinstance(found, dict) else None


@contextlib.contextmanager
def threads(most: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that is not waited for at an error or Ctrl-C: a server may never answer."""
    pool = ThreadPoolExecutor(most)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Bearer(requests.auth.AuthBase):
    """As `auth`, because an entry in ~/.netrc would replace a header."""

    def __init__(self, key: str | None) -> None:
        self.key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request


def _streamed(response: requests.Response, started: float) -> tuple[str, float | None]:
    """The text of OpenAI's events, and when the first of it came. Raises ValueError without `transcript.text.done`."""
    first_s, text = None, None
    for event in _events(response):
        if event.get("type") == DELTA and event.get("delta", "").strip() and first_s is None:
            first_s = time.perf_counter() - started
        elif event.get("type") == DONE:
            text = str(event["text"])
    if text is None:
        raise ValueError(f"a stream without {DONE}")
    return text, first_s


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
