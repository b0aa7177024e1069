"""`openai`: `audio.transcriptions.create` as for `gpt-transcribe`, with its newest fields, whole and streamed."""

from clip import KEY, Clip, Server, each
from openai import AsyncOpenAI


async def transcribe(server: Server, clip: Clip) -> None:
    transcriptions = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY).audio.transcriptions
    file = ("clip.wav", clip.file())
    hints = {"languages": ["en", "fr"], "keywords": ["Voxtral"]}
    answer = await transcriptions.create(model=server.model, file=file, include=["logprobs"], **hints)
    if "".join(each.token or "" for each in answer.logprobs or ()) != answer.text:
        raise RuntimeError(answer)
    if [language.code for language in answer.languages or ()] != ["en"]:
        raise RuntimeError(answer)
    deltas = []
    async for event in await transcriptions.create(model=server.model, file=file, stream=True, **hints):
        if event.type == "transcript.text.delta":
            clip.delta(event.delta)
            deltas.append(event.delta)
        elif event.type == "transcript.text.done":
            clip.turn(event.text)
            if [language.code for language in event.languages or ()] != ["en"]:
                raise RuntimeError(event)
    if "".join(deltas) != answer.text:
        raise RuntimeError((deltas, answer))


if __name__ == "__main__":
    each(transcribe)
