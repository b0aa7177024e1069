"""The events of vLLM's own protocol at `/v1/realtime`, which all clients here share.

The client sends session.update with the model and input_audio_buffer.commit, then audio as input_audio_buffer.append,
and at its end a commit that is final. The server sends session.created first, transcription.delta for each token, and
transcription.done with the whole text at the end, or an error (vLLM 0.32.0, entrypoints/speech_to_text/realtime).
"""

import base64
import json
from typing import Any

PATH = "/v1/realtime"
CREATED, ERROR = "session.created", "error"
DELTA, DONE = "transcription.delta", "transcription.done"
UPDATE, APPEND, COMMIT = "session.update", "input_audio_buffer.append", "input_audio_buffer.commit"

Event = dict[str, Any]


def address(url: str) -> str:
    """The WebSocket's address on a server at `url`."""
    return f"ws{url.removeprefix('http')}{PATH}"


def opening(model: str) -> list[Event]:
    """What to send before the audio."""
    return [{"type": UPDATE, "model": model}, {"type": COMMIT}]


def closing() -> list[Event]:
    """What to send after the audio."""
    return [{"type": COMMIT, "final": True}]


def append(pcm: bytes) -> str:
    """The message with a piece of PCM16 at 16 kHz. Not by `json`: hundreds of sessions send it 12 times a second."""
    return f'{{"type": "{APPEND}", "audio": "{base64.b64encode(pcm).decode()}"}}'


def read(message: str | bytes) -> Event | None:
    """The event of a message; None if it is no JSON object."""
    try:
        event = json.loads(message)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
