"""Bodies that are still arriving: what is ended where there are too many, and what is kept."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from voxtral_serve.guard import body, limits
from voxtral_serve.guard.body import CREDIT_S, PACE_BYTES_S, OpenBodies, OpenBody
from voxtral_serve.guard.budget import Budget, Reservation
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.limits import OpenLimits

MOST = 1 << 20
ROOMY = OpenLimits(100, 1 << 30)


class Client:
    """Sends pieces when it is told to, in the form of ASGI's messages."""

    def __init__(
        self, bodies: OpenBodies, bounds: OpenLimits, most: int = MOST, held: Reservation | None = None
    ) -> None:
        self.waiting: asyncio.Queue[Any] = asyncio.Queue()
        self.counted = 0
        self.task = asyncio.create_task(bodies.read(self.waiting.get, most, bounds, self.count, held=held))

    def count(self, size: int) -> None:
        self.counted += size

    async def send(self, piece: bytes, more: bool = True) -> None:
        self.waiting.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        await settled()

    async def outcome(self) -> bytes | int | None:
        """The body, or the status of the refusal."""
        try:
            return await asyncio.wait_for(self.task, 5)
        except RefusedError as error:
            return error.status


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[OpenBodies], Any]) -> None:
    async def whole() -> None:
        bodies = OpenBodies()
        await test(bodies)
        assert (bodies.bodies, bodies.size, len(bodies._paused), len(bodies._turns)) == (set(), 0, 0, 0)

    asyncio.run(whole())


def test_a_body_in_pieces() -> None:
    async def test(bodies: OpenBodies) -> None:
        client = Client(bodies, ROOMY)
        await client.send(b"ab")
        await client.send(b"c")
        assert (len(bodies.bodies), bodies.size) == (1, 3)
        await client.send(b"d", more=False)
        assert (await client.outcome(), client.counted) == (b"abcd", 4)

    run(test)


def test_a_client_that_goes() -> None:
    async def test(bodies: OpenBodies) -> None:
        client = Client(bodies, ROOMY)
        await client.send(b"ab")
        client.waiting.put_nowait({"type": "http.disconnect"})
        assert await client.outcome() is None

    run(test)


def test_a_body_that_is_too_large() -> None:
    async def test(bodies: OpenBodies) -> None:
        client = Client(bodies, ROOMY, most=3)
        await client.send(b"abc")
        await client.send(b"d")
        assert await client.outcome() == 413

    run(test)


def test_a_body_that_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "STALL_S", 0.05)

    async def test(bodies: OpenBodies) -> None:
        client = Client(bodies, ROOMY)
        await settled()
        with pytest.raises(RefusedError, match="no data of the body arrived"):
            await client.task

    run(test)


def test_the_newcomer_is_kept_and_the_oldest_that_sends_nothing_is_ended() -> None:
    async def test(bodies: OpenBodies) -> None:
        bounds = OpenLimits(2, 1 << 30)
        first, second = Client(bodies, bounds), Client(bodies, bounds)
        await settled()
        await first.send(b"a" * PACE_BYTES_S)
        third = Client(bodies, bounds)
        await settled()
        with pytest.raises(RefusedError, match="this one was the slowest") as caught:
            await second.task
        assert (caught.value.status, caught.value.code) == (408, "too_slow")
        for client in (first, third):
            await client.send(b"b", more=False)
        assert await first.outcome() == b"a" * PACE_BYTES_S + b"b"
        assert await third.outcome() == b"b"

    run(test)


