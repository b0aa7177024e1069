"""The server under proof, and uploads to it. An upload is sent once: a refusal is an answer, too."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import requests

from voxtral_serve.client import server as client_server
from voxtral_serve.client.errors import RequestError
from voxtral_serve.client.server import CONNECT_S, said
from voxtral_serve.measure.sound import RATE_HZ, TOKEN
from voxtral_serve.measure.upload import Bearer, Server
from voxtral_serve.prove.clips import Clip

ANSWER_S = 600  # the longest wait for a part of an answer
RIGHT_PADDING = 17  # tokens behind a clip at the published delay of 480 ms
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
        client = client_server.Server(url, key)
        self.server = Server(client.url, key, (CONNECT_S, ANSWER_S))
        self.key, self.capped = key, capped
        self.model = client.model()
        listed = self._get("/v1/models") or {}
        longest = next((each.get("max_model_len") for each in listed.get("data", [])), None)
        self.context_s = longest * TOKEN / RATE_HZ if isinstance(longest, int) else None
        self.about = self._get("/v1/server")
        self.version = (self._get("/version") or {}).get("version")
        self.drafts = bool(self._values("vllm:spec_decode_num_drafts_total"))  # vLLM has it only with drafts

    @property
    def is_local(self) -> bool:
        return not self.server.proxied

    def limit(self, name: str) -> Any:
        """One of the limits that the server names, None if it does not."""
        return (self.about or {}).get("limits", {}).get(name)

    def rollovers(self) -> int | None:
        """Times that live sessions went over to another request, since the server's start; None if it does not say."""
        values = self._values(ROLLOVERS)
        return round(sum(values)) if values else None

    def _values(self, name: str) -> list[float]:
        """The values of a metric, by its labels; empty if the server has none of this name."""
        try:
            lines = self.server.get("/metrics", CONNECT_S).text.splitlines()
        except requests.RequestException:
            return []
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]

    def clip(self, clip: Clip, stream: bool = False) -> Upload:
        fields = [("stream", "true")] if stream else []
        if self.capped:
            tokens = -(-len(clip.samples) // TOKEN) + RIGHT_PADDING
            fields.append(("max_completion_tokens", str(tokens)))
        return Upload(clip.wav, fields=tuple(fields))

    def send(self, upload: Upload) -> Answer:
        """Raises RequestError if there is no answer, or a 200 without a transcript."""
        fields = dict((("model", self.model), *upload.fields))
        request = self.server.transcription(upload.name, upload.content, list(fields.items()))
        if upload.key:
            request.auth = Bearer(upload.key)
        answer = self.server.transcribe(request, streamed="stream" in fields)
        if answer.problem is not None or answer.status is None:
            raise RequestError(f"an upload has no answer: {type(answer.problem).__name__}")
        text = answer.text if answer.status == 200 else said(answer.body)
        if text is None:
            raise RequestError(f"an upload's answer is no transcript: {answer.error}", 200)
        first_s = answer.pieces[0][0] - answer.start if answer.pieces else None
        return Answer(answer.status, text.strip(), answer.end - answer.start, first_s)

    def send_all(self, uploads: Sequence[Upload], in_flight: int) -> list[Answer]:
        """Answers in the order of the uploads. Raises as `send`, and RequestError for a status other than 200."""
        with threads(in_flight) as pool:
            answers = list(pool.map(self.send, uploads))
        for answer in answers:
            if answer.status != 200:
                raise RequestError(f"{answer.status}: {answer.text}", answer.status)
        return answers

    def _get(self, path: str) -> dict[str, Any] | None:
        """The JSON object at a path; None for any other answer."""
        try:
            response = self.server.get(path, CONNECT_S)
            content = response.json()
        except (requests.RequestException, ValueError):
            return None
        return content if response.status_code == 200 and isinstance(content, dict) else None


@contextlib.contextmanager
def threads(most: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that is not waited for at an error or Ctrl-C: a server may never answer."""
    pool = ThreadPoolExecutor(most)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
