"""vLLM-Omni's answer on its way to the client: how much audio it has, and what the guard adds to its headers."""

import asyncio
import io
import json
import time
from concurrent.futures import Executor
from typing import Any

from voxtral_serve.guard.answer import IGNORED_HEADER
from voxtral_serve.guard.asgi import Message, Send
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.speech.fields import SpeechParameters

SAMPLE_BYTES = 2  # of PCM, which is mono
RATE_HEADER = b"x-audio-sample-rate"  # vLLM-Omni's, with the first audio; of events, each delta has `sample_rate`
DELTA, DONE, ERROR = "speech.audio.delta", "speech.audio.done", "speech.audio.error"


class SpeechAnswer:
    """The answer to one request.

    seconds       of audio that was sent
    first_byte_s  from `start` to the first of it; None if there was none
    complete      whether the audio was sent to its end
    failed        the error of a stream of events that failed before its first audio: the client has got nothing
    """

    def __init__(self, parameters: SpeechParameters, start: float, send: Send, threads: Executor) -> None:
        """`start`: of the request, of time.monotonic()."""
        self.parameters, self.start, self.client, self.threads = parameters, start, send, threads
        self.first_byte_s: float | None = None
        self.complete = False
        self.failed: RefusedError | None = None
        self._seconds = 0.0  # of a whole file
        self._bytes = 0  # of samples
        self._rate = 0  # of the samples in Hz, which vLLM-Omni says before the first of them
        self._held: Message | None = None  # the status, until there is audio or an error
        self._status = 0
        self._file: list[bytes] = []
        self._rest = b""  # of an event

    @property
    def seconds(self) -> float:
        if self._bytes == 0:
            return self._seconds
        return self._bytes / (SAMPLE_BYTES * self._rate)

    async def send(self, message: Message) -> None:
        """Take a message of vLLM-Omni's."""
        if message["type"] == "http.response.start":
            self._status, self._held = message["status"], message
            self._rate = int(dict(message.get("headers", ())).get(RATE_HEADER, 0))
            if self.parameters.ignored and self._status == 200:
                ignored = (IGNORED_HEADER, ", ".join(self.parameters.ignored).encode())
                message["headers"] = [*message.get("headers", ()), ignored]
            return
        body, last = message.get("body", b""), not message.get("more_body", False)
        if self._status == 200:
            self._count(body, last)
        if self.failed is not None:
            return
        if self._held is not None and (body or last):
            held, self._held = self._held, None
            await self.client(held)
        await self.client(message)
        if last and self._file:
            loop = asyncio.get_running_loop()
            self._seconds = await loop.run_in_executor(self.threads, duration, b"".join(self._file))

    def _count(self, body: bytes, last: bool) -> None:
        if self.parameters.events:
            self._read_events(body)
            return
        if body:
            self._heard()
        if self.parameters.format == "pcm":
            if body and not self._rate:
                raise RuntimeError(f"vLLM-Omni sent samples without the header {RATE_HEADER.decode()}")
            self._bytes += len(body)
        else:
            self._file.append(body)
        self.complete = last

    def _read_events(self, body: bytes) -> None:
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            for line in event.splitlines():
                if line.startswith(b"data:"):
                    self._read_event(json.loads(line.removeprefix(b"data:")))

    def _read_event(self, event: dict[str, Any]) -> None:
        if event["type"] == DELTA:
            audio: str = event["audio"]
            self._bytes += len(audio) * 3 // 4 - audio[-2:].count("=")
            self._rate = event["sample_rate"]
            self._heard()
        elif event["type"] == ERROR and self._held is not None:
            self.failed = RefusedError(500, f"the speech failed: {event['error']['message']}", "failed")
        self.complete = event["type"] == DONE

    def _heard(self) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic() - self.start


def duration(file: bytes) -> float:
    """Seconds of audio in a file. Raises soundfile.LibsndfileError. Call it in a thread: it takes milliseconds."""
    import soundfile

    with soundfile.SoundFile(io.BytesIO(file)) as opened:
        return float(len(opened) / opened.samplerate)
