"""The budget in bytes: who waits, who comes first, and that all is given back."""

import asyncio
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from guarding import RULES

from voxtral_serve.audio.decode import Bounds
from voxtral_serve.guard import budget
from voxtral_serve.guard.budget import COPIES, Budget
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.units import GIB, MIB

RATE = 16000
SHORT_S = 12
DEFAULT = RULES._replace(file_bytes=25 * MIB, bounds=Bounds(Fraction(600), "", 256 * MIB))
LONG = RULES._replace(file_bytes=GIB, bounds=Bounds(Fraction(3602), "", 1_500_000_000))  # profiles/long.yaml


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(size: int, bodies: int, test: Callable[[Budget], Any]) -> None:
    async def whole() -> None:
        made = Budget(size, bodies)
        await test(made)
        assert (made.used, made.used_by_bodies, len(made._audio), len(made._bodies)) == (0, 0, 0, 0)

    asyncio.run(whole())


def test_a_body_waits_until_there_is_room_and_then_in_order() -> None:
    order: list[str] = []

    async def one(made: Budget, name: str, size: int) -> None:
        with made.hold() as held:
            await held.add_body(size)
            order.append(name)
            await asyncio.sleep(0.01)

    async def test(made: Budget) -> None:
        await asyncio.gather(one(made, "first", 90), one(made, "large", 50), one(made, "small", 5))

    run(100, 100, test)
    assert order == ["first", "large", "small"]  # the small one does not overtake


def test_no_room_is_a_429_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "WAIT_S", 0.05)

    async def test(made: Budget) -> None:
        with made.hold() as first, made.hold() as second:
            await first.add_clip(30)
            with pytest.raises(RefusedError, match=r"\(100 bytes\): try again soon") as caught:
                await second.add_body(20)
            assert (caught.value.status, caught.value.code, made.used) == (429, "overloaded", 90)

    run(100, 50, test)


def test_bodies_leave_room_for_audio() -> None:
    async def test(made: Budget) -> None:
        with made.hold() as first, made.hold() as second, made.hold() as third:
            await first.add_body(30)
            await second.add_body(20)
            waiting = asyncio.create_task(third.add_body(1))
            await settled()
            assert not waiting.done()
            await first.add_clip(10)
            first.drop_body()
            await asyncio.wait_for(waiting, 1)
            assert (made.used, made.used_by_bodies) == (20 + 30 + 1, 21)

    run(100, 50, test)


def test_audio_comes_before_bodies() -> None:
    async def test(made: Budget) -> None:
        with made.hold() as first, made.hold() as second, made.hold() as third:
            await first.add_clip(30)
            body = asyncio.create_task(second.add_body(15))
            await settled()
            audio = asyncio.create_task(third.add_clip(5))
            await settled()
            assert (body.done(), audio.done()) == (False, False)
            first.audio, given = 0, first.audio
            made._give(0, given)
            await settled()
            assert (body.done(), audio.done()) == (True, True)
            assert (second.body, third.audio, made.used) == (15, 15, 30)

    run(100, 50, test)


def test_a_request_that_is_alone_always_has_room() -> None:
    async def test(made: Budget) -> None:
        with made.hold() as held:
            await held.add_body(1000)
            await held.add_clip(1000)
            held.drop_body()
            assert made.used == 1000 * COPIES

    run(100, 50, test)


def test_a_request_that_is_cancelled_while_it_waits_takes_nothing() -> None:
    async def test(made: Budget) -> None:
        with made.hold() as first, made.hold() as second, made.hold() as third:
            await first.add_body(50)
            waiting = asyncio.create_task(second.add_body(40))
            behind = asyncio.create_task(third.add_body(10))
            await settled()
            first.drop_body()
            waiting.cancel()  # in the moment in which it is granted
            await asyncio.wait([waiting, behind], timeout=1)
            assert (waiting.cancelled(), behind.done()) == (True, True)

    run(100, 50, test)


def test_room_that_comes_after_a_cancellation_goes_to_the_next() -> None:
    """The request that gives it back is not to blame: its client would get the error."""

    async def test(made: Budget) -> None:
        with made.hold() as first, made.hold() as second, made.hold() as third:
            await first.add_body(50)
            waiting = asyncio.create_task(second.add_body(40))
            behind = asyncio.create_task(third.add_body(45))
            await settled()
            waiting.cancel()
            first.drop_body()  # before the cancelled task runs
            await asyncio.wait([waiting, behind], timeout=1)
            assert (waiting.cancelled(), behind.done(), second.body, third.body) == (True, True, 0, 45)

    run(100, 50, test)


def test_what_is_small_passes_by_what_waits_and_has_a_part_for_itself() -> None:
    async def test() -> None:
        made = Budget(80, 40, small=5)
        with made.hold() as third, made.hold() as fourth:
            with made.hold() as first, made.hold() as second:
                await first.add_body(1)
                assert second.add_clip_now(22)  # 67 of the 70 bytes that large requests may take
                assert not third.add_clip_now(2)
                large = asyncio.create_task(third.add_clip(2))
                await settled()
                assert not large.done() and fourth.add_clip_now(1) and made.used == 70
            await large
        assert made.used == 0

    asyncio.run(test())


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_256_clips_of_12_s_have_room_at_once(processes: int) -> None:
    """In 16-bit WAV files of 48 kHz in stereo at most half of their bodies at a time; decoded all."""
    each = 256 // processes
    made = Budget.of_process(processes, each, DEFAULT)
    assert each * COPIES * SHORT_S * RATE * 4 <= made.size
    assert each * SHORT_S * 48000 * 2 * 2 <= made.size
    assert made.size * processes <= GIB or processes > 1


def test_the_largest_body_and_the_longest_clip_have_room_together() -> None:
    for rules in (DEFAULT, LONG):
        for processes in (1, 8):
            made = Budget.of_process(processes, 32, rules)
            assert made.bodies >= rules.chat_bytes
            assert made.size >= made.bodies + COPIES * rules.bounds.bytes_at(RATE)
    assert Budget.of_process(1, 256, DEFAULT).size == budget.BUDGET_BYTES
