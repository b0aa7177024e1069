"""Speculation without a draft model: always guess that the next tokens are [STREAMING_PAD].

Voxtral Realtime emits a token every 80 ms, and more than half of pico's are pads. vLLM verifies a guess greedily in
the step that makes the next token anyway, so the text cannot change; a wrong guess costs its share of that step only.

    speculative_config: {method: ngram_gpu,    model: voxtral_serve.drafter.PadDrafter, num_speculative_tokens: 5}
    speculative_config: {method: custom_class, model: voxtral_serve.drafter.PadDrafter, num_speculative_tokens: 5}

The first is for GPUs: vLLM knows `ngram_gpu` as a method that drafts there, and so schedules a step ahead. The pads
take the place of its n-gram search where `model` names this class: in Model Runner V2 by the worker (worker.py), in V1
of 0.20.0 by a patch (voxtral_serve.patches.ngram_pads). A pad does not depend on the tokens before it, so drafting
waits for none of them. The second is vLLM 0.32.0's own interface: tokens come to it on the CPU, after each step.

Every request gets all its drafts in every step, right after [STREAMING_WORD] too, where a pad never follows: only
steps in which each request has the same number of tokens run as full CUDA graphs, and a draft that is thrown away
costs far less than a step without its graph.

Only for the encode-once model. vLLM's own dies at a clip's end, where drafted positions have no audio rows, and its
encoder has full graphs for one token a step only. While vLLM schedules ahead, the CPU's count of computed tokens is
too high after a rejection, until the GPU has corrected it: a model must take its rows by the GPU's positions.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from voxtral_serve import shims

NAME = "voxtral_serve.drafter.PadDrafter"  # as configs write it
# 0.20.0's V2 runner is a sketch that it never uses by itself.
V1 = shims.installed("vllm") == "0.20.0"

if TYPE_CHECKING:
    import numpy as np


def streaming_pad(vllm_config: VllmConfig) -> int:
    """The id of [STREAMING_PAD] in the served checkpoint's tokenizer."""
    tokenizer: Any = cached_tokenizer_from_config(vllm_config.model_config)
    return int(tokenizer.instruct.audio_encoder.streaming_pad)


def drafts_pads(vllm_config: VllmConfig) -> bool:
    """Whether `speculative_config.model` names PadDrafter."""
    config = vllm_config.speculative_config
    return config is not None and config.model == NAME


def pads(vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[max_num_seqs, num_speculative_tokens]"""
    config = vllm_config.speculative_config
    assert config is not None
    shape = (vllm_config.scheduler_config.max_num_seqs, config.num_speculative_tokens)
    return torch.full(shape, streaming_pad(vllm_config), dtype=dtype, device=device)


class PadDrafter:
    """`method: custom_class` of vLLM 0.32.0: called on the CPU, after each step's tokens have arrived there."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self.draft = [streaming_pad(vllm_config)] * vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, model: object) -> None:
        """Nothing to load; the CPU runner calls it all the same."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: "np.ndarray[Any, Any]",
        token_ids_cpu: "np.ndarray[Any, Any]",
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A list for each request of the batch; empty for one whose prefill goes on. vLLM cuts it at the context."""
        return [list(self.draft) if sampled else [] for sampled in sampled_token_ids]


def pad_speculator(vllm_config: VllmConfig, device: torch.device) -> Any:
    """The same for the V2 model runner: a tensor that lies on the GPU from the start, so a step launches nothing."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class PadSpeculator(BaseSpeculator):
        supports_mm_inputs = False  # a drafting model's: it would need the audio rows of its own positions
        draft_logits = None  # a draft is certain of itself; the rejection sampler treats it as one-hot

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
            return drafts.clone()  # the runner overwrites the drafts that this step's size of batch does not get

    return PadSpeculator()


def check(vllm_config: VllmConfig) -> None:
    """Raise ValueError where `model` names PadDrafter and vLLM would draft something else, and not say so."""
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
