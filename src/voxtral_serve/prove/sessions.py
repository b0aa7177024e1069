"""Live sessions, many in one thread, in vLLM's protocol at `/v1/realtime`: one text and one delta for each token.

The lag of a token is the time from when the client had sent the last sample that the token's audio row needs to the
token's delta. Token k, from 0, needs (D + k + 1) * 1280 + 40 samples, or the audio's end where that is shorter; D is
the delay in tokens. The time to final is that from the last sample to the text's end.
"""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from voxtral_serve.client.dialects import Event, VllmDialect, harmless, message
from voxtral_serve.client.errors import RequestError
from voxtral_serve.client.live import PATH
from voxtral_serve.client.server import CONNECT_S, said
from voxtral_serve.client.sound import RATE_HZ
from voxtral_serve.prove.clips import Samples, pcm16
from voxtral_serve.prove.target import TOKEN, Target

PIECE_S = TOKEN / RATE_HZ
DELAY = 6  # tokens: 480 ms, as the published checkpoint has it; vLLM's protocol has no field for another
LOOK_AHEAD = 40  # samples past its end that a row needs
AHEAD_S = 20.0  # that a session which is sent as fast as it goes may be ahead of its text
SILENT_S = 120.0  # without an event after which a session has failed


class LiveError(RequestError):
    """A session ended otherwise than with its text. The message is for the user."""


class NoLiveError(LiveError):
    """The server has no live sessions."""


@dataclass
class Timeline:
    """What was sent and received in a session; times are of time.perf_counter, in s.

    sent    when each 80 ms were sent
    late_s  by how much later than due, of what was sent at the pace of speech
    deltas  (time, text) of each delta
    """

    sent: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    deltas: list[tuple[float, str]] = field(default_factory=list)
    samples: int = 0
    ended: float | None = None
    done: float | None = None
    text: str = ""
    tokens: int | None = None  # as the server counts them

    @property
    def final_s(self) -> float | None:
        return None if self.done is None or self.ended is None else self.done - self.ended

    def lags_s(self) -> list[float] | None:
        """The lag of each token. None where deltas are not tokens, one by one; a last one may be for the end alone."""
        if self.tokens is None or len(self.deltas) - self.tokens not in (0, 1) or self.ended is None:
            return None
        need = (np.arange(len(self.deltas)) + DELAY + 1) * TOKEN + LOOK_AHEAD
        piece = (np.minimum(need, self.samples) - 1) // TOKEN
        due = np.where(need <= self.samples, np.asarray(self.sent)[piece], self.ended)
        return [float(lag) for lag in np.asarray([at for at, _ in self.deltas]) - due]


