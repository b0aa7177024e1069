"""vLLM's native Voxtral Realtime, reading weights of either layout."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.voxtral_realtime import VoxtralRealtimeGeneration

from voxtral_serve import checkpoint


def to_pairs(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, ...]: each head's rows from first half, second half to neighbouring pairs.

    transformers rotates element i of a head with element i + head_dim / 2; Mistral, and so vLLM's loader, rotates
    elements 2 i and 2 i + 1.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def to_mistral(
    weights: Iterable[tuple[str, torch.Tensor]], text_head_dim: int, encoder_head_dim: int, tied: bool
) -> Iterable[tuple[str, torch.Tensor]]:
    """Names, and the order of query and key rows, as in consolidated.safetensors; what is so already passes through."""
    for stored, tensor in weights:
        name = checkpoint.mistral_name(stored)
        if name == "output.weight" and tied:
            continue  # a copy of the token embeddings
        if name != stored and checkpoint.is_rotated(name):
            tensor = to_pairs(tensor, encoder_head_dim if "whisper_encoder" in name else text_head_dim)
        yield name, tensor


class EitherLayout:
    """Put before one of vLLM's Voxtral classes: its weights may be stored in either layout."""

    config: Any

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        text, audio = self.config.text_config, self.config.audio_config
        return super().load_weights(  # type: ignore[misc]
            to_mistral(weights, text.head_dim, audio.encoder_head_dim, text.tie_word_embeddings)
        )


class VoxtralRealtimeForConditionalGeneration(EitherLayout, VoxtralRealtimeGeneration):
    """The architecture by the name that config.json gives it."""
