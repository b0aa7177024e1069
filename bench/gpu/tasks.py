"""The clips that each row sends to its server, the order of the rows, and the clips decoded to WAV."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import BenchError, dataset
from bench.dataset import Clip
from bench.gpu import rows
from bench.gpu.plan import Uploads
from mistral_layout.audio import SAMPLE_RATE

SEED = 0
ALONE = 20  # clips of the rows of one request at a time, of which other rows send none
WARM_UPS = 3  # minimum number of warm-up requests before each measurement


@dataclass(frozen=True)
class Task:
    """What one row of uploads sends: the clips of the warm-up, then those that are measured."""

    row: str
    concurrency: int
    warm_up: list[Clip]
    clips: list[Clip]


def task_of(item: Uploads, config: Mapping[str, Any]) -> Task:
    """The clips of a row of uploads, the same of every server. Raises BenchError.

    The first ALONE clips of a random order are those of one request at a time. The last ones are for the warm-up. A
    cache of processed clips must not answer, so a server that has one gets no clip twice.
    """
    if (most := config.get("max_num_seqs", item.in_flight)) < item.in_flight:
        raise BenchError(f"{item.row}: {item.server} has max_num_seqs {most}, so the other requests would only wait")
    everything = dataset.load(rows.ROOT / "bench/data").clips
    order = random.Random(SEED).sample(everything, len(everything))
    warming = max(WARM_UPS, min(item.in_flight, item.clips))
    warm_up = order[-WARM_UPS:] if item.in_flight == 1 else (order * 2)[-WARM_UPS - warming : -WARM_UPS]
    if item.minutes is not None:
        clip = Clip(f"{item.minutes}min", Path(f"{item.minutes}min.wav"), "", 60.0 * item.minutes, {})
        return Task(item.row, 1, warm_up, [clip])
    first, last = (0, ALONE) if item.in_flight == 1 else (ALONE, len(order) - WARM_UPS)
    if config.get("mm_processor_cache_gb") != 0:
        last = min(last, len(order) - WARM_UPS - (0 if item.in_flight == 1 else warming))
        if item.clips > last - first:
            raise BenchError(
                f"{item.row}: {item.clips} clips, but the cache of processed clips of {item.server} would answer more "
                f"than {last - first}: expected fewer clips, or mm_processor_cache_gb: 0"
            )
    several = order[first:last]
    clips = several * -(-item.clips // len(several))
    return Task(item.row, item.in_flight, warm_up, clips[: item.clips])


def decode(clip: Clip, directory: Path, sources: Sequence[Clip]) -> Clip:
    """The clip as 16 kHz 16-bit WAV in `directory`. One without a file is made of the sources from `first` on."""
    import numpy as np
    import soundfile

    def read(path: Path) -> Any:
        samples, rate = soundfile.read(path, dtype="int16")
        if rate != SAMPLE_RATE or samples.ndim != 1:
            raise BenchError(f"{path.name} has {rate} Hz: expected mono at {SAMPLE_RATE} Hz")
        return samples

    if clip.path.is_absolute():
        samples = read(clip.path)
    else:
        wanted = round(clip.duration_s * SAMPLE_RATE)
        parts: list[Any] = []
        begin = clip.extra.get("first", 0)
        while sum(part.size for part in parts) < wanted:
            parts.append(read(sources[(begin + len(parts)) % len(sources)].path))
        samples = np.concatenate(parts)[:wanted]
    path = directory / f"{clip.id}.wav"
    soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")
    return Clip(clip.id, path, clip.text, len(samples) / SAMPLE_RATE, {"tokens": rows.tokens(len(samples))})


def decoded(tasks: Sequence[Task], directory: Path) -> list[Task]:
    """The tasks with all their clips decoded into `directory`, which is created."""
    directory.mkdir()
    needed = {clip.id: clip for task in tasks for clip in (*task.warm_up, *task.clips)}
    sources = [clip for clip in needed.values() if clip.path.is_absolute()]
    with ThreadPoolExecutor() as pool:  # libsndfile decodes without the interpreter's lock
        ready = dict(zip(needed, pool.map(lambda clip: decode(clip, directory, sources), needed.values()), strict=True))
    return [
        dataclasses.replace(
            task, warm_up=[ready[clip.id] for clip in task.warm_up], clips=[ready[clip.id] for clip in task.clips]
        )
        for task in tasks
    ]
