"""The processes that decode audio for an API process, each with limits on its memory, its files and its time.

A file that makes a decoder crash, swell or hang costs its own request only: the process is killed and replaced. So is
the process of a request that is cancelled. The processes start when they are needed, and are reused.

The smallest file that waits is decoded first, and no request waits for room in the budget while it has a process: it
gives up its samples, waits, and has the file decoded again. Otherwise long files would keep short ones waiting.
"""

import asyncio
import heapq
import itertools
import json
import math
import os

import msgspec
import numpy as np

from voxtral_serve.audio.decode import CODES, PYAV, SOXR, AudioError, Bounds, Clip
from voxtral_serve.audio.decode_worker import START, Failure, Order, Samples
from voxtral_serve.guard.budget import Reservation
from voxtral_serve.guard.errors import RefusedError
from voxtral_serve.guard.limits import Rules
from voxtral_serve.guard.processes import BROKEN, OrderProcess
from voxtral_serve.patches.live_server import log
from voxtral_serve.units import MIB

WORKERS = 4  # of all API processes together; ten minutes of audio occupy one for a second
# Of address space: libraries (some 200 MiB), decoders, and blocks of samples. The file and its samples come on top.
BASE_BYTES = 512 * MIB
START_S = 60  # until a process is ready; it takes 0.2 s on an idle core
FREE_S = 30  # the longest wait for a process that is free
# The longest time to decode a clip: DEADLINE_S, and a second for SPEED seconds of the longest clip. Decoders are 200
# times as fast as speech or more, on a core of their own.
DEADLINE_S, SPEED = 20, 20
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # it would reserve memory for a thread on each core
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",  # so that large blocks go back to the system
}

if not (PYAV or SOXR):
    raise ImportError(
        "neither av nor soxr is installed, so only audio at the model's own rate could be served: install av"
    )


