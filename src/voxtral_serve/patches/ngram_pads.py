"""Replace vLLM 0.20.0's n-gram drafts on a GPU by pads if `speculative_config.model` is PadDrafter.

Model Runner V1 of vLLM 0.20.0 creates the proposer itself and cannot use another one. In newer runners the worker
creates it (voxtral_serve.engine.worker).
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
    does = "makes `method: ngram_gpu` draft [STREAMING_PAD] if `speculative_config.model` is PadDrafter"
    target = "vllm.v1.spec_decode.ngram_proposer_gpu"
    breaks = "vLLM drafts n-grams, which seldom repeat in a live transcript"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = "in vLLM 0.32.0 a worker class can replace the drafter of the model runner"
    until = "vLLM 0.20.0 is no longer supported"
    used_by = "`speculative_config` with `method: ngram_gpu` and `model: voxtral_serve.drafter.PadDrafter`"

    def probe(self, module: Any) -> bool:
        stock = module.NgramProposerGPU
        if hasattr(stock, "drafts_pads"):
            return False
        found = {
            name: [*inspect.signature(getattr(stock, name)).parameters] for name in EXPECTED if hasattr(stock, name)
        }
        # If Model Runner V2 drafts n-grams, a GPU does not use the proposer of V1.
        if find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None:
            return False
        if found != EXPECTED:
            raise LookupError(f"NgramProposerGPU has {found}, expected {EXPECTED}")
        return True

    def apply(self, module: Any) -> None:
        module.NgramProposerGPU = pads_or_ngrams(module.NgramProposerGPU)
        if runner := sys.modules.get("vllm.v1.worker.gpu_model_runner"):  # it has imported the name
            runner.NgramProposerGPU = module.NgramProposerGPU  # type: ignore[attr-defined]


def pads_or_ngrams(stock: Any) -> type:
    """A subclass of vLLM's proposer, so that the runner's isinstance checks accept it."""

    class PadsOrNgrams(stock):
        drafts_pads = True
        pads: Any = None  # int32 [max_num_seqs, num_speculative_tokens], if the config selects pads

        def __init__(self, vllm_config: Any, device: Any, runner: Any = None) -> None:
            from voxtral_serve.engine import drafter

            if not drafter.is_ours(vllm_config):
                super().__init__(vllm_config, device, runner)
                return
            import torch

            self.pads = drafter.pads(vllm_config, device, torch.int32)
            self.device, self.runner = device, runner

        def propose(self, num_tokens_no_spec: Any, *args: Any, **kwargs: Any) -> Any:
            if self.pads is None:
                return super().propose(num_tokens_no_spec, *args, **kwargs)
            # None as the number of valid drafts: otherwise the runner would wait for the GPU at each step. The runner
            # then reads the numbers of the last copy, which are always the full number of drafts.
            self.runner._num_valid_draft_tokens_cpu.fill_(self.pads.shape[1])
            return self.pads[: len(num_tokens_no_spec)], None

        def load_model(self, *args: Any, **kwargs: Any) -> None:
            if self.pads is None:
                super().load_model(*args, **kwargs)

    return PadsOrNgrams
