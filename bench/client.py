"""Send clips to a transcription server and measure the responses: OpenAI's transcription endpoint, chat, or live audio.

What completes a request, and when it is sent again, is that of measure/upload.py; for live audio see bench/realtime.py.
A row's latency includes the waits between, and its row has the number of `sends`. Live audio is sent once, because its
timing cannot be repeated.
"""

import asyncio
import base64
import math
import time
from array import array
from typing import TYPE_CHECKING, Any

import requests

from bench import BenchError
from bench.answers import Answer, Api, Mode, Row
from bench.dataset import Clip
from bench.measure import upload
from bench.measure.lag import DELAY_MS

if TYPE_CHECKING:
    from bench.realtime import Place

# Voxtral-Mini-3B-2507 needs an instruction to transcribe in a chat. This one is from SGLang's example for Voxtral
# (https://github.com/sgl-project/sglang/pull/21635).
CHAT_PROMPT = "Transcribe this audio."
# Far more than speech needs: fast English has 5 tokens per second. A server's default may be too low.
CHAT_TOKENS, CHAT_TOKENS_PER_S = 128, 16
GET_S = 10  # for the text of a GET, at most
# Containers that servers accept as audio_url. Python's mimetypes has audio/x-wav for WAV, and audio/opus for Ogg Opus.
MIME = {
    **{".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".m4a": "audio/mp4", ".mp4": "audio/mp4"},
    **{".ogg": "audio/ogg", ".oga": "audio/ogg", ".opus": "audio/ogg", ".webm": "audio/webm"},
}


def clean_url(url: str, flag: str = "--url") -> str:
    """Return the server's root URL, without a trailing slash or /v1. Errors name the `flag`."""
    key = "--api-key-env" if flag == "--url" else f"{flag}-key-env"
    return upload.root(url, flag, f"is written to the results, so it must not contain a password: use {key}")


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
        self._server = upload.Server(url, api_key, timeout_s)
        self._timeout_s = timeout_s
        self._api, self._mode, self._language, self._prompt = api, mode, language, prompt
        self._delay_ms = delay_ms
        # Unix times are derived from the monotonic clock, so that a step of the system clock does not change durations.
        self._epoch = time.time() - time.perf_counter()

    def get(self, path: str) -> Any:
        """The JSON response of a GET, null if it is not JSON. Raises BenchError if there is no response."""
        try:
            return self._server.get(path, self._timeout_s).json()
        except requests.JSONDecodeError:
            return None
        except requests.RequestException as error:
            raise self.hopeless(f"GET {path}: {type(error).__name__}: {error}") from None

    def get_text(self, path: str) -> str | None:
        """The text of a GET with status 200, else null."""
        try:
            response = self._server.get(path, min(self._timeout_s, GET_S))
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

        answer = await realtime.transcribe(
            self._server, self.model, clip, due, self._timeout_s, delay_ms=self._delay_ms, place=place, late=late
        )
        return self._row(clip, part, load, due, answer)

    def _row(self, clip: Clip, part: int, load: str, due: float | None, answer: upload.Answer) -> Row:
        live = answer if isinstance(answer, Answer) else Answer()
        complete = answer.error is None
        begun = answer.start if due is None or live.spoken is not None else due
        deltas_ms = None
        if complete and answer.pieces is not None:
            deltas_ms = [round((at - begun) * 1000, 3) for at, _ in answer.pieces]
        since = begun if live.spoken is None else live.spoken
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
            words_ms=live.words_ms,
            sends=answer.sends,
            lags=live.lags,
            lag_of=live.lag_of,
            fell_behind=live.fell_behind,
            server_ms=answer.stages if complete else None,
        )

    def _send(self, clip: Clip, due: float | None, fields: dict[str, str]) -> upload.Answer:
        streamed, chat = self._mode == "stream", self._api == "chat"

        def once(first: bool) -> upload.Answer:
            request = self._chat(clip) if chat else self._upload(clip, fields)
            return self._server.transcribe(request, streamed, chat, due if first else None)

        return upload.until_answered(once)

    def _chat(self, clip: Clip) -> requests.Request:
        url = f"data:{mime(clip)};base64,{base64.b64encode(clip.path.read_bytes()).decode()}"
        content = [{"type": "audio_url", "audio_url": {"url": url}}, {"type": "text", "text": self._prompt}]
        asked = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": CHAT_TOKENS + CHAT_TOKENS_PER_S * math.ceil(clip.duration_s),
            **({"stream": True} if self._mode == "stream" else {}),
        }
        return requests.Request("POST", f"{self.url}/v1/chat/completions", json=asked)

    def _upload(self, clip: Clip, fields: dict[str, str]) -> requests.Request:
        data = {"model": self.model, "response_format": "json", "temperature": "0"}
        if self._language:
            data["language"] = self._language
        if self._mode == "stream":
            data["stream"] = "true"
        return self._server.transcription(clip.path.name, clip.path.read_bytes(), list((data | fields).items()))


def mime(clip: Clip) -> str:
    """The MIME type of the clip's file, from its name. Raises BenchError for an unknown one."""
    kind = MIME.get(clip.path.suffix.lower())
    if kind is None:
        raise BenchError(f"--api chat: {clip.path.name!r} has an unknown format: expected {', '.join(MIME)}")
    return kind
