"""Progress messages with times on stderr."""

import sys
import time


class Clock:
    """Prints each message with the seconds since this object was created."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)
