"""Complete `speculative_config` for the drafters of voxtral-serve, so that one profile serves on every platform.

vLLM takes a dotted name in `model` for its interface `custom_class`, which drafts on the CPU after each step, and which
Model Runner V2 refuses. On a GPU the drafters take the place of vLLM's n-gram search on the GPU (engine/drafter.py).
The config is made from the arguments before any hook for a model runs, and then has a method already.
"""

import inspect
from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

from voxtral_serve.engine import names
from voxtral_serve.shims import Patch

MARK = "voxtral_serve_completes"
PARAMETERS = ["self", "target_model_config", "target_parallel_config"]


class DraftMethod(Patch):
    name = "draft_method"
    does = (
        "sets the `method` of a `speculative_config` that names a drafter of voxtral-serve and no method: `ngram_gpu` "
        "on a GPU with CUDA, else `custom_class`; `Drafter` means no drafts on vLLM 0.20.0"
    )
    target = "vllm.engine.arg_utils"
    breaks = "a profile with drafts needs another `method` on each platform, and cannot serve on vLLM 0.20.0 too"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "vLLM has no place where a plugin could add a speculative method, and refuses `custom_class` on a GPU"
    until = "Model Runner V2 accepts the drafter of a plugin"
    expires = "tests/patches/test_draft_method.py::test_vllm_takes_no_drafter_of_a_plugin_on_a_gpu"
    used_by = "`speculative_config` with `model: voxtral_serve.drafter.Drafter` or `PadDrafter`"

    def probe(self, module: Any) -> bool:
        stock = module.EngineArgs.create_speculative_config
        if [*inspect.signature(stock).parameters] != PARAMETERS:
            raise LookupError(f"create_speculative_config takes {[*inspect.signature(stock).parameters]}")
        if "SpeculativeConfig(**self.speculative_config)" not in inspect.getsource(stock):
            raise LookupError("create_speculative_config does not make its config of EngineArgs.speculative_config")
        return not hasattr(stock, MARK)

    def apply(self, module: Any) -> None:
        stock = module.EngineArgs.create_speculative_config

        @wraps(stock)
        def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.speculative_config = completed(self.speculative_config, self)
            return stock(self, *args, **kwargs)

        setattr(create_speculative_config, MARK, True)
        module.EngineArgs.create_speculative_config = create_speculative_config


def completed(config: dict[str, Any] | None, arguments: Any) -> dict[str, Any] | None:
    """`speculative_config` with a method; None for no drafts. `arguments`: vLLM's EngineArgs, which in 0.32.0 have the
    model and the method as options of their own, too."""
    given = {name: (config or {}).get(name) or getattr(arguments, f"spec_{name}", None) for name in ("model", "method")}
    if given["model"] not in (names.DRAFTER, names.PAD_DRAFTER):
        return config
    from vllm.platforms import current_platform

    from voxtral_serve.engine import drafter

    if drafter.V1 and given["model"] == names.DRAFTER:
        drafter.logger.info("no drafts: vLLM 0.20.0 has no place for %s. PadDrafter drafts pads", names.DRAFTER)
        return None
    if given["method"] is not None:
        return config
    by_platform = "ngram_gpu" if current_platform.is_cuda() or drafter.V1 else "custom_class"
    return {**(config or {}), "method": by_platform}
