"""Levels of load, and the sending of clips at one of them.

Live sessions: so many at once, which start within a second of each other, each with audio of its own.
Closed loop: so many requests in flight, the next one when one ends. Open loop: requests start when they are due,
whatever is in flight, so that a slow server cannot slow down those who ask it, and its queue shows in the latency.
"""

import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from bench import BenchError

LEAD_S = 0.2  # before a request is due, its body is built
SPARE_FILES = 100  # that are open beside the connections
Item = TypeVar("Item")  # what a request sends, such as a Clip


@dataclass(frozen=True)
class Load:
    """`concurrency` requests in flight, Poisson arrivals of `rate` a second, or so many live `sessions` at once: two of
    them are null."""

    name: str
    concurrency: int | None = None
    rate: float | None = None
    sessions: int | None = None

    @property
    def at_once(self) -> int | None:
        """How many are in flight at most; null in an open loop."""
        return self.concurrency or self.sessions


def closed(numbers: str) -> list[Load]:
    """The loads of --concurrency: "1,4,16". Raises ValueError."""
    return _distinct([Load(f"c{number}", concurrency=number) for number in map(int, numbers.split(","))])


def open_loop(numbers: str) -> list[Load]:
    """The loads of --rate: "2.5,10". Raises ValueError."""
    rates = [float(number) for number in numbers.split(",")]
    return _distinct([Load(f"r{str(rate).removesuffix('.0')}", rate=rate) for rate in rates])


def live(numbers: str) -> list[Load]:
    """The loads of --sessions: "16,64". Raises ValueError."""
    return _distinct([Load(f"s{number}", sessions=number) for number in map(int, numbers.split(","))])


def parse(name: str) -> Load:
    """The load of a name such as "c16", "r2.5" or "s64". Raises BenchError for any other form."""
    read = {"c": closed, "r": open_loop, "s": live}.get(name[:1])
    try:
        found = read(name[1:]) if read else []
    except ValueError:
        found = []
    if [load.name for load in found] != [name]:
        known = "c16 (requests in flight), r2.5 (arrivals a second) or s64 (live sessions)"
        raise BenchError(f"load {name!r}: expected one like {known}")
    return found[0]


def _distinct(loads: list[Load]) -> list[Load]:
    for load in loads:
        if not 0 < (load.at_once or load.rate or 0) < float("inf"):
            raise ValueError("each must be more than 0")
    if len(set(loads)) < len(loads):
        raise ValueError("each level once")
    return loads


def pool(load: Load, clips: int, mode: str = "whole") -> Executor:
    """Threads for the load, each with a connection of its own: in open loop up to one per clip, made as needed. For
    `mode` realtime, one event loop with as many coroutines (bench/sessions.py).

    Raises BenchError if the operating system allows fewer connections than the load needs.
    """
    if load.at_once and load.at_once > (most := _most_connections()):
        flag = "--sessions" if load.sessions else "--concurrency"
        raise BenchError(f"{flag} {load.at_once}: the limit of open files allows {most}; raise `ulimit -n`")
    if mode == "realtime":
        from bench.sessions import Sessions  # which other modes do without

        return Sessions(load.at_once)
    return ThreadPoolExecutor(load.at_once or clips)


def send(
    load: Load, threads: Executor, clips: Sequence[Item], one: Callable[[Item, float | None], Any], seed: int
) -> Iterator[Any]:
    """Send each clip once and yield the rows as they end. Raises BenchError when open loop needs more than it may have.

    `one(clip, due)` sends a clip when it is due, in seconds of time.perf_counter; without `due` at once. It returns a
    row, or what makes one in the pool.
    """
    ended: SimpleQueue[Future[Any]] = SimpleQueue()

    def start(clip: Item, due: float | None = None) -> None:
        threads.submit(one, clip, due).add_done_callback(ended.put)

    if load.at_once:
        waiting = iter(clips)
        # As many again wait in the pool: no thread is idle until this one has written a row.
        for clip in islice(waiting, 2 * load.at_once):
            start(clip)
        for _ in clips:
            row = ended.get().result()
            for clip in islice(waiting, 1):
                start(clip)
            yield row
        return

    most, in_flight = _most_connections(), 0
    for clip, due in zip(clips, _arrivals(load, seed), strict=False):
        while True:
            try:
                row = ended.get(timeout=max(0.0, due - LEAD_S - time.perf_counter())).result()
            except Empty:
                break
            in_flight -= 1
            yield row
        if in_flight >= most:
            raise BenchError(
                f"--rate {load.rate}: {in_flight} requests are in flight, as many as the limit of open files allows; "
                "raise `ulimit -n`, or take a lower rate"
            )
        try:
            start(clip, due)
        except RuntimeError as error:
            raise BenchError(
                f"--rate {load.rate}: with {in_flight} requests in flight: {error} (`ulimit -u`)"
            ) from None
        in_flight += 1
    for _ in range(in_flight):
        yield ended.get().result()


def _arrivals(load: Load, seed: int) -> Iterator[float]:
    """Poisson arrivals, on time.perf_counter: independent, exponentially distributed gaps with a mean of 1 / rate."""
    draw, due = random.Random(seed), time.perf_counter() + LEAD_S
    while load.rate:
        due += draw.expovariate(load.rate)
        yield due


def _most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 10**9 if soft == resource.RLIM_INFINITY else max(1, soft - SPARE_FILES)
