"""Where the milliseconds of an upload go: the header Server-Timing of its answer, and `timing_ms` in the log.

The tools of a browser show the header (https://www.w3.org/TR/server-timing/). Each stage begins where the one before it
ends, so they add up. docs/pages/monitoring.md has a table of STAGES.
"""

import time
from typing import Any, NamedTuple

HEADER = b"server-timing"
STAGES = {
    "receive": "the body arrives",
    "decode": "the form is read, and a process decodes the audio",
    "speech": "the audio is searched for speech; a long clip is cut at pauses",
    "prompt": "the samples go to vLLM's engine",
    "queue": "they wait for the engine's next step",
    "encoder": "the audio is encoded and the prompt computed, to the first token",
    "steps": "the other tokens",
    "engine": "instead of the last four, if vLLM does not measure them (`disable_log_stats`)",
    "speakers": "the last tokens come from the engine, and speakers are labelled, for a request that asks for them",
    "text": "the last tokens come from the engine, and the answer is written",
}


class EngineTimes(NamedTuple):
    """When the engine received a request, began its first step, and had its first and its last token so far.

    In seconds of time.monotonic(), which is the same in all processes of a machine.
    """

    queued: float
    begun: float
    first: float
    last: float

    @classmethod
    def of_output(cls, output: Any) -> "EngineTimes | None":
        """From vLLM's RequestOutput. None if vLLM does not measure them."""
        stats = output.metrics
        return stats and cls(stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts)


class UploadTiming:
    """The stages of one upload.

    Of a clip in several pieces, `prompt`, `queue` and `encoder` end when they end for the first piece.
    """

    def __init__(self, start: float) -> None:
        """`start`: when the upload began, in seconds of time.monotonic()."""
        self._start = start
        self._ends: dict[str, float] = {}  # of the stages that have ended, in order
        self._engine: EngineTimes | None = None

    def end(self, stage: str) -> None:
        """The stage ends now; `speakers` and `text` after all others."""
        if self._engine is not None and stage in ("speakers", "text"):
            self._ends |= self._of_engine(self._engine) | {"steps": self._engine.last}
            self._engine = None
        self._ends[stage] = time.monotonic()

    def add(self, times: EngineTimes | None) -> None:
        """Take the times of an output of the engine, as far as vLLM measures them."""
        if times is None:
            self.end("engine")
            return
        queued, begun, first, last = zip(self._engine or times, times, strict=True)
        self._engine = EngineTimes(min(queued), min(begun), min(first), max(last))

    def milliseconds(self) -> dict[str, float]:
        """The stages that have ended, in order. A streamed answer begins before its `steps` have."""
        ends = self._ends | ({} if self._engine is None else self._of_engine(self._engine))
        starts = (self._start, *ends.values())
        return {
            stage: round(1000 * (end - start), 2) for (stage, end), start in zip(ends.items(), starts, strict=False)
        }

    def header(self) -> bytes:
        """The value of Server-Timing."""
        return ", ".join(f"{stage};dur={spent_ms:g}" for stage, spent_ms in self.milliseconds().items()).encode()

    @staticmethod
    def _of_engine(times: EngineTimes) -> dict[str, float]:
        return {"prompt": times.queued, "queue": times.begun, "encoder": times.first}
