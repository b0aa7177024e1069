"""`mistralai`: `audio.transcriptions.complete` with the speakers of a file, of whom one is known."""

import base64

from clip import KEY, Clip, Server, each
from mistralai.client import Mistral


async def transcribe(server: Server, clip: Clip) -> None:
    client, content = Mistral(api_key=KEY, server_url=server.url), clip.file()
    for known in ({}, {"Ann": base64.b64encode(content).decode()}):
        answer = await client.audio.transcriptions.complete_async(
            model=server.model,
            file={"file_name": "clip.wav", "content": content},
            diarize=True,
            timestamp_granularities=["segment"],
            speaker_references=known,
        )
        speakers = {segment.speaker_id for segment in answer.segments or ()}
        text = " ".join(segment.text for segment in answer.segments or ())
        if (speakers, text) != ({"Ann"} if known else {"speaker_1"}, answer.text):
            raise RuntimeError(answer)
    clip.turn(answer.text)


if __name__ == "__main__":
    each(transcribe)
