"""CUDA graphs for `cudagraph_mode: FULL` of Model Runner V2: of any batch, and of batches that only decode.

vLLM captures in this mode graphs for any batch, and uses them for steps that only decode, too. Its attention kernels
for batches with one new token per request (or with one and the drafts) are faster, but are captured in other modes
only, in which a step that begins a request runs its attention outside of graphs.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from voxtral_serve.shims import Patch

MARK = "voxtral_serve_decodes"
USED = ("self.cudagraph_mode", "self._capture_descs", "self._candidates")


class StepGraphs(Patch):
    name = "step_graphs"
    does = "`cudagraph_mode: FULL` also captures graphs for steps that only decode, and prefers them"
    target = "vllm.v1.worker.gpu.cudagraph_utils"
    breaks = "steps that only decode use the slower attention of graphs for any batch"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": False, "0.32.0": True}
    upstream = "vLLM has one kind of graph in this mode; its other modes run attention outside of graphs in mixed steps"
    until = "vLLM captures full graphs for decoding beside full graphs for any batch"
    used_by = "`cudagraph_mode: FULL` of the encode-once model, with Model Runner V2"

    def probe(self, module: Any) -> bool:
        stock = module.ModelCudaGraphManager
        # 0.20.0 has an early form of this runner, which it does not use by default.
        early = "max_query_len" not in getattr(module.BatchExecutionDescriptor, "__dataclass_fields__", {})
        if early or hasattr(stock, MARK):
            return False
        method = getattr(stock, "_init_candidates", None)
        source = inspect.getsource(method) if method else ""
        if lacking := [name for name in USED if name not in source]:
            raise LookupError(f"ModelCudaGraphManager._init_candidates has no {', '.join(lacking)}")
        return True

    def apply(self, module: Any) -> None:
        stock, modes = module.ModelCudaGraphManager, module.CUDAGraphMode
        full, decode_only = modes.FULL, modes.FULL_DECODE_ONLY
        init_candidates = stock._init_candidates

        def both(self: Any) -> None:
            init_candidates(self)
            if self.cudagraph_mode != full:
                return
            captured, chosen = self._capture_descs.get(full, []), self._candidates
            self.cudagraph_mode, self._capture_descs, self._candidates = decode_only, {}, {}
            init_candidates(self)
            decoding, self.cudagraph_mode = self._capture_descs.get(full, []), full
            # The largest first, as vLLM has them: the others fit into its memory. vLLM takes the first graph that fits.
            self._capture_descs = {full: sorted(decoding + captured, key=lambda desc: desc.num_tokens, reverse=True)}
            preferred = self._candidates
            self._candidates = {
                key: preferred.get(key, []) + chosen.get(key, []) for key in preferred.keys() | chosen.keys()
            }

        stock._init_candidates = both
        setattr(stock, MARK, True)
