"""The CUDA graphs of vLLM's own model where a config names none: vLLM's default, unless that model refuses it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.plugins import load_general_plugins

from voxtral_serve import shims
from voxtral_serve.engine import config

REFUSES = shims.installed("vllm") == "0.20.0"


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    """The hook asks for patches that it brings."""
    load_general_plugins()


def decided(**options: Any) -> Any:
    settings: Any = SimpleNamespace(speculative_config=None, compilation_config=CompilationConfig(**options))
    config.Stock.verify_and_update_config(settings)
    return settings.compilation_config.cudagraph_mode


def test_piecewise_where_this_vllm_refuses_full_graphs() -> None:
    """Where this fails, vLLM no longer says "Please use PIECEWISE": see whether it takes full graphs by now."""
    assert decided() == (CUDAGraphMode.PIECEWISE if REFUSES else None)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL"])
def test_a_mode_that_is_set_stays(mode: str) -> None:
    assert decided(cudagraph_mode=mode) == CUDAGraphMode[mode]


@pytest.mark.parametrize(
    ("gpu", "v2", "mode", "expected"),
    [
        (True, False, "FULL", "FULL_AND_PIECEWISE"),
        (True, True, "FULL", "FULL"),
        (False, False, "FULL", "FULL"),  # a CPU has no graphs; vLLM says so
        (True, False, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
    ],
)
def test_full_graphs_of_the_encode_once_model_need_model_runner_v2(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, v2: bool, mode: str, expected: str
) -> None:
    monkeypatch.setattr(type(config.current_platform), "is_cuda_alike", lambda _: gpu)
    graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode[mode])
    config._choose_graphs(SimpleNamespace(compilation_config=graphs, use_v2_model_runner=v2))  # type: ignore[arg-type]
    assert graphs.cudagraph_mode == CUDAGraphMode[expected]
