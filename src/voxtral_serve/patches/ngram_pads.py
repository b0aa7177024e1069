"""Pads in the place of vLLM 0.20.0's n-gram search on a GPU, where `speculative_config.model` names PadDrafter.

Its Model Runner V1 makes the proposer itself and has no place for another. Newer runners get theirs from the worker
(voxtral_serve.engine.worker).
"""

import inspect
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from voxtral_serve.shims import Patch

EXPECTED = {
    "__init__": ["self", "vllm_config", "device", "runner"],
    "propose": [
        *("self", "num_tokens_no_spec", "token_ids_gpu", "valid_sampled_token_ids_gpu", "valid_sampled_tokens_count")
    ],
    "load_model": ["self", "args", "kwargs"],
}


class NgramPads(Patch):
    name = "ngram_pads"
    does = "`method: ngram_gpu` drafts [STREAMING_PAD] where `speculative_config.model` names PadDrafter"
    target = "vllm.v1.spec_decode.ngram_proposer_gpu"
    breaks = "nothing ends: n-grams are drafted, of which a live transcript has few"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = "vLLM 0.32.0 has a model runner whose drafts a worker class may replace"
    until = "vLLM 0.20.0 is no longer supported"
    used_by = "`speculative_config` with `method: ngram_gpu` and `model: voxtral_serve.drafter.PadDrafter`"

    def probe(self, module: Any) -> bool:
        stock = module.NgramProposerGPU
        if hasattr(stock, "drafts_pads"):
            return False
        found = {
            name: [*inspect.signature(getattr(stock, name)).parameters] for name in EXPECTED if hasattr(stock, name)
        }
        # Where Model Runner V2 drafts n-grams, V1's proposer is not the one that is used on a GPU.
        if find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None:
            return False
        if found != EXPECTED:
            raise LookupError(f"NgramProposerGPU has {found}, expected {EXPECTED}")
        return True

    def apply(self, module: Any) -> None:
        module.NgramProposerGPU = pads_or_ngrams(module.NgramProposerGPU)
        if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # it has bound the name
            runner.NgramProposerGPU = module.NgramProposerGPU  # type: ignore[attr-defined]


def pads_or_ngrams(stock: Any) -> type:
    """A subclass of vLLM's proposer, which the runner's assertions take for it."""

    class PadsOrNgrams(stock):
        drafts_pads = True
        pads: Any = None  # int32 [max_num_seqs, num_speculative_tokens] where the config asks for pads

        def __init__(self, vllm_config: Any, device: Any, runner: Any = None) -> None:
            from voxtral_serve.engine import drafter

            if not drafter.drafts_pads(vllm_config):
                super().__init__(vllm_config, device, runner)
                return
            import torch

            self.pads = drafter.pads(vllm_config, device, torch.int32)
            self.device, self.runner = device, runner

        def propose(self, num_tokens_no_spec: Any, *args: Any, **kwargs: Any) -> Any:
            if self.pads is None:
                return super().propose(num_tokens_no_spec, *args, **kwargs)
            # None for the number of drafts that are valid: the runner would wait for the GPU to hear it, each step.
            # It then reads the numbers of the last copy, and those are always all.
            self.runner._num_valid_draft_tokens_cpu.fill_(self.pads.shape[1])
            return self.pads[: len(num_tokens_no_spec)], None

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            if self.pads is None:
                super().load_model(*args, **kwargs)

    return PadsOrNgrams
