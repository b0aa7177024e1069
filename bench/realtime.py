"""Send a clip as a microphone would, over the WebSocket /v1/realtime of vLLM 0.32.0, and time the text that comes back.

The protocol is that of vLLM's entrypoints/speech_to_text/realtime: session.created, session.update with the model,
input_audio_buffer.commit, then input_audio_buffer.append with base64 PCM16 at 16 kHz, and a commit that is final;
transcription.delta while it goes on, transcription.done at the end, or error.
A piece of audio is sent when its last sample would have been spoken: the n-th, from 1, n * 80 ms after the speech
began, whatever became of those before it.

A session is a coroutine, so that one process holds hundreds: bench/sessions.py runs them.
"""

import asyncio
import base64
import contextlib
import json
import time
from array import array
from collections.abc import Mapping
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from bench import lag, sound
from bench.answers import Answer
from bench.dataset import Clip
from bench.sound import SessionClip, Sound
from mistral_layout.audio import DELAY_MS, SAMPLE_RATE
from mistral_layout.audio import SAMPLES_PER_TOKEN as PIECE

PIECE_S = PIECE / SAMPLE_RATE
AHEAD_TOKENS = 25  # 2 s: so far a session that gains age is ahead of its text


class LiveError(Exception):
    """The session ended otherwise than with a transcript."""


class Place(Protocol):
    """A session's place among those that are measured at the same time: bench.sessions.Place."""

    async def ready(self) -> float: ...
    async def ended(self) -> None: ...


async def transcribe(
    url: str,
    model: str,
    clip: Clip,
    due: float | None,
    timeout_s: float,
    headers: Mapping[str, str],
    *,
    proxy: bool,
    delay_ms: int = DELAY_MS,
    place: Place | None = None,
    late: "array[float] | None" = None,
) -> Answer:
    """Hold one session. Decoding the clip and opening the session come before its start, the first audio sent.

    With a `place` it starts at the time that this gives, once it has its age. `late` gets the seconds by which each
    piece was sent later than due.
    """
    answer = Answer(start := time.perf_counter(), start, pieces=[])
    spoken = await asyncio.get_running_loop().run_in_executor(None, sound.of, clip)
    session = None
    try:
        # Base64 of sound hardly shrinks, and a ping that a busy server leaves unanswered would end the session.
        async with connect(
            "ws" + url.removeprefix("http") + "/v1/realtime",
            additional_headers=headers,
            compression=None,
            open_timeout=timeout_s,
            close_timeout=1,
            ping_interval=None,
            proxy=True if proxy else None,
        ) as socket:
            answer.status = 101
            session = _Session(socket, answer, timeout_s, spoken, lag.delay_tokens(delay_ms), late)
            async with session.opened(model):
                skipped = round(clip.age_s * SAMPLE_RATE) if isinstance(clip, SessionClip) else 0
                await session.gain_age(skipped)
                await session.speak(skipped, await place.ready() if place else due)
                answer.text = await session.text()
    except InvalidStatus as problem:
        answer.status = problem.response.status_code
        shown = (problem.response.body or b"")[:300].decode(errors="replace")
        answer.error = f"HTTP {answer.status} instead of a WebSocket: {shown}"
    except LiveError as problem:
        answer.error = str(problem)
    except ConnectionClosed as problem:
        answer.error = f"the connection was closed before transcription.done: {problem}"
    except (OSError, WebSocketException) as problem:  # TimeoutError is an OSError
        answer.error = f"{type(problem).__name__} after {time.perf_counter() - answer.start:.3f} s: {problem}"
    if answer.error is not None:
        answer.end = time.perf_counter()
    if place:
        await place.ended()  # what is scored now takes no time from a session that is still measured
    if answer.error is None and session is not None:
        session.score(clip, delay_ms)
    return answer


