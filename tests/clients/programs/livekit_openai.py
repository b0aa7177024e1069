"""`livekit-plugins-openai`: STT(use_realtime=True), with the server_vad that it asks for itself."""

from clip import KEY, Clip, Server, each
from livekit.agents.utils import http_context
from livekit.plugins import openai
from livekit_speech import transcript


async def transcribe(server: Server, clip: Clip) -> None:
    async with http_context.open():
        stt = openai.STT(base_url=f"{server.url}/v1", api_key=KEY, model=server.model, use_realtime=True)
        await transcript(stt, clip)


if __name__ == "__main__":
    each(transcribe)
