"""The parsers and hooks that the package puts into vLLM's maps, and that vLLM has none of its own there."""

from types import SimpleNamespace
from typing import Any

import pytest
import scratch

from voxtral_serve.engine import config, names
from voxtral_serve.patches.config_hooks import ConfigHooks

# In an interpreter that has nothing of ours in force
HOOKS = f"""
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
print({{*{names.REALTIME!r}}} & MODELS_CONFIG_MAP.keys())
"""
MODELS = f"""
from vllm.model_executor.models.registry import ModelRegistry
print({names.HUGGING_FACE!r} in ModelRegistry.models, {names.STOCK!r} in ModelRegistry.models)
"""


def said(stock: Any, code: str) -> str:
    done = scratch.run(stock, "-c", code, VLLM_PLUGINS="")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_vllm_has_no_hook_for_voxtral_realtime(stock: Any) -> None:
    """Where this fails, vLLM completes such a config itself: see what of ours is still needed."""
    assert said(stock, HOOKS) == "set()"


@pytest.mark.slow
def test_vllm_has_no_model_for_hugging_faces_layout(stock: Any) -> None:
    """Where this fails, vLLM serves that layout by a model of its own: the parsers can go."""
    assert said(stock, MODELS) == "False True"


def test_hooks_are_put_in_once() -> None:
    module = SimpleNamespace(MODELS_CONFIG_MAP={"Other": object})
    assert ConfigHooks().settle(module)[0] == "applied"  # type: ignore[arg-type]
    assert module.MODELS_CONFIG_MAP.keys() == {"Other", *names.REALTIME}
    assert not ConfigHooks().probe(module)


@pytest.mark.parametrize("name", names.REALTIME)
def test_a_hook_of_vllms_own_is_not_lost(name: str) -> None:
    module = SimpleNamespace(MODELS_CONFIG_MAP={name: int})
    outcome, found = ConfigHooks().settle(module)  # type: ignore[arg-type]
    assert (outcome, module.MODELS_CONFIG_MAP) == ("drifted", {name: int})
    assert f"MODELS_CONFIG_MAP has hooks of its own: {{'{name}'" in found


def test_every_architecture_has_its_hook() -> None:
    assert config.HOOKS.keys() == {*names.REALTIME}
