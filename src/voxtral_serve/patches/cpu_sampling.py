"""Sampling with drafts on a CPU: temperatures reach the logits of drafts.

With drafts, vLLM repeats each request's temperature, top_k and top_p for its drafts. Its CPU build does that in a
tensor of whole numbers and drops it if the result has another type: temperatures stay whatever the memory held. In a
step with one request above temperature 0, this also makes wrong tokens for those at 0.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from voxtral_serve.shims import Patch


class CpuSampling(Patch):
    name = "cpu_sampling"
    does = "repeats temperature and top_p of requests for their drafts on a CPU"
    target = "vllm.utils.cpu_triton_utils"
    breaks = "on a CPU, a request with a temperature gets random tokens with drafts, and so do those of the same step"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": False, "0.32.0": True}
    upstream = "`_expand_kernel_impl` converts its output to int64, and never copies the result back"
    until = "vLLM's CPU build repeats float tensors"
    used_by = "`speculative_config` on a CPU"

    def probe(self, module: Any) -> bool:
        import torch
        from vllm.platforms import current_platform

        older = hasattr(module, "expand_kernel")  # 0.20.0, which takes no drafter on a CPU
        if older or not current_platform.is_cpu() or not hasattr(module, "_expand_kernel_impl"):
            return False
        out = torch.zeros(3)
        module._expand_kernel_impl(out, torch.tensor([0.5, 0.0]), torch.tensor([1, 3]), 0, 1)
        return out.tolist() != [0.5, 1.0, 1.0]

    def apply(self, module: Any) -> None:
        module._expand_kernel_impl = expand


def expand(output: Any, input_val: Any, cu_num_tokens: Any, replace_from: float, replace_to: float, *_: Any) -> None:
    """Write each value [requests] as often as its request has drafts; `replace_from` as `replace_to`. vLLM gives it the
    arguments of its kernel by their places.

    cu_num_tokens: int32 [requests], drafts up to the end of each request.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts))
