"""What the commands of a client do to its session, and what the session's text is for the client.

A conversation is driven by the socket: `run` takes the commands, one after the other, and `write` follows the text of
a session in a task of its own. It tells the socket of outputs, in order. `Texts` is for a protocol in which one text
follows the other, each with a session of its own; `Turns` for one in which a connection is one session of turns.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from voxtral_serve.audio.stream import StreamDecoder
from voxtral_serve.guard.live import commands, outputs
from voxtral_serve.guard.live.codec import Command
from voxtral_serve.guard.live.events import EventError
from voxtral_serve.guard.live.items import TurnEnd, TurnText
from voxtral_serve.guard.live.outputs import Output
from voxtral_serve.guard.live.service import LiveService
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.guard.live.speakers import SessionSpeakers
from voxtral_serve.guard.live.turn_audio import TurnAudio
from voxtral_serve.guard.live.turns import IdleTimeout, SpeechEnd, TurnSign, finder
from voxtral_serve.transcript.language import MOST, recognised_later
from voxtral_serve.transcript.turns import TimedSegment
from voxtral_serve.units import MIB

MOST_EARLY = 16 * MIB  # bytes of audio that wait for the command that begins their text
SLICE = 256 * 1024  # bytes of encoded audio that are decoded at a time, which bounds their memory
LARGE = 192 * 1024  # bytes of encoded audio that are decoded in a thread: more takes over a millisecond


class Conversation:
    """
    session    the one that is open
    texts      number of texts, or of turns, so far
    the others are sums over the sessions that are over
    """

    def __init__(
        self,
        service: LiveService,
        say: Callable[[Output], Awaitable[None]],
        begin: Callable[[LiveSession], Awaitable[bool]],
        failed: Callable[[str], None],
    ) -> None:
        """
        say     tells the client of an output
        begin   has the engine take a session, and its text written; False if the engine refuses it
        failed  is told what the engine refused once a session had begun
        """
        self.service, self.say, self.begin, self.failed = service, say, begin, failed
        self.session: LiveSession | None = None
        self.texts = self.samples = self.tokens = self.rollovers = 0
        self.worst_lag_s = 0.0
        self.early_bytes = 0  # of audio that waits for its text to begin

    async def run(self, command: Command) -> None:
        """Raises EventError for a command that makes no sense now."""
        raise NotImplementedError

    async def write(self, session: LiveSession) -> None:
        """Tell of the text of a session that has begun, until it is complete. Raises what the engine raises."""
        raise NotImplementedError

    @property
    def awaits_text(self) -> bool:
        """Whether the client has ended its audio and waits for text: it is not idle then."""
        raise NotImplementedError

    @property
    def unfinished(self) -> bool:
        """Whether a client that leaves now leaves within a text."""
        raise NotImplementedError

    @property
    def had_audio(self) -> bool:
        """Whether there was a session, or audio waits for one."""
        return self.texts > 0 or self.session is not None or self.early_bytes > 0

    def release(self) -> None:
        """The session is over or given up: free its place."""
        if (session := self.session) is not None:
            session.close()
            self.session = None
            self.samples += session.samples
            self.tokens += session.tokens
            self.rollovers += session.rollovers
            self.worst_lag_s = max(self.worst_lag_s, session.worst_lag_s)

    def close(self) -> None:
        """The connection is over."""
        self.release()


class Texts(Conversation):
    """One text after the other. Each begins and ends with a command, and audio before its text waits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._early = bytearray()  # no list: appends of a sample take many times their bytes
        self._ends_early = False  # whether the next text ends with the audio that waits

    def take_early(self) -> bytes:
        """The audio that waits. `early_bytes` goes on counting it."""
        early = bytes(self._early)
        self._early = bytearray()
        return early

    async def run(self, command: Command) -> None:
        match command:
            case commands.Append(audio):
                await self._append(audio)
            case commands.Begin():
                if self.session is None:  # vLLM ignores another one as well
                    await self._begin()
            case commands.End():
                if self.session is not None:
                    self.session.end()
                else:
                    self._ends_early = True  # as in vLLM
            case _:
                raise TypeError(f"{command!r:.80} needs a protocol with turns")

    async def write(self, session: LiveSession) -> None:
        texts, tokens = list[str](), 0
        async with contextlib.aclosing(session.deltas()) as deltas:
            async for text, count in deltas:
                tokens += count
                texts.append(text)
                await self.say(outputs.Tokens(text, count))
        self.release()
        await self.say(outputs.TextDone("".join(texts), session.prompt_tokens, tokens))

    @property
    def awaits_text(self) -> bool:
        return self.session is not None and self.session.ended

    @property
    def unfinished(self) -> bool:
        return self.session is not None

    async def _append(self, audio: bytes) -> None:
        if self.session is not None:
            await self.session.feed(audio)  # which drops what comes after the text's end, as vLLM does
            return
        if self.early_bytes + len(audio) > MOST_EARLY or not self.service.has_room(self.early_bytes):
            raise EventError(
                f"{self.early_bytes} bytes of audio wait for input_audio_buffer.commit, and this append is too much: "
                f"expected at most {MOST_EARLY}, and fewer on a busy server",
                "invalid_audio",
            )
        self._early += audio
        self.early_bytes += len(audio)

    async def _begin(self) -> None:
        session = self.session = self.service.session(self.failed)
        if not await self.begin(session):
            return
        self.texts += 1
        ends, self._ends_early = self._ends_early, False
        try:
            await session.feed(self.take_early())
        finally:
            self.early_bytes = 0
        if ends:
            session.end()


