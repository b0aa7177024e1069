"""Send a clip as a microphone would, and time the text that comes back: one live session of a load.

bench/sessions.py runs hundreds of them in one process.
"""

import asyncio
import time
from array import array
from typing import Protocol

from bench import sound
from bench.answers import Answer
from bench.dataset import Clip
from bench.measure import lag, live
from bench.measure.live import LiveError, Timeline
from bench.measure.sound import RATE_HZ, TOKEN, TOKEN_S
from bench.measure.upload import Server
from bench.sound import SessionClip

AHEAD_TOKENS = 25  # 2 s: so far a session that gains age is ahead of its text


class Place(Protocol):
    """A session's place among those that are measured at the same time: bench.sessions.Place."""

    async def ready(self) -> float: ...
    async def ended(self) -> None: ...


async def transcribe(
    server: Server,
    model: str,
    clip: Clip,
    due: float | None,
    timeout_s: float,
    *,
    delay_ms: int = lag.DELAY_MS,
    place: Place | None = None,
    late: "array[float] | None" = None,
) -> Answer:
    """Hold one session. Decoding the clip and opening the session come before its start, the first audio sent.

    With a `place` it starts at the time that this gives, once it has its age. `late` gets the seconds by which each
    piece was sent later than due.
    """
    answer, line = Answer(time.perf_counter()), Timeline()
    spoken = await asyncio.get_running_loop().run_in_executor(None, sound.of, clip)
    skipped = round(clip.age_s * RATE_HZ) if isinstance(clip, SessionClip) else 0
    delay = lag.delay_tokens(delay_ms)
    try:
        async with live.session(
            server, model, open_timeout_s=timeout_s, timeout_s=timeout_s, delay=delay, timeline=line
        ) as session:
            await session.hurry((spoken.read(at, TOKEN) for at in range(0, skipped, TOKEN)), AHEAD_TOKENS)
            await session.catch_up()
            await session.speak(spoken, skipped, await place.ready() if place else due)
            await session.finish()
            answer.status = 101
    except LiveError as problem:
        answer.status, answer.error = problem.status, str(problem)
    answer.start = line.started or answer.start
    answer.end = time.perf_counter() if line.done is None else line.done
    if late is not None:
        late.extend(line.late_s)
    if place:
        await place.ended()  # what is scored now takes no time from a session that is still measured
    if answer.error is None:
        _score(answer, line, clip, skipped, delay_ms)
    return answer


def _score(answer: Answer, line: Timeline, clip: Clip, skipped: int, delay_ms: int) -> None:
    """Fill in the text, the lags, the delays of the words, and whether the session fell behind."""
    answer.text, answer.spoken = line.text, line.ended
    skipped_s, audio_s = skipped / RATE_HZ, line.samples / RATE_HZ
    # The speech began one piece before the first piece was sent.
    began = line.started - min(TOKEN_S, audio_s) - skipped_s
    delays: list[tuple[float, float]] = []
    if words := clip.extra.get("words"):
        known = lag.word_delays(words, [(at - began, text) for at, text in line.pieces])
        delays = [(end, delay) for end, delay in known if end >= skipped_s]
        answer.words_ms = [delay for _, delay in delays]
    answer.pieces = [(at, text) for at, text in line.pieces if at >= line.started]
    delay = lag.delay_tokens(delay_ms)
    needed = lag.complete_tokens(line.samples, delay)
    answer.lags = line.lags(delay, skipped)
    if answer.lags is not None:
        answer.lag_of = "token"
    elif words:
        answer.lag_of, answer.lags, needed = "word", lag.word_lags(delays, delay_ms), 0
    if answer.lags is not None:
        answer.fell_behind = lag.fell_behind(answer.lags, audio_s, len(line.arrivals) >= needed)
