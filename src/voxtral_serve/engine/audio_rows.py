"""Where the encode-once model keeps the audio rows of running requests.

vLLM would look the rows up for every step, request by request, and embed the tokens before the model and outside its
CUDA graph. Here each running request has a slot in one tensor, filled when its clip is encoded; a step says only which
slot each of its tokens belongs to. Who fills it: `model_state` in Model Runner V2, `model_runner` in V1.
"""

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig


class AudioRows(nn.Module):
    """`slots` rows of up to `length` positions each; as many as requests may run, and as long as the context."""

    pool: torch.Tensor
    starts: torch.Tensor
    embeddings: torch.Tensor

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.slots = vllm_config.scheduler_config.max_num_seqs
        self.length = vllm_config.model_config.max_model_len
        tokens, dim = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.get_hidden_size()
        # CUDA graphs read from, and write to, addresses: all of these stay where they are.
        self.register_buffer("pool", torch.zeros(self.slots * self.length, dim), persistent=False)
        self.register_buffer("starts", torch.zeros(tokens, dtype=torch.int64), persistent=False)
        self.register_buffer("embeddings", torch.zeros(tokens, dim), persistent=False)

    def put(self, slot: int, rows: torch.Tensor) -> None:
        """Rows [n, dim] of positions 0 to n - 1 into a slot; positions after them have none."""
        held = self.pool[slot * self.length : (slot + 1) * self.length]
        n = min(len(rows), self.length)
        held[:n] = rows[:n]
        held[n:] = 0

    def added_to(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token embeddings [n, dim] of one step, at positions [n] of their requests, plus the audio's rows."""
        n = len(positions)
        # Warm-up runs count positions beyond the context.
        rows = F.embedding(self.starts[:n] + positions.clamp(max=self.length - 1), self.pool)
        return torch.add(embeddings, rows, out=self.embeddings[:n])
