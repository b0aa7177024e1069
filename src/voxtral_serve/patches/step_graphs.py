"""CUDA graphs for `cudagraph_mode: FULL` of Model Runner V2: of any batch, and of batches that only decode.

vLLM captures in this mode graphs for any batch, and uses them for steps that only decode, too. Its attention kernels
for batches with one new token per request (or with one and the drafts) are faster, but are captured in other modes
only, in which a step that begins a request runs its attention outside of graphs.

With a number of drafts by running requests, each number has graphs of its own. vLLM captures all of them for all
numbers of requests, and chooses among those with the next larger number of tokens, where perhaps none is of the step's
number of drafts. Here, no graph is captured for more requests than the schedule has for its drafts or for fewer; and
each step finds the smallest graph of its own number. Drafts of this package may stop (engine/draft_watch.py), and live
sessions have none, so there are graphs without drafts, too.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from voxtral_serve.engine import names
from voxtral_serve.shims import Patch

MARK = "voxtral_serve_decodes"
USED = (
    *("self.cudagraph_mode", "self._capture_descs", "self._candidates", "self.decode_query_len"),
    *("uses_dynamic_speculative_decoding", "build_dynamic_sd_schedule_lookup", "uniform_token_count"),
)


class StepGraphs(Patch):
    name = "step_graphs"
    does = "`cudagraph_mode: FULL` also captures graphs for steps that only decode and can occur, and prefers them"
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
            any_batch, chosen, self.cudagraph_mode = self._capture_descs.get(full, []), self._candidates, decode_only
            decoding, tokens = list[Any](), self.decode_query_len  # of each request
            for number in {tokens, 1} if may_stop(self) else {tokens}:
                self.decode_query_len, self._capture_descs, self._candidates = number, {}, {}
                init_candidates(self)
                decoding += [desc for desc in self._capture_descs.get(full, []) if desc not in decoding]
            self.cudagraph_mode, self.decode_query_len = full, tokens
            decoding = reachable(decoding, most_requests(module, self))
            # The largest first, as vLLM has them: the others fit into its memory. vLLM takes the first graph that fits.
            self._capture_descs = {full: sorted(decoding + any_batch, key=lambda desc: desc.num_tokens, reverse=True)}
            preferred = candidates(decoding)
            self._candidates = {
                key: preferred.get(key, []) + chosen.get(key, []) for key in preferred.keys() | chosen.keys()
            }

        stock._init_candidates = both
        setattr(stock, MARK, True)


def may_stop(manager: Any) -> bool:
    """Whether a step may have no drafts, although drafts are configured."""
    config = manager.vllm_config.speculative_config
    return config is not None and config.model in (names.DRAFTER, names.PAD_DRAFTER)


def most_requests(module: Any, manager: Any) -> dict[int, int]:
    """The most requests of a step that only decodes, by its tokens of each request; empty where that is one number."""
    config = manager.vllm_config.speculative_config
    if config is None or not config.uses_dynamic_speculative_decoding():
        return {}
    drafts = manager.vllm_config.num_speculative_tokens
    schedule = module.build_dynamic_sd_schedule_lookup(
        config.num_speculative_tokens_per_batch_size,
        vllm_max_batch_size=manager.max_num_reqs,
        vllm_num_speculative_tokens=drafts,
    )
    most = (
        max((n for n, most in enumerate(schedule) if n and most >= count), default=0) for count in range(drafts + 1)
    )
    return {1 + count: requests for count, requests in enumerate(most)}


def reachable(descs: Iterable[Any], most: Mapping[int, int]) -> list[Any]:
    """Those of vLLM's descriptions of graphs that a step can use: for as many requests as there may be, and the next
    larger one."""
    kept, before = [], defaultdict[Any, int](int)
    for desc in sorted(descs, key=lambda desc: desc.num_reqs):
        kind = desc.uniform_token_count, desc.num_active_loras, desc.num_ubatches
        if before[kind] < most.get(desc.uniform_token_count, desc.num_reqs):
            kept.append(desc)
        before[kind] = desc.num_reqs
    return kept


def candidates(descs: Iterable[Any]) -> dict[tuple[int, int], list[Any]]:
    """By tokens of a step and LoRAs: the smallest graph of each kind that has as many tokens."""
    chosen, first = defaultdict[tuple[int, int], list[Any]](list), defaultdict[Any, int](int)
    for desc in sorted(descs, key=lambda desc: desc.num_tokens):
        kind = desc.uniform_token_count, desc.num_active_loras, desc.num_ubatches
        for tokens in range(first[kind], desc.num_tokens + 1):
            chosen[tokens, desc.num_active_loras].append(desc)
        first[kind] = desc.num_tokens + 1
    return dict(chosen)
