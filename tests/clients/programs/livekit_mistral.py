"""`livekit-plugins-mistralai`: its own speech detection ends a turn by a flush.

It uses its live protocol for models with `realtime` in their name only.
"""

from clip import KEY, Clip, Server, each
from livekit.agents import inference
from livekit.plugins import mistralai
from livekit_speech import transcript
from mistralai.client import Mistral


async def transcribe(server: Server, clip: Clip) -> None:
    client = Mistral(api_key=KEY, server_url=server.url)
    stt = mistralai.STT(client=client, model=server.model, vad=inference.VAD(model="silero"))
    await transcript(stt, clip)


if __name__ == "__main__":
    each(transcribe)
