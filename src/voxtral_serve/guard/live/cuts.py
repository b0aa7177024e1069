"""Where a session's audio goes over from one request of the engine to the next.

A request holds at most as many positions as the engine's context, and a session lasts as long as its client speaks. So
its audio is cut: in a pause, if there is one, before the context is full. Nothing is held back for that until the
context is nearly full, since what was sent to a request is not taken back: the cut is made in a pause, at the end of
the audio that has arrived.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from voxtral_serve.engine.session import AGE, LEVELS_S, ROLL_OVER, SessionShape, least_positions

FRAME = 320  # samples, 20 ms, of a level
SAMPLE_BYTES = 2
# From ROLL_OVER of its positions a request is cut in a pause of PAUSE frames; from TIGHT of them HELD frames are held
# back, and it is cut in a pause of SHORT frames; with the last position where it is quietest.
TIGHT = 0.97
PAUSE, SHORT, HELD, AGAIN = 15, 5, 20, 5  # AGAIN: quiet frames until a pause that was denied is looked at again
QUIETEST = 10  # frames whose mean level is compared at the last position
LEVELS = LEVELS_S * 16000 // FRAME  # frames by whose levels a frame is quiet
FLOOR_DB = -90.0
# A frame is quiet below a third of the way from the tenth percentile of the levels to the 95th, or where it is
# DROP_DB below the latter: digital silence would make all else loud.
GATE, DROP_DB = 0.35, 30.0
ANEW = 25  # frames between two looks at the percentiles
HEARD = 3 * 16000 * SAMPLE_BYTES  # bytes of audio that `heard` keeps


class ContextError(ValueError):
    """The engine's context is too short for live sessions."""


class CutPoints(NamedTuple):
    """Samples of a request from which levels are kept, pauses are looked for, audio is held back; and the most."""

    watch: int
    soft: int
    tight: int
    most: int

    @classmethod
    def of(cls, shape: SessionShape, positions: int) -> "CutPoints":
        """For a context of `positions`. Raises ContextError if it is too short."""

        def samples(share: float) -> int:
            # One position less than all: the last token needs a place of its own.
            return (int(share * (positions - 1)) - shape.left - shape.right) * shape.samples

        most = samples(1.0)
        if positions < (least := least_positions(shape)):
            needed = f"live sessions need at least {least} with a delay of {shape.delay_ms} ms"
            raise ContextError(f"max_model_len or {AGE} gives a request {positions} positions, and {needed}")
        return cls(samples(ROLL_OVER) - LEVELS * FRAME, samples(ROLL_OVER), samples(TIGHT), most)


class Stretch(NamedTuple):
    """What goes to the request at once.

    cut     the request ends after it
    doubt   it ends in what may be a pause: to be confirmed, from Splitter.heard
    """

    pcm: bytes
    cut: bool = False
    doubt: bool = False


class Splitter:
    """Splits PCM16 into the audio of one request after the other. Cuts do not depend on how the audio is chunked."""

    def __init__(self, points: CutPoints) -> None:
        self.points = points
        self._begin()

    def _begin(self) -> None:
        self.samples = 0  # of the request, with those that are held back
        self.heard = bytearray()  # the last audio of the request, once it is watched
        self._held = bytearray()
        self._frame = bytearray()  # that is not complete
        self._levels: deque[float] = deque(maxlen=LEVELS)
        self._quiet_db = FLOOR_DB
        self._run = self._count = 0

    def take(self, pcm: bytes) -> tuple[Stretch, bytes]:
        """(what to send now, the rest, for the next call). The rest belongs to the next request if this one is cut."""
        room = (self.points.watch - self.samples) * SAMPLE_BYTES
        if room > 0:
            first = pcm[:room]
            self.samples += len(first) // SAMPLE_BYTES
            return Stretch(first), pcm[room:]
        given = 0
        while given < len(pcm):
            part = pcm[given : given + FRAME * SAMPLE_BYTES - len(self._frame)]
            given += len(part)
            self.samples += len(part) // SAMPLE_BYTES
            self._frame += part
            self._held += part
            if len(self._frame) < FRAME * SAMPLE_BYTES:
                break
            self._level()
            if self.samples < self.points.soft:
                continue
            if self.samples <= self.points.tight:
                if self._run >= PAUSE:
                    self._run = PAUSE - AGAIN
                    return Stretch(self._release(), doubt=True), pcm[given:]
            elif back := self._tight():
                back = min(back * FRAME * SAMPLE_BYTES, len(self._held))
                stretch = Stretch(bytes(self._held[: len(self._held) - back]), cut=True)
                rest = bytes(self._held[len(self._held) - back :]) + pcm[given:]
                self._begin()
                return stretch, rest
        return Stretch(self._release(HELD * FRAME if self.samples > self.points.tight else 0)), b""

    def cut(self) -> None:
        """The request ends with what was given out last: the doubt is settled."""
        self._begin()

    def flush(self) -> bytes:
        """What is held back."""
        return self._release()

    def _release(self, kept: int = 0) -> bytes:
        """All that is held back but the last `kept` samples."""
        end = max(0, len(self._held) - kept * SAMPLE_BYTES)
        given = bytes(self._held[:end])
        del self._held[:end]
        return given

    def _level(self) -> None:
        """Add the frame that is complete to the levels, and count the quiet ones up to it."""
        frame = np.frombuffer(self._frame, np.int16).astype(np.float32)
        power = float(frame @ frame) / FRAME / 2**30
        self._levels.append(max(FLOOR_DB, 10 * math.log10(power + 1e-12)))
        self.heard += self._frame
        del self.heard[:-HEARD]
        self._frame = bytearray()
        if self._count % ANEW == 0:
            low, high = np.percentile(self._levels, (10, 95))
            self._quiet_db = float(max(low + GATE * (high - low), high - DROP_DB))
        self._count += 1
        self._run = self._run + 1 if self._levels[-1] <= self._quiet_db else 0

    def _tight(self) -> int:
        """Frames from the cut to the end of the audio where the context is nearly full; 0 for no cut yet."""
        if self._run >= SHORT:
            return self._run // 2
        if self.samples < self.points.most:
            return 0
        levels = list(self._levels)[-HELD:]
        quietest = min(range(HELD - QUIETEST + 1), key=lambda first: sum(levels[first : first + QUIETEST]))
        return HELD - quietest - QUIETEST // 2
