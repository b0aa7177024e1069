"""`speculative_config` that names a drafter of voxtral-serve: what vLLM's arguments make of it on each platform."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine import arg_utils
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from voxtral_serve import shims
from voxtral_serve.engine import drafter, names
from voxtral_serve.patches.draft_method import DraftMethod, completed

OLDER = shims.installed("vllm") == "0.20.0"
ARGUMENTS = SimpleNamespace()


@pytest.mark.skipif(OLDER, reason="0.20.0 has no such list")
def test_vllm_takes_no_drafter_of_a_plugin_on_a_gpu() -> None:
    """Where this fails, Model Runner V2 may take the drafters as they are, and the patch can go."""
    speculation = SimpleNamespace(method="custom_class", parallel_drafting=False, use_heterogeneous_vocab=False)
    parallel = SimpleNamespace(
        distributed_executor_backend="mp",
        pipeline_parallel_size=1,
        use_ubatching=False,
        prefill_context_parallel_size=1,
    )
    config: Any = SimpleNamespace(speculative_config=speculation, parallel_config=parallel)
    assert VllmConfig._get_v2_model_runner_unsupported_features(config) == ["speculative method 'custom_class'"]


def test_the_arguments_are_completed_before_vllm_makes_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    load_general_plugins()
    shims.require("draft_method")
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(arg_utils, "SpeculativeConfig", lambda **config: made.append(config) or "made")
    # Without its __init__, which reads a checkpoint
    arguments = arg_utils.EngineArgs.__new__(arg_utils.EngineArgs)
    arguments.speculative_config = {"model": names.PAD_DRAFTER, "num_speculative_tokens": 5}
    assert arguments.create_speculative_config("model", "parallel") == "made"
    method = "ngram_gpu" if OLDER else "custom_class"  # this is a CPU
    expected = {"model": names.PAD_DRAFTER, "num_speculative_tokens": 5, "method": method}
    assert made == [expected | {"target_model_config": "model", "target_parallel_config": "parallel"}]


@pytest.mark.skipif(OLDER, reason="0.20.0 is the next test's")
@pytest.mark.parametrize("name", [names.DRAFTER, names.PAD_DRAFTER])
@pytest.mark.parametrize(("is_cuda", "method"), [(False, "custom_class"), (True, "ngram_gpu")], ids=["CPU", "GPU"])
def test_the_method_is_the_platforms_if_none_is_given(
    name: str, is_cuda: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": name, "num_speculative_tokens": 15}
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: is_cuda)
    assert completed(config, ARGUMENTS) == config | {"method": method}
    assert completed(config | {"method": "another"}, ARGUMENTS) == config | {"method": "another"}
    options = SimpleNamespace(spec_model=name, spec_method=None)  # of vLLM 0.32.0's command line
    assert completed(None, options) == {"method": method}
    assert completed({"num_speculative_tokens": 2}, SimpleNamespace(spec_model=name, spec_method="given")) == {
        "num_speculative_tokens": 2
    }


def test_vllm_0_20_0_has_no_place_for_the_drafter_and_one_for_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys that it does not know, as the profiles have."""
    monkeypatch.setattr(drafter, "V1", True)
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 64, 15]]}
    assert completed({"model": names.DRAFTER, "num_speculative_tokens": 15} | schedule, ARGUMENTS) is None
    pads = {"model": names.PAD_DRAFTER, "num_speculative_tokens": 5}
    assert completed(pads, ARGUMENTS) == pads | {"method": "ngram_gpu"}


@pytest.mark.parametrize("config", [None, {"model": "a/draft-model"}, {"method": "ngram"}, {"model": "my.Drafter"}])
def test_any_other_speculation_is_vllms(config: Any) -> None:
    assert completed(config, ARGUMENTS) is config


# The record


def module_of(create: Any) -> Any:
    return SimpleNamespace(EngineArgs=type("EngineArgs", (), {"create_speculative_config": create}))


def without_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> None: ...


def other_arguments(self: Any, config: Any) -> None: ...


@pytest.mark.parametrize(
    ("create", "found"),
    [
        (other_arguments, r"create_speculative_config takes \['self', 'config'\]"),
        (without_config, "does not make its config of EngineArgs.speculative_config"),
    ],
)
def test_arguments_of_another_form_have_drifted(create: Any, found: str) -> None:
    with pytest.raises(LookupError, match=found):
        DraftMethod().probe(module_of(create))
