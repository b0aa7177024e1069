"""The CUDA graphs of vLLM's own model where a config names none: vLLM's default, unless that model refuses it."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.plugins import load_general_plugins
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from voxtral_serve import shims
from voxtral_serve.engine import config
from voxtral_serve.engine.model_runner import with_audio_rows

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
    ("gpu", "v2", "mode", "patched"),
    [
        (True, True, "FULL", True),
        (True, False, "FULL", False),  # model_runner.py has them
        (False, True, "FULL", False),  # a CPU has no graphs; vLLM says so
        (True, True, "FULL_DECODE_ONLY", False),
    ],
)
def test_full_graphs_of_the_encode_once_model_in_model_runner_v2_need_a_patch(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, v2: bool, mode: str, patched: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(shims, "require", asked.append)
    monkeypatch.setattr(type(config.current_platform), "is_cuda_alike", lambda _: gpu)
    graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode[mode])
    settings: Any = SimpleNamespace(speculative_config=None, compilation_config=graphs, use_v2_model_runner=v2)
    config._choose_graphs(settings)
    assert asked == (["step_graphs"] if patched else [])
    assert graphs.cudagraph_mode == CUDAGraphMode[mode]


@pytest.mark.parametrize(
    ("drafts", "v2", "left"), [(None, False, [1, 64]), (object(), False, [64]), (object(), True, [1, 64])]
)
def test_nothing_is_compiled_for_one_token_where_each_step_has_drafts(drafts: Any, v2: bool, left: list[int]) -> None:
    """profiles/throughput.yaml compiles for one token. The dispatcher of V1 refuses that with graphs for drafts."""
    graphs = CompilationConfig(cudagraph_mode=CUDAGraphMode.NONE, compile_sizes=[1, 64])
    settings: Any = SimpleNamespace(speculative_config=drafts, compilation_config=graphs, use_v2_model_runner=v2)
    config._choose_graphs(settings)
    assert graphs.compile_sizes == left


class Resolving:
    """Of Model Runner V1, what chooses the graphs: with a resolved mode, and vLLM's own dispatcher."""

    def __init__(self, mode: str, sizes: list[int], sequences: int, drafts: int) -> None:
        self.mode, self.uniform_decode_query_len = CUDAGraphMode[mode], 1 + drafts
        self.compilation_config = CompilationConfig(
            cudagraph_mode=self.mode, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        )
        self.scheduler_config = SimpleNamespace(max_num_seqs=sequences)
        settings: Any = SimpleNamespace(
            compilation_config=self.compilation_config,
            scheduler_config=self.scheduler_config,
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
            lora_config=None,
            num_speculative_tokens=drafts,
        )
        self.cudagraph_dispatcher = CudagraphDispatcher(settings)

    def _prepare_inputs(self, scheduler_output: Any) -> None: ...

    def _preprocess(self, scheduler_output: Any) -> None:
        "supports_mm_inputs"

    def _dummy_run(self, num_tokens: int) -> None:
        "supports_mm_inputs"

    def _check_and_update_cudagraph_mode(self, attention_backends: Any) -> None:
        self.cudagraph_dispatcher.initialize_cudagraph_keys(self.mode, self.uniform_decode_query_len)


def dispatching(mode: str, sizes: list[int], sequences: int, drafts: int = 0) -> Any:
    runner = with_audio_rows(Resolving)(mode, sizes, sequences, drafts)
    runner._check_and_update_cudagraph_mode([])
    return runner.cudagraph_dispatcher


def graph(dispatcher: Any, tokens: int, decodes: bool) -> tuple[str, int, bool]:
    mode, filled = dispatcher.dispatch(tokens, uniform_decode=decodes)[:2]
    return mode.name, filled.num_tokens, filled.uniform


@pytest.mark.parametrize(
    ("drafts", "sizes", "begins", "decodes"),
    [(0, [1, 2, 4, 40, 64, 104, 512], (39, 40), (60, 64)), (5, [6, 12, 48, 384, 510], (45, 48), (378, 384))],
)
def test_model_runner_v1_has_graphs_of_steps_that_only_decode_beside_those_of_any_step(
    drafts: int, sizes: list[int], begins: tuple[int, int], decodes: tuple[int, int]
) -> None:
    found = dispatching("FULL", sizes, 64, drafts)
    assert graph(found, begins[0], decodes=False) == ("FULL", begins[1], False)
    assert graph(found, decodes[0], decodes=True) == ("FULL", decodes[1], True)
    assert graph(found, sizes[-1] + 1, decodes=False)[0] == "NONE"
    for mode, filled in found.get_capture_descs():  # each graph that vLLM captures is one that it finds again
        assert mode == CUDAGraphMode.FULL
        assert all(found.dispatch(one.num_tokens, uniform_decode=one.uniform)[:2] == (mode, one) for one in filled)


def test_model_runner_v1_shares_graphs_where_those_of_decoding_would_not_reach_all_requests() -> None:
    found = dispatching("FULL", [1, 2, 4, 40, 64, 104, 512], 60)
    assert graph(found, 59, decodes=True) == ("FULL", 64, False)


def test_model_runner_v1_with_another_mode_is_vllms() -> None:
    found = dispatching("FULL_DECODE_ONLY", [1, 2, 4, 40, 64], 64)
    assert graph(found, 39, decodes=False)[0] == "NONE"
    assert graph(found, 39, decodes=True)[:2] == ("FULL", 40)
