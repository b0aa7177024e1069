"""The phrases that requests prefer (keywords.py) in vLLM's Model Runner V2: a processor of logits as its interface has
it. The config hook names it (config.py). vLLM imports it in the API server's process, too, and skips it in steps whose
requests have no phrases. 0.20.0 has no such interface."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor, LogitsProcRequestState

from voxtral_serve.engine import keywords

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


class KeywordProcessor(LogitsProcessor):
    """A table for each slot, 128 KiB each, so that a request's phrases are one copy to the GPU."""

    def __init__(self, vllm_config: "VllmConfig", req_states: LogitsProcRequestState) -> None:
        import torch

        from voxtral_serve.engine.keyword_boost import WIDTH, boost

        self.state = req_states
        shape = (req_states.max_num_reqs, WIDTH)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=req_states.device)
        self.wanted: np.ndarray[Any, Any] = np.zeros(req_states.max_num_reqs, bool)  # slots with a table
        # A kernel that does not compile ends the start. vLLM's indices are int64, which its first such step compiles.
        if self.tables.is_cuda:
            zero = torch.zeros(1, dtype=torch.int32, device=req_states.device)
            names = ("idx_mapping", "expanded_idx_mapping", "expanded_local_pos", "input_ids")
            logits = torch.zeros((1, req_states.vocab_size), device=req_states.device)
            boost(logits, self.tables, req_states, SimpleNamespace(**dict.fromkeys(names, zero)))

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Raises ValueError for a table that is not whole."""
        if (table := keywords.table_of(sampling_params)) is not None:
            keywords.unpacked(table)

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Called when a request starts, or restarts after preemption: its automaton reads its text anew."""
        import torch

        table = keywords.table_of(sampling_params)
        if table is not None:
            numbers = torch.frombuffer(bytearray(table), dtype=torch.int32)
            if self.tables.is_cuda:
                numbers = numbers.pin_memory()
            self.tables[req_idx, : len(numbers)].copy_(numbers, non_blocking=True)
        elif self.wanted[req_idx]:
            self.tables[req_idx, keywords.NODES] = 0
        self.wanted[req_idx] = table is not None
        return table is not None

    def apply(self, logits: "torch.Tensor", ctx: LogitsContext) -> "torch.Tensor":
        """Changes the logits in place."""
        if self.wanted[ctx.idx_mapping_np].any():
            from voxtral_serve.engine.keyword_boost import boost

            boost(logits, self.tables, self.state, ctx)
        return logits
