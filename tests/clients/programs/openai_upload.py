"""`openai`: `audio.transcriptions.create` with the speaker of each segment, also streamed. A clip has one voice."""

from clip import KEY, Clip, Server, each
from openai import AsyncOpenAI
from openai.types.audio import TranscriptionDiarized, TranscriptionTextSegmentEvent

MODEL = "gpt-4o-transcribe-diarize"
FORM = "diarized_json"


async def transcribe(server: Server, clip: Clip) -> None:
    create = AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1").audio.transcriptions.create
    file = ("clip.wav", clip.file())
    answer = await create(model=MODEL, file=file, response_format=FORM, chunking_strategy="auto")
    if not isinstance(answer, TranscriptionDiarized) or {segment.speaker for segment in answer.segments} != {"A"}:
        raise RuntimeError(answer)
    events = await create(model=MODEL, file=file, response_format=FORM, chunking_strategy="auto", stream=True)
    segments = [event async for event in events if isinstance(event, TranscriptionTextSegmentEvent)]
    if [segment.model_dump() for segment in segments] != [segment.model_dump() for segment in answer.segments]:
        raise RuntimeError(segments)
    if " ".join(segment.text for segment in segments) != answer.text:
        raise RuntimeError(answer)
    clip.turn(answer.text)


if __name__ == "__main__":
    each(transcribe)