def test_bytes_over_the_bound_end_those_that_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they sent before, and at once; the body that the bytes are of goes on."""
    monkeypatch.setattr(body, "CREDIT_S", 0.05)

    async def test(bodies: OpenBodies) -> None:
        bounds = OpenLimits(10, 1000)
        stopped = [Client(bodies, bounds) for _ in range(3)]
        for client in stopped:
            await client.send(b"a" * 300)
        await asyncio.sleep(0.1)
        newcomer = Client(bodies, bounds)
        await newcomer.send(b"b" * 600)
        assert [await client.outcome() for client in stopped[:2]] == [408, 408]
        assert bodies.size == 900
        await newcomer.send(b"b", more=False)
        await stopped[2].send(b"a", more=False)
        assert await newcomer.outcome() == b"b" * 601
        assert await stopped[2].outcome() == b"a" * 301

    run(test)


def test_bytes_over_the_bound_are_waited_for_among_bodies_at_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body is read no further until another one is complete."""
    monkeypatch.setattr(body, "PAUSE_S", 60)
    monkeypatch.setattr(body, "TURNS", 0)

    async def test(bodies: OpenBodies) -> None:
        bounds = OpenLimits(10, 1000)
        first, second = Client(bodies, bounds), Client(bodies, bounds)
        await first.send(b"a" * 600)
        await second.send(b"b" * 600)
        await second.send(b"b", more=False)
        assert (len(bodies.bodies), bodies.size, second.waiting.qsize()) == (2, 1200, 1)  # it is not read
        await first.send(b"a", more=False)
        assert await first.outcome() == b"a" * 600 + b"a"
        assert await second.outcome() == b"b" * 600 + b"b"

    run(test)


def test_paused_bodies_are_read_in_turn_so_that_each_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty bodies of 2,500 bytes; 10,000 are taken at a time, 15,000 with turns."""
    monkeypatch.setattr(body, "TURNS", 1)
    sizes: list[int] = []

    async def test(bodies: OpenBodies) -> None:
        clients = [Client(bodies, OpenLimits(100, 10_000)) for _ in range(20)]
        for piece in range(50):
            for client in clients:
                client.waiting.put_nowait({"type": "http.request", "body": b"a" * 50, "more_body": piece < 49})
            await settled()
            sizes.append(bodies.size)
        assert [await client.outcome() for client in clients] == [b"a" * 2500] * 20

    run(test)
    assert 10_000 < max(sizes) <= 15_000


def test_a_turn_of_a_body_that_stops_passes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "TURNS", 1)
    monkeypatch.setattr(body, "TURN_S", 0.05)

    async def test(bodies: OpenBodies) -> None:
        bounds = OpenLimits(10, 1000)
        first, second, third = (Client(bodies, bounds) for _ in range(3))
        for client in (first, second, third):
            await client.send(b"a" * 400)
        await second.send(b"b", more=False)
        assert (third.waiting.qsize(), len(bodies._turns)) == (0, 1)
        await first.send(b"a")
        await first.send(b"a", more=False)
        assert await first.outcome() == b"a" * 402
        assert await second.outcome() == b"a" * 400 + b"b"
        await third.send(b"c", more=False)
        assert await third.outcome() == b"a" * 400 + b"c"

    run(test)


def test_after_a_pause_the_slowest_body_at_the_pace_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PAUSE_S", 0.05)
    monkeypatch.setattr(body, "TURNS", 0)

    async def test(bodies: OpenBodies) -> None:
        bounds = OpenLimits(10, 1000)
        first, second = Client(bodies, bounds), Client(bodies, bounds)
        await first.send(b"a" * 600)
        await second.send(b"b" * 600)
        with pytest.raises(RefusedError, match="as many bytes as this server takes") as caught:
            await asyncio.wait_for(first.task, 5)
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        await second.send(b"b", more=False)
        assert await second.outcome() == b"b" * 600 + b"b"

    run(test)


def test_a_complete_body_counts_until_the_budget_has_room_and_is_not_ended() -> None:
    async def test(bodies: OpenBodies) -> None:
        bounds, budget = OpenLimits(10, 1000), Budget(1000, 1000)
        with budget.hold() as before, budget.hold() as held:
            await before.add_body(600)
            waiting = Client(bodies, bounds, held=held)
            await waiting.send(b"a" * 600, more=False)
            assert bodies.size == 600 and not waiting.task.done()
            bodies._make_room(OpenLimits(0, 0), pace=False)
            assert bodies.size == 600
            before.drop_body()
            assert await waiting.outcome() == b"a" * 600
            assert (held.body, budget.used) == (600, 600)

    run(test)


def test_a_piece_that_comes_as_the_body_is_ended_does_not_make_it_whole() -> None:
    async def test(bodies: OpenBodies) -> None:
        bounds = OpenLimits(1, 1 << 30)
        first = Client(bodies, bounds)
        await first.send(b"a")
        first.waiting.put_nowait({"type": "http.request", "body": b"b", "more_body": False})
        bodies._make_room(OpenLimits(0, 0))
        assert await first.outcome() == 408

    run(test)


def test_a_body_that_ends_itself_to_make_room_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for no further piece: it is no longer counted, and its client may send none for STALL_S."""
    monkeypatch.setattr(body, "PAUSE_S", 0.05)
    monkeypatch.setattr(body, "TURNS", 0)

    async def test(bodies: OpenBodies) -> None:
        alone = Client(bodies, OpenLimits(10, 1000))
        await alone.send(b"a" * 1200)
        assert await alone.outcome() == 429

    run(test)


