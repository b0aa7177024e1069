"""A clip through a `livekit.agents` STT: what both plugins have in common."""

import asyncio
import contextlib

from clip import Clip
from livekit import rtc
from livekit.agents import stt

RATE = 16000  # each stream resamples to its own
SILENCE_S = 1.5
SETTLED_S = 2.0  # without an event after the silence: no turn is open


async def transcript(service: stt.STT, clip: Clip) -> None:
    """Until all turns that were begun have their text. Raises what the stream raises."""
    stream = service.stream()
    speaking = 0

    async def speak() -> None:
        async for piece in clip.spoken_async(RATE, SILENCE_S):
            stream.push_frame(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))

    async def listen() -> None:
        nonlocal speaking
        async for event in stream:
            match event.type:
                case stt.SpeechEventType.START_OF_SPEECH:
                    speaking += 1
                case stt.SpeechEventType.INTERIM_TRANSCRIPT:
                    clip.delta(event.alternatives[0].text)
                case stt.SpeechEventType.FINAL_TRANSCRIPT:
                    clip.turn(event.alternatives[0].text)

    listener, speaker = asyncio.create_task(listen()), asyncio.create_task(speak())
    try:
        await asyncio.wait([listener, speaker], return_when=asyncio.FIRST_COMPLETED)
        # A plugin's stream does not say that its last turn has ended.
        while not listener.done() and (not clip.turns or len(clip.turns) < speaking):
            await asyncio.sleep(0.05)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(listener), SETTLED_S)
    finally:
        speaker.cancel()
        listener.cancel()
        await stream.aclose()
        await service.aclose()
