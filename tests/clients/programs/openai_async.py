"""`openai`, with asyncio: the server finds the turns."""

import asyncio
import base64
from typing import Any

from clip import KEY, Clip, Server, each
from openai import AsyncOpenAI

RATE = 24000
SILENCE_S = 1.5  # in which server_vad finds the last turn's end


async def transcribe(server: Server, clip: Clip) -> None:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        speaker: asyncio.Task[None] | None = None
        items: set[str] = set()  # turns whose text has not come
        async for event in connection:
            match event.type:
                case "session.created":
                    await connection.session.update(session=settings(server.model))
                case "session.updated":
                    speaker = asyncio.create_task(speak(connection, clip))
                case "input_audio_buffer.committed":
                    items.add(event.item_id)
                case "conversation.item.input_audio_transcription.delta":
                    clip.delta(event.delta)
                case "conversation.item.input_audio_transcription.completed":
                    items.remove(event.item_id)
                    clip.turn(event.transcript)
                case "error" | "conversation.item.input_audio_transcription.failed":
                    raise RuntimeError(event.error)
            if speaker and speaker.done() and clip.turns and not items:
                await speaker
                return


def settings(model: str) -> Any:
    return {
        "type": "transcription",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": RATE},
                "transcription": {"model": model},
                "turn_detection": {"type": "server_vad"},
            }
        },
    }


async def speak(connection: Any, clip: Clip) -> None:
    async for piece in clip.spoken_async(RATE, SILENCE_S):
        await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
    # Answered by `cleared`, so that there is an event after the last of the audio.
    await connection.input_audio_buffer.clear()


if __name__ == "__main__":
    each(transcribe)