class Turns(Conversation):
    """One session of several turns, which begins with the first audio.

    turns  those whose text is not complete, by number
    """

    def __init__(self, *args: Any, options: commands.Options) -> None:
        super().__init__(*args)
        self.options, self.rate_hz = options, self.service.link.shape.rate_hz
        self.turns: dict[int, TurnText] = {}
        self._decoder = StreamDecoder(options.form, self.rate_hz)
        self._audio: TurnAudio | None = None
        self._speakers: SessionSpeakers | None = None  # if they are labelled
        self._is_labelling = self._has_ended = False

    async def run(self, command: Command) -> None:
        match command:
            case commands.Append(audio):
                await self.append(audio)
            case commands.Configure(options, find):
                await self._configure(options, find)
            case commands.Cut(empty):
                await self._hear(self._decoder.flush())
                if self._audio is not None and self._uncut:
                    await self._cut(self._audio, "client")
                elif empty is not None:
                    raise empty
            case commands.Clear():
                self._clear()
            case commands.End():
                await self._end()
            case _:
                raise TypeError(f"{command!r:.80} needs a protocol without turns")

    async def append(self, audio: bytes) -> None:
        """Take bytes in the format of the options."""
        in_thread = len(audio) > LARGE
        for start in range(0, len(audio), SLICE):
            part = audio[start : start + SLICE]
            await self._hear(
                await asyncio.to_thread(self._decoder.take, part) if in_thread else self._decoder.take(part)
            )

    async def write(self, session: LiveSession) -> None:
        assert self._audio is not None
        power = self._audio.power
        last: TurnText | None = None  # whose end waits for the speakers
        async with contextlib.aclosing(session.outputs()) as pieces:
            async for piece in pieces:
                if isinstance(piece, TurnEnd):
                    if (ended := self.turns.get(piece.turn)) is None:
                        continue
                    if last is not None:
                        await self._complete(last, session, self._audio)
                    last = ended if self._speakers is not None and session.ended else None
                    if last is None:
                        await self._complete(ended, session, self._audio)
                    continue
                turn = self._turn(piece.turn, piece.start)
                text, logprobs = turn.add(piece)
                segments = turn.complete_segments(power)
                if turn.is_dropped:
                    continue
                if text:
                    await self.say(outputs.TurnDelta(turn, text, logprobs))
                if told := self._held(segments):
                    language = await self._language(turn, self.options.segment_languages)
                    for segment in told:
                        await self.say(outputs.TurnSegment(turn, segment, language))
        if self._speakers is not None:
            await self._label(last, session, self._audio, self._speakers)

    def close(self) -> None:
        super().close()
        if self._speakers is not None:
            self._speakers.close()

    @property
    def awaits_text(self) -> bool:
        return self._has_ended or self._is_labelling or any(turn.end is not None for turn in self.turns.values())

    @property
    def unfinished(self) -> bool:
        return self.awaits_text or self._uncut > 0

    @property
    def _uncut(self) -> int:
        """Samples of the turn that goes on."""
        return 0 if self._audio is None else self._audio.fed - self._audio.begin

    async def _configure(self, options: commands.Options, find: bool) -> None:
        self.options = options
        if options.form != self._decoder.form:
            await self._hear(self._decoder.flush())
            self._decoder = StreamDecoder(options.form, self.rate_hz)
        if self._audio is not None:
            self._audio.session.logprobs, self._audio.session.keywords = options.logprobs, options.keywords
            if find:
                self._find(self._audio)

    def _find(self, audio: TurnAudio) -> None:
        """Look for turns by the rule of the options from here on."""
        rule = self.options.rule
        audio.find(None if rule is None else finder(rule, audio.begin, self._sentence_over))

    async def _hear(self, pcm: bytes) -> None:
        """PCM16 at the model's rate."""
        if not pcm or (self._audio is None and not await self._begin()):
            return
        assert self._audio is not None
        if self._speakers is not None and not self._audio.session.ended:
            self._speakers.take(pcm)
        async for event in self._audio.feed(pcm):
            if isinstance(event, TurnSign):
                await self.say(event)
                continue
            await self.say(outputs.TurnHeard(self._current(self._audio), event))
            if isinstance(event, SpeechEnd):
                await self._cut(self._audio, "silence")
            elif isinstance(event, IdleTimeout):
                await self._cut(self._audio, "timeout")

    async def _begin(self) -> bool:
        session = self.session = self.service.session(self.failed, delay_ms=self.options.delay_ms)
        session.logprobs, session.keywords = self.options.logprobs, self.options.keywords
        if not await self.begin(session):
            return False
        if self.options.speakers:
            assert self.service.kept is not None  # otherwise the codec refuses them
            self._speakers = SessionSpeakers(self.service.kept)
        self._audio = TurnAudio(session, self.service.voices)
        self._find(self._audio)
        return True

    async def _cut(self, audio: TurnAudio, by: str) -> None:
        await self._announce(self._current(audio), audio.fed)
        self.service.metrics.turns.labels(by).inc()
        audio.cut()

    async def _announce(self, turn: TurnText, end: int) -> None:
        turn.end = end
        self.texts += 1
        await self.say(outputs.TurnCut(turn))

    def _clear(self) -> None:
        self._decoder = StreamDecoder(self.options.form, self.rate_hz)
        if self._audio is not None and self._uncut:
            self._current(self._audio).is_dropped = True
            self._audio.cut()

    async def _end(self) -> None:
        self._has_ended = True
        if self.session is not None:
            self.session.end()
        if self._audio is not None:
            return
        self.texts += 1
        turn = self._turn(0, 0)
        turn.end = 0
        await self.say(outputs.TurnDone(turn, [], 0))

    async def _complete(self, turn: TurnText, session: LiveSession, audio: TurnAudio) -> None:
        if turn.is_dropped:
            done = outputs.TurnDone(turn, [], 0)
        else:
            segments = self._held(await self._last_segments(turn, audio))
            prompt_tokens, language = (
                turn.requests * session.shape.prompt,
                await self._language(turn, self.options.languages),
            )
            done = outputs.TurnDone(turn, segments, prompt_tokens, language=language)
        await self.say(done)
        self.turns.pop(turn.number)

    async def _label(
        self, last: TurnText | None, session: LiveSession, audio: TurnAudio, speakers: SessionSpeakers
    ) -> None:
        """Tell of the segments of all turns with their speakers, and of the end of the last one.

        last  that turn; None if no audio has come since the one before
        """
        if last is None:
            last = self._turn(session.turn, audio.fed)
            last.end = audio.fed
        unsaid = speakers.hold(await self._last_segments(last, audio))
        self._is_labelling = True
        self.release()  # what the engine has of the session is free
        segments, unlabelled = await speakers.labelled()
        prompt_tokens, language = (
            last.requests * session.shape.prompt,
            await self._language(last, self.options.languages),
        )
        await self.say(outputs.TurnDone(last, [*unsaid, *segments], prompt_tokens, unlabelled, language))
        self.turns.pop(last.number)

    async def _last_segments(self, turn: TurnText, audio: TurnAudio) -> list[TimedSegment]:
        if turn.end is None and audio.fed > turn.begin:  # the end of the session has ended it
            await self._announce(turn, audio.fed)
        return turn.last_segments(audio.power)

    def _held(self, segments: list[TimedSegment]) -> list[TimedSegment]:
        """Those that are said before the session's end."""
        return segments if self._speakers is None else self._speakers.hold(segments)

    async def _language(self, turn: TurnText, is_told: bool) -> str | None:
        """Of the end of the text so far: people may go on in another language."""
        return await recognised_later(turn.text[-MOST:]) if is_told else None

    def _turn(self, number: int, begin: int) -> TurnText:
        if number not in self.turns:
            self.turns[number] = TurnText(number, begin, self.service.stream, self.rate_hz)
        return self.turns[number]

    def _current(self, audio: TurnAudio) -> TurnText:
        """The turn that goes on."""
        return self._turn(audio.session.turn, audio.begin)

    def _sentence_over(self, voice: int) -> bool:
        """Whether the text up to this sample has come, and ends a sentence."""
        session = self.session
        if session is None or (turn := self.turns.get(session.turn)) is None:
            return False
        shape = session.shape
        heard = session.samples - session.backlog
        return heard >= voice + (shape.delay + 2) * shape.samples and turn.ends_sentence
