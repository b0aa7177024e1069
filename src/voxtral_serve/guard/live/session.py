"""One live session: PCM16 in, pieces of text out, over as many requests of the engine as it takes.

It knows nothing of a WebSocket or of its events. Its user calls `begin`, then `feed` for audio, `cut` where a turn ends
and `end`, all in one task; `outputs` or `deltas` in another, which ends with the text; and `close` in any case.
"""

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from voxtral_serve.engine.session import SessionShape
from voxtral_serve.guard.live.cuts import SAMPLE_BYTES, CutPoints, Splitter
from voxtral_serve.guard.live.items import SessionOutput, TurnEnd
from voxtral_serve.guard.live.link import EngineLink, LinkError
from voxtral_serve.guard.live.metrics import Metrics
from voxtral_serve.guard.metrics import metrics as guard_metrics
from voxtral_serve.transcript.logprobs import chosen_logprobs

EOS = 2  # </s> of Mistral's tokenizers
BEHIND_S, CAUGHT_UP_S = 0.5, 0.16  # lags that a catch-up goes from and to
PART_BYTES = 1 << 16  # of audio that is fed at a time
MOST_PARTS = 16  # requests of a session that are not complete: turns of a few samples are no backlog of audio


class Part:
    """The audio and the tokens of one request of a session. `turn` and `start` are those of SessionOutput."""

    def __init__(self, name: str, shape: SessionShape, turn: int = 0, start: int = 0) -> None:
        self.name, self.turn, self.start = name, turn, start
        self.samples = 0  # sent
        self.tokens = 0  # received
        self.ready = asyncio.Event()  # the prompt's rows are complete, or there is no more audio
        self.opened = self.ended = self.done = False
        self.waiting: list[bytes] = []  # audio that goes to the engine once it is opened
        # (samples, time) of what was sent: that many samples had arrived by then
        self.arrivals: deque[tuple[int, float]] = deque()
        self.last = time.monotonic()  # when its last audio arrived, or its end
        self._first, self._step = shape.ready_samples, shape.samples

    def needed(self, token: int) -> int:
        """Samples after which the row is complete that a token (the first is 0) needs."""
        return self._first + token * self._step

    @property
    def covered(self) -> int:
        """Samples whose text is there, as far as tokens tell."""
        return min(self.samples, self.needed(self.tokens - 1)) if self.tokens else 0

    def lag_s(self, now: float) -> float:
        """Seconds since the last sample arrived that the row of the last token needs."""
        samples, arrivals = self.needed(self.tokens - 1), self.arrivals
        while arrivals and arrivals[0][0] < samples:
            arrivals.popleft()
        return now - (arrivals[0][1] if arrivals else self.last)


