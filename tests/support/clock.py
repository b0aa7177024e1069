"""An event loop whose clock the test turns: it goes on by itself to the next timer when nothing else is left to do.

`asyncio.sleep(60)` takes no time and lets everything happen that happens within 60 s, on a busy machine too. Jobs in
threads are waited for while the clock stands. A test that waits for something that no timer and no thread brings fails
at once.
"""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

START_S = 1000.0


class Clock:
    """`now`, in seconds, for `asyncio` and for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = START_S

    def monotonic(self) -> float:
        return self.now


class ClockSelector(selectors.DefaultSelector):
    """Turns the clock instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.jobs = clock, 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.jobs:  # a thread wakes the loop when its job is done
            return super().select(None if timeout is None or timeout > 0 else 0)
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("the test waits for something that will not happen: no timer and no thread is left")
        if not events and timeout is not None and timeout > 0:
            self.clock.now += timeout
        return events


class ClockLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self.clock, self.clock_selector = clock, ClockSelector(clock)
        super().__init__(self.clock_selector)

    def time(self) -> float:
        return self.clock.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self.clock_selector.jobs += 1
        future.add_done_callback(self._job_done)
        return future

    def _job_done(self, future: asyncio.Future[Any]) -> None:
        self.clock_selector.jobs -= 1

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """It waits for a thread, which is no job of run_in_executor."""
        self.clock_selector.jobs += 1
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self.clock_selector.jobs -= 1


class ClockPolicy(asyncio.DefaultEventLoopPolicy):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return ClockLoop(self.clock)


@contextmanager
def turned() -> Iterator[Clock]:
    """While it lasts, `asyncio.run` and `time.monotonic` have a Clock."""
    clock = Clock()
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(ClockPolicy(clock))
    try:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr("time.monotonic", clock.monotonic)
            yield clock
    finally:
        asyncio.set_event_loop_policy(before)
