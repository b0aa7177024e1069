"""Config parsers and config hooks: vLLM calls them before it builds a model.

Both are vLLM's own extension points, but an entry is replaced or added there, so each has a record. The hooks also call
`shims.require` for the records that a configuration uses. Therefore these two are verified at every start.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from voxtral_serve.engine import names
from voxtral_serve.shims import Patch

ALWAYS = "every start, because it finds out which other patches a configuration uses"


class ConfigParsers(Patch):
    name = "config_parsers"
    does = (
        "replaces vLLM's config parsers `hf` and `mistral`: both check a Voxtral Realtime checkpoint first, and `hf` "
        "translates its config.json into params.json; other models are left to vLLM's parser, or vLLM-Omni's"
    )
    target = "vllm.transformers_utils.config"
    breaks = (
        "ValueError: Following weights were not initialized from checkpoint (for Hugging Face's "
        "layout, vLLM uses its Transformers backend, which does not support audio)"
    )
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "vLLM has no model for `VoxtralRealtimeForConditionalGeneration`"
    until = "vLLM serves Hugging Face's layout of Voxtral Realtime with its own model"
    expires = "tests/patches/test_config_hooks.py::test_vllm_has_no_model_for_hugging_faces_layout"
    used_by = ALWAYS

    def probe(self, module: Any) -> bool:
        from voxtral_serve.engine import config

        return any(type(module.get_config_parser(name)) is not parser for name, parser in config.PARSERS.items())

    def apply(self, module: Any) -> None:
        from voxtral_serve.engine import config

        found = type(module.get_config_parser("mistral"))
        if found is not config.MistralLayout:
            config.MistralLayout.before = found
        log = logging.getLogger(module.__name__)
        level = log.level
        log.setLevel(logging.ERROR)  # vLLM logs a warning for each replaced parser
        try:
            for name, parser in config.PARSERS.items():
                module.register_config_parser(name)(parser)
        finally:
            log.setLevel(level)


class ConfigHooks(Patch):
    name = "config_hooks"
    does = "adds hooks to `MODELS_CONFIG_MAP` that check and complete vLLM's config for the Voxtral Realtime models"
    target = "vllm.model_executor.models.config"
    breaks = "AssertionError: Voxtral realtime doesn't support full cudagraphs yet. Please use PIECEWISE. (0.20.0)"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "vLLM has no hook for Voxtral Realtime, and no function to register one"
    until = "plugins can register such hooks"
    expires = "tests/patches/test_config_hooks.py::test_vllm_has_no_hook_for_voxtral_realtime"
    used_by = ALWAYS

    def probe(self, module: Any) -> bool:
        """Raises LookupError if vLLM has its own hook, which would be overwritten."""
        from voxtral_serve.engine import config

        found = {name: module.MODELS_CONFIG_MAP.get(name) for name in names.REALTIME}
        foreign = {name: hook for name, hook in found.items() if hook not in (None, config.HOOKS[name])}
        if foreign:
            raise LookupError(f"MODELS_CONFIG_MAP has hooks of its own: {foreign}")
        return None in found.values()

    def apply(self, module: Any) -> None:
        from voxtral_serve.engine import config

        module.MODELS_CONFIG_MAP.update(config.HOOKS)
