"""Storage for the audio rows of the running requests of the encode-once model.

Without it, vLLM would look up the rows of each request in every step and embed the tokens outside the CUDA graph. Here,
each running request has a range of rows in one tensor, which is filled when its audio is encoded. A step only sets the
request slot of each of its tokens. The rows are filled by `model_state` in Model Runner V2 and by `model_runner` in V1.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig

from voxtral_serve.engine.clip_length import clip_positions
from voxtral_serve.engine.session import RING

NO_AUDIO = "the request has no audio"


class AudioRows(nn.Module):
    """Rows of up to `slots` requests.

    A slot for an uploaded clip has as many rows as the longest clip; the clip's positions 0 to n - 1 are the first n. A
    live session has a ring of `ring` rows, more than one step needs; position p is at p modulo `ring`. Slot number
    `slots` is for requests without audio. It has one row of zeros.

    `faults` says what is wrong with the audio of requests, by request id. The worker sends it to the scheduler with the
    step's output (worker.py), and a scheduler with live sessions ends these requests with an error.

    `observe` is called with each clip that begins: its identifier and its rows [n, dim], in whose place the encoder
    computes the next clip's.
    """

    pool: torch.Tensor
    first: torch.Tensor
    length: torch.Tensor
    delay: torch.Tensor
    slot: torch.Tensor
    token_delay: torch.Tensor
    embeddings: torch.Tensor

    def __init__(self, vllm_config: VllmConfig, live_slots: int = 0, clip_delay: int = 0) -> None:
        """`clip_delay`: the delay of uploaded clips, in token positions."""
        super().__init__()
        self.slots = vllm_config.scheduler_config.max_num_seqs
        self.positions = clip_positions(vllm_config.model_config)
        tokens, dim = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.get_hidden_size()
        self.clip_delay = clip_delay
        self.ring = min(RING, tokens, vllm_config.model_config.max_model_len)
        self.clips = self.slots * self.positions  # rows of the pool for clips; the rings of live sessions follow
        # CUDA graphs use fixed addresses, so these tensors are never reallocated.
        self.zeros = self.clips + live_slots * self.ring  # number of the row of zeros
        self.register_buffer("pool", torch.zeros(self.zeros + 1, dim), persistent=False)
        places = torch.arange(self.slots + 1, dtype=torch.int64) * self.positions
        self.register_buffer("first", places, persistent=False)  # first row in the pool, by request slot
        self.register_buffer("length", torch.full_like(places, self.positions), persistent=False)
        self.register_buffer("delay", torch.full_like(places, clip_delay), persistent=False)
        self.register_buffer("slot", torch.zeros(tokens, dtype=torch.int64), persistent=False)  # by token of a step
        self.register_buffer("token_delay", torch.zeros_like(self.slot), persistent=False)
        self.register_buffer("embeddings", torch.zeros(tokens, dim), persistent=False)
        self.filled = [0] * self.slots  # rows that the last clip of a slot has left in its place
        self.faults: dict[str, str] = {}
        self.observe: Callable[[str, torch.Tensor], None] = lambda clip, rows: None
        self.put_nothing(self.slots)

    def put(self, slot: int, rows: torch.Tensor, delay: int | None = None) -> None:
        """Store rows [n, dim] of an uploaded clip for its positions 0 to n - 1. Later positions get zeros. `delay` is
        in token positions; None for that of clips which name none."""
        delay = self.clip_delay if delay is None else delay
        self._place(slot, slot * self.positions, self.positions, delay)
        place = self.pool[slot * self.positions : (slot + 1) * self.positions]
        n = min(len(rows), self.positions)
        place[:n] = rows[:n]
        place[n : self.filled[slot]].zero_()  # the rows behind these are zeros already
        self.filled[slot] = n

    def put_live(self, slot: int, live_slot: int, delay: int) -> None:
        """Let a request slot read the ring of a live session, whose delay is in token positions."""
        self._place(slot, self.clips + live_slot * self.ring, self.ring, delay)

    def put_nothing(self, slot: int) -> None:
        """Let a request slot read the row of zeros, for a request without audio."""
        self._place(slot, self.zeros, 1, self.clip_delay)

    def _place(self, slot: int, first: int, length: int, delay: int) -> None:
        # Not by `tensor[slot] = number`, which would copy the number from pageable memory and wait for the GPU.
        for tensor, number in ((self.first, first), (self.length, length), (self.delay, delay)):
            tensor[slot : slot + 1].fill_(number)

    def live(self) -> torch.Tensor:
        """The rings of live sessions: [live slots * ring, dim]."""
        return self.pool[self.clips : self.zeros]

    def delays(self, n: int) -> torch.Tensor:
        """[n], of the tokens of one step: the delays of their requests."""
        return torch.index_select(self.delay, 0, self.slot[:n], out=self.token_delay[:n])

    def added_to(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token embeddings [n, dim] of one step, at positions [n] in their requests, plus their audio rows."""
        n = len(positions)
        slot = self.slot[:n]
        # The modulo is also for warm-up runs, whose positions exceed the context.
        rows = F.embedding(self.first[slot] + positions % self.length[slot], self.pool)
        return torch.add(embeddings, rows, out=self.embeddings[:n])
