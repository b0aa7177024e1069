"""`mistralai`: `audio.transcriptions.complete` with the speaker of each segment. A clip has one voice."""

from clip import KEY, Clip, Server, each
from mistralai.client import Mistral


async def transcribe(server: Server, clip: Clip) -> None:
    client = Mistral(api_key=KEY, server_url=server.url)
    answer = await client.audio.transcriptions.complete_async(
        model=server.model,
        file={"file_name": "clip.wav", "content": clip.file()},
        diarize=True,
        timestamp_granularities=["segment"],
    )
    segments = answer.segments or []
    if {segment.speaker_id for segment in segments} != {"speaker_1"}:
        raise RuntimeError(answer)
    if " ".join(segment.text for segment in segments) != answer.text:
        raise RuntimeError(answer)
    clip.turn(answer.text)


if __name__ == "__main__":
    each(transcribe)
