"""What the command prints: lines of progress, and the table."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from voxtral_serve.draft.scoring import DRAFTS

EVERY_S = 10.0


def say(line: str) -> None:
    print(line, flush=True)


class Progress:
    """Lines with how much is done, the rate and the time that is left, every EVERY_S seconds."""

    def __init__(self, verb: str, total: float, unit: str) -> None:
        self.verb, self.total, self.unit = verb, total, unit
        self.started = self.told = time.monotonic()

    def at(self, done: float) -> None:
        now = time.monotonic()
        if now - self.told < EVERY_S:
            return
        self.told = now
        rate = done / (now - self.started)  # a second
        left = duration(max(0.0, self.total - done) / rate) if rate else "unknown time"
        say(f"{self.verb} {done:.2f} of {self.total:.2f} {self.unit}, {3600 * rate:.3g} an hour, {left} left")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Line(NamedTuple):
    """A line of the table. `clip_ms` and what it is: measured, or computed from the time of a step."""

    name: str
    right: float | None
    a_step: dict[int, float]
    clip_ms: float | None
    measured: bool


def table(lines: Sequence[Line], device: str) -> str:
    drafts = "".join(f"{count:>8}" for count in DRAFTS)
    rows = [
        f"{'':12}{'right':>9}   tokens a step, by number of drafts   a clip alone on {device}",
        f"{'trained on':12}{'tokens':>9}{drafts}{'ms':>13}",
    ]
    for line in lines:
        right = "" if line.right is None else f"{100 * line.right:.1f} %"
        a_step = "".join(f"{line.a_step[count]:8.2f}" for count in DRAFTS)
        time_ms = "" if line.clip_ms is None else f"{line.clip_ms:13.0f}{'' if line.measured else '  computed'}"
        rows.append(f"{line.name:12}{right:>9}{a_step}{time_ms}")
    return "\n".join(rows)
