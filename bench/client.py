"""Send clips to a transcription server and measure the responses: OpenAI's transcription endpoint, chat, or live audio.

A request completes only with a valid and complete response: HTTP 200 and a JSON object whose `text` is a string. For
streams see bench/stream.py, for live audio bench/realtime.py. Anything else is a failure with a reason, never an empty
transcript.

A request is sent again after HTTP 429, 502, 503 or 504 and after a dropped connection, at most RETRIES times, and never
after another status. Its latency includes the waits, and its row has the number of `sends`. Live audio is sent once,
because its timing cannot be repeated.
"""

import asyncio
import base64
import json
import math
import re
import threading
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import requests
import urllib3

from bench import BenchError, stream
from bench.answers import Answer, Api, Attempt, Mode, Row, wait_until
from bench.dataset import Clip
from mistral_layout.audio import DELAY_MS

if TYPE_CHECKING:
    from bench.realtime import Place

Sent = TypeVar("Sent", bound=Attempt)

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Voxtral-Mini-3B-2507 needs an instruction to transcribe in a chat. This one is from SGLang's example for Voxtral
# (https://github.com/sgl-project/sglang/pull/21635).
CHAT_PROMPT = "Transcribe this audio."
# Far more than speech needs: fast English has 5 tokens per second. A server's default may be too low.
CHAT_TOKENS, CHAT_TOKENS_PER_S = 128, 16
RESENT = (429, 502, 503, 504)
RETRIES = 7
WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before the first retry without Retry-After, doubled each time
# Containers that servers accept as audio_url. Python's mimetypes has audio/x-wav for WAV, and audio/opus for Ogg Opus.
MIME = {
    **{".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".m4a": "audio/mp4", ".mp4": "audio/mp4"},
    **{".ogg": "audio/ogg", ".oga": "audio/ogg", ".opus": "audio/ogg", ".webm": "audio/webm"},
}


def clean_url(url: str, flag: str = "--url") -> str:
    """Return the server's root URL, without a trailing slash or /v1. Errors name the `flag`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is not a number, or a bracket is not closed
        good = False
    if not good:
        raise BenchError(f"{flag} {url!r} must look like http://127.0.0.1:8000")
    if parts.username or parts.password:
        key = "--api-key-env" if flag == "--url" else f"{flag}-key-env"
        raise BenchError(f"{flag} is written to the results, so it must not contain a password: use {key}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class Client:
    """A client of one server. Thread-safe: each thread has its own session and connection.

    `timeout_s` bounds the time to connect and each wait for the server's next byte, not the whole request. `language`
    is sent to the transcription endpoint only. `prompt` is the text of a chat request. `delay_ms` is the model's delay.
    """

    does = "transcribe"  # what its requests ask for

    def __init__(
        self,
        url: str,
        timeout_s: float,
        api_key: str | None = None,
        *,
        api: Api = "transcriptions",
        mode: Mode = "whole",
        language: str | None = None,
        prompt: str = CHAT_PROMPT,
        delay_ms: int = DELAY_MS,
    ) -> None:
        self.url = url
        self.model = ""
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._api, self._mode, self._language, self._prompt = api, mode, language, prompt
        self._delay_ms = delay_ms
        self._threads = threading.local()
        # Unix times are derived from the monotonic clock, so that a step of the system clock does not change durations.
        self._epoch = time.time() - time.perf_counter()

    def get(self, path: str) -> Any:
        """The JSON response of a GET, null if it is not JSON. Raises BenchError if there is no response."""
        try:
            return self._session().get(self.url + path, timeout=self._timeout_s).json()
        except requests.JSONDecodeError:
            return None
        except requests.RequestException as error:
            raise self.hopeless(f"GET {path}: {type(error).__name__}: {error}") from None

    def get_text(self, path: str) -> str | None:
        """The text of a GET with status 200, else null."""
        try:
            response = self._session().get(self.url + path, timeout=min(self._timeout_s, 10))
        except requests.RequestException:
            return None
        return response.text if response.status_code == 200 else None

    def hopeless(self, error: str) -> BenchError:
        """The error for a server with which no request can succeed."""
        return BenchError(
            f"cannot {self.does} with {self.url}\n  {error}\n"
            f"Check that the server is running (`curl {self.url}/v1/models`). Check --url, --model and --api-key-env."
        )

    def transcribe(self, clip: Clip, part: int, load: str = "c1", due: float | None = None, **fields: str) -> Row:
        """Send one clip and wait for its transcript. `fields` are additional form fields.

        The latency is the time from the first byte sent until the response's body is read. With `due`, a time of
        time.perf_counter, it starts at `due`. Reading the file and building the request are not included.
        """
        if self._mode == "realtime":
            return asyncio.run(self.live(clip, part, load, due))
        return self._row(clip, part, load, due, self._send(clip, due, fields))

    async def live(
        self,
        clip: Clip,
        part: int,
        load: str = "c1",
        due: float | None = None,
        place: "Place | None" = None,
        late: "array[float] | None" = None,
    ) -> Row:
        """Send one clip at the pace of speech. For `place` and `late` see bench.realtime.transcribe."""
        from bench import realtime  # its libraries are needed for this mode only

        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        answer = await realtime.transcribe(
            self.url,
            self.model,
            clip,
            due,
            self._timeout_s,
            headers,
            proxy=not self._loopback,
            delay_ms=self._delay_ms,
            place=place,
            late=late,
        )
        return self._row(clip, part, load, due, answer)

    def _row(self, clip: Clip, part: int, load: str, due: float | None, answer: Answer) -> Row:
        complete = answer.error is None
        begun = answer.start if due is None or answer.spoken is not None else due
        deltas_ms = None
        if complete and answer.pieces is not None:
            deltas_ms = [round((at - begun) * 1000, 3) for at, _ in answer.pieces]
        since = begun if answer.spoken is None else answer.spoken
        return Row(
            id=clip.id,
            duration_s=clip.duration_s,
            part=part,
            start=self._epoch + answer.start,
            end=self._epoch + answer.end,
            latency_ms=round((answer.end - since) * 1000, 3) if complete else None,
            status=answer.status,
            text=answer.text if complete else None,
            reference=clip.text,
            error=answer.error,
            load=load,
            due=None if due is None else self._epoch + due,
            first_text_ms=deltas_ms[0] if deltas_ms else None,
            deltas_ms=deltas_ms,
            words_ms=answer.words_ms if complete else None,
            sends=answer.sends,
            lags=answer.lags if complete else None,
            lag_of=answer.lag_of if complete else None,
            fell_behind=answer.fell_behind if complete else None,
        )

    def _send(self, clip: Clip, due: float | None, fields: dict[str, str]) -> Answer:
        return until_answered(lambda first: self._send_once(clip, due if first else None, fields))

    def _send_once(self, clip: Clip, due: float | None, fields: dict[str, str]) -> Answer:
        session = self._session()
        prepared = session.prepare_request(self._request(clip, fields))
        # Session.send, unlike Session.request, ignores proxies and certificates of the environment.
        # stream=True returns the status before the body, so that a truncated body still has its status.
        settings = session.merge_environment_settings(self.url, {}, True, None, None)
        wait_until(due)
        start = time.perf_counter()
        answer = Answer(start, start)
        try:
            response = session.send(prepared, timeout=self._timeout_s, allow_redirects=False, **settings)
            answer.status = response.status_code
            kind = response.headers.get("Content-Type", "none")
            if self._mode == "stream" and answer.status == 200 and kind.startswith("text/event-stream"):
                with response:
                    answer.text, answer.pieces, answer.end = stream.read(response.raw.read1, self._api == "chat")
                return answer
            body = response.content
            answer.end = time.perf_counter()
            answer.text, answer.error = _read(answer.status, body, self._api)
            answer.resend_s = wait_s(response)
            if self._mode == "stream" and answer.status == 200:
                answer.error = f"HTTP 200, but the Content-Type is {kind} instead of text/event-stream: {shown(body)!r}"
        except stream.StreamError as problem:
            answer.end = time.perf_counter()
            answer.error = f"HTTP 200, but {problem}"
        # urllib3's own errors come only from streams: requests does not translate them when a body is read in pieces.
        except (requests.RequestException, urllib3.exceptions.HTTPError) as problem:
            cut(answer, start, problem)
        return answer

    def _request(self, clip: Clip, fields: dict[str, str]) -> requests.Request:
        audio = clip.path.read_bytes()
        if self._api == "chat":
            url = f"data:{mime(clip)};base64,{base64.b64encode(audio).decode()}"
            content = [{"type": "audio_url", "audio_url": {"url": url}}, {"type": "text", "text": self._prompt}]
            asked = {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": CHAT_TOKENS + CHAT_TOKENS_PER_S * math.ceil(clip.duration_s),
                **({"stream": True} if self._mode == "stream" else {}),
            }
            return requests.Request("POST", f"{self.url}/v1/chat/completions", json=asked)
        data = {"model": self.model, "response_format": "json", "temperature": "0"}
        if self._language:
            data["language"] = self._language
        if self._mode == "stream":
            data["stream"] = "true"
        return requests.Request(
            "POST",
            f"{self.url}/v1/audio/transcriptions",
            files={"file": (clip.path.name, audio)},
            data={**data, **fields},
        )

    @property
    def _loopback(self) -> bool:
        """Whether the server is on this machine. A proxy must not be used then: its 127.0.0.1 is another machine."""
        return urlsplit(self.url).hostname in LOOPBACK

    def _session(self) -> requests.Session:
        if not hasattr(self._threads, "session"):
            self._threads.session = requests.Session()
            self._threads.session.trust_env = not self._loopback
            # As `auth`, because an entry in ~/.netrc would silently replace a header.
            self._threads.session.auth = self._authorize
        session: requests.Session = self._threads.session
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._api_key:
            request.headers["Authorization"] = f"Bearer {self._api_key}"
        return request


def mime(clip: Clip) -> str:
    """The MIME type of the clip's file, from its name. Raises BenchError for an unknown one."""
    kind = MIME.get(clip.path.suffix.lower())
    if kind is None:
        raise BenchError(f"--api chat: {clip.path.name!r} has an unknown format: expected {', '.join(MIME)}")
    return kind


def until_answered(once: Callable[[bool], Sent]) -> Sent:
    """Send a request with `once` until it need not be sent again, at most 1 + RETRIES times. Returns the last attempt.

    `once` is told whether it is the first time.
    """
    start = None
    for sends in range(1, RETRIES + 2):
        attempt = once(start is None)
        start = attempt.start if start is None else start
        attempt.start, attempt.sends = start, sends
        if attempt.resend_s is None or sends > RETRIES:
            break
        time.sleep(min(attempt.resend_s * 2 ** (sends - 1), LONGEST_WAIT_S))
    return attempt


def wait_s(response: requests.Response) -> float | None:
    """Seconds before a request with this response is sent again; null if it is not."""
    if response.status_code not in RESENT:
        return None
    told = response.headers.get("Retry-After", "")
    return float(told) if re.fullmatch(r"[0-9]{1,6}", told) else WAIT_S


def cut(attempt: Attempt, start: float, problem: Exception) -> None:
    """End an attempt that began at `start` with an error of the connection."""
    attempt.end = time.perf_counter()
    attempt.error = f"{type(problem).__name__} after {attempt.end - start:.3f} s: {problem}"
    attempt.resend_s = WAIT_S if dropped(problem) else None


def dropped(error: BaseException | None) -> bool:
    """Whether an established connection ended before the response did."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return False
        if isinstance(
            error, ConnectionError | urllib3.exceptions.IncompleteRead | urllib3.exceptions.InvalidChunkLength
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read(status: int, body: bytes, api: Api) -> tuple[str | None, str | None]:
    """Return (transcript, null) or (null, what is wrong with the response)."""
    said = shown(body)
    if status != 200:
        return None, f"HTTP {status}: {said}"
    where = "'text'" if api == "transcriptions" else "'choices[0].message.content'"
    cut = False
    try:
        answer = json.loads(body)
        if api == "transcriptions":
            text = answer["text"]
        else:
            text = answer["choices"][0]["message"]["content"]
            cut = answer["choices"][0].get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, f"HTTP 200, but the body is not a JSON object with {where}: {said!r}"
    if cut:
        return None, f"HTTP 200, but the text was cut off at max_tokens: {said!r}"
    return (text, None) if isinstance(text, str) else (None, f"HTTP 200, but {where} is not a string: {said!r}")


def shown(body: bytes) -> str:
    return body[:300].decode(errors="replace")
