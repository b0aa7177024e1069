"""`mistralai`: `audio.realtime.transcribe_stream`."""

from clip import KEY, Clip, Server, each
from mistralai.client import Mistral
from mistralai.client.models import (
    AudioFormat,
    RealtimeTranscriptionError,
    TranscriptionStreamDone,
    TranscriptionStreamTextDelta,
)
from mistralai.extra.realtime import UnknownRealtimeEvent

RATE = 16000


async def transcribe(server: Server, clip: Clip) -> None:
    client = Mistral(api_key=KEY, server_url=server.url)
    events = client.audio.realtime.transcribe_stream(
        clip.spoken_async(RATE),
        model=server.model,
        audio_format=AudioFormat(encoding="pcm_s16le", sample_rate=RATE),
        target_streaming_delay_ms=480,
    )
    async for event in events:
        if isinstance(event, TranscriptionStreamTextDelta):
            clip.delta(event.text)
        elif isinstance(event, TranscriptionStreamDone):
            clip.turn(event.text)
        elif isinstance(event, RealtimeTranscriptionError):
            raise RuntimeError(event.error)
        elif isinstance(event, UnknownRealtimeEvent):  # whatever does not have its type's fields
            raise RuntimeError(event)


if __name__ == "__main__":
    each(transcribe)