class Decoders:
    """`count` processes, each with `memory` bytes of address space."""

    def __init__(self, count: int, memory: int) -> None:
        self.memory = memory
        self._places = Places(count)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    @classmethod
    def of_process(cls, processes: int, rules: Rules) -> "Decoders":
        """Those of one of `processes` API processes, with memory for the largest file and the longest clip."""
        cores = len(os.sched_getaffinity(0))
        count = max(min(WORKERS, cores) // processes, 1)
        # A file with tags before its audio is copied once; so may the samples be.
        return cls(count, BASE_BYTES + 2 * (rules.file_bytes + rules.bounds.bytes_at(rules.rate)))

    async def decode(
        self,
        data: bytes | memoryview,
        bounds: Bounds,
        rate: int,
        param: str,
        held: Reservation,
        *,
        last: bool = True,
        channel: int | None = None,
    ) -> Clip:
        """The samples of an audio file at `rate` Hz, for which `held` has room afterwards: the mean of its channels, or
        those of one, from 0.

        `param` is the request's field that has the file. `last` says that nothing else of the request's body is needed:
        its bytes are then given back, and `data`, if it is a memoryview, is released.

        Raises RefusedError if the file is no audio, is longer than `bounds`, or ends its decoder; if no decoder is free
        for FREE_S; and if there is no room for the samples. If it is cancelled, the process is killed.
        """
        samples = await self._attempt(data, bounds, rate, channel, param, held)
        if isinstance(samples, int):
            await held.add_clip(4 * samples)
            samples = await self._attempt(data, bounds, rate, channel, param, held, samples)
            assert not isinstance(samples, int)
        if last:
            if isinstance(data, memoryview):
                data.release()
            held.drop_body()
        return Clip(samples, rate)

    async def _attempt(
        self,
        data: bytes | memoryview,
        bounds: Bounds,
        rate: int,
        channel: int | None,
        param: str,
        held: Reservation,
        room: int = 0,
    ) -> np.ndarray | int:
        """The samples of a file; their number if `held` has no room for them, which is for `room` samples."""
        try:
            async with asyncio.timeout(FREE_S):
                await self._places.take(0 if room else len(data))
        except TimeoutError:
            message = f"all decoders are busy, and none was free for {FREE_S} s: try again soon"
            raise RefusedError(429, message, "overloaded") from None
        try:
            worker = await self._worker()
            try:
                return await self._decoded(worker, data, bounds, rate, channel, held, room)
            except AudioError as error:
                raise RefusedError(400, f"{param}: {error}", error.code, param) from error
            finally:
                if worker.ready:
                    self._idle.append(worker)
                else:
                    worker.kill()
                    self._all.discard(worker)
        finally:
            self._places.give()

    async def aclose(self) -> None:
        """Kill all processes."""
        for worker in self._all:
            worker.kill()
        await asyncio.gather(*(worker.process.wait() for worker in self._all))
        self._all.clear()
        self._idle.clear()

    async def _worker(self) -> "Worker":
        """A process that is ready: the one that was used last, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            worker.kill()  # its connection stays open otherwise
            self._all.discard(worker)
        worker = await Worker.start(self.memory)
        self._all.add(worker)
        return worker

    async def _decoded(
        self,
        worker: "Worker",
        data: bytes | memoryview,
        bounds: Bounds,
        rate: int,
        channel: int | None,
        held: Reservation,
        room: int,
    ) -> np.ndarray | int:
        worker.ready = False
        deadline_s = DEADLINE_S + math.ceil(bounds.seconds / SPEED)
        try:
            async with asyncio.timeout(deadline_s):
                await worker.send(data, bounds, rate, channel)
                count = await worker.count(4 * room if room else bounds.bytes_at(rate))
                if room or held.add_clip_now(4 * count):
                    return await worker.samples(count)
                await worker.leave(count)
                return count
        except TimeoutError:
            log.warning("a decoder was ended: it took more than %d s for a file", deadline_s)
            raise AudioError(
                f"the decoder ended at its deadline of {deadline_s} s: the file is damaged, or takes too long to decode"
            ) from None
        except BROKEN as error:
            how = await worker.ended()
            log.warning("a decoder ended with %s while it had a file (%s)", how, type(error).__name__)
            raise AudioError(
                f"the decoder ended with {how}: the file is damaged, or no audio that this server reads"
            ) from None


class Places:
    """Who may have a file decoded: `free` places, which the smallest file takes first."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap

    async def take(self, size: int = 0) -> None:
        """Wait for a place, for a file of `size` bytes; equal sizes wait in their order."""
        if self.free:
            self.free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it has got the place in the meantime
                self.give()
            raise

    def give(self) -> None:
        """Give a place back."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


class Worker(OrderProcess):
    """One process."""

    @classmethod
    async def start(cls, memory: int) -> "Worker":
        """A new process that is ready. Raises RuntimeError if it cannot start."""
        return await cls.begin("a decoder", START, (str(memory),), ENVIRONMENT, START_S)

    async def send(self, data: bytes | memoryview, bounds: Bounds, rate: int, channel: int | None) -> None:
        """Send a file. Raises ConnectionError if the process has ended."""
        order: Order = {
            "size": len(data),
            "rate": rate,
            "channel": channel,
            "seconds": bounds.seconds.as_integer_ratio(),
            "because": bounds.because,
            "most_bytes": bounds.most_bytes,
        }
        await self.write(json.dumps(order).encode() + b"\n")
        await self.write(data)

    async def count(self, most_bytes: int) -> int:
        """The number of samples that follow, whose bytes are at most `most_bytes`.

        Raises AudioError if there are none, and one of BROKEN if the process has ended or answers nonsense.
        """
        answer = msgspec.json.decode(await self.line(), type=dict)
        if "error" in answer:
            failure = msgspec.convert(answer, Failure)
            if failure["code"] not in CODES:
                raise msgspec.ValidationError(failure["code"])
            self.ready = not failure["ends"]
            raise AudioError(failure["error"], failure["code"])
        samples = msgspec.convert(answer, Samples)["samples"]
        if not 0 < 4 * samples <= most_bytes + 4:  # the last one may have only begun
            raise msgspec.ValidationError(samples)
        return samples

    async def samples(self, count: int) -> np.ndarray:
        """The samples, after `count`. Raises asyncio.IncompleteReadError if the process has ended."""
        samples = np.empty(count, np.float32)
        await self.read_into(samples.data.cast("B"))
        self.ready = True
        return samples

    async def leave(self, count: int) -> None:
        """Read the samples, after `count`, and keep none. Raises as `samples`."""
        await self.skip(4 * count)
        self.ready = True
