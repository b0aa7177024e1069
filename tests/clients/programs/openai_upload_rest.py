"""`openai`: `audio.transcriptions.create` as for `gpt-transcribe`, with its newest fields, and with the speaker of each
segment, whole and streamed. A clip has one voice."""

from clip import KEY, Clip, Server, each
from openai import AsyncOpenAI
from openai.types.audio import TranscriptionDiarized, TranscriptionTextSegmentEvent

DIARIZE = "gpt-4o-transcribe-diarize"
FORM = "diarized_json"


async def transcribe(server: Server, clip: Clip) -> None:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    file = ("clip.wav", clip.file())
    hints = {"languages": ["en", "fr"], "keywords": ["Voxtral"]}
    answer = await client.audio.transcriptions.create(model=server.model, file=file, include=["logprobs"], **hints)
    if "".join(each.token or "" for each in answer.logprobs or ()) != answer.text:
        raise RuntimeError(answer)
    if [language.code for language in answer.languages or ()] != ["en"]:
        raise RuntimeError(answer)
    deltas = []
    async for event in await client.audio.transcriptions.create(model=server.model, file=file, stream=True, **hints):
        if event.type == "transcript.text.delta":
            clip.delta(event.delta)
            deltas.append(event.delta)
        elif event.type == "transcript.text.done":
            clip.turn(event.text)
            if [language.code for language in event.languages or ()] != ["en"]:
                raise RuntimeError(event)
    if "".join(deltas) != answer.text:
        raise RuntimeError((deltas, answer))
    await _label(client, file, answer.text)


async def _label(client: AsyncOpenAI, file: tuple[str, bytes], text: str) -> None:
    create = client.audio.transcriptions.create
    answer = await create(model=DIARIZE, file=file, response_format=FORM, chunking_strategy="auto")
    if not isinstance(answer, TranscriptionDiarized) or {segment.speaker for segment in answer.segments} != {"A"}:
        raise RuntimeError(answer)
    events = await create(model=DIARIZE, file=file, response_format=FORM, chunking_strategy="auto", stream=True)
    segments = [event async for event in events if isinstance(event, TranscriptionTextSegmentEvent)]
    if [segment.model_dump() for segment in segments] != [segment.model_dump() for segment in answer.segments]:
        raise RuntimeError(segments)
    if not answer.text == " ".join(segment.text for segment in segments) == text:
        raise RuntimeError((answer, text))


if __name__ == "__main__":
    each(transcribe)