class Session:
    """One, whose events a task reads. All methods raise LiveError once the session has ended without its text."""

    def __init__(self, socket: ClientConnection, target: Target) -> None:
        self.timeline = Timeline()
        self._socket, self._dialect = socket, VllmDialect(target.model, 0)
        self._heard = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def begun(self) -> AsyncIterator["Session"]:
        created = _event(await asyncio.wait_for(self._socket.recv(), SILENT_S))
        if created.get("type") != "session.created":
            raise LiveError(f"expected session.created, received {str(created)[:300]}")
        for event in self._dialect.opening():
            await self._socket.send(json.dumps(event))
        self._listener = asyncio.create_task(self._listen())
        try:
            yield self
        finally:
            self._listener.cancel()
            await asyncio.wait({self._listener})
            if not self._listener.cancelled():
                self._listener.exception()

    async def speak(self, samples: Samples) -> None:
        """Send at the pace of speech: each 80 ms when its last sample would have been spoken."""
        begun, line = time.perf_counter(), self.timeline
        for start in range(0, len(samples), TOKEN):
            piece = samples[start : start + TOKEN]
            due = begun + (start + len(piece)) / RATE_HZ
            await self._sleep(due)
            line.late_s.append(time.perf_counter() - due)
            await self._append(piece)

    async def hurry(self, pieces: Iterable[Samples], until: float, enough: int, latest: float) -> None:
        """Send as fast as the text comes, each piece of a multiple of 1,280 samples: up to the time `until`, and with
        fewer than `enough` samples by then, up to the time `latest`."""
        for piece in pieces:
            while len(self.timeline.sent) - len(self.timeline.deltas) > AHEAD_S / PIECE_S:
                await self._news()
            if time.perf_counter() > (until if self.timeline.samples >= enough else latest):
                return
            await self._append(piece)

    async def finish(self) -> Timeline:
        """End the audio and wait for the text."""
        self.timeline.ended = time.perf_counter()
        for event in self._dialect.closing():
            await self._socket.send(json.dumps(event))
        while not self._dialect.done:
            await self._news()
        return self.timeline

    async def _append(self, samples: Samples) -> None:
        line = self.timeline
        event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm16(samples)).decode()}
        await self._socket.send(json.dumps(event))
        line.sent += [time.perf_counter()] * -(-len(samples) // TOKEN)
        line.samples += len(samples)

    async def _sleep(self, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._raise()

    async def _news(self) -> None:
        """Wait for the next event."""
        self._raise()
        self._heard.clear()
        try:
            await asyncio.wait_for(self._heard.wait(), SILENT_S)
        except TimeoutError:
            raise LiveError(f"a live session had no event for {SILENT_S:.0f} s") from None
        self._raise()

    def _raise(self) -> None:
        if self._listener is not None and self._listener.done() and not self._dialect.done:
            error = self._listener.exception()
            raise error if isinstance(error, LiveError) else LiveError(f"a live session ended early: {error}")

    async def _listen(self) -> None:
        line = self.timeline
        try:
            while not self._dialect.done:
                event = _event(await self._socket.recv())
                kind = event.get("type")
                if kind == "transcription.delta":
                    line.deltas.append((time.perf_counter(), str(event.get("delta", ""))))
                elif kind == "transcription.done":
                    line.done, line.text = time.perf_counter(), str(event.get("text", "")).strip()
                    line.tokens = (event.get("usage") or {}).get("completion_tokens")
                elif kind == "error" and not harmless(event):
                    raise LiveError(f"the server says: {message(event)}")
                for _ in self._dialect.take(event):
                    pass
                self._heard.set()
        except ConnectionClosed as error:
            raise LiveError(f"a live session was closed before its text's end: {error}") from None
        finally:
            self._heard.set()


@contextlib.asynccontextmanager
async def session(target: Target) -> AsyncIterator[Session]:
    """Raises LiveError, and NoLiveError if the server has no live sessions."""
    url = f"ws{target.server.url.removeprefix('http')}{PATH}"
    try:
        async with (
            connect(
                url,
                additional_headers=target.server.headers,
                compression=None,  # base64 of sound hardly shrinks
                open_timeout=CONNECT_S,
                close_timeout=1,
                ping_interval=None,  # a server that has enough audio answers none
                proxy=True if target.server.proxied else None,
            ) as socket,
            Session(socket, target).begun() as begun,
        ):
            yield begun
    except InvalidStatus as error:
        told = said(bytes(error.response.body or b"")) or error.response.reason_phrase
        raise NoLiveError(f"{PATH} answers {error.response.status_code} instead of a WebSocket: {told}") from None
    except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
        raise LiveError(f"a live session ended with {type(error).__name__}") from None


def _event(text: str | bytes) -> Event:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise LiveError("a message of a live session is no JSON object")
    return event


async def spoken(target: Target, samples: Samples, after_s: float = 0.0) -> Timeline:
    """One session at the pace of speech, which begins after some seconds."""
    await asyncio.sleep(after_s)
    async with session(target) as each:
        await each.speak(samples)
        return await each.finish()


async def at_once(target: Target, sounds: Iterable[Samples]) -> list[Timeline]:
    """Sessions side by side, which begin at different times within 80 ms. Raises the first error, ends the others."""
    each = list(sounds)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(spoken(target, sound, number / len(each) * PIECE_S))
                for number, sound in enumerate(each)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
