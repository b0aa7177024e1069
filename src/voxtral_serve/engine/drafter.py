"""Speculative decoding without a draft model: every draft is [STREAMING_PAD].

Voxtral Realtime emits a token every 80 ms, and more than half of pico's tokens are pads. vLLM verifies drafts greedily
in the step that computes the next token, so the text does not change. A wrong draft costs only its share of that step.

    speculative_config: {method: ngram_gpu,    model: voxtral_serve.drafter.PadDrafter, num_speculative_tokens: 5}
    speculative_config: {method: custom_class, model: voxtral_serve.drafter.PadDrafter, num_speculative_tokens: 5}

The first form is for GPUs. With `ngram_gpu`, vLLM drafts on the GPU and can therefore schedule one step ahead. If
`model` names this class, pads replace the n-gram search: in Model Runner V2 through the worker (worker.py), in V1 of
0.20.0 through a patch (voxtral_serve.patches.ngram_pads). Pads do not depend on earlier tokens, so drafting waits for
none. The second form is an interface of vLLM 0.32.0 that gets the tokens on the CPU after each step.

Every request gets all drafts in every step, even after [STREAMING_WORD], which no pad follows. Only steps with the same
number of tokens for each request run as full CUDA graphs, and a rejected draft costs far less than a step without its
graph.

This works only with the encode-once model. vLLM's own model ends with an error at the end of a clip, where drafted
positions have no audio rows, and its encoder has full graphs for one token per step only. While vLLM schedules ahead,
the CPU's count of computed tokens is too high after a rejection until the GPU has corrected it. A model must therefore
select its rows by the positions on the GPU.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from voxtral_serve import shims

NAME = "voxtral_serve.drafter.PadDrafter"  # as configs write it
# 0.20.0 has an early Model Runner V2, which it does not use by default.
V1 = shims.installed("vllm") == "0.20.0"

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


def streaming_pad(vllm_config: VllmConfig) -> int:
    """The id of [STREAMING_PAD] in the served checkpoint's tokenizer."""
    tokenizer: Any = cached_tokenizer_from_config(vllm_config.model_config)
    return int(tokenizer.instruct.audio_encoder.streaming_pad)


def is_ours(vllm_config: VllmConfig) -> bool:
    """Whether `speculative_config.model` names a drafter of this package."""
    return drafts_pads(vllm_config)


def head_file(vllm_config: VllmConfig) -> "Path | None":
    """The file of the head that drafts; None if pads are drafted."""
    return None


def drafts_pads(vllm_config: VllmConfig) -> bool:
    """Whether `speculative_config.model` names PadDrafter."""
    config = vllm_config.speculative_config
    return config is not None and config.model == NAME


def pads(vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Drafts for all requests: pads, [max_num_seqs, num_speculative_tokens]."""
    config = vllm_config.speculative_config
    assert config is not None
    shape = (vllm_config.scheduler_config.max_num_seqs, config.num_speculative_tokens)
    return torch.full(shape, streaming_pad(vllm_config), dtype=dtype, device=device)


class PadDrafter:
    """`method: custom_class` of vLLM 0.32.0, which calls it on the CPU after each step."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self.draft = [streaming_pad(vllm_config)] * vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, model: object) -> None:
        """Does nothing. The CPU runner calls it."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: "np.ndarray[Any, Any]",
        token_ids_cpu: "np.ndarray[Any, Any]",
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for each request of the batch; empty during its prefill. vLLM cuts drafts beyond the context."""
        return [list(self.draft) if sampled else [] for sampled in sampled_token_ids]


def pad_speculator(vllm_config: VllmConfig, device: torch.device) -> Any:
    """The drafter for Model Runner V2. Its drafts are a constant tensor on the GPU, so a step launches no kernel."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class PadSpeculator(BaseSpeculator):
        supports_mm_inputs = False  # only for draft models, which need the audio rows of their positions
        draft_logits = None  # no logits: the rejection sampler treats drafts as one-hot

        def __init__(self) -> None:
            self.drafts = pads(vllm_config, device, torch.int64)

        def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
            pass

        def capture(self) -> None:
            pass

        def propose(self, input_batch: Any, *_: object, num_speculative_tokens: int | None = None, **__: object) -> Any:
            drafts = self.drafts[: input_batch.num_reqs]
            if num_speculative_tokens is None or num_speculative_tokens == drafts.shape[1]:
                return drafts
            return drafts.clone()  # the runner overwrites the drafts that are not used at this batch size

    return PadSpeculator()


def check(vllm_config: VllmConfig) -> None:
    """Raise ValueError if `model` names PadDrafter, but vLLM would silently draft other tokens."""
    config = vllm_config.speculative_config
    if config is None or not drafts_pads(vllm_config):
        return
    on_gpu = current_platform.is_cuda() and (V1 or getattr(vllm_config, "use_v2_model_runner", False))
    if config.method != "custom_class" and not (config.method == "ngram_gpu" and on_gpu):
        raise ValueError(
            f"speculative_config has method {config.method!r} and model {config.model!r}: expected method 'ngram_gpu' "
            f"on a GPU, with vLLM 0.20.0 or with 0.32.0's Model Runner V2, or 'custom_class' with any other runner of "
            f"0.32.0; this is vllm {shims.installed('vllm')} on {current_platform.device_name}"
        )
    if config.method == "ngram_gpu" and not getattr(vllm_config, "use_v2_model_runner", False):
        shims.require("ngram_pads")
