"""The graphs of cudagraph_mode FULL: vLLM's manager of Model Runner V2 chooses, no GPU captures."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform

from voxtral_serve.patches.step_graphs import StepGraphs

SIZES = [1, 2, 4, 8, 16, 40, 64, 104, 128]
SEQUENCES = 64


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of vLLM's module of its own: the plugin, once loaded in this process, has patched the other one."""
    spec = importlib.util.find_spec("vllm.v1.worker.gpu.cudagraph_utils")
    assert spec is not None and spec.origin is not None
    spec = importlib.util.spec_from_file_location("stock_cudagraph_utils", spec.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)  # without a process group
    monkeypatch.setattr(module, "get_pp_group", lambda: alone)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda *_: (0, 1), raising=False)
    return module


@pytest.fixture
def patched(stock: ModuleType) -> ModuleType:
    assert StepGraphs().probe(stock)
    StepGraphs().apply(stock)
    assert not StepGraphs().probe(stock)
    return stock


def manager(module: ModuleType, mode: CUDAGraphMode, tokens_per_step: int = 1) -> Any:
    """vLLM's, as after the start: all its graphs are captured."""
    config = VllmConfig(compilation_config=CompilationConfig(cudagraph_mode=mode))
    config.compilation_config.cudagraph_capture_sizes = SIZES  # a CPU's config has none
    config.compilation_config.max_cudagraph_capture_size = SIZES[-1]
    config.scheduler_config.max_num_seqs = SEQUENCES
    made = module.ModelCudaGraphManager(config, torch.device("cpu"), mode, tokens_per_step)
    made._graphs_captured = True
    return made


def chosen(made: Any, requests: int, tokens: int, uniform: int | None) -> tuple[str, int, int | None]:
    desc = made.dispatch(requests, tokens, uniform, 0, uniform)
    return desc.cg_mode.name, desc.num_tokens, desc.uniform_token_count


def test_vllm_alone_has_one_graph_for_all_steps(stock: ModuleType) -> None:
    assert chosen(manager(stock, CUDAGraphMode.FULL), 64, 64, 1) == ("FULL", 64, None)


def test_steps_that_decode_have_graphs_of_their_own(patched: ModuleType) -> None:
    made = manager(patched, CUDAGraphMode.FULL)
    assert made.cudagraph_mode == CUDAGraphMode.FULL
    assert chosen(made, 64, 64, 1) == ("FULL", 64, 1)
    assert chosen(made, 3, 3, 1) == ("FULL", 4, 1)
    # Steps that begin a clip, with and without others that decode, and one with more tokens than any graph
    assert chosen(made, 1, 39, None) == ("FULL", 40, None)
    assert chosen(made, 64, 63 + 39, None) == ("FULL", 104, None)
    assert chosen(made, 2, 78, None) == ("FULL", 104, None)
    assert chosen(made, 8, 8 * 39, None) == ("NONE", 312, None)
    captured = made._capture_descs[CUDAGraphMode.FULL]
    assert len(captured) == len(set(captured)) == len(SIZES) + sum(size <= SEQUENCES for size in SIZES)
    assert [desc.num_tokens for desc in captured] == sorted((desc.num_tokens for desc in captured), reverse=True)


def test_with_drafts_too(patched: ModuleType) -> None:
    made = manager(patched, CUDAGraphMode.FULL, tokens_per_step=6)
    assert chosen(made, 16, 96, 6) == ("FULL", 108, 6)
    assert chosen(made, 1, 6, 6) == ("FULL", 6, 6)
    assert chosen(made, 16, 15 * 6 + 39, None) == ("NONE", 129, None)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.NONE])
def test_other_modes_stay_as_they_are(stock: ModuleType, mode: CUDAGraphMode, request: pytest.FixtureRequest) -> None:
    before = manager(stock, mode)
    after = manager(request.getfixturevalue("patched"), mode)
    assert (after._candidates, after._capture_descs) == (before._candidates, before._capture_descs)


def test_another_manager_is_named(stock: ModuleType) -> None:
    class ModelCudaGraphManager:
        def _init_candidates(self) -> None:
            self._candidates = [self.cudagraph_mode]  # type: ignore[attr-defined]

    with pytest.raises(LookupError, match=r"_init_candidates has no self\._capture_descs$"):
        StepGraphs().probe(
            SimpleNamespace(
                ModelCudaGraphManager=ModelCudaGraphManager,
                BatchExecutionDescriptor=stock.BatchExecutionDescriptor,
            )
        )
