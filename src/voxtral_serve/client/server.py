"""A transcription server over HTTP: its model, its transcripts; a request that may succeed later is sent again."""

import contextlib
import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests
import urllib3

from voxtral_serve.client.errors import GoneError, IgnoredError, RequestError, StoppedError, UsageError
from voxtral_serve.client.text import plain, shown
from voxtral_serve.measure import upload
from voxtral_serve.measure.errors import MeasureError
from voxtral_serve.measure.upload import Answer

CONNECT_S = 10
ANSWER_S = 3600  # an hour of audio takes a small machine many minutes, and no byte comes before the end
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
    password = "must not contain a password, which other users can see in the list of processes: use OPENAI_API_KEY"
    try:
        return upload.root(url, "--url", password)
    except MeasureError as error:
        raise UsageError(str(error)) from None


DELAY = "target_streaming_delay_ms"  # a form's field, Mistral's name
KEYWORDS = "keywords[]"  # OpenAI's


class Server:
    """A transcription server. Thread-safe: each thread has its own session and connection.

    All methods raise RequestError, and StoppedError once `stop` is set.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.http = upload.Server(root(url), key, (CONNECT_S, ANSWER_S))
        self.stop = threading.Event()

    @property
    def url(self) -> str:
        return self.http.url

    def model(self) -> str:
        """The first model that the server lists."""
        request = requests.Request("GET", f"{self.url}/v1/models")
        answer = self._answer(lambda: self.http.ask(request, CONNECT_S))
        try:
            return str(json.loads(answer.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RequestError(f"{self.url}/v1/models lists no model: {_start(answer)}: use --model") from None

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What the guard says of the server; empty for stock vLLM."""
        request = requests.Request("GET", f"{self.url}/v1/server")
        try:
            found = json.loads(self._answer(lambda: self.http.ask(request, CONNECT_S)).body)
        except ValueError:
            return {}
        except RequestError as error:
            if error.status != 404:
                raise
            return {}
        return found if isinstance(found, dict) and found.get("object") == "server" else {}

    @property
    def names_ignored(self) -> bool:
        """Whether answers name the fields without effect: the guard's do, and stock vLLM's do not."""
        return bool(self.about)

    @property
    def prefers_words(self) -> bool:
        """Whether live sessions can prefer custom words; their events do not tell."""
        capabilities = self.about.get("capabilities")
        return isinstance(capabilities, dict) and capabilities.get("keywords") is True

    def transcribe(
        self,
        path: Path,
        model: str,
        form: str,
        language: str | None,
        times: Sequence[str] = (),
        speakers: int | None = None,
        delay_ms: int | None = None,
        keywords: Sequence[str] = (),
    ) -> bytes:
        """The file's transcript in the format `form`.

        times     "word" and "segment", for verbose_json
        speakers  their number, 0 if it is not known; None for a transcript without speakers
        delay_ms  of the text behind the audio; None for the server's
        keywords  phrases to prefer

        Raises IgnoredError for an answer without the speakers, the delay or the keywords, and for a server that would
        not say so.
        """
        # `text` without speakers is taken from `json`: stock vLLM returns JSON for both.
        whole = form in ("srt", "vtt") or (form == "text" and speakers is not None)
        fields = [("model", model), ("response_format", "json" if form == "text" and not whole else form)]
        if language:
            fields.append(("language", language))
        fields += [("timestamp_granularities[]", each) for each in times]
        if speakers is not None:
            fields += [("diarize", "true"), *([("num_speakers", str(speakers))] if speakers else [])]

        if (delay_ms is not None or keywords) and not self.names_ignored:
            what = "keywords need" if delay_ms is None else "the delay needs"
            raise IgnoredError(f"{what} a server with the guard, and {self.url} has no /v1/server")
        if delay_ms is not None:
            fields.append((DELAY, str(delay_ms)))

        fields += [(KEYWORDS, each) for each in keywords]

        def send() -> Answer:
            with path.open("rb") as file:
                return self.http.transcribe(self.http.transcription(shown(Path(path.name)), file, fields))

        answer = self._answer(send)
        if speakers is not None and "diarize" in answer.ignored:
            raise IgnoredError("200, but without speakers: this server does not label them")
        if DELAY in answer.ignored:
            raise IgnoredError("200, but with the server's delay: its config has no upload_delay_ms")
        if KEYWORDS.removesuffix("[]") in answer.ignored:
            raise IgnoredError("200, but without keywords: this server's model does not prefer any")
        if whole:
            if answer.kind.startswith("application/json"):
                raise RequestError(f"200, but JSON instead of {form}: {_start(answer)}")
            return answer.body
        if answer.text is None:
            raise RequestError(f"200, but not a JSON object with 'text': {_start(answer)}")
        if speakers is not None and not _has_speakers(answer):
            raise IgnoredError(f"200, but without speakers: {_start(answer)}")
        return f"{answer.text.strip()}\n".encode() if form == "text" else answer.body

    def _answer(self, send: Callable[[], Answer]) -> Answer:
        """The answer with status 200; a request that may succeed later is sent again."""
        try:
            answer = upload.until_answered(lambda _: send(), self._pause)
        except OSError as error:
            raise RequestError(f"cannot be read: {error.strerror or error}") from None
        if answer.problem is not None:
            cause = _cause(answer.problem)
            if _unreached(answer.problem):
                raise GoneError(f"cannot connect to {self.url}: {cause}")
            raise RequestError(f"no response: {cause}")
        if answer.status != 200:
            raise RequestError(f"{answer.status}: {said(answer.body) or answer.reason}", answer.status)
        return answer

    def _pause(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise StoppedError


def _has_speakers(answer: Answer) -> bool:
    """Whether each segment of a JSON object has a speaker, and there is a segment if there is a text."""
    segments = json.loads(answer.body).get("segments") or []
    with contextlib.suppress(AttributeError, TypeError):
        named = all(each.get("speaker") or each.get("speaker_id") for each in segments)
        return named and bool(segments or not (answer.text or "").strip())
    return False


def said(body: bytes) -> str:
    """One line from an answer: the message of an error in OpenAI's form, else the first characters."""
    text = body[:ERROR_BYTES].decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return plain(" ".join(str(json.loads(text)["error"]["message"]).split()))
    return plain(" ".join(text[:SHOWN].split()))


def _start(answer: Answer) -> str:
    return repr(answer.body[:SHOWN].decode(errors="replace"))


def _cause(error: BaseException) -> str:
    """The message of the innermost error."""
    *_, under = upload.chain(error)
    return getattr(under, "strerror", None) or str(under) or type(under).__name__


def _unreached(error: Exception) -> bool:
    """Whether there was no connection to send anything over."""
    under = error.args[0] if error.args else None
    never = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
    return isinstance(error, requests.ConnectTimeout) or isinstance(getattr(under, "reason", None), never)
