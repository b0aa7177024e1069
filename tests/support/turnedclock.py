"""An event loop whose clock the test turns: waiting takes no time, and a time that is waited for is met exactly.

with turned() as clock:
    clock.run(coroutine())
    assert clock.now == 2.0
"""

import asyncio
import contextlib
import selectors
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")


class Clock:
    """`now` is the time in seconds, of the loop and of what asks `perf_counter` or `monotonic`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        loop = asyncio.SelectorEventLoop(_Selector(self))
        loop.time = self.perf_counter  # type: ignore[method-assign]
        try:
            return loop.run_until_complete(work)
        finally:
            loop.close()


class _Selector(selectors.SelectSelector):
    """Waits for nothing: it turns the clock to when the loop wants to go on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the loop waits for something that never happens"
            self.clock.now += max(timeout, 0)
        return ready


@contextlib.contextmanager
def turned(monkeypatch: Any, *modules: Any) -> Iterator[Clock]:
    """A clock that is also the `time` of these modules."""
    clock = Clock()
    with monkeypatch.context() as patch:
        for module in modules:
            patch.setattr(module, "time", clock)
        yield clock
