"""The graphs of cudagraph_mode FULL: vLLM's manager of Model Runner V2 chooses, no GPU captures."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from places import ROOT
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


def manager(
    module: ModuleType,
    mode: CUDAGraphMode,
    tokens_per_step: int = 1,
    drafts: Any = None,
    sizes: list[int] = SIZES,
    sequences: int = SEQUENCES,
) -> Any:
    """vLLM's, as after the start: all its graphs are captured."""
    config = VllmConfig(compilation_config=CompilationConfig(cudagraph_mode=mode))
    config.compilation_config.cudagraph_capture_sizes = sizes  # a CPU's config has none
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    config.scheduler_config.max_num_seqs = sequences
    if drafts is not None:
        drafts.num_speculative_tokens = tokens_per_step - 1
        config.speculative_config = drafts
    made = module.ModelCudaGraphManager(config, torch.device("cpu"), mode, tokens_per_step)
    made._graphs_captured = True
    return made


SCHEDULE = [[1, 4, 15], [5, 16, 7]]


def drafting(
    module: ModuleType,
    model: str = "voxtral_serve.drafter.Drafter",
    schedule: list[list[int]] = SCHEDULE,
    **changes: Any,
) -> Any:
    """With a number of drafts by running requests."""
    drafts = SimpleNamespace(
        model=model,
        num_speculative_tokens_per_batch_size=schedule,
        uses_dynamic_speculative_decoding=lambda: True,
    )
    return manager(module, CUDAGraphMode.FULL, 16, drafts, **changes)


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


def decode_graphs(made: Any) -> dict[int, list[int]]:
    """Numbers of requests of the graphs of steps that only decode, by tokens of a request."""
    found: dict[int, list[int]] = {}
    for desc in reversed(made._capture_descs[CUDAGraphMode.FULL]):
        if desc.uniform_token_count:
            found.setdefault(desc.uniform_token_count, []).append(desc.num_reqs)
    return found


def test_no_graph_is_captured_for_drafts_that_so_many_requests_never_have(patched: ModuleType) -> None:
    graphs = decode_graphs(drafting(patched))
    assert graphs == {1: [1, 2, 4, 8, 16, 40, 64], 8: [1, 2, 5, 8, 13, 16], 16: [1, 3, 4]}
    assert decode_graphs(drafting(patched, "another")) == {8: graphs[8], 16: graphs[16]}
    alone = manager(patched, CUDAGraphMode.FULL, 16)
    assert decode_graphs(alone)[16] == [1, 3, 4, 7, 8]  # 128 tokens, with one number of drafts


def test_a_step_finds_the_graph_of_its_number_of_drafts(stock: ModuleType, request: pytest.FixtureRequest) -> None:
    """vLLM's has one for 40 tokens of 5 requests, and does not look further."""
    before = drafting(stock)
    after = drafting(request.getfixturevalue("patched"))
    assert before._candidates != after._candidates
    assert chosen(after, 2, 32, 16) == ("FULL", 48, 16)
    assert chosen(after, 5, 40, 8) == ("FULL", 40, 8)
    assert chosen(after, 64, 64, 1) == ("FULL", 64, 1)
    assert chosen(after, 3, 1 + 16 + 16, None) == ("FULL", 40, None)  # a live session beside uploads


@pytest.mark.parametrize(("name", "graphs"), [("fast", 77), ("realtime", 164), ("throughput", 146)])
def test_every_step_of_a_profile_is_a_graph(patched: ModuleType, name: str, graphs: int) -> None:
    """Steps that only decode, with the number of drafts that the schedule has or one of fewer; and steps that begin up
    to eight clips beside requests whose drafts were made with as many others as there may be."""
    profile = yaml.safe_load((ROOT / f"profiles/{name}.yaml").read_text(encoding="utf-8"))
    sizes = profile["compilation_config"]["cudagraph_capture_sizes"]
    schedule = profile["speculative_config"]["num_speculative_tokens_per_batch_size"]
    most = profile["max_num_seqs"]
    made = drafting(patched, schedule=schedule, sizes=sizes, sequences=most)
    assert len(made._capture_descs[CUDAGraphMode.FULL]) == graphs
    for first, last, drafts in schedule:
        for decoding in range(last + 1):
            if decoding:
                assert chosen(made, decoding, decoding * (drafts + 1), drafts + 1)[::2] == ("FULL", drafts + 1)
                assert chosen(made, decoding, decoding, 1)[::2] == ("FULL", 1)
            for clips in range(1, min(8, most - decoding) + 1):
                tokens = decoding * (drafts + 1) + clips * 39
                assert chosen(made, decoding + clips, tokens, None)[0] == "FULL", (first, decoding, clips, tokens)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.NONE])
def test_other_modes_stay_as_they_are(stock: ModuleType, mode: CUDAGraphMode, request: pytest.FixtureRequest) -> None:
    before = manager(stock, mode)
    after = manager(request.getfixturevalue("patched"), mode)
    assert (after._candidates, after._capture_descs) == (before._candidates, before._capture_descs)


def test_another_manager_is_named(stock: ModuleType) -> None:
    class ModelCudaGraphManager:
        def _init_candidates(self) -> None:
            self._candidates = [self.cudagraph_mode]  # type: ignore[attr-defined]

    with pytest.raises(
        LookupError, match=r"_init_candidates has no self\._capture_descs, self\.decode_query_len, uses_"
    ):
        StepGraphs().probe(
            SimpleNamespace(
                ModelCudaGraphManager=ModelCudaGraphManager,
                BatchExecutionDescriptor=stock.BatchExecutionDescriptor,
            )
        )