class _Session:
    def __init__(
        self,
        socket: ClientConnection,
        answer: Answer,
        timeout_s: float,
        spoken: Sound,
        delay: int,
        late: "array[float] | None",
    ) -> None:
        self._socket, self._answer, self._timeout_s = socket, answer, timeout_s
        self._sound, self._delay, self._late = spoken, delay, late
        self._sent, self._arrivals = array("d"), array("d")  # of each piece, of each delta
        self._tokens: int | None = None
        self._done: str | None = None
        self._skipped = 0
        self._heard = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def opened(self, model: str) -> Any:
        """Begin a transcription, and listen until the `async with` ends."""
        async with asyncio.timeout(self._timeout_s):
            created = self._read(await self._socket.recv())
        if created.get("type") != "session.created":
            raise LiveError(f"expected session.created, received {json.dumps(created)[:300]}")
        await self._send(json.dumps({"type": "session.update", "model": model}))
        await self._send('{"type": "input_audio_buffer.commit"}')
        self._listener = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            self._listener.cancel()
            await asyncio.wait({self._listener})
            if not self._listener.cancelled():
                self._listener.exception()  # the session has raised it, or something else before it

    async def gain_age(self, samples: int) -> None:
        """Send these first samples as fast as the server takes them, and wait until it has caught up.

        The client is never more than 2 s ahead of the text.
        """
        for at in range(0, samples, PIECE):
            await self._text_within(at, AHEAD_TOKENS)
            await self._append(at)
        await self._text_within(samples, 0)
        self._skipped = samples

    async def speak(self, begin: int, due: float | None) -> None:
        """Send the rest at the pace of speech, from `due` on, on the clock of time.perf_counter."""
        await self._until(due)
        first = self._answer.start = time.perf_counter()
        first = due if due is not None and first - due < PIECE_S else first
        length = self._sound.samples - begin
        for number, at in enumerate(range(begin, self._sound.samples, PIECE)):
            # The last one is shorter, and so is the time that it takes to say it.
            scheduled = first + (min(number * PIECE, length - PIECE) / SAMPLE_RATE if number else 0)
            await self._until(scheduled)
            if self._late is not None:
                self._late.append(time.perf_counter() - scheduled)
            await self._append(at)
        self._answer.spoken = time.perf_counter()
        await self._send('{"type": "input_audio_buffer.commit", "final": true}')

    async def text(self) -> str:
        """Wait for the end. A timeout is the longest silence, as in the other modes."""
        while self._done is None:
            await self._next()
        return self._done

    def score(self, clip: Clip, delay_ms: int) -> None:
        """Note in the answer the lags, the delays of the words, and whether the session fell behind."""
        answer, samples = self._answer, self._sound.samples
        assert answer.spoken is not None
        skipped_s = self._skipped / SAMPLE_RATE
        # The speech began one piece before the first piece was sent.
        began = answer.start - min(PIECE_S, samples / SAMPLE_RATE) - skipped_s
        delays: list[tuple[float, float]] = []
        if words := clip.extra.get("words"):
            found = lag.word_delays(words, [(at - began, text) for at, text in answer.pieces or ()])
            delays = [(end, delay) for end, delay in found if end >= skipped_s]
            answer.words_ms = [delay for _, delay in delays]
        answer.pieces = [(at, text) for at, text in answer.pieces or () if at >= answer.start]
        needed = lag.complete_tokens(samples, self._delay)
        if lag.is_one_delta_a_token(len(self._arrivals), self._tokens, samples, self._delay):
            answer.lag_of = "token"
            answer.lags = lag.token_lags(self._arrivals, self._sent, answer.spoken, samples, self._skipped, self._delay)
        elif words:
            answer.lag_of, answer.lags, needed = "word", lag.word_lags(delays, delay_ms), 0
        if answer.lags is not None:
            answer.fell_behind = lag.fell_behind(answer.lags, samples / SAMPLE_RATE, len(self._arrivals) >= needed)

    # ---- Sending

    async def _until(self, due: float | None) -> None:
        """Sleep until then, and raise what ended the session meanwhile."""
        await asyncio.sleep(max(0.0, (due or 0.0) - time.perf_counter()))
        self._check()

    async def _append(self, at: int) -> None:
        audio = base64.b64encode(self._sound.read(at, PIECE).tobytes()).decode()
        self._sent.append(time.perf_counter())
        await self._send(f'{{"type": "input_audio_buffer.append", "audio": "{audio}"}}')

    async def _send(self, event: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):  # a server that reads no more would hold it for ever
                await self._socket.send(event)
        except TimeoutError:
            self._socket.transport.abort()  # as it would hold a close
            raise

    # ---- Receiving

    async def _text_within(self, samples: int, tokens: int) -> None:
        """Wait until at most so many tokens are missing of those that the first samples are enough for."""
        while lag.complete_tokens(samples, self._delay) - len(self._arrivals) > tokens:
            try:
                await self._next()
            except TimeoutError:
                raise LiveError(
                    f"no transcription.delta for {self._timeout_s:g} s, {len(self._arrivals)} after "
                    f"{samples / SAMPLE_RATE:.1f} s of audio: expected one for each 80 ms"
                ) from None

    async def _next(self) -> None:
        """Wait for the next event. Raises TimeoutError, and what ended the session."""
        self._heard.clear()
        self._check()
        async with asyncio.timeout(self._timeout_s):
            await self._heard.wait()
        self._check()

    def _check(self) -> None:
        if self._listener is not None and self._listener.done() and self._done is None:
            self._listener.result()

    async def _listen(self) -> None:
        try:
            while self._done is None:
                self._take(await self._socket.recv())
                self._heard.set()
        finally:
            self._heard.set()

    def _take(self, message: str | bytes) -> None:
        at = time.perf_counter()
        event = self._read(message)
        kind = event.get("type")
        name = {"transcription.delta": "delta", "transcription.done": "text"}.get(str(kind))
        if name is None:
            return
        if not isinstance(text := event.get(name), str):
            raise LiveError(f"{kind} has no string {name!r}: {json.dumps(event)[:300]}")
        if name == "text":
            if self._answer.spoken is None:
                raise LiveError(f"transcription.done before the audio's end: {text[:300]!r}")
            usage = event.get("usage")
            counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
            self._tokens = counted if isinstance(counted, int) else None
            self._done, self._answer.end = text, at
            return
        self._arrivals.append(at)
        if text and self._answer.pieces is not None:
            self._answer.pieces.append((at, text))

    def _read(self, message: str | bytes) -> dict[str, Any]:
        try:
            event = json.loads(message)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise LiveError(f"a message is no JSON object: {message[:300]!r}")
        if event.get("type") == "error":
            raise LiveError(f"the server says: {json.dumps(event, ensure_ascii=False)[:300]}")
        return event
