"""`mistralai`: what is left of `audio.transcriptions`: `complete` with words, `stream` with segments, and `file_url`.

Mistral's audio has no `response_format`: `timestamp_granularities` alone asks for times.
"""

from typing import Any

from clip import KEY, Clip, Server, each
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from mistralai.client.models import (
    TranscriptionStreamDone,
    TranscriptionStreamLanguage,
    TranscriptionStreamSegmentDelta,
    TranscriptionStreamTextDelta,
)


async def transcribe(server: Server, clip: Clip) -> None:
    transcriptions = Mistral(api_key=KEY, server_url=server.url).audio.transcriptions
    asked: dict[str, Any] = {"model": server.model, "language": "en", "temperature": 0.0, "context_bias": ["Voxtral"]}
    file = {"file_name": "clip.wav", "content": clip.file()}
    answer = await transcriptions.complete_async(**asked, file=file, timestamp_granularities=["word"])
    words = answer.segments or []
    if [word.text for word in words] != answer.text.split() or not all(word.start < word.end for word in words):
        raise RuntimeError(answer)
    if (answer.model, answer.language) != (server.model, "en") or not answer.usage.total_tokens:
        raise RuntimeError(answer)
    deltas, segments, languages = list[str](), list[str](), list[str]()
    async for event in await transcriptions.stream_async(**asked, file=file, timestamp_granularities=["segment"]):
        match event.data:
            case TranscriptionStreamTextDelta(text=text):
                clip.delta(text)
                deltas.append(text)
            case TranscriptionStreamLanguage(audio_language=language):
                languages.append(language)
            case TranscriptionStreamSegmentDelta(text=text):
                segments.append(text)
            case TranscriptionStreamDone() as done:
                clip.turn(done.text)
            case unknown:
                raise RuntimeError(unknown)
    if not ("".join(deltas) == " ".join(segments) == done.text == answer.text) or languages != ["en"]:
        raise RuntimeError((deltas, segments, languages, done, answer))
    try:
        await transcriptions.complete_async(**asked, file_url="http://127.0.0.1/clip.wav")
    except SDKError as error:
        if error.status_code != 400 or "`file_url`" not in error.body:
            raise
    else:
        raise RuntimeError("file_url was taken")


if __name__ == "__main__":
    each(transcribe)
