"""`pipecat-ai`, OpenAIRealtimeSTTService: the server finds the turns."""

from clip import KEY, Clip, Server, each
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat_speech import transcript


async def transcribe(server: Server, clip: Clip) -> None:
    service = OpenAIRealtimeSTTService(
        api_key=KEY,
        base_url=server.url.replace("http", "ws", 1) + "/v1/realtime",
        turn_detection={"type": "server_vad"},
        settings=OpenAIRealtimeSTTService.Settings(model=server.model),
    )
    await transcript(service, clip, detects=False)


if __name__ == "__main__":
    each(transcribe)
