"""The scheduler of the encode-once model: vLLM's own, with live sessions, with drafts that are watched, and with
the experiment of shared left padding.

`scheduler_cls` names `scheduler`, which vLLM has for this; the config hook of the model sets it (config.py) if the
server has one of the three. The scheduler of vLLM has no public interface, so `expected` checks what is used of it
before the engine starts.
"""

import inspect
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from voxtral_serve import shims
from voxtral_serve.engine import drafter
from voxtral_serve.engine.draft_scheduler import DraftCounts
from voxtral_serve.engine.experiments import shares_padding
from voxtral_serve.engine.live_scheduler import LiveSessions
from voxtral_serve.engine.padding_scheduler import SharedPadding
from voxtral_serve.engine.session import OPTION

Mixin = type[LiveSessions] | type[DraftCounts] | type[SharedPadding]


def scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """vLLM calls it to make its scheduler. Raises PatchError if vLLM's own scheduler is not as expected."""
    mixins: list[Mixin] = []
    if vllm_config.additional_config.get(OPTION):
        mixins.append(LiveSessions)
    if drafter.is_ours(vllm_config):
        mixins.append(DraftCounts)
    if shares_padding():
        mixins.append(SharedPadding)
    for mixin in mixins:
        if lacking := expected(Scheduler, mixin):
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')}: its scheduler has no {', '.join(lacking)}: {mixin.SERVES} cannot be "
                f"served with it. {shims.ADVICE}"
            )
    stock = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    name = "".join(each.__name__ for each in (*mixins, stock))
    return type(name, (*mixins, stock), {})(*args, vllm_config=vllm_config, **kwargs)


def expected(stock: type, mixin: Mixin) -> list[str]:
    """Return the methods and attributes that a mixin uses of vLLM's scheduler and that it lacks."""
    source = inspect.getsource(inspect.getmodule(stock))  # type: ignore[arg-type]
    lacking = [name for name in mixin.ATTRIBUTES if name not in source]
    for name, parameters in mixin.METHODS.items():
        method = getattr(stock, name, None)
        accepted = inspect.signature(method).parameters if method else {}
        if method is None or not set(parameters) <= set(accepted):
            lacking.append(f"{name}({', '.join(parameters)})")
    return lacking
