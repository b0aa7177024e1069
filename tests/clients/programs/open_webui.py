"""The request of Open WebUI for a recording, at the level of HTTP: its package pins 91 others, among them a version of
openai that wyoming-openai does not take.

Version 0.12.4 (open_webui/routers/audio) sends an MP3 file in chunks, with `model`, and with `language` if the user has
one; it reads `text`.
"""

import io
import wave
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import soundfile
from clip import Clip, Server, each
from recipe import settings

CHUNK = 1 << 16  # bytes


def mp3(wav: bytes) -> bytes:
    with wave.open(io.BytesIO(wav)) as file:
        rate, samples = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
    made = io.BytesIO()
    soundfile.write(made, samples, rate, format="MP3")
    return made.getvalue()


async def transcribe(server: Server, clip: Clip) -> None:
    recipe = settings("Environment of Open WebUI", server)
    if recipe["AUDIO_STT_ENGINE"] != "openai":
        raise RuntimeError(recipe)
    audio = mp3(clip.file())

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(audio), CHUNK):
            yield audio[start : start + CHUNK]

    form = aiohttp.FormData()
    form.add_field("model", recipe["AUDIO_STT_MODEL"])
    form.add_field("language", "en")
    form.add_field("file", chunks(), filename="recording.mp3")
    url = f"{recipe['AUDIO_STT_OPENAI_API_BASE_URL']}/audio/transcriptions"
    headers = {"Authorization": f"Bearer {recipe['AUDIO_STT_OPENAI_API_KEY']}"}
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers, data=form) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        clip.turn((await answer.json())["text"])


if __name__ == "__main__":
    each(transcribe)
