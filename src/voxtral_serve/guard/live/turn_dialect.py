"""What protocols share whose connection is one session of several turns: audio in, one text for each turn out."""

import asyncio
import contextlib
import functools
from typing import Any

from voxtral_serve.audio.stream import StreamDecoder, StreamFormat
from voxtral_serve.guard.live.events import Event, EventError
from voxtral_serve.guard.live.items import TurnText
from voxtral_serve.guard.live.session import LiveSession, TurnEnd
from voxtral_serve.guard.live.socket import Dialect, LiveSocket, decoded
from voxtral_serve.guard.live.turn_audio import Finder, TurnAudio
from voxtral_serve.transcript.turns import TimedSegment

# Endings without an error event: clients that take any as fatal connect again after a close.
NO_ERRORS = ("idle",)

SLICE = 256 * 1024  # bytes of encoded audio


class TurnDialect(Dialect):
    """`turns` has those whose text is not complete, by number. The session begins with the first audio."""

    def __init__(self, socket: LiveSocket, form: StreamFormat) -> None:
        super().__init__(socket)
        self.rate_hz = self.service.link.shape.rate_hz
        self.decoder = StreamDecoder(form, self.rate_hz)
        self.audio: TurnAudio | None = None
        self.turns: dict[int, TurnText] = {}

    # ---- What a protocol adds

    def options(self) -> tuple[int | None, bool]:
        """(delay in ms, None for the checkpoint's; whether logprobs are asked for)"""
        raise NotImplementedError

    def finder(self) -> Finder | None:
        """What finds turns, and None where the client ends them. The session has begun."""
        raise NotImplementedError

    async def found(self, audio: TurnAudio, event: Any) -> None:
        """The finder has found something at the end of the audio so far."""
        raise NotImplementedError

    def new_turn(self, begin: int) -> TurnText:
        raise NotImplementedError

    async def delta(self, turn: TurnText, text: str, logprobs: list[dict[str, Any]]) -> None:
        """More text of a turn."""
        raise NotImplementedError

    async def segment(self, turn: TurnText, segment: TimedSegment) -> None:
        """A segment of a turn, before the turn is complete."""
        raise NotImplementedError

    async def complete(self, turn: TurnText) -> None:
        """The text of a turn has come. Where `turn.end` is None, it was ended by the session's end."""
        raise NotImplementedError

    async def finished(self) -> None:
        """The text of a session that was ended is complete."""
        if self.draining is not None:
            self.socket.stop(self.draining)

    # ---- Audio

    def drain(self) -> None:
        assert self.session is not None
        self.session.end()

    def set_format(self, form: StreamFormat) -> None:
        """Of the audio from now on; what the former decoder holds is given up or was flushed."""
        self.decoder = StreamDecoder(form, self.rate_hz)

    def find(self) -> None:
        """Have the finder of the settings look for turns from here on."""
        if self.audio is not None:
            self.audio.find(self.finder())

    @property
    def uncut(self) -> int:
        """Samples of the turn that goes on."""
        return 0 if self.audio is None else self.audio.fed - self.audio.begin

    async def append(self, event: Event, large: bool) -> None:
        """The audio of an event, which may be empty. Raises EventError."""
        content = await asyncio.to_thread(decoded, event) if large else decoded(event)
        if not content and event.audio:
            raise EventError("audio is not base64 of at most 15 MiB", "invalid_audio", "audio")
        await self.take(content, large)

    async def take(self, content: bytes, large: bool = False) -> None:
        """Bytes of the session's format. Minutes of audio are decoded slice by slice, which bounds their memory."""
        for start in range(0, len(content), SLICE):
            part = content[start : start + SLICE]
            await self.hear(await asyncio.to_thread(self.decoder.take, part) if large else self.decoder.take(part))

    async def hear(self, pcm: bytes) -> None:
        """PCM16 at the model's rate."""
        if not pcm or (self.audio is None and not await self._begin()):
            return
        assert self.audio is not None
        async for event in self.audio.feed(pcm):
            await self.found(self.audio, event)

    def turn(self, number: int, begin: int) -> TurnText:
        if number not in self.turns:
            self.turns[number] = self.new_turn(begin)
        return self.turns[number]

    def current(self, audio: TurnAudio) -> TurnText:
        """The turn that goes on."""
        return self.turn(audio.session.turn, audio.begin)

    def heard(self, turn: TurnText) -> float:
        """Seconds of a turn that has ended."""
        return round(((turn.end or turn.begin) - turn.begin) / self.rate_hz, 3)

    async def _begin(self) -> bool:
        delay_ms, logprobs = self.options()
        session = self.session = self.service.session(self.socket.failed, delay_ms=delay_ms)
        session.logprobs = logprobs
        if not await self.socket.begin(session):
            return False
        self.audio = TurnAudio(session, self.service.voices)
        self.find()
        self.socket.write(functools.partial(self._write, session, self.audio))
        if self.draining is not None:
            session.end()
        return True

    async def _write(self, session: LiveSession, audio: TurnAudio) -> None:
        async with contextlib.aclosing(session.outputs()) as outputs:
            async for output in outputs:
                if isinstance(output, TurnEnd):
                    if (turn := self.turns.get(output.turn)) is not None:
                        await self.complete(turn)
                        self.turns.pop(output.turn)
                        self.socket.heed()
                    continue
                turn = self.turn(output.turn, output.start)
                text, logprobs = turn.add(output)
                if text:
                    await self.delta(turn, text, logprobs)
                for segment in turn.complete_segments(audio.power):
                    await self.segment(turn, segment)
        await self.finished()
