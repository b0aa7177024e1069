"""A clip through a `pipecat` pipeline with a speech-to-text service: what the services have in common."""

import asyncio
import sys
from typing import Any

from clip import Clip
from loguru import logger
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    TranscriptionFrame,
)
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.audio.vad_processor import VADProcessor
from pipecat.workers.runner import WorkerRunner

RATE = 16000
SILENCE_S = 1.5
SETTLED_S = 2.0

logger.remove()
logger.add(sys.stderr, level="WARNING")


class Texts(BaseObserver):
    """The frames that the pipeline pushes; each is seen once."""

    def __init__(self, clip: Clip) -> None:
        super().__init__()
        self.clip, self.seen = clip, set[int]()
        self.error: str | None = None

    async def on_push_frame(self, data: FramePushed) -> None:
        frame: Any = data.frame
        if frame.id in self.seen:
            return
        self.seen.add(frame.id)
        if isinstance(frame, TranscriptionFrame):
            self.clip.turn(frame.text)
        elif isinstance(frame, InterimTranscriptionFrame):
            self.clip.delta(frame.text)
        elif isinstance(frame, ErrorFrame):
            self.error = frame.error


async def transcript(service: Any, clip: Clip, *, detects: bool = True) -> None:
    """Until nothing more comes. `detects` says whether pipecat finds the turns. Raises RuntimeError for an error."""
    texts = Texts(clip)
    processors = [VADProcessor(vad_analyzer=SileroVADAnalyzer()), service] if detects else [service]
    worker = PipelineWorker(Pipeline(processors), observers=[texts], enable_rtvi=False, cancel_on_idle_timeout=False)
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def on_pipeline_started(*_: Any) -> None:
        started.set()

    async def speak() -> None:
        await started.wait()
        async for piece in clip.spoken_async(RATE, SILENCE_S):
            await worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))
        while not clip.turns and not texts.error:
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLED_S)
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), speak())
    if texts.error:
        raise RuntimeError(texts.error)
