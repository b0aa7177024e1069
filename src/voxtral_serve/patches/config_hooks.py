"""What vLLM asks before it builds a model: parsers of config files, and hooks that check and complete a config.

Both are vLLM's own places for this, with an entry replaced or added there, hence the records. The hooks also ask
`shims.require` for the records that their configuration uses; so these two are verified at every start.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from voxtral_serve.engine import names
from voxtral_serve.shims import Patch

ALWAYS = "every start: they tell which other patches a configuration uses"


class ConfigParsers(Patch):
    name = "config_parsers"
    does = (
        "the parsers `hf` and `mistral` check a checkpoint of Voxtral Realtime first, and `hf` translates its "
        "config.json into Mistral's terms"
    )
    target = "vllm.transformers_utils.config"
    breaks = (
        "Hugging Face's layout is served by vLLM's Transformers backend, which knows no audio: ValueError: Following "
        "weights were not initialized from checkpoint"
    )
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "vLLM registers no model for `VoxtralRealtimeForConditionalGeneration`"
    until = "vLLM serves Hugging Face's layout of Voxtral Realtime by its own model"
    expires = "tests/patches/test_config_hooks.py::test_vllm_has_no_model_for_hugging_faces_layout"
    used_by = ALWAYS

    def probe(self, module: Any) -> bool:
        from voxtral_serve.engine import config

        return any(type(module.get_config_parser(name)) is not parser for name, parser in config.PARSERS.items())

    def apply(self, module: Any) -> None:
        from voxtral_serve.engine import config

        log = logging.getLogger(module.__name__)
        level = log.level
        log.setLevel(logging.ERROR)  # vLLM warns of each replacement, and this one is meant
        try:
            for name, parser in config.PARSERS.items():
                module.register_config_parser(name)(parser)
        finally:
            log.setLevel(level)


class ConfigHooks(Patch):
    name = "config_hooks"
    does = "vLLM's config is checked and completed for the models of Voxtral Realtime (`MODELS_CONFIG_MAP`)"
    target = "vllm.model_executor.models.config"
    breaks = "AssertionError: Voxtral realtime doesn't support full cudagraphs yet. Please use PIECEWISE. (0.20.0)"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "vLLM has no hook for Voxtral Realtime; its map has no function to register one"
    until = "vLLM takes hooks of models that plugins register"
    expires = "tests/patches/test_config_hooks.py::test_vllm_has_no_hook_for_voxtral_realtime"
    used_by = ALWAYS

    def probe(self, module: Any) -> bool:
        """Raises LookupError where vLLM has a hook of its own, which would be lost."""
        from voxtral_serve.engine import config

        found = {name: module.MODELS_CONFIG_MAP.get(name) for name in names.REALTIME}
        foreign = {name: hook for name, hook in found.items() if hook not in (None, config.HOOKS[name])}
        if foreign:
            raise LookupError(f"MODELS_CONFIG_MAP has hooks of its own: {foreign}")
        return None in found.values()

    def apply(self, module: Any) -> None:
        from voxtral_serve.engine import config

        module.MODELS_CONFIG_MAP.update(config.HOOKS)
