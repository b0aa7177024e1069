"""vLLM's scheduler with uploads that begin together, where `clips_together` is set: several clips encoded in one step
take less time than in one step each.

The matrix products of one short clip do not fill a large GPU, and every step that begins a clip also delays the tokens
of all running requests. So while many requests run, those that could begin are held back until there are several, or
until the first of them has waited for WAIT_S. A server with few requests holds none. The limit of running requests,
lowered for one step, is what holds them: both tested versions of vLLM have it. live_scheduler puts this before vLLM's
classes.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from voxtral_serve.engine.config import clips_together

# Running requests for each clip that a step should begin: with fewer than twice as many, no clip waits for another.
SHARE = 32
WAIT_S = 0.025
# vLLM 0.32.0 has both of these limits, 0.20.0 the first.
MOST_RUNNING = ("max_num_running_reqs", "max_num_active_reqs")


class ClipsTogether:
    """Put before one of vLLM's scheduler classes."""

    running: list[Any]
    waiting: Any
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.together = clips_together(self.vllm_config)  # type: ignore[attr-defined]
        self.held_since: float | None = None  # time.monotonic
        self.most_running = [name for name in MOST_RUNNING if hasattr(self, name)]

    def holds(self) -> bool:
        """Whether this step begins no clip, because several should begin in a later one."""
        could = min(len(self.waiting), self.max_num_running_reqs - len(self.running))
        if could <= 0 or could >= min(self.together, len(self.running) // SHARE):
            self.held_since = None
            return False
        now = time.monotonic()
        if self.held_since is None:
            self.held_since = now
        if now - self.held_since < WAIT_S:
            return True
        self.held_since = None
        return False

    @contextlib.contextmanager
    def fewer(self, by: int) -> Iterator[None]:
        """Lower the limits of running requests inside the `with` block."""
        limits = {name: getattr(self, name) for name in self.most_running}
        for name, most in limits.items():
            setattr(self, name, most - by)
        try:
            yield
        finally:
            for name, most in limits.items():
                setattr(self, name, most)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        spare = self.max_num_running_reqs - len(self.running) if self.together and self.holds() else 0
        with self.fewer(spare):
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
