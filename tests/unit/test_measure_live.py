"""The live client on a clock that the tests turn: what it sends when, and what it notes of what comes back."""

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from turnedclock import Clock, turned

from bench import sessions
from bench.measure import lag, live
from bench.measure.live import LiveError, Session, Timeline
from bench.measure.sound import TOKEN, Sound

RATE = 16000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    with turned(monkeypatch, live, sessions) as clock:
        yield clock


class Socket:
    """A server in the test's own event loop: one delta for each token, `lag_s` after the audio that it needs.

    `slow` are seconds that the sending of a piece takes, by its number. After `silent_after` deltas nothing comes.
    """

    transport = SimpleNamespace(abort=lambda: None)

    def __init__(self, clock: Clock, lag_s: float = 0.0, silent_after: int = 10**6, **slow: float) -> None:
        self.clock, self.lag_s, self.silent_after = clock, lag_s, silent_after
        self.slow = {int(name.removeprefix("piece")): seconds for name, seconds in slow.items()}
        self.kinds: list[str] = []
        self.pieces: list[tuple[float, np.ndarray]] = []  # arrival, samples
        self.told = 0
        self.outgoing: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()
        self.say("session.created")

    def say(self, kind: str, **fields: Any) -> None:
        self.outgoing.put_nowait((self.clock.now + self.lag_s, {"type": kind, **fields}))

    async def recv(self) -> str:
        at, event = await self.outgoing.get()
        await asyncio.sleep(at - self.clock.now)
        return json.dumps(event)

    async def send(self, message: str) -> None:
        event = json.loads(message)
        self.kinds.append(event["type"])
        if event["type"] == "input_audio_buffer.append":
            await asyncio.sleep(self.slow.get(len(self.pieces), 0))
            self.pieces.append((self.clock.now, np.frombuffer(base64.b64decode(event["audio"]), "<i2")))
            self.tell(lag.complete_tokens(self.samples, lag.DELAY))
        elif event.get("final"):
            self.tell(-(-self.samples // TOKEN) + 11)
            if self.told < self.silent_after:
                self.say("transcription.done", text="", usage={"completion_tokens": self.told})

    @property
    def samples(self) -> int:
        return sum(len(samples) for _, samples in self.pieces)

    def tell(self, tokens: int) -> None:
        while self.told < min(tokens, self.silent_after):
            self.told += 1
            self.say("transcription.delta", delta="a" if self.told % 5 == 0 else "")


def hold(
    clock: Clock,
    make: Callable[[], Socket],
    act: Callable[[Session], Coroutine[Any, Any, None]],
    timeout_s: float = 5.0,
) -> tuple[Socket, Timeline]:
    async def session() -> tuple[Socket, Timeline]:
        socket: Any = make()
        line = Timeline()
        async with Session(socket, timeout_s, lag.DELAY, line).opened("mine") as opened:
            await act(opened)
        return socket, line

    return clock.run(session())


def sound(seconds: float) -> Sound:
    return Sound([np.arange(round(seconds * RATE)).astype("<i2")])


def test_the_pace_does_not_drift(clock: Clock) -> None:
    """Each piece is sent in its time; one that takes long to send makes no later one late."""

    async def act(session: Session) -> None:
        await session.speak(sound(2.5), due=1.0)
        await session.finish()

    socket, line = hold(clock, lambda: Socket(clock, piece9=0.2), act)
    commit, append = "input_audio_buffer.commit", "input_audio_buffer.append"
    assert socket.kinds == ["session.update", commit, *[append] * 32, commit]
    assert [len(samples) for _, samples in socket.pieces] == [1280] * 31 + [320]
    np.testing.assert_array_equal(np.concatenate([samples for _, samples in socket.pieces]), sound(2.5).read(0, 10**6))
    due = [1.0 + 0.08 * number for number in range(31)]
    due.append(1.0 + 0.08 * 30 + 0.02)  # the last piece is shorter, and so is its time
    late = [at - expected for (at, _), expected in zip(socket.pieces, due, strict=True)]
    assert late == pytest.approx([*[0.0] * 9, 0.2, 0.12, 0.04, *[0.0] * 20], abs=1e-9)
    assert list(line.late_s) == pytest.approx([*[0.0] * 10, 0.12, 0.04, *[0.0] * 20], abs=1e-9)
    assert (line.started, line.ended) == pytest.approx((1.0, 1.0 + 2.42))


def test_a_session_that_begins_late_keeps_its_pace_from_there(clock: Clock) -> None:
    async def act(session: Session) -> None:
        await asyncio.sleep(3)
        await session.speak(sound(0.24), due=1.0)

    socket, line = hold(clock, lambda: Socket(clock), act)
    assert [at for at, _ in socket.pieces] == pytest.approx([3.0, 3.08, 3.16])
    assert line.started == 3.0


@pytest.mark.parametrize("lag_s", [0.0, 0.05, 0.7])
def test_the_lag_is_the_servers(clock: Clock, lag_s: float) -> None:
    async def act(session: Session) -> None:
        await session.speak(sound(2.0))
        await session.finish()

    _, line = hold(clock, lambda: Socket(clock, lag_s), act)
    lags = line.lags()
    assert lags is not None and len(lags) == 25 + 11
    assert [ms for _, ms in lags] == pytest.approx([1000 * lag_s] * len(lags))
    assert line.final_s == pytest.approx(lag_s)
    assert lag.fell_behind(lags, 2.0, True) is (lag_s > 0.5)
    assert "".join(text for _, text in line.pieces) == "a" * 7


def test_age_is_gained_without_the_pace_of_speech(clock: Clock) -> None:
    """Eight seconds of audio go as fast as the text comes, two seconds ahead of it at most."""
    ahead: list[int] = []

    async def act(session: Session) -> None:
        spoken = sound(9.0)

        def pieces() -> Iterator[np.ndarray]:
            for at in range(0, 8 * RATE, TOKEN):
                ahead.append(lag.complete_tokens(session.timeline.samples, lag.DELAY) - len(session.timeline.arrivals))
                yield spoken.read(at, TOKEN)

        await session.hurry(pieces(), 25)
        await session.catch_up()
        assert len(session.timeline.arrivals) == 100 - lag.DELAY - 1
        await session.speak(spoken, 8 * RATE)
        await session.finish()

    socket, line = hold(clock, lambda: Socket(clock, 0.01), act)
    assert max(ahead) <= 26
    assert len(socket.pieces) == 113
    assert socket.pieces[99][0] < 1.5
    lags = line.lags(skipped=8 * RATE)
    assert lags is not None and min(age for age, _ in lags) > 8
    assert len(line.late_s) == 13  # of what was sent at the pace of speech


def test_hurry_ends_where_it_is_told(clock: Clock) -> None:
    async def act(session: Session) -> None:
        piece = np.zeros(TOKEN, "<i2")
        await session.hurry((piece for _ in range(100)), 250, lambda: session.timeline.samples < 7 * TOKEN)

    assert len(hold(clock, lambda: Socket(clock), act)[0].pieces) == 7


def test_a_server_that_falls_silent(clock: Clock) -> None:
    async def finish(session: Session) -> None:
        await session.speak(sound(1.0))
        await session.finish()

    with pytest.raises(TimeoutError):
        hold(clock, lambda: Socket(clock, silent_after=3), finish)
    assert clock.now == pytest.approx(0.92 + 5)

    async def catch_up(session: Session) -> None:
        await session.hurry([np.zeros(RATE, "<i2")], 250)
        await session.catch_up()

    with pytest.raises(LiveError, match=r"no transcription.delta for 5 s, 3 after 1.0 s of audio: expected one for"):
        hold(clock, lambda: Socket(clock, silent_after=3), catch_up)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"type": "error", "error": "too many", "code": "too_many_sessions"}, 'the server says: {"type": "error"'),
        ({"type": "transcription.delta", "delta": 3}, "transcription.delta has no string 'delta'"),
        ({"type": "transcription.done", "text": "a"}, "transcription.done before the audio's end: 'a'"),
        (["a list"], "a message is no JSON object"),
    ],
)
def test_an_event_that_ends_the_session(clock: Clock, event: Any, message: str) -> None:
    async def act(session: Session) -> None:
        socket: Any = session._socket
        socket.outgoing.put_nowait((clock.now, event))
        await session.speak(sound(1.0))

    with pytest.raises(LiveError) as error:
        hold(clock, lambda: Socket(clock), act)
    assert message in str(error.value)
    assert clock.now < 0.2  # at once, and not at the audio's end


def test_a_session_is_created_first(clock: Clock) -> None:
    def make() -> Socket:
        socket = Socket(clock)
        socket.outgoing.get_nowait()
        socket.say("transcription.delta", delta="a")
        return socket

    async def act(session: Session) -> None:
        raise AssertionError

    with pytest.raises(LiveError, match=r"expected session.created, received"):
        hold(clock, make, act)


def test_sessions_that_are_measured_together_start_within_a_second(clock: Clock) -> None:
    """They wait for the last one to be ready; and one that fails before it is ready holds up nobody."""

    async def act() -> list[float]:
        together = sessions.Together(21, 0, lambda: lambda: {"joules": 1})

        async def one(number: int) -> float:
            place = together.place(f"session-{number:04}")
            await asyncio.sleep(number / 10)
            if number == 20:
                await place.ended()
                return 0.0
            at = await place.ready()
            await asyncio.sleep(at - clock.now + 1)
            await place.ended()
            return at

        starts = await asyncio.gather(*(one(number) for number in range(21)))
        assert together.took == {"joules": 1}
        return starts[:20]

    starts = clock.run(act())
    assert min(starts) >= 2.1 and max(starts) <= 3.1
    assert max(starts) - min(starts) > 0.8
