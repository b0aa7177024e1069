"""Load weights of both checkpoint layouts into vLLM's native Voxtral Realtime model."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.voxtral_realtime import VoxtralRealtimeGeneration

from voxtral_serve import checkpoint


def to_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head in [heads * head_dim, ...] from (first half, second half) to interleaved pairs.

    transformers rotates element i of a head with element i + head_dim / 2. Mistral's layout, and therefore vLLM's
    loader, rotates element 2 i with element 2 i + 1.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_mistral(
    weights: Iterable[tuple[str, torch.Tensor]], text_head_dim: int, encoder_head_dim: int, tied: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    """Convert names and the order of query and key rows to those of consolidated.safetensors, where they differ."""
    for stored, tensor in weights:
        name = checkpoint.mistral_name(stored)
        if name == "output.weight" and tied:
            continue  # a copy of the token embeddings
        if name != stored and checkpoint.is_rotated(name):
            tensor = to_pairs(tensor, encoder_head_dim if "whisper_encoder" in name else text_head_dim)
        yield name, tensor


class EitherLayout:
    """Mixin for vLLM's Voxtral classes: loads weights of both layouts."""

    config: Any

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        text, audio = self.config.text_config, self.config.audio_config
        return super().load_weights(  # type: ignore[misc]
            to_mistral(weights, text.head_dim, audio.encoder_head_dim, text.tie_word_embeddings)
        )


class VoxtralRealtimeForConditionalGeneration(EitherLayout, VoxtralRealtimeGeneration):
    """vLLM's own model under the architecture name of config.json."""
