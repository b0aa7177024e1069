"""`pipecat-ai`, MistralSTTService: pipecat's own speech detection, whose turns it flushes."""

from clip import KEY, Clip, Server, each
from pipecat.services.mistral.stt import MistralSTTService
from pipecat_speech import transcript


async def transcribe(server: Server, clip: Clip) -> None:
    service = MistralSTTService(
        api_key=KEY, base_url=server.url, settings=MistralSTTService.Settings(model=server.model)
    )
    await transcript(service, clip)


if __name__ == "__main__":
    each(transcribe)
