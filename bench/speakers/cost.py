"""What the server's process that labels speakers takes for a recording of some length."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.speakers.recordings import RATE_HZ

Span = tuple[float, float]


async def cost(samples: np.ndarray, words: Sequence[Span], minutes: float, device: str) -> dict[str, Any]:
    """`cpu_s` and `wall_s` without the start, and `peak_bytes`, for a recording that is repeated to so many minutes."""
    from voxtral_serve.audio.decode import Clip
    from voxtral_serve.audio.speech import Detector
    from voxtral_serve.guard.labeller import Labeller
    from voxtral_serve.speakers.campplus import SIZE
    from voxtral_serve.speakers.windows import Voices

    length = round(minutes * 60 * RATE_HZ)
    times = -(-length // len(samples))
    clip = Clip(np.tile(samples, times)[:length], RATE_HZ)
    shifts = [number * len(samples) / RATE_HZ for number in range(times)]
    spans = [(start + shift, end + shift) for shift in shifts for start, end in words]
    speech = Detector().stretches(clip)
    labeller = Labeller(device=device)
    try:
        await labeller.labels(Voices(np.empty((0, 2)), np.empty((0, SIZE))), [])  # it starts
        start_s, cpu_s = time.monotonic(), _cpu_s()
        found = await labeller.voices(clip, speech)
        await labeller.labels(found, [span for span in spans if span[1] <= clip.seconds])
        spent = {"cpu_s": round(_cpu_s() - cpu_s, 2), "wall_s": round(time.monotonic() - start_s, 2)}
        return {"minutes": minutes, **spent, "peak_bytes": _peak_bytes()}
    finally:
        await labeller.aclose()


def _cpu_s() -> float:
    """Seconds of CPU that this process's children have had."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return sum(each.user + each.system for each in times)


def _peak_bytes() -> int:
    """The largest memory that a child has had. getrusage has this process's own, at the child's start, among it."""
    files = [Path(f"/proc/{child.pid}/status").read_text() for child in psutil.Process().children()]
    return max(1024 * int(file.partition("VmHWM:")[2].split()[0]) for file in files)
