"""The scheduler of the encode-once model: vLLM's own, with a bound on what a step encodes, with live sessions, and
with drafts that are watched.

`scheduler_cls` names `scheduler`, which vLLM has for this; the config hook of the model sets it (config.py). The
scheduler of vLLM has no public interface, so `expected` checks what is used of it before the engine starts.

vLLM bounds what a step encodes: the rows of the clips that begin in it are at most `max_num_batched_tokens`, or those
of the longest clip if it has more. Requests that do not fit wait, in their order. patches/clip_end.py tells vLLM how
many rows a clip has, and `StepCache` that none of them outlives its step.
"""

import inspect
from typing import Any, ClassVar

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from voxtral_serve import shims
from voxtral_serve.engine import drafter
from voxtral_serve.engine.draft_scheduler import DraftCounts
from voxtral_serve.engine.live_scheduler import LiveSessions
from voxtral_serve.engine.session import OPTION


class StepCache(EncoderCacheManager):
    """vLLM's record of the rows in the workers' encoder caches: those of one step.

    A worker stores the rows of a clip in AudioRows in the step that encodes them (model_state.py, model_runner.py), so
    the next step frees them in its encoder cache. A request that was preempted has its clip encoded again.
    """

    SERVES = "the encode-once model"
    METHODS: ClassVar[dict[str, tuple[str, ...]]] = {"reset": ()}
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ("self.cached:", "self.freed:", "self.cache_size", "def can_allocate(")

    def get_freed_mm_hashes(self) -> list[str]:
        """The clips that the workers free before this step, which vLLM has decided on when it calls this."""
        encoded = [*self.cached]
        freed = [clip for clip in self.freed if clip not in self.cached]
        self.reset()
        self.freed = encoded
        return freed


class Uploads:
    """Mixin for vLLM's scheduler classes, whose clips of a step are in a StepCache."""

    SERVES = StepCache.SERVES
    METHODS: ClassVar[dict[str, tuple[str, ...]]] = {
        "_try_schedule_encoder_inputs": ("request", "num_computed_tokens", "num_new_tokens", "encoder_compute_budget")
    }
    ATTRIBUTES: ClassVar[tuple[str, ...]] = (
        "self.encoder_cache_manager.can_allocate(",
        "free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes()",
        "encoder_compute_budget = self.max_num_encoder_input_tokens",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.encoder_cache_manager = StepCache(self.encoder_cache_manager.cache_size)  # type: ignore[has-type]


Mixin = type[LiveSessions] | type[DraftCounts] | type[Uploads] | type[StepCache]


def scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """vLLM calls it to make its scheduler. Raises PatchError if vLLM's own scheduler is not as expected."""
    mixins: list[Mixin] = []
    if vllm_config.additional_config.get(OPTION):
        mixins.append(LiveSessions)
    # Replicas that are one server draft the same number, as vLLM wants it.
    if drafter.is_ours(vllm_config) and not drafter.V1 and vllm_config.parallel_config.data_parallel_size == 1:
        mixins.append(DraftCounts)
    mixins.append(Uploads)
    for mixin, of in (*((mixin, Scheduler) for mixin in mixins), (StepCache, EncoderCacheManager)):
        if lacking := expected(of, mixin):
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')}: its scheduler has no {', '.join(lacking)}: {mixin.SERVES} cannot be "
                f"served with it. {shims.ADVICE}"
            )
    stock = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    name = "".join(each.__name__ for each in (*mixins, stock))
    return type(name, (*mixins, stock), {})(*args, vllm_config=vllm_config, **kwargs)


def expected(stock: type, mixin: Mixin) -> list[str]:
    """Return the methods and attributes that a mixin uses of vLLM's scheduler, or StepCache of its encoder cache, and
    that it lacks."""
    source = inspect.getsource(inspect.getmodule(stock))  # type: ignore[arg-type]
    lacking = [name for name in mixin.ATTRIBUTES if name not in source]
    for name, parameters in mixin.METHODS.items():
        method = getattr(stock, name, None)
        accepted = inspect.signature(method).parameters if method else {}
        if method is None or not set(parameters) <= set(accepted):
            lacking.append(f"{name}({', '.join(parameters)})")
    return lacking
