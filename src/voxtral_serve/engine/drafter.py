"""Speculation without a draft model: always guess that the next tokens are [STREAMING_PAD].

Voxtral Realtime emits a token every 80 ms, and more than half of pico's are pads. vLLM verifies a guess greedily in
the step that makes the next token anyway, so the text cannot change; a wrong guess costs its share of that step only.

    speculative_config: {method: ngram_gpu,    model: voxtral_serve.drafter.PadDrafter, num_speculative_tokens: 5}
    speculative_config: {method: custom_class, model: voxtral_serve.drafter.PadDrafter, num_speculative_tokens: 5}

The first is for GPUs: vLLM knows `ngram_gpu` as a method that drafts there, and so goes on scheduling a step ahead;
`install` puts the pads in the place of its n-gram search when `model` names this class (in Model Runner V2 of 0.32.0
and in V1 of 0.20.0). A pad needs to know nothing about the tokens before it, and so waits for none of them. The second
is vLLM 0.32.0's own interface: tokens come to it on the CPU, after each step.

Every request gets all its drafts in every step, right after [STREAMING_WORD] too, where a pad never follows: only
steps in which each request has the same number of tokens run as full CUDA graphs, and a draft that is thrown away
costs far less than a step without its graph.

Only for the encode-once model. vLLM's own dies at a clip's end, where drafted positions have no audio rows, and its
encoder has full graphs for one token a step only. While vLLM schedules ahead, the CPU's count of computed tokens is
too high after a rejection, until the GPU has corrected it: a model must take its rows by the GPU's positions.
"""

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from voxtral_serve import shims

MARK = "voxtral_serve_pads"
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


def install() -> None:
    """Have vLLM's model runner draft pads on the GPU where `model` asks for them.

    May run twice. Raises PatchError if what it drafts with is not as expected.
    """
    if V1:
        return install_v1()
    from vllm.v1.worker.gpu import spec_decode

    stock: Any = getattr(spec_decode, "init_speculator", None)
    if hasattr(stock, MARK):
        return
    if stock is None or [*inspect.signature(stock).parameters][:2] != ["vllm_config", "device"]:
        raise shims.PatchError(
            f"vllm {shims.installed('vllm')}: vllm.v1.worker.gpu.spec_decode has no init_speculator(vllm_config, "
            f"device, ...), which is to make the drafter. {shims.ADVICE}"
        )

    def init_speculator(vllm_config: VllmConfig, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        if drafts_pads(vllm_config):
            return pad_speculator(vllm_config, device)
        return stock(vllm_config, device, *args, **kwargs)

    setattr(init_speculator, MARK, True)
    spec_decode.init_speculator = init_speculator
    if runner := sys.modules.get("vllm.v1.worker.gpu.model_runner"):  # it has bound the name
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]


def install_v1() -> None:
    """For Model Runner V1 of vLLM 0.20.0, which finds a class that can do either where the n-gram search was."""
    from vllm.v1.spec_decode import ngram_proposer_gpu

    stock: Any = getattr(ngram_proposer_gpu, "NgramProposerGPU", None)
    if hasattr(stock, MARK):
        return
    expected = {
        "__init__": ["self", "vllm_config", "device", "runner"],
        "propose": [
            "self",
            "num_tokens_no_spec",
            "token_ids_gpu",
            "valid_sampled_token_ids_gpu",
            "valid_sampled_tokens_count",
        ],
        "load_model": ["self", "args", "kwargs"],
    }
    found = {name: [*inspect.signature(getattr(stock, name)).parameters] for name in expected if hasattr(stock, name)}
    if found != expected:
        raise shims.PatchError(
            f"vllm {shims.installed('vllm')}: NgramProposerGPU has {found}, expected {expected}; pads cannot be "
            f"drafted in its place. {shims.ADVICE}"
        )

    class PadsOrNgrams(stock):
        pads: torch.Tensor | None = None

        def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
            if not drafts_pads(vllm_config):
                super().__init__(vllm_config, device, runner)
                return
            self.pads = pads(vllm_config, device, torch.int32)
            self.device, self.runner = device, runner

        def propose(self, num_tokens_no_spec: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.pads is None:
                return super().propose(num_tokens_no_spec, *args, **kwargs)
            # None for the number of drafts that are valid: the runner would wait for the GPU to hear it, each step.
            # It then reads the numbers of the last copy, and those are always all.
            self.runner._num_valid_draft_tokens_cpu.fill_(self.pads.shape[1])
            return self.pads[: len(num_tokens_no_spec)], None

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            if self.pads is None:
                super().load_model(*args, **kwargs)

    setattr(PadsOrNgrams, MARK, True)
    ngram_proposer_gpu.NgramProposerGPU = PadsOrNgrams  # type: ignore[misc,unused-ignore]
    if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # it has bound the name
        runner.NgramProposerGPU = PadsOrNgrams  # type: ignore[attr-defined]
