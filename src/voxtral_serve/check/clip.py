"""The longest clip that fits into max_model_len, and the vLLM limits on uploads that are lower."""

import math
from collections.abc import Iterator
from typing import Any

from voxtral_serve.check.report import Report
from voxtral_serve.checkpoint import Checkpoint, CheckpointError
from voxtral_serve.engine.clip_length import ClipLength
from voxtral_serve.engine.session import LEAST_UPLOAD_S, UPLOAD_DELAY, SessionShape
from voxtral_serve.units import MIB

PCM16_BYTES, FLOAT32_BYTES = 2, 4  # of one sample


def check_clip(report: Report, held: Checkpoint, positions: int, delay_ms: int | None = None) -> None:
    """Report the longest clip. `positions` is max_model_len, in token positions; `delay_ms` that of uploads, None for
    the checkpoint's."""
    try:
        length = clip_length(held.tekken, delay_ms)
    except CheckpointError as error:
        report.problem(str(error))
        return
    longest, rate_hz = length.longest(positions), length.rate_hz
    if longest < (1 if delay_ms is None else LEAST_UPLOAD_S * rate_hz):
        delay = "" if delay_ms is None else f", with {UPLOAD_DELAY} {delay_ms}"
        report.problem(
            f"max_model_len is {positions}, but the padding of a clip alone takes {length.padding} tokens{delay}: "
            "raise max_model_len"
        )
        return
    tokens = positions - length.padding
    report.row("length", f"{longest / rate_hz:.2f} s: {tokens:,} tokens of audio and {length.padding} of padding")
    report.row("longer clips", "refused with HTTP status 400")
    for limit in _upload_limits(longest, rate_hz):
        report.row("upload limit", limit)


def _upload_limits(samples: int, rate_hz: int) -> Iterator[str]:
    """A line for each environment variable of vLLM whose limit is below a clip of `samples` samples."""
    from vllm import envs

    for name, per_sample, of in (
        ("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", PCM16_BYTES / MIB, " of 16-bit WAV"),
        ("VLLM_MAX_AUDIO_DECODE_DURATION_S", 1 / rate_hz, ""),  # this and the next not in vLLM 0.20.0
        ("VLLM_MAX_AUDIO_DECODE_BYTES", FLOAT32_BYTES, f" of one channel at {rate_hz / 1000:g} kHz"),
    ):
        limit, needed = getattr(envs, name, None), math.ceil(samples * per_sample)
        if limit is not None and limit < needed:
            seconds = limit / per_sample / rate_hz
            yield f"{name}={limit} allows {seconds:.0f} s{of}. Set it to {needed} or more to accept the longest clip"


def clip_length(tekken: dict[str, Any], delay_ms: int | None = None) -> ClipLength:
    """Padding and positions of clips with this delay, by default the checkpoint's, from the `audio` section of
    tekken.json.

    Raises CheckpointError for values that mistral-common's AudioConfig rejects.
    """
    audio = audio_config(tekken)
    shape = SessionShape.of(audio).with_delay_ms(delay_ms)
    return ClipLength.of(audio)._replace(padding=shape.left + shape.right)


def audio_config(tekken: dict[str, Any]) -> Any:
    """mistral-common's AudioConfig. Raises CheckpointError."""
    from mistral_common.tokens.tokenizers.audio import AudioConfig, AudioSpectrogramConfig

    values = dict(tekken)
    try:
        encoding = AudioSpectrogramConfig(**values.pop("audio_encoding_config"))
        return AudioConfig(encoding_config=encoding, **values)
    except (AssertionError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"mistral-common rejects the audio section of tekken.json: {type(error).__name__}: {error}"
        ) from error
