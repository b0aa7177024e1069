"""`wyoming-openai` with the recipe's settings: this program speaks the Wyoming protocol to it, as Home Assistant does.

Its text comes while the clip is spoken (`transcript-chunk`), from a live session of OpenAI's protocol.
"""

import asyncio
import sys

from clip import Clip, Server, arguments, each
from recipe import free_port, running, settings
from wyoming.asr import Transcribe, Transcript, TranscriptChunk
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient

RATE = 16000
FORMAT = {"rate": RATE, "width": 2, "channels": 1}
URI = f"tcp://127.0.0.1:{free_port()}"


async def speak(client: AsyncClient, clip: Clip) -> None:
    await client.write_event(Transcribe(language="en").event())
    await client.write_event(AudioStart(**FORMAT).event())
    async for piece in clip.spoken_async(RATE):
        await client.write_event(AudioChunk(audio=piece, **FORMAT).event())
    await client.write_event(AudioStop().event())


async def transcribe(server: Server, clip: Clip) -> None:
    async with AsyncClient.from_uri(URI) as client:
        speaking = asyncio.create_task(speak(client, clip))
        deltas = []
        while (event := await client.read_event()) is not None:
            if TranscriptChunk.is_type(event.type):
                deltas.append(TranscriptChunk.from_event(event).text)
                clip.delta(deltas[-1])
            elif Transcript.is_type(event.type):
                clip.turn(Transcript.from_event(event).text)
                break
        await speaking
        if not clip.turns or "".join(deltas).strip() != clip.turns[-1]:
            raise RuntimeError((deltas, clip.turns))


if __name__ == "__main__":
    environment = {**settings("Environment of wyoming-openai", arguments()[0]), "WYOMING_URI": URI}
    with running([sys.executable, "-m", "wyoming_openai"], int(URI.rpartition(":")[2]), environment):
        each(transcribe)
