"""`pipecat-ai`, OpenAIRealtimeSTTService: pipecat's own speech detection, whose turns it commits."""

from clip import KEY, Clip, Server, each
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat_speech import transcript


async def transcribe(server: Server, clip: Clip) -> None:
    service = OpenAIRealtimeSTTService(
        api_key=KEY,
        base_url=server.url.replace("http", "ws", 1) + "/v1/realtime",
        settings=OpenAIRealtimeSTTService.Settings(model=server.model),
    )
    await transcript(service, clip)


if __name__ == "__main__":
    each(transcribe)
