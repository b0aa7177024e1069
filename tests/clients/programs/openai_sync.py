"""`openai`, blocking: the client ends its turn itself."""

import base64

from clip import KEY, Clip, Server, arguments
from openai import OpenAI

RATE = 24000


def transcribe(server: Server, clip: Clip) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": RATE},
                        "transcription": {"model": server.model},
                        "turn_detection": None,
                    }
                },
            }
        )
        for piece in clip.spoken(RATE):
            connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
        connection.input_audio_buffer.commit()
        for event in connection:
            if event.type == "error":
                raise RuntimeError(event.error)
            if event.type == "conversation.item.input_audio_transcription.failed":
                raise RuntimeError(event.error)
            if event.type == "conversation.item.input_audio_transcription.completed":
                clip.turn(event.transcript)
                return


if __name__ == "__main__":
    server, clips = arguments()
    for clip in clips:
        transcribe(server, clip)
        clip.report()
