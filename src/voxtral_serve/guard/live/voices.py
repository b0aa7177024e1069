"""Speech detection for all sessions of an API process: off the event loop, and in one call of the model for all."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from voxtral_serve.audio.voice import FRAME, RATE, VoiceModel, VoiceStream

MOST_FRAMES = RATE // FRAME  # of one stream in a call: a client that sends minutes at once keeps no other waiting


class _Job(NamedTuple):
    stream: VoiceStream
    frames: np.ndarray
    found: list[np.ndarray]
    done: asyncio.Future[np.ndarray]


class VoicePool:
    """The only one of a process; `load` gives the model, by `prepare` or at the first use."""

    def __init__(self, load: Callable[[], Any] = VoiceModel) -> None:
        self._load = load
        self._model: Any = None
        self._jobs: list[_Job] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="voices")
        self._pump: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Load the model now. Raises ImportError where a package is missing."""
        if self._model is None:
            self._model = self._load()

    async def probabilities(self, stream: VoiceStream, pcm: bytes) -> np.ndarray:
        """float [n]: of the frames that this PCM16 completes."""
        frames = stream.frames(pcm)
        if not len(frames):
            return np.zeros(0, np.float32)
        loop = asyncio.get_running_loop()
        job = _Job(stream, frames, [], loop.create_future())
        self._jobs.append(job)
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
        return await job.done

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while jobs := [job for job in self._jobs if not job.done.done()]:
            self._jobs = []
            try:
                found = await loop.run_in_executor(self._thread, self._compute, jobs)
            except Exception as error:
                for job in jobs:
                    if not job.done.done():
                        job.done.set_exception(error)
                continue
            for job, part in zip(jobs, found, strict=True):
                job.found.append(part)
                rest = job.frames[len(part) :]
                if len(rest):
                    self._jobs.append(job._replace(frames=rest))
                elif not job.done.done():
                    job.done.set_result(np.concatenate(job.found))

    def _compute(self, jobs: list[_Job]) -> list[np.ndarray]:
        self.prepare()
        found: list[np.ndarray] = self._model.probabilities(
            [job.stream for job in jobs], [job.frames[:MOST_FRAMES] for job in jobs]
        )
        return found
