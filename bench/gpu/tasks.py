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
from mistral_layout.audio import SAMPLE_RATE

SEED = 0
WARM_UPS = 3  # minimum number of warm-up requests before each measurement


@dataclass(frozen=True)
class Task:
    """One measurement: the clips of the warm-up, then those that are measured."""

    row: str
    server: str
    concurrency: int
    warm_up: list[Clip]
    clips: list[Clip]


def tasks_of(names: Sequence[str], counts: Mapping[int, int], configs: Mapping[str, Mapping[str, Any]]) -> list[Task]:
    """All measurements in order: for each concurrency, all servers in turn. Long clips come last. Raises BenchError.

    A config is not measured with more requests in flight than its max_num_seqs, because the others would only wait.
    """
    everything = dataset.load(rows.ROOT / "bench/data").clips
    warming = {concurrency: max(WARM_UPS, concurrency) for concurrency in counts}
    needed = sum(counts.values()) + sum(warming.values())
    copies = -(-needed // len(everything))
    cached = [name for name, config in configs.items() if config.get("mm_processor_cache_gb") != 0]
    if copies > 1 and cached:
        raise BenchError(
            f"--clips needs {needed} clips including the warm-ups, but the dataset has {len(everything)}, and the "
            f"cache of {cached[0]} would answer repeated clips: expected fewer clips, or mm_processor_cache_gb: 0"
        )
    order = random.Random(SEED).sample(everything, len(everything)) * copies
    chosen: dict[int, list[Clip]] = {}
    for concurrency, count in counts.items():
        chosen[concurrency], order = order[:count], order[count:]
    # Warm-ups use the shortest of the other clips: they only load code and fill caches.
    order.sort(key=lambda clip: clip.duration_s, reverse=True)
    warm = {concurrency: [order.pop() for _ in range(count)] for concurrency, count in warming.items()}
    tasks, long = [], []
    for name in names:
        server, minutes = rows.server_of(name)
        if minutes is not None:
            first = min(counts)
            clip = Clip(f"{minutes}min", Path(f"{minutes}min.wav"), "", 60.0 * minutes, {})
            long.append(Task(name, server, 1, warm[first], [clip]))
            continue
        most = configs[server].get("max_num_seqs", max(counts))
        length_s = rows.length_of(name)
        if length_s is not None and server in cached:
            raise BenchError(
                f"--rows: {name!r} sends the same clips again, which the cache of {server} would answer: expected "
                "mm_processor_cache_gb: 0"
            )
        made = chosen if length_s is None else {n: _of_one_length(length_s, len(chosen[n])) for n in counts}
        tasks += [Task(name, server, n, warm[n], made[n]) for n in counts if n <= most]
    return sorted(tasks, key=lambda task: task.concurrency) + long


def _of_one_length(seconds: int, count: int) -> list[Clip]:
    return [Clip(f"{seconds}s-{n}", Path("made.wav"), "", float(seconds), {"first": n}) for n in range(count)]


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
