"""The longest clip that a context takes, and vLLM's limits on uploads that are below it."""

import math
from collections.abc import Iterator
from typing import Any

from voxtral_serve.check.report import Report
from voxtral_serve.checkpoint import Checkpoint, CheckpointError
from voxtral_serve.engine.clip_length import ClipLength
from voxtral_serve.units import MIB

PCM16_BYTES, FLOAT32_BYTES = 2, 4  # of one sample


def check_clip(report: Report, held: Checkpoint, positions: int) -> None:
    """Report the longest clip for a context of so many token positions, max_model_len."""
    try:
        length = clip_length(held.tekken)
    except CheckpointError as error:
        report.problem(str(error))
        return
    longest, rate_hz = length.longest(positions), length.rate_hz
    if longest < 1:
        report.problem(f"max_model_len is {positions}, and padding alone takes {length.padding} tokens: raise it")
        return
    tokens = positions - length.padding
    report.row("transcribed", f"{longest / rate_hz:.2f} s: {tokens:,} tokens, and {length.padding} of padding")
    report.row("beyond", "refused with status 400")
    for limit in _upload_limits(longest, rate_hz):
        report.row("upload limit", limit)


def _upload_limits(samples: int, rate_hz: int) -> Iterator[str]:
    """A line for each limit of vLLM's environment variables that is below a clip of so many samples."""
    from vllm import envs

    for name, per_sample, of in (
        ("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", PCM16_BYTES / MIB, " of 16-bit WAV"),
        ("VLLM_MAX_AUDIO_DECODE_DURATION_S", 1 / rate_hz, ""),  # this and the next not in vLLM 0.20.0
        ("VLLM_MAX_AUDIO_DECODE_BYTES", FLOAT32_BYTES, f" of one channel at {rate_hz / 1000:g} kHz"),
    ):
        limit, needed = getattr(envs, name, None), math.ceil(samples * per_sample)
        if limit is not None and limit < needed:
            seconds = limit / per_sample / rate_hz
            yield f"{name} is {limit}: {seconds:.0f} s{of} at most. For the longest clip set it to {needed} or more"


def clip_length(tekken: dict[str, Any]) -> ClipLength:
    """Padding and positions of clips, from the `audio` part of tekken.json.

    Raises CheckpointError for values that mistral-common's AudioConfig refuses.
    """
    return ClipLength.of(audio_config(tekken))


def audio_config(tekken: dict[str, Any]) -> Any:
    """mistral-common's AudioConfig. Raises CheckpointError."""
    from mistral_common.tokens.tokenizers.audio import AudioConfig, AudioSpectrogramConfig

    values = dict(tekken)
    try:
        encoding = AudioSpectrogramConfig(**values.pop("audio_encoding_config"))
        return AudioConfig(encoding_config=encoding, **values)
    except (AssertionError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"mistral-common refuses the audio part of tekken.json: {type(error).__name__}: {error}"
        ) from error
