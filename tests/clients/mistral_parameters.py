"""Print the parameters of `mistralai` that docs/pages/from-mistral.md explains, as JSON: by heading of the page."""

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

from mistralai.client.models import AudioFormat, TurnDetectionConfig
from mistralai.client.speech import Speech
from mistralai.client.transcriptions import Transcriptions
from mistralai.extra.realtime.transcription import RealtimeTranscription

# Of each method: what concerns the connection or the method itself, not the request
LOCAL = {"self", "retries", "server_url", "timeout_ms", "http_headers", "accept_header_override", "audio_stream"}
MODELS = {"audio_format": AudioFormat, "turn_detection": TurnDetectionConfig}


def parameters(*methods: Callable[..., Any]) -> Iterator[str]:
    for name in sorted({name for method in methods for name in inspect.signature(method).parameters} - LOCAL):
        yield name
        yield from (f"{name}.{field}" for field in (MODELS[name].model_fields if name in MODELS else ()))


if __name__ == "__main__":
    tables = {
        "Files": (Transcriptions.complete, Transcriptions.stream),
        "Live": (RealtimeTranscription.connect, RealtimeTranscription.transcribe_stream),
        "Speech": (Speech.complete,),
    }
    print(json.dumps({heading: list(parameters(*methods)) for heading, methods in tables.items()}))
