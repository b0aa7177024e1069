"""The audio of live sessions in vLLM's engine: the scheduler stores it and sends it to the worker, step by step.

The samples of a session stay here while its request lives: a request that was preempted is computed again from its
first row. 2.5 KiB a row, 21 MiB for a session of 11 minutes.
"""

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve.engine.session import LOOK_AHEAD, SessionShape

HOP = 160  # samples between two frames of the spectrogram
# Samples before a row that its first encoder frame sees: three frames of the spectrogram through the convolutions, and
# half a window before the first of these.
LOOK_BACK = 3 * HOP + LOOK_AHEAD + HOP
BYTES = 2  # of a sample
BULK = 8  # rows of a session that the encoder computes in one pass, if at least this number is complete
AHEAD = 24  # rows of a session, from the first of a step, that may be encoded in the step
STEP = "voxtral_serve_live"  # attribute of vLLM's SchedulerOutput: a LiveStep
FAULTS = "voxtral_serve_faults"  # attribute of vLLM's ModelRunnerOutput: {request: what is wrong with its audio}


class LivePart(NamedTuple):
    """What the worker encodes of a session in one step: rows `first` to `first + rows - 1`.

    samples: int16, from LOOK_BACK before row `max(first, left - 1)` to LOOK_AHEAD after the last row. The rows before
    that one are the same for every session; the array is empty where only those are needed.
    delay: of the session, in token positions.
    last: whether these rows complete the session, whose audio has ended.
    """

    first: int
    rows: int
    samples: np.ndarray
    delay: int
    last: bool = False


class LiveStep(NamedTuple):
    """What the scheduler tells the worker of one step.

    parts: by request id.
    preempted: requests that were preempted since the last step that had tokens; vLLM's own field has those of one step.
    """

    parts: Mapping[str, LivePart] = {}
    preempted: Set[str] = frozenset()


def step_of(scheduled: Any) -> LiveStep:
    """The LiveStep of vLLM's SchedulerOutput. vLLM's own scheduler has an empty one."""
    step: LiveStep = getattr(scheduled, STEP, LiveStep())
    return step


class SessionAudio:
    """The samples of one session so far. It has at most `positions` rows, the context of a request."""

    def __init__(self, shape: SessionShape, positions: int) -> None:
        self.shape = shape
        self.limit = (positions - shape.left) * shape.samples
        self.request: str | None = None  # the only one
        self.pcm = bytearray()
        self.ended = False
        self.rows = 0  # that are complete
        self.encoded = 0  # rows that the worker has, or has in the steps that it was given

    def add(self, pcm: bytes) -> None:
        """Add PCM16. Raises ValueError for half a sample, after the end, and for more than a request can use."""
        if self.ended:
            raise ValueError("audio after the end")
        if len(pcm) % BYTES:
            raise ValueError(f"{len(pcm)} bytes: expected an even number")
        if (samples := (len(self.pcm) + len(pcm)) // BYTES) > self.limit:
            raise ValueError(f"{samples} samples: a request has at most {self.limit}")
        self.pcm += pcm
        self.rows = max(self.shape.rows(len(self.pcm) // BYTES), self.rows)

    def end(self) -> None:
        self.ended = True
        self.rows = self.shape.total_rows(len(self.pcm) // BYTES)

    @property
    def is_encoded(self) -> bool:
        """Whether the session has ended and the worker has, or is given, all its rows."""
        return self.ended and self.encoded >= self.rows

    def next_part(self, first: int, count: int, window: int, to_end: bool = False) -> LivePart | None:
        """The rows to encode in a step whose tokens need rows `first` to `first + count - 1`; None if the worker has
        them, or all that there will be. If many rows are complete, as at the end of the audio, some are encoded ahead
        of their steps: up to row `first + window - 1`, in whole passes of BULK rows; with `to_end`, as drafts want
        it, to the last row if that is within. Raises ValueError for rows that are not complete."""
        if self.is_encoded:
            return None  # drafts may need rows past the last one
        begin, needed = max(first, self.encoded), first + count
        ahead = min(self.rows, first + window) - begin
        if not (to_end and self.ended and begin + ahead == self.rows):
            ahead = ahead // BULK * BULK
        end = max(needed, begin + ahead)
        if begin >= end:
            return None
        part = self.part(begin, end - begin)
        self.encoded = end
        return part

    def part(self, first: int, count: int) -> LivePart:
        """The part of `count` rows from `first` on. Raises ValueError for rows that are not complete."""
        if first + count > self.rows:
            raise ValueError(f"rows {first} to {first + count - 1} of a session with {self.rows}")
        shape = self.shape
        begin, end = max(first, shape.left - 1), first + count
        last = self.ended and end == self.rows
        if begin >= end:
            return LivePart(first, count, np.zeros(0, np.int16), shape.delay, last)
        # In samples of the session: the left padding lies before 0.
        start = (begin - shape.left) * shape.samples - LOOK_BACK
        stop = (end - shape.left) * shape.samples + LOOK_AHEAD
        samples = np.zeros(stop - start, np.int16)
        inside = self.pcm[max(start, 0) * BYTES : max(stop, 0) * BYTES]  # a copy
        at = max(-start, 0)
        samples[at : at + len(inside) // BYTES] = np.frombuffer(inside, "<i2")
        return LivePart(first, count, samples, shape.delay, last)
