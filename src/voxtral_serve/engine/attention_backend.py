"""vLLM's attention backend TRITON_ATTN with a kernel of our own for steps of many requests.

vLLM has `attention_backend: CUSTOM` for backends of plugins; plugin.py registers this one. The cache, its metadata and
all that the kernel does not compute are those of vLLM's backend.
"""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
)

from voxtral_serve.engine.paged_attention import paged_attention

NO_WINDOW = (-1, -1)
HEAD_DIMS = (64, 128)  # whose keys and values fit into the shared memory of older GPUs
GROUPS = (1, 2, 4, 8, 16, 32)  # query heads of a KV head


class PagedAttentionImpl(TritonAttentionImpl):
    """Attention of one layer. `plain`: the layer has nothing that the kernel does not compute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        features = (self.alibi_slopes, self.sinks, self.logits_soft_cap or None)
        self.plain = (
            self.attn_type == AttentionType.DECODER
            and all(feature is None for feature in features)
            and self.head_size in HEAD_DIMS
            and self.num_queries_per_kv in GROUPS
            and getattr(self, "chunk_lookback", -1) == -1
        )
        self.window = None if tuple(self.sliding_window) == NO_WINDOW else self.sliding_window[0] + 1

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's: query and output [tokens, heads, head_dim], the tokens of a step and those that fill its graph."""
        plain = self.plain and output_scale is None and output_block_scale is None
        if not plain or attn_metadata is None or not _is_of_many(attn_metadata) or not _are_of_16_bits(query, kv_cache):
            scales = (output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        tokens = attn_metadata.num_actual_tokens
        paged_attention(
            query[:tokens],
            *halves(kv_cache, self.head_size),
            output[:tokens],
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.block_table,
            attn_metadata.max_query_len,
            self.scale,
            self.window,
        )
        return output


def _is_of_many(metadata: TritonAttentionMetadata) -> bool:
    """Whether a step has more requests than those whose contexts vLLM's kernel splits, and plain causal attention.

    In a CUDA graph, the requests that fill it count as well.
    """
    prefixes = metadata.mm_prefix_range_tensor is not None or getattr(metadata, "rswa_window", None) is not None
    many = len(metadata.seq_lens) > metadata.seq_threshold_3D
    return many and not prefixes and getattr(metadata, "causal", True) is True


def _are_of_16_bits(query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    return query.itemsize == 2 and query.dtype == kv_cache.dtype


def halves(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's cache, each [pages, page size, KV heads, head_dim].

    vLLM 0.20.0 has [pages, 2, page size, KV heads, head_dim]; later ones [pages, KV heads, page size, 2 head_dim].
    """
    if kv_cache.ndim == 5:
        keys, values = kv_cache.unbind(1)
    else:
        keys, values = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return keys, values


class PagedAttentionBackend(TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return PagedAttentionImpl

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # the kernel depends on the number of requests
