"""Request bodies while they arrive: limits on their number and bytes, and which body is ended at a limit.

A request enters the queue only when its body is complete, so a slow client occupies an open body but no place in the
queue. Open bodies have their own limits (`OpenLimits`). If a new body exceeds the limit on their number, the slowest
open body is ended with status 408, and the new one is kept. If new bytes exceed the limit on bytes, bodies behind the
pace are ended in this way, the slowest first. If all are at the pace, the body whose bytes they are is paused: it is
read no further until there is room. A few paused bodies at a time have a turn, in which they are read though the limit
is reached. Otherwise all bodies could be paused, and none complete. If a body is paused for PAUSE_S, the slowest is
ended with status 429.

A complete body counts among the bytes until the request has room for it in the budget (guard.budget). It is not ended.

The slowest body is the one whose credit ends first. A body starts with CREDIT_S seconds of credit. Each PACE_BYTES_S
bytes add one second, up to CREDIT_S seconds from now. A body whose credit has ended is behind the pace. Therefore no
body ranks above one that has just started, a body that stops ranks below all later ones, and a body at this pace or
faster keeps its rank. Ranking by the average rate would let a client send one burst and then outrank all new bodies for
minutes.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from voxtral_serve.guard.asgi import Receive
from voxtral_serve.guard.budget import Reservation
from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.limits import OpenLimits

STALL_S = 30  # the longest wait for the next bytes of a body
CREDIT_S = 5.0  # a pause of this length costs no rank
PACE_BYTES_S = 16 << 10  # a slow mobile connection; a 10 s clip in Opus takes 2 s at this pace
PAUSE_S = 2.0  # the longest time for which a body at the pace is not read
TURNS, TURN_S = 2, 0.5  # paused bodies that are read at a time, and for how long
OVER = 1.5  # times the limit on bytes, which those with a turn may reach
# Seconds before a refused slow client gets its response. Clients that retry at once would otherwise take all of the
# event loop's time.
HOLD_S = 2.0
LARGE_BYTES = 32 << 20  # of a body that is joined in a thread: its copy takes 10 ms or more
LINGER_S = 1.0  # the wait for the rest of a body that is refused, so that the client reads the answer
DISCARD_S = 10.0  # the longest time that is spent on the rest of a refused body


class OpenBody:
    """A body that is still arriving. `clock` is the timeout of the task that reads it, `now` the event loop's time.

    `refusal` is why the body was ended to make room, once it was. A complete body is not ended.
    """

    def __init__(self, clock: asyncio.Timeout, now: float) -> None:
        self.clock = clock
        self.pieces: list[bytes] = []
        self.size = 0  # bytes
        self.credit_end = now + CREDIT_S  # on the event loop's clock
        self.paused: float | None = None  # since when
        self.complete = False
        self.refusal: RefusedError | None = None

    def add(self, piece: bytes, now: float) -> None:
        self.pieces.append(piece)
        self.size += len(piece)
        self.credit_end = min(self.credit_end + len(piece) / PACE_BYTES_S, now + CREDIT_S)

    def credit(self, now: float) -> float:
        """When the credit ends. It does not run while the body is paused."""
        return self.credit_end + (0 if self.paused is None else now - self.paused)

    def end(self, refusal: RefusedError) -> None:
        self.refusal = refusal
        self.pieces.clear()
        if not self.clock.expired():
            self.clock.reschedule(0)  # its task wakes with TimeoutError


class OpenBodies:
    """The bodies that are arriving at one API process, and those that wait for room in the budget."""

    def __init__(self) -> None:
        self.bodies: set[OpenBody] = set()
        self.size = 0  # bytes of all of them
        self._paused: deque[tuple[OpenBody, asyncio.Future[None]]] = deque()
        self._turns: dict[OpenBody, asyncio.TimerHandle] = {}

    async def read(
        self,
        receive: Receive,
        most: int,
        limits: OpenLimits,
        count: Callable[[int], None],
        large: Callable[[str, int | str, int], RefusedError] = too_large,
        held: Reservation | None = None,
    ) -> bytes | None:
        """A complete body, whose bytes `held` then has; None if the client has disconnected.

        `count` is called with the size of each piece, `large` for the error of a body of more than `most` bytes.

        Raises RefusedError for a body of more than `most` bytes, one that stalls, one that is ended to make room, and
        one for which there is no room in the budget.
        """
        now = asyncio.get_running_loop().time
        body = None
        try:
            async with asyncio.timeout(STALL_S) as clock:
                body = OpenBody(clock, now())
                try:
                    self.bodies.add(body)
                    self._make_room(limits)
                    while (message := await receive())["type"] != "http.disconnect" and body.refusal is None:
                        piece = message.get("body", b"")
                        count(len(piece))
                        if body.size + len(piece) > most:
                            raise large("the body", f"more than {most}", most)
                        body.add(piece, now())
                        self.size += len(piece)
                        if not message.get("more_body", False):
                            return await self._completed(body, held)
                        await self._wait_for_room(body, limits)
                        if body.refusal is not None:
                            break
                        clock.reschedule(now() + STALL_S)
                finally:
                    self._remove(body)
                    self._resume(limits)
        except TimeoutError:
            if body is None or body.refusal is None:
                raise RefusedError(408, f"no data of the body arrived for {STALL_S} s", "stalled") from None
        if body.refusal is not None:
            raise body.refusal
        return None

    async def _completed(self, body: OpenBody, held: Reservation | None) -> bytes:
        body.complete = True
        body.clock.reschedule(None)
        if held is not None:
            await held.add_body(body.size)
        if body.size > LARGE_BYTES:
            return await asyncio.to_thread(b"".join, body.pieces)
        return b"".join(body.pieces)

    async def _wait_for_room(self, body: OpenBody, limits: OpenLimits) -> None:
        """Wait until `body` may be read further. After PAUSE_S, end the slowest."""
        self._make_room(limits)
        if self.size <= limits.size or (body in self._turns and self.size <= limits.size * OVER):
            return
        self._end_turn(body, limits)
        now = asyncio.get_running_loop().time
        body.paused = now()
        waiting = body, asyncio.get_running_loop().create_future()
        self._paused.append(waiting)
        self._resume(limits)
        try:
            async with asyncio.timeout(PAUSE_S):
                await waiting[1]
        except TimeoutError:
            self._make_room(limits, pace=False)
        finally:
            if waiting in self._paused:
                self._paused.remove(waiting)
            body.credit_end, body.paused = body.credit(now()), None

    def _resume(self, limits: OpenLimits) -> None:
        """Let paused bodies be read, the one that waits longest first: all if there is room, else those in turn."""
        while self._paused:
            if self.size > limits.size:
                if len(self._turns) >= TURNS or self.size > limits.size * OVER:
                    return
                body = self._paused[0][0]
                loop = asyncio.get_running_loop()
                self._turns[body] = loop.call_later(TURN_S, self._end_turn, body, limits)
            _, resumed = self._paused.popleft()
            if not resumed.done():
                resumed.set_result(None)

    def _end_turn(self, body: OpenBody, limits: OpenLimits) -> None:
        if (timer := self._turns.pop(body, None)) is not None:
            timer.cancel()
            self._resume(limits)

    def _make_room(self, limits: OpenLimits, *, pace: bool = True) -> None:
        """End the slowest bodies until the others are within the limits; with `pace`, none at the pace for bytes."""
        now = asyncio.get_running_loop().time()
        while len(self.bodies) > limits.bodies or self.size > limits.size:
            arriving = [body for body in self.bodies if not body.complete]
            slowest = min(arriving, key=lambda body: body.credit(now), default=None)
            if slowest is None:
                return
            slow = len(self.bodies) > limits.bodies or slowest.credit(now) < now
            if pace and not slow:
                return
            self._remove(slowest)
            slowest.end(_too_slow() if slow else _too_many_bytes())

    def _remove(self, body: OpenBody) -> None:
        if body in self.bodies:
            self.bodies.remove(body)
            self.size -= body.size
        if (timer := self._turns.pop(body, None)) is not None:
            timer.cancel()


def _too_slow() -> RefusedError:
    return RefusedError(
        408,
        "too many bodies are still arriving at the server, and this one was the slowest: send it again over a faster "
        "connection",
        "too_slow",
    )


def _too_many_bytes() -> RefusedError:
    return RefusedError(
        429, "the bodies that are arriving have as many bytes as this server takes: try again soon", "overloaded"
    )


async def hold(receive: Receive) -> bool:
    """Receive the rest of a refused body before the response, for HOLD_S at most. Returns whether it is complete."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HOLD_S):
            while (await receive()).get("more_body", False):
                pass
            return True
    return False


async def discard(receive: Receive) -> None:
    """Receive the rest of a refused body after the response: for LINGER_S, longer while it arrives at the pace, and for
    DISCARD_S at most.

    Closing a connection while the client still sends resets it, and the client may lose the response.
    """
    now = asyncio.get_running_loop().time
    end = now() + DISCARD_S
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S) as clock:
            while (message := await receive()).get("more_body", False):
                credit_end = (clock.when() or now()) + len(message.get("body", b"")) / PACE_BYTES_S
                clock.reschedule(min(credit_end, now() + CREDIT_S, end))
