"""What fits on a GPU and the bounds of its speed, by arithmetic from its data sheet and the size of the model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.gpu.checkpoint import PARAMS
from bench.gpu.rows import SESSION_BYTES, tokens
from mistral_layout import tensors
from mistral_layout.audio import PROMPT_TOKENS, SAMPLE_RATE

GB = 1e9


class Gpu(NamedTuple):
    """By the maker's data sheet: bytes of memory, bytes a second, dense BF16 operations a second."""

    memory: float
    bandwidth: float
    arithmetic: float


GPUS = {
    "L4": Gpu(24 * GB, 0.30e12, 121e12),
    "RTX 4090": Gpu(24 * GB, 1.008e12, 165e12),
    "A100, 40 GB": Gpu(40 * GB, 1.555e12, 312e12),
    "A100, 80 GB": Gpu(80 * GB, 2.039e12, 312e12),
    "H100": Gpu(80 * GB, 3.35e12, 989e12),
    "H200": Gpu(141 * GB, 4.8e12, 989e12),
}
CLIP_S = 10.6  # of audio: the mean clip of the benchmark
SHARE = 0.9  # gpu_memory_utilization of the profiles
KV_BYTES = 104 * 2**10  # of a token
TOKENS_S, FRAMES_S = 12.5, 50  # of the language model and of the encoder, for a second of audio
WINDOW = 8192  # tokens of the language model's attention, full after 11 minutes
AGES_S = (90, 660)  # of live sessions


class Bounds(NamedTuple):
    """sessions: the most live sessions of each of AGES_S. step_ms, clip_s, drafted_s: the least time of a step, and of
    a clip of CLIP_S alone without and with drafts (None without acceptance). rtfx: the most."""

    sessions: tuple[int, ...]
    step_ms: float
    clip_s: float
    drafted_s: float | None
    rtfx: float


def sizes() -> tuple[int, int]:
    """Parameters of the encoder and of the language model."""
    shapes = tensors.shapes(PARAMS)
    encoder = sum(math.prod(shape) for name, shape in shapes.items() if "whisper" in name or "projection" in name)
    return encoder, sum(math.prod(shape) for shape in shapes.values()) - encoder


def beside(config: Mapping[str, Any], peak: float) -> float:
    """Bytes of a server beside weights, live sessions and KV cache: audio rows, activations, CUDA graphs and so on.

    config: of `fast.yaml` with a fixed KV cache; peak: its memory on the GPU that was measured.
    """
    sessions = config["additional_config"]["max_live_sessions"] * SESSION_BYTES
    return float(peak - config["kv_cache_memory_bytes"] - sessions - 2 * sum(sizes()))


def bounds(gpu: Gpu, beside: float, accepted: Sequence[float] | None) -> Bounds:
    """beside: bytes, as above. accepted: the share of accepted drafts at each position."""
    encoder, language = sizes()
    weights = 2 * (encoder + language)
    operations = 2 * (language * TOKENS_S + encoder * FRAMES_S)  # for a second of audio
    room, step_s = SHARE * gpu.memory - weights - beside, 2 * language / gpu.bandwidth
    sessions = []
    for age_s in AGES_S:
        held = SESSION_BYTES + KV_BYTES * min(WINDOW, PROMPT_TOKENS + age_s * TOKENS_S)
        by_time = (0.08 * gpu.bandwidth - weights) / held  # a step has 80 ms to read all
        sessions.append(math.floor(max(0, min(room / held, by_time))))
    clip_s = tokens(round(CLIP_S * SAMPLE_RATE)) * step_s
    drafted_s = clip_s / (1 + sum(accepted)) if accepted else None
    return Bounds(tuple(sessions), 1000 * step_s, clip_s, drafted_s, gpu.arithmetic / operations)
