"""What the unit tests of speech synthesis share: a guard, an application that stands for vLLM-Omni, and a client."""

import asyncio
import base64
import functools
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile

from voxtral_serve.guard.limits import OpenLimits
from voxtral_serve.guard.middleware import Guard
from voxtral_serve.guard.speech.facts import SpeechFacts
from voxtral_serve.guard.speech.stages import Stages

RATE, SECONDS, CHUNKS = 24000, 0.5, 4
RATE_HEADER = b"x-audio-sample-rate"
VOICES = ("casual_female", "neutral_male")
MODELS = ("voxtral-tts", "tts-1")
SPEECH = "/v1/audio/speech"
SAMPLES = np.random.default_rng(0).normal(0, 0.1, round(RATE * SECONDS)).astype(np.float32)


@functools.cache
def encoded(name: str) -> bytes:
    """The samples, always in the same bytes, as vLLM-Omni writes them (entrypoints/openai/audio_utils_mixin.py)."""
    container, subtype = {
        **{"pcm": ("RAW", "PCM_16"), "wav": ("WAV", None), "flac": ("FLAC", None)},
        **{"mp3": ("MP3", None), "opus": ("OGG", "OPUS")},
    }[name]
    with io.BytesIO() as file:
        soundfile.write(file, SAMPLES, RATE, format=container, subtype=subtype)
        return file.getvalue()


def event(name: str, **content: Any) -> bytes:
    """An event of vLLM-Omni's stream."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n".encode()


def delta(samples: bytes) -> bytes:
    return event("speech.audio.delta", audio=base64.b64encode(samples).decode(), sample_rate=RATE)


class OmniApp:
    """Answers as vLLM-Omni does, and keeps what it was asked. `fail_after` chunks, its engine fails.

    `wait` is awaited before each chunk.
    """

    def __init__(self, fail_after: int | None = None, wait: Callable[[], Any] | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.gone = 0
        self.fail_after, self.wait = fail_after, wait

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["path"] != SPEECH:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps({"data": [{"id": "tts"}]}).encode()})
            return
        self.asked.append(asked := json.loads((await receive())["body"]))
        leaving = asyncio.ensure_future(receive())
        speaking = asyncio.ensure_future(self._speak(asked, send))
        await asyncio.wait({leaving, speaking}, return_when=asyncio.FIRST_COMPLETED)
        if speaking.done():
            leaving.cancel()
        else:
            self.gone += leaving.result()["type"] == "http.disconnect"
            speaking.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        if not speaking.cancelled() and speaking.done():
            speaking.result()

    async def _speak(self, asked: dict[str, Any], send: Any) -> None:
        kind = asked.get("stream_format")
        headers = [(b"content-type", b"text/event-stream" if kind == "sse" else b"audio/any")]
        if kind != "sse":
            headers.append((RATE_HEADER, str(RATE).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        whole = encoded(asked["response_format"])
        parts = [whole]
        if kind is not None:
            parts = [
                whole[start : start + len(whole) // CHUNKS] for start in range(0, len(whole), len(whole) // CHUNKS)
            ]
        for number, part in enumerate(parts):
            if self.wait is not None:
                await self.wait()
            if number == self.fail_after:
                if kind != "sse":
                    raise RuntimeError("the engine failed")
                error = {"message": "a stage failed", "type": "server_error", "param": None, "code": 500}
                await send(body(event("speech.audio.error", error=error)))
                await send({"type": "http.response.body", "body": b""})
                return
            await send(body(delta(part) if kind == "sse" else part, more=kind is not None))
        if kind is not None:
            done = event("speech.audio.done", usage={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3})
            await send(body(done if kind == "sse" else b""))
            await send({"type": "http.response.body", "body": b""})


def body(content: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


class Engine:
    """vLLM-Omni's AsyncOmni."""

    errored = False

    def __init__(self) -> None:
        self.dead = False

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.dead:
            raise EngineDeadError("Stage-1 has no live replica")


def facts(**more: Any) -> SpeechFacts:
    stages = Stages(Engine(), 30, SimpleNamespace(should_exit=False))
    found = SpeechFacts(VOICES, 16, None, OpenLimits.of_process(1, 1 << 17), {"object": "server"}, stages, MODELS)
    return found._replace(**more)


def guarded(app: Any = None, **more: Any) -> tuple[Guard, OmniApp]:
    app = app or OmniApp()
    made = Guard(app)
    made.begin(facts(**more))
    return made, app


class Answer:
    """What a client of the guard got. `complete`: whether its end came, without which uvicorn closes the connection."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""
        self.parts: list[bytes] = []
        self.complete = False

    async def send(self, message: Any) -> None:
        if message["type"].endswith("response.start"):
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b""))
            self.body = b"".join(self.parts)
            self.complete = not message.get("more_body", False)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


async def ask(
    made: Guard,
    path: str = SPEECH,
    content: Any = None,
    *headers: tuple[bytes, bytes],
    method: str | None = None,
    leave: asyncio.Event | None = None,
) -> Answer:
    """A request with `content` as JSON, or these bytes. Its client leaves when `leave` is set."""
    answer, raw = Answer(), content if isinstance(content, bytes) else json.dumps(content).encode()
    waiting = [{"type": "http.request", "body": raw if content is not None else b"", "more_body": False}]

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {
        **{"type": "http", "method": method or ("GET" if content is None else "POST"), "path": path},
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    await made(scope, receive, answer.send)
    return answer


def said(**more: Any) -> dict[str, Any]:
    """A good request."""
    return {"model": "voxtral-tts", "input": "Two cups, please.", "voice": VOICES[0], **more}