def order(*sent: Callable[[OpenBody], None]) -> list[int]:
    """Numbers of bodies that were sent bytes as given, slowest first."""
    made = []
    for each in sent:
        made.append(OpenBody(None, 0.0))  # type: ignore[arg-type]
        each(made[-1])
    return sorted(range(len(made)), key=lambda number: made[number].credit_end)


def each_second(size: int) -> Callable[[OpenBody], None]:
    """Of 100 seconds."""

    def send(to: OpenBody) -> None:
        for second in range(1, 101):
            to.add(bytes(size), float(second))

    return send


def test_the_slowest_is_the_one_that_sends_least() -> None:
    assert order(each_second(PACE_BYTES_S), each_second(1), each_second(PACE_BYTES_S // 2)) == [1, 2, 0]


def test_no_burst_outranks_a_newcomer() -> None:
    burst, newcomer = OpenBody(None, 0.0), OpenBody(None, 0.01)  # type: ignore[arg-type]
    burst.add(bytes(10 * MOST), 0.005)
    assert burst.credit_end < newcomer.credit_end
    steady = OpenBody(None, 0.0)  # type: ignore[arg-type]
    each_second(PACE_BYTES_S)(steady)
    assert steady.credit_end == 100 + CREDIT_S  # as that of one that begins now, and no later


def test_the_rest_of_a_refused_body_is_received_while_it_keeps_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "LINGER_S", 0.05)

    async def sent(pieces: int, size: int) -> int:
        """How many pieces, one each 10 ms, are received."""
        received = 0

        async def receive() -> Any:
            nonlocal received
            await asyncio.sleep(0.01)
            received += 1
            return {"type": "http.request", "body": bytes(size), "more_body": received < pieces}

        await body.discard(receive)
        return received

    assert asyncio.run(sent(20, PACE_BYTES_S)) == 20
    assert asyncio.run(sent(20, 1)) < 10


def test_the_rest_of_a_refused_body_is_received_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it arrives."""
    monkeypatch.setattr(body, "DISCARD_S", 0.2)

    async def endless() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": bytes(PACE_BYTES_S), "more_body": True}

    asyncio.run(asyncio.wait_for(body.discard(endless), 2))


def test_an_answer_is_held_until_the_body_is_whole_or_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "HOLD_S", 0.05)

    async def held(pieces: int) -> bool:
        left = pieces

        async def receive() -> Any:
            nonlocal left
            await asyncio.sleep(0.01)
            left -= 1
            return {"type": "http.request", "body": b"a", "more_body": left > 0}

        return await body.hold(receive)

    assert asyncio.run(held(1))
    assert not asyncio.run(held(1000))


def test_each_process_has_its_share() -> None:
    assert OpenLimits.of_process(4, MOST) == (limits.OPEN_BODIES // 4, limits.OPEN_BYTES // 4)
    assert OpenLimits.of_process(4, limits.OPEN_BYTES).size == 2 * limits.OPEN_BYTES
