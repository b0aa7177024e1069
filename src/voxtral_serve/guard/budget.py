"""A budget in bytes for the complete bodies and the decoded audio of an API process.

A request holds its complete body until a decoder has it, and then its decoded audio, counted COPIES times, until its
answer is sent. A request that finds no room waits, in order of arrival, for WAIT_S at most; then it is refused with
status 429. Complete bodies take a part of the budget only. Otherwise they could fill it, and no clip that is decoded
would find room. A part is for short clips and small bodies only, which pass by those that wait: long files may wait for
each other, and no short clip waits for them.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.limits import Rules
from voxtral_serve.units import MIB

BUDGET_BYTES = 768 * MIB  # of all API processes: room for seven clips of ten minutes, or for 256 clips of 12 s
REQUEST_BYTES = 3 * MIB  # of each request in flight: 12 s in a WAV file of 48 kHz in stereo, or decoded
# Copies of the samples of a clip: the clip, its pieces on their way to the engine, and the engine's.
COPIES = 3
WAIT_S = 10.0


SPARE = 8  # one of so many bytes is for what takes at most REQUEST_BYTES


class Budget:
    """`size` is the number of bytes, `bodies` those of them that complete bodies may take; `used` are held now.

    What takes at most `small` bytes has all of them; other requests leave one of SPARE, if `small` is not 0.
    """

    def __init__(self, size: int, bodies: int, small: int = 0) -> None:
        self.size, self.bodies, self.small = size, bodies, small
        self.used = self.used_by_bodies = 0
        # Those that wait. Decoded audio comes first: its body is given back then.
        self._audio: deque[Waiter] = deque()
        self._bodies: deque[Waiter] = deque()

    @classmethod
    def of_process(cls, processes: int, in_flight: int, rules: Rules) -> "Budget":
        """The budget of one of `processes` API processes, which takes `in_flight` requests at a time.

        It has room for the largest body and the longest clip.
        """
        size = max(BUDGET_BYTES // processes, in_flight * REQUEST_BYTES)
        bodies = max(size // 2, rules.chat_bytes * SPARE // (SPARE - 1))
        largest = bodies + COPIES * rules.bounds.bytes_at(rules.rate)
        return cls(max(size, largest * SPARE // (SPARE - 1)), bodies, REQUEST_BYTES)

    @contextlib.contextmanager
    def hold(self) -> Iterator["Reservation"]:
        """A reservation of a request, which is empty at first and is given back at the end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self._give(reservation.body, reservation.audio)
            reservation.body = reservation.audio = 0

    async def _take(self, reservation: "Reservation", body: int, audio: int) -> None:
        """Add bytes to a reservation as soon as they fit. Raises RefusedError after WAIT_S."""
        if self._take_now(reservation, body, audio):
            return
        waiter = Waiter(reservation, body, audio, asyncio.get_running_loop().create_future())
        waiting = self._audio if audio else self._bodies
        waiting.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(WAIT_S):
                await waiter.granted
        except TimeoutError:
            raise RefusedError(
                429,
                f"the requests in flight hold as much audio as this server takes at a time ({self.size} bytes): try "
                "again soon",
                "overloaded",
            ) from None
        finally:
            if waiter in waiting:  # not granted
                waiting.remove(waiter)
                self._grant()

    def _take_now(self, reservation: "Reservation", body: int, audio: int) -> bool:
        """Add bytes to a reservation if they fit. Only what is small passes by others that wait."""
        if body + audio > self.small and (self._audio or (self._bodies and not audio)):
            return False
        if not self._fits(reservation, body, audio):
            return False
        self._add(reservation, body, audio)
        return True

    def _add(self, reservation: "Reservation", body: int, audio: int) -> None:
        reservation.body += body
        reservation.audio += audio
        self.used += body + audio
        self.used_by_bodies += body

    def _grant(self) -> None:
        """Grant what fits, in order."""
        for waiting in (self._audio, self._bodies):
            while waiting:
                waiter = waiting[0]
                cancelled = waiter.granted.done()  # its task has not run since
                if not cancelled and not self._fits(waiter.reservation, waiter.body, waiter.audio):
                    break
                waiting.popleft()
                if not cancelled:
                    self._add(waiter.reservation, waiter.body, waiter.audio)
                    waiter.granted.set_result(None)

    def _fits(self, reservation: "Reservation", body: int, audio: int) -> bool:
        """Whether there is room. A request that is alone always has it."""
        if self.used == reservation.body + reservation.audio:
            return True
        small = body + audio <= self.small
        parts = SPARE if small or not self.small else SPARE - 1
        if body and ((self._audio and not small) or self.used_by_bodies + body > self.bodies * parts // SPARE):
            return False
        return self.used + body + audio <= self.size * parts // SPARE

    def _give(self, body: int, audio: int) -> None:
        self.used -= body + audio
        self.used_by_bodies -= body
        self._grant()


class Reservation:
    """What a request holds of the budget: bytes of its complete body, and of its decoded audio with its copies."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.body = self.audio = 0

    async def add_body(self, size: int) -> None:
        """Hold `size` bytes for the complete body. Raises RefusedError if there is no room for WAIT_S."""
        await self._budget._take(self, size, 0)

    def drop_body(self) -> None:
        """Give the body's bytes back: nothing refers to the body any more."""
        body, self.body = self.body, 0
        self._budget._give(body, 0)

    async def add_clip(self, size: int) -> None:
        """Hold room for a clip of `size` bytes and its copies. Raises RefusedError if there is none for WAIT_S."""
        await self._budget._take(self, 0, COPIES * size)

    def add_clip_now(self, size: int) -> bool:
        """Hold the same if there is room now. Returns whether there was."""
        return self._budget._take_now(self, 0, COPIES * size)


class Waiter(NamedTuple):
    """Bytes that a request waits for; `granted` is set when it has them."""

    reservation: Reservation
    body: int
    audio: int
    granted: asyncio.Future[None]
