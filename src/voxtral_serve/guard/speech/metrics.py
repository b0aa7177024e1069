"""What /metrics says of speech synthesis, beside `guard.metrics`."""

import functools
from typing import Any, NamedTuple

FIRST_BYTE_S = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


class SpeechMetrics(NamedTuple):
    """
    characters  of the texts that vLLM-Omni was given
    seconds     of audio that clients were sent
    first_byte  seconds from the request's headers to the first byte of audio, by whether it is sent while it is made
    incomplete  answers that ended before their audio did
    """

    characters: Any
    seconds: Any
    first_byte: Any
    incomplete: Any


@functools.cache
def metrics() -> SpeechMetrics:
    """Those of this process, registered at the first call."""
    from prometheus_client import Counter, Histogram

    prefix = "voxtral_serve_speech_"
    return SpeechMetrics(
        Counter(f"{prefix}characters", "Characters of text that were accepted for synthesis."),
        Counter(f"{prefix}audio_seconds", "Seconds of synthesised audio that were sent, as played.", ["format"]),
        Histogram(
            f"{prefix}first_byte_seconds",
            "From the request's headers to the first byte of audio. streamed: sent while it is made.",
            ["streamed"],
            buckets=FIRST_BYTE_S,
        ),
        Counter(f"{prefix}incomplete", "Answers that ended before their audio: the client left, or the engine failed."),
    )
