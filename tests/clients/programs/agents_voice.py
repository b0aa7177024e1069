"""`openai-agents`: a transcription session of its voice pipeline, with the turn detection that it asks for itself."""

import asyncio

import numpy as np
from agents import set_tracing_disabled
from agents.voice import OpenAISTTModel, StreamedAudioInput, STTModelSettings
from clip import KEY, Clip, Server, each
from openai import AsyncOpenAI

RATE = 24000  # which the session asks for


async def transcribe(server: Server, clip: Clip) -> None:
    model = OpenAISTTModel(server.model, AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY))
    audio = StreamedAudioInput()
    session = await model.create_session(audio, STTModelSettings(), False, False)

    async def speak() -> None:
        async for piece in clip.spoken_async(RATE):
            await audio.add_audio(np.frombuffer(piece, np.int16))
        await audio.add_audio(None)

    speaker = asyncio.create_task(speak())
    async for text in session.transcribe_turns():
        clip.turn(text)
    await speaker


if __name__ == "__main__":
    set_tracing_disabled(True)
    each(transcribe)
