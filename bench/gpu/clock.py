"""Say on stderr what happens, and when."""

import sys
import time


class Clock:
    """Prints each line with the seconds since the clock was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)