class LiveSession:
    """
    shape      that of its delay
    points     where its audio is cut
    pause      says whether PCM16 ends in a pause
    failed     is told what the engine refused once the session had begun
    backlog_s  bounds the audio that the engine has and has not answered by tokens: `feed` waits then
    """

    def __init__(
        self,
        link: EngineLink,
        shape: SessionShape,
        points: CutPoints,
        metrics: Metrics,
        pause: Callable[[bytes], Awaitable[bool]],
        failed: Callable[[str], None],
        backlog_s: float,
    ) -> None:
        self.link, self.shape, self.metrics = link, shape, metrics
        self._counted = 0  # of the samples
        self._pause, self._failed = pause, failed
        self._most, self._ready_samples = round(backlog_s * shape.rate_hz), shape.ready_samples
        self._splitter = Splitter(points)
        self.id = uuid.uuid4().hex  # of its requests in the engine, each with its number behind it
        self._parts: list[Part] = []  # those that are not done, and the last one
        self._done_samples = self._requests = 0
        # Told the samples that `feed` gets; false ends the session, and these are not fed
        self.allowed: Callable[[int], Awaitable[bool]] | None = None
        self.logprobs = False  # whether the next request asks for them
        self.keywords: bytes | None = None  # the next request's table of custom words
        self.turn = 0
        self._room: asyncio.Future[None] | None = None
        self._begun = self._behind = False
        self.ended = self.closed = False
        self.samples = self.tokens = self.prompt_tokens = self.rollovers = 0
        self.worst_lag_s = 0.0
        self.heard_from = time.monotonic()  # when the last token came, or the engine had nothing to do

    async def begin(self) -> None:
        """Raises LinkError if the engine has no place for another session."""
        part = self._new()
        self._open(part)
        await self.link.open(part.name, self.shape.delay)
        self.metrics.sessions.inc()
        self._begun = True

    async def feed(self, pcm: bytes) -> None:
        """Mono PCM16 of any length, at the shape's rate. It waits while the backlog is full, in seconds or in turns."""
        arrived = time.monotonic()
        if self.ended or not (self.allowed is None or await self.allowed(len(pcm) // SAMPLE_BYTES)):
            return
        # Part by part: what waits is copied for each position of room.
        for first in range(0, len(pcm), PART_BYTES):
            await self._feed(pcm[first : first + PART_BYTES], arrived)

    async def _feed(self, pcm: bytes, arrived: float) -> None:
        while pcm and not self.ended:
            room, later = (self._most - self.backlog) * SAMPLE_BYTES, b""
            if room <= 0 or len(self._parts) > MOST_PARTS:
                await self._until_room()
                continue
            if len(pcm) > room:
                pcm, later = pcm[:room], pcm[room:]
            stretch, rest = self._splitter.take(pcm)
            self._send(stretch.pcm, arrived)
            if stretch.cut or (stretch.doubt and await self._is_pause()):
                self._roll_over()
            pcm = rest + later if later else rest

    def end(self) -> None:
        """No more audio. What is held back goes to the engine; `deltas` ends with the last token."""
        if not self.ended:
            self._send(self._splitter.flush(), time.monotonic())
            self.ended = True
            self._end(self._parts[-1])
            self._wake()

    def cut(self) -> None:
        """A turn ends with the audio so far: its text comes at once, and what follows is the next turn's."""
        if not self.ended:
            self._send(self._splitter.flush(), time.monotonic())
            self.turn += 1
            self._next_part()

    async def deltas(self) -> AsyncGenerator[tuple[str, int], None]:
        """(text, tokens) of each output of the engine, in order; most texts are empty. Raises as `outputs`.

        There is one token for each 80 ms of audio: those that a rollover adds for its padding are left out. A request
        that begins within 80 ms of audio begins with their token: a client that counts takes none for later than it is.
        """
        told = surplus = start = 0
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for output in outputs:
                if isinstance(output, TurnEnd):
                    continue
                if output.start != start:  # another request's first output
                    start = output.start
                    surplus = told - start // self.shape.samples
                tokens = len(output.tokens)
                left_out = max(0, min(tokens - bool(output.text), surplus))
                surplus -= left_out
                told += tokens - left_out
                if output.text or tokens > left_out:
                    yield output.text, tokens - left_out

    async def outputs(self) -> AsyncGenerator[SessionOutput | TurnEnd, None]:
        """The text of each turn, in order, and its end. Raises LinkError, and what vLLM raises."""
        text_ended, written = True, False  # whether the turn's text ends in a space; whether there is any
        while True:
            part = self._parts[0]
            await part.ready.wait()
            await self.link.delivered()  # the engine refuses a request whose prompt has no audio yet
            fresh = True  # the first word after another request's
            if part.samples:
                async with contextlib.aclosing(self._outputs(part)) as outputs:
                    async for output in outputs:
                        if text := output.text:
                            if fresh and written and not text_ended and not text[0].isspace():
                                output = output._replace(text=" " + text)
                            fresh, written, text_ended = False, True, text[-1].isspace()
                        yield output
            self._finish(part)
            last = self._parts[0] is part
            if last or self._parts[0].turn != part.turn:
                text_ended, written = True, False
                yield TurnEnd(part.turn)
            if last:
                return

    def close(self) -> None:
        """Free what the engine has of it. To be called in any case, once `deltas` is not running."""
        if not self.closed:
            self.closed = self.ended = True
            self.count()
            if self._begun:
                self.metrics.sessions.dec()
                self.link.left()
            for part in self._parts:
                if part.opened and not part.done:
                    self.link.close(part.name)
            self._wake()

    def count(self) -> None:
        """Add the seconds since the last call to the metric. For each append it would cost as much as the append."""
        if fresh := self.samples - self._counted:
            self._counted = self.samples
            guard_metrics().audio.labels("live").inc(fresh / self.shape.rate_hz)

    @property
    def backlog(self) -> int:
        """Samples that the engine has been sent and has not answered by tokens."""
        answered = self._done_samples
        for part in self._parts:
            if not part.done:
                answered += part.covered
        return self.samples - answered

    def stalled_s(self, now: float) -> float:
        """Seconds until `now` in which the engine has not answered, while it had what it needs for a token."""
        part = self._parts[0]
        if not part.ended and part.needed(part.tokens) > part.samples:
            self.heard_from = now
        return now - self.heard_from

    def _new(self) -> Part:
        part = Part(f"{self.id}-{self._requests}", self.shape, self.turn, self.samples)
        self._requests += 1
        self._parts.append(part)
        return part

    def _open(self, part: Part) -> None:
        part.opened = True
        self.link.on_refused[part.name] = self._failed

    def _send(self, pcm: bytes, arrived: float) -> None:
        if not pcm or self.ended:
            return
        part = self._parts[-1]
        part.samples += len(pcm) // SAMPLE_BYTES
        self.samples += len(pcm) // SAMPLE_BYTES
        part.arrivals.append((part.samples, arrived))
        part.last = arrived
        if part.opened:
            self.link.audio(part.name, pcm)
        else:
            part.waiting.append(pcm)
        if part.samples >= self._ready_samples:
            part.ready.set()

    def _end(self, part: Part) -> None:
        part.ended, part.last = True, time.monotonic()
        if part.opened:
            self.link.end(part.name)
        part.ready.set()

    async def _is_pause(self) -> bool:
        return await self._pause(bytes(self._splitter.heard)) and not self.ended

    def _roll_over(self) -> None:
        self.rollovers += 1
        self.metrics.rollovers.inc()
        self._next_part()

    def _next_part(self) -> None:
        """The audio so far is one request's, what follows the next one's: it is opened when the former is done, so
        that a session has one place in the engine."""
        self._splitter.cut()
        self._end(self._parts[-1])
        self._new()

    async def _outputs(self, part: Part) -> AsyncGenerator[SessionOutput, None]:
        observe = self.metrics.lag.observe
        self.prompt_tokens += self.shape.prompt
        asked = self.logprobs
        outputs = self.link.tokens(part.name, self.shape, asked, self.keywords)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if not output.outputs:
                    continue
                answer = output.outputs[0]
                if answer.finish_reason == "error":  # also after the audio's end, where the text would be cut short
                    raise LinkError(f"the engine has ended the request: {answer.stop_reason}")
                count = len(answer.token_ids)
                now = self.heard_from = time.monotonic()
                for _ in range(count):
                    part.tokens += 1
                    lag_s = part.lag_s(now)
                    observe(lag_s)
                    self._follow(lag_s)
                self.tokens += count
                if self._room is not None:
                    self._wake()
                logprobs = chosen_logprobs(answer) if asked else None
                yield SessionOutput(part.turn, part.start, answer.text, answer.token_ids, logprobs)
                # Before the audio's end EOS is a pause of the speaker's.
                if part.ended and EOS in answer.token_ids and self._heard_all(part):
                    return
        if not part.ended:
            raise LinkError("the engine has ended the request before its audio's end")

    def _heard_all(self, part: Part) -> bool:
        """Whether the last token had all of the request's audio, its padding aside."""
        shape = self.shape
        return shape.prompt - 1 + part.tokens >= shape.left + -(-part.samples // shape.samples)

    def _follow(self, lag_s: float) -> None:
        self.worst_lag_s = max(self.worst_lag_s, lag_s)
        if lag_s > BEHIND_S:
            self._behind = True
        elif self._behind and lag_s <= CAUGHT_UP_S:
            self._behind = False
            self.metrics.catch_ups.inc()

    def _finish(self, part: Part) -> None:
        """Of a request that has all its tokens: the next one takes its place in the engine."""
        part.done = True
        self._done_samples += part.samples
        self.link.close(part.name)
        if len(self._parts) > 1:
            self._parts.pop(0)
            following = self._parts[0]
            self._open(following)
            self.link.open_next(following.name, self.shape.delay)
            if following.waiting:
                self.link.audio(following.name, b"".join(following.waiting))
                following.waiting.clear()
            if following.ended:
                self.link.end(following.name)
        self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _until_room(self) -> None:
        self._room = asyncio.get_running_loop().create_future()
        try:
            await self._room
        finally:
            self._room = None
