"""An engine of live sessions that computes nothing, and a client of a socket, both in the test's own event loop."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from voxtral_serve.engine.session import SESSION, UTILITY, SessionShape
from voxtral_serve.guard.labeller import Labeller
from voxtral_serve.guard.live.codec import Codec, CodecContext
from voxtral_serve.guard.live.link import Engine, EngineLink
from voxtral_serve.guard.live.mistral_codec import MistralCodec
from voxtral_serve.guard.live.openai_codec import OpenAiCodec
from voxtral_serve.guard.live.service import LiveService
from voxtral_serve.guard.live.socket import LiveSocket
from voxtral_serve.guard.live.vllm_codec import VllmCodec
from voxtral_serve.guard.live.voices import VoicePool
from voxtral_serve.transcript.words import TokenStream

SHAPE = SessionShape(left=32, delay=6, right=17, samples=1280, rate_hz=16000)
EOS, PAD, WORD, SPOKEN = 2, 10, 9, 100  # SPOKEN: the token of " w0"
LOGPROB = -0.5
LOUD = 0.005  # of a frame with a voice
RATE = SHAPE.rate_hz


def _piece(token: int) -> bytes:
    return f" w{token - SPOKEN}".encode() if token >= SPOKEN else b""


STREAM = TokenStream(PAD, WORD, 0.08, lambda tokens: b"".join(map(_piece, tokens)).decode(), _piece)


def noise(seconds: float, seed: int = 0, loud: float = 3000.0) -> bytes:
    """No two samples in a row are likely to be those of another place."""
    samples = np.random.default_rng(seed).normal(0, loud, round(seconds * RATE))
    return samples.clip(-32767, 32767).astype("<i2").tobytes()


def speech(seconds: float, pauses: list[float], pause_s: float = 0.5) -> bytes:
    """Noise whose level changes as speech's does, with pauses from these seconds on."""
    samples = np.frombuffer(noise(seconds), "<i2").astype(np.float64)
    samples *= 0.6 + 0.4 * np.sin(np.arange(len(samples)) * 2 * np.pi * 3 / RATE)
    for start in pauses:
        samples[round(start * RATE) : round((start + pause_s) * RATE)] *= 0.003
    return samples.astype("<i2").tobytes()


def tokens_of(samples: int, shape: SessionShape = SHAPE) -> int:
    """As an upload of this length has: the last token is sampled at the last padded row."""
    return shape.total_rows(samples) - shape.prompt + 1 if samples else 0


def with_pauses(*parts: float) -> bytes:
    """Noise and silence by turns, of so many seconds each, at 16 kHz."""
    made = [noise(s, seed=n) if n % 2 == 0 else bytes(2 * round(s * RATE)) for n, s in enumerate(parts)]
    return b"".join(made)


