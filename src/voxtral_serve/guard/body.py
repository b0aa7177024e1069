"""Request bodies while they arrive: limits on their number and bytes, and which body is ended at a limit.

A request enters the queue only when its body is complete, so a slow client occupies an open body but no place in the
queue. Open bodies have their own limits (`OpenLimits`). If a new body or new bytes exceed a limit, the slowest open
body is ended with status 408, and the new one is kept.

The slowest body is the one whose credit ends first. A body starts with CREDIT_S seconds of credit. Each PACE_BYTES_S
bytes add one second, up to CREDIT_S seconds from now. Therefore no body ranks above one that has just started, a body
that stops ranks below all later ones, and a body at this pace or faster keeps its rank. Ranking by the average rate
would let a client send one burst and then outrank all new bodies for minutes.
"""

import asyncio
import contextlib
import operator
from collections.abc import Callable

from voxtral_serve.guard.asgi import Receive
from voxtral_serve.guard.errors import RefusedError, too_large
from voxtral_serve.guard.limits import OpenLimits

STALL_S = 30  # the longest wait for the next bytes of a body
CREDIT_S = 5.0  # a pause of this length costs no rank
PACE_BYTES_S = 16 << 10  # a slow mobile connection; a 10 s clip in Opus takes 2 s at this pace
# Seconds before a refused slow client gets its response. Clients that retry at once would otherwise take all of the
# event loop's time.
HOLD_S = 2.0
LINGER_S = 1.0  # the wait for the rest of a body that is refused, so that the client reads the answer


class OpenBody:
    """A body that is still arriving. `clock` is the timeout of the task that reads it, `now` the event loop's time.

    `ended` is True after the body was ended to make room.
    """

    def __init__(self, clock: asyncio.Timeout, now: float) -> None:
        self.clock = clock
        self.pieces: list[bytes] = []
        self.size = 0  # bytes
        self.credit_end = now + CREDIT_S  # on the event loop's clock
        self.ended = False

    def add(self, piece: bytes, now: float) -> None:
        self.pieces.append(piece)
        self.size += len(piece)
        self.credit_end = min(self.credit_end + len(piece) / PACE_BYTES_S, now + CREDIT_S)


class OpenBodies:
    """The bodies that are arriving at one API process."""

    def __init__(self) -> None:
        self.bodies: set[OpenBody] = set()
        self.size = 0  # bytes of all of them

    async def read(
        self,
        receive: Receive,
        most: int,
        limits: OpenLimits,
        count: Callable[[int], None],
        large: Callable[[str, int | str, int], RefusedError] = too_large,
    ) -> bytes | None:
        """A complete body; None if the client has disconnected. `count` is called with the size of each piece, `large`
        for the error of a body of more than `most` bytes.

        Raises RefusedError for a body of more than `most` bytes, one that stalls, and one that is ended to make room.
        """
        now = asyncio.get_running_loop().time
        ended = False
        try:
            async with asyncio.timeout(STALL_S) as clock:
                body = OpenBody(clock, now())
                try:
                    self.bodies.add(body)
                    self._make_room(limits)
                    while (message := await receive())["type"] != "http.disconnect" and not body.ended:
                        piece = message.get("body", b"")
                        count(len(piece))
                        if body.size + len(piece) > most:
                            raise large("the body", f"more than {most}", most)
                        if not message.get("more_body", False):
                            return b"".join([*body.pieces, piece])
                        clock.reschedule(now() + STALL_S)
                        body.add(piece, now())
                        self.size += len(piece)
                        self._make_room(limits)
                finally:
                    ended = body.ended
                    self._remove(body)
        except TimeoutError:
            if not ended:
                raise RefusedError(408, f"no data of the body arrived for {STALL_S} s", "stalled") from None
        if ended:
            raise RefusedError(
                408,
                "too many bodies are still arriving at the server, and this one was the slowest: send it again over a "
                "faster connection",
                "too_slow",
            )
        return None

    def _make_room(self, limits: OpenLimits) -> None:
        """End the slowest bodies until the others are within the limits."""
        while self.bodies and (len(self.bodies) > limits.bodies or self.size > limits.size):
            slowest = min(self.bodies, key=operator.attrgetter("credit_end"))
            self._remove(slowest)
            slowest.ended = True
            slowest.pieces.clear()
            if not slowest.clock.expired():
                slowest.clock.reschedule(0)  # its task wakes with TimeoutError

    def _remove(self, body: OpenBody) -> None:
        if body in self.bodies:
            self.bodies.remove(body)
            self.size -= body.size


async def hold(receive: Receive) -> bool:
    """Receive the rest of a refused body before the response, for HOLD_S at most. Returns whether it is complete."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HOLD_S):
            while (await receive()).get("more_body", False):
                pass
            return True
    return False


async def discard(receive: Receive) -> None:
    """Receive the rest of a refused body after the response, for LINGER_S, and longer while it arrives at the pace.

    Closing a connection while the client still sends resets it, and the client may lose the response.
    """
    now = asyncio.get_running_loop().time
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S) as clock:
            while (message := await receive()).get("more_body", False):
                credit_end = (clock.when() or now()) + len(message.get("body", b"")) / PACE_BYTES_S
                clock.reschedule(min(credit_end, now() + CREDIT_S))