class FakeEngine:
    """Answers each row with PAD, whose text is empty, but every `spoken`th with SPOKEN and its number: " w" and that.

    most     sessions that it takes
    paused   while set, no token comes
    eos      numbers of tokens that are EOS, of every request
    breaks   raised in place of the token of this number, by the session's number
    faults   why a request ends with an error in place of the token of this number
    """

    def __init__(self, positions: int = 1024, most: int = 8, spoken: int = 5) -> None:
        self.positions, self.most, self.spoken = positions, most, spoken
        self.opened: list[str] = []
        self.shapes: dict[str, SessionShape] = {}
        self.audio: dict[str, bytearray] = {}
        self.ended: set[str] = set()
        self.closed: set[str] = set()
        self.aborted: list[str] = []
        self.requests: list[str] = []
        self.tokens: dict[str, int] = {}
        self.params: dict[str, Any] = {}
        self.calls: list[list[list[Any]]] = []
        self.eos: set[int] = set()
        self.breaks: dict[int, tuple[int, Exception]] = {}
        self.faults: dict[int, str] = {}
        self.paused = self.silent = self.is_dead = False
        self.refuses_audio: set[str] = set()
        self._news = asyncio.Event()

    @property
    def engine(self) -> Engine:
        def request(session: str, shape: SessionShape, max_tokens: int) -> tuple[Any, Any]:
            return [1] * shape.prompt, SimpleNamespace(max_tokens=max_tokens, extra_args={SESSION: session})

        return Engine(self.call, self.generate, lambda: self.is_dead, request, -1, self.positions)

    def link(self) -> EngineLink:
        return EngineLink(self.engine, SHAPE, tick_s=0)

    async def call(self, method: str, messages: list[list[Any]]) -> dict[str, str]:
        assert method == UTILITY
        assert messages
        if self.silent:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.calls.append(messages)
        refused = {}
        for what, name, *more in messages:
            if what == "open":
                if len(self.opened) - len(self.closed) >= self.most:
                    refused[name] = f"max_live_sessions is {self.most}"
                    continue
                self.opened.append(name)
                self.shapes[name] = SHAPE.with_delay(*more)
                self.audio[name] = bytearray()
            elif what == "audio":
                assert name not in self.ended
                assert more[0]
                if name in self.refuses_audio:
                    refused[name] = "bad audio"
                    continue
                self.audio[name] += more[0]
            elif what == "end":
                self.ended.add(name)
            elif name in self.audio:
                assert what == "close"
                self.closed.add(name)
        self.step()
        return refused

    def step(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def rows(self, name: str) -> int:
        samples, shape = len(self.audio[name]) // 2, self.shapes[name]
        return shape.total_rows(samples) if name in self.ended else shape.rows(samples)

    async def generate(self, prompt: Any, params: Any, request_id: str, priority: int) -> AsyncIterator[Any]:
        name = params.extra_args[SESSION]
        positions = self.shapes[name].prompt
        assert (request_id, len(prompt)) == (name, positions)
        assert self.rows(name) >= positions  # vLLM's scheduler aborts it otherwise
        self.requests.append(name)
        self.params[name] = params
        self.tokens[name] = 0
        try:
            while True:
                while self.paused or self.rows(name) < positions + self.tokens[name]:
                    await self._news.wait()
                if (broken := self.breaks.get(len(self.requests) - 1)) and broken[0] == self.tokens[name]:
                    raise broken[1]
                number = self.tokens[name]
                self.tokens[name] += 1
                last = name in self.ended and self.rows(name) == positions - 1 + self.tokens[name]
                last |= self.tokens[name] == params.max_tokens
                text = f" w{number}" if number % self.spoken == self.spoken - 1 else ""
                token = EOS if number in self.eos else SPOKEN + number if text else PAD
                logprobs = None
                if getattr(params, "logprobs", None) is not None:
                    logprobs = [{token: SimpleNamespace(logprob=LOGPROB)}]
                answer = SimpleNamespace(text=text, token_ids=[token], logprobs=logprobs, finish_reason=None)
                if (fault := self.faults.get(number)) is not None:
                    answer = SimpleNamespace(text="", token_ids=[], finish_reason="error", stop_reason=fault)
                    last = True
                yield SimpleNamespace(outputs=[answer], finished=last)
                if last:
                    return
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(name)
            raise


class Sentences(FakeEngine):
    """Each third word, one each 1.2 s, ends a sentence."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        async for output in super().generate(*args, **kwargs):
            token = output.outputs[0].token_ids[0]
            output.outputs[0].text = piece(token).decode()
            yield output


def piece(token: int) -> bytes:
    content = STREAM.piece(token)
    return content + b"." if content and (token - SPOKEN) % 15 == 14 else content


class FakeDetector:
    """Says how long the audio has been silent, as told."""

    def __init__(self, silent_s: float = 1.0) -> None:
        self.answer = silent_s
        self.asked = 0

    def silent_s(self, clip: Any) -> float:
        self.asked += 1
        return self.answer

    def stretches(self, clip: Any) -> list[tuple[float, float]]:
        return [(0.0, clip.seconds)]


class FakeVoices:
    """Says that a frame has a voice where it is loud."""

    def probabilities(self, streams: Any, frames: Any) -> list[np.ndarray]:
        return [np.where(np.sqrt((each**2).mean(1)) > LOUD, 0.9, 0.05) for each in frames]


class FakeClient:
    """The other end of a LiveSocket: what it sends, and what comes."""

    def __init__(self, service: LiveService, codec: Callable[[CodecContext], Codec] = VllmCodec) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.events: list[dict[str, Any]] = []
        self.closed: tuple[int, str] | None = None
        self.blocked = False
        self.read = 0  # messages that the server took
        self.inbox.put_nowait({"type": "websocket.connect"})
        self.socket = LiveSocket(service, self._receive, self._take, "test", codec)
        self.task = asyncio.ensure_future(self.socket.serve())

    async def _receive(self) -> Any:
        message = await self.inbox.get()
        self.read += 1
        return message

    async def _take(self, message: Any) -> None:
        while self.blocked:
            await asyncio.sleep(0.001)
        if message["type"] == "websocket.send":
            self.events.append(json.loads(message["text"]))
        elif message["type"] == "websocket.close":
            self.closed = message["code"], message["reason"]

    def send(self, kind: str, **fields: Any) -> None:
        self.raw(json.dumps({"type": kind, **fields}))

    def raw(self, text: str) -> None:
        self.inbox.put_nowait({"type": "websocket.receive", "text": text})

    def begin(self) -> None:
        self.send("session.update", model="voxtral")
        self.send("input_audio_buffer.commit")

    def speak(self, pcm: bytes, piece: int = 2560) -> None:
        for start in range(0, len(pcm), piece):
            audio = base64.b64encode(pcm[start : start + piece]).decode()
            self.send("input_audio_buffer.append", audio=audio)

    def end(self) -> None:
        self.send("input_audio_buffer.commit", final=True)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "websocket.disconnect", "code": 1005})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def kinds(self) -> list[str]:
        return [event["type"].rpartition(".")[2] for event in self.events]

    async def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while len(found := [event for event in self.events if event["type"].endswith(kind)]) < count:
                await asyncio.sleep(0.001)
        return found[-1]

    async def gone(self) -> tuple[int, str] | None:
        done, _ = await asyncio.wait({self.task}, timeout=10)
        assert done, "the socket is still served"
        self.task.result()
        return self.closed


class OpenAiClient(FakeClient):
    """A client of OpenAI's protocol, with PCM of 16 kHz unless told."""

    def __init__(self, live: LiveService, codec: Any = OpenAiCodec) -> None:
        super().__init__(live, codec)

    def configure(self, **fields: Any) -> None:
        form = fields.pop("format", {"type": "audio/pcm", "rate": 16000})
        session = {"type": "transcription", "audio": {"input": {"format": form, **fields}}}
        self.send("session.update", session=session)

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    async def settled(self, pcm: bytes) -> None:
        self.speak(pcm)
        self.send("input_audio_buffer.clear", event_id="settled")
        await self.until("cleared")


class MistralClient(FakeClient):
    """A client of Mistral's protocol."""

    def __init__(self, live: LiveService, model: str | None = "voxtral") -> None:
        super().__init__(live, lambda context: MistralCodec(context, model))

    def update(self, **session: Any) -> None:
        self.send("session.update", session=session)

    def speak(self, pcm: bytes, piece: int = 2560) -> None:
        for start in range(0, len(pcm), piece):
            self.send("input_audio.append", audio=base64.b64encode(pcm[start : start + piece]).decode())


def context() -> CodecContext:
    """What a codec knows of a connection to a server of the model `voxtral`."""
    return service(FakeEngine()).context("test", None)


def service(
    engine: FakeEngine,
    silent_s: float = 1.0,
    idle_s: float = 60,
    backlog_s: float = 60,
    session_s: float | None = None,
    labeller: Labeller | None = None,
) -> LiveService:
    made = LiveService(
        engine.engine,
        SHAPE,
        FakeDetector(silent_s),  # type: ignore[arg-type]
        lambda name: name == "voxtral",
        idle_s,
        backlog_s,
        "voxtral",
        STREAM,
        session_s,
        labeller=labeller,
        unlabelled=None if labeller is not None else "this server has no labels",
    )
    made.voices = VoicePool(FakeVoices)
    made.link._tick_s = 0
    return made


def with_sentences(engine: FakeEngine, **more: Any) -> Any:
    live = service(engine, **more)
    live.stream = STREAM._replace(decode=lambda tokens: b"".join(map(piece, tokens)).decode(), piece=piece)
    return live


def chunks(pcm: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    """PCM16 in pieces of so many samples."""
    start = 0
    while start < len(pcm):
        end = start + 2 * next(sizes)
        yield pcm[start:end]
        start = end
