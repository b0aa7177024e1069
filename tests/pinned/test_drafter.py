"""What Model Runner V1 of vLLM 0.20.0 finds in the place of its n-gram search, which itself needs a GPU."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import offline
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.spec_decode import ngram_proposer_gpu
from vllm.v1.worker import gpu_model_runner

from voxtral_serve import shims
from voxtral_serve.engine import drafter

DRAFTS = 5
NAME = "voxtral_serve.drafter.PadDrafter"


@pytest.fixture(scope="module")
def config() -> Any:
    config = EngineArgs(**offline.OPTIONS | {"max_num_seqs": 4}).create_engine_config()
    config.speculative_config = SimpleNamespace(model=NAME, method="ngram_gpu", num_speculative_tokens=DRAFTS)  # type: ignore[assignment]
    return config


@pytest.fixture
def proposer(config: Any) -> Any:
    shims.require("ngram_pads")
    assert gpu_model_runner.NgramProposerGPU is ngram_proposer_gpu.NgramProposerGPU  # the runner asserts on its class
    runner = SimpleNamespace(_num_valid_draft_tokens_cpu=torch.full((4,), -7, dtype=torch.int32))
    return ngram_proposer_gpu.NgramProposerGPU(config, torch.device("cpu"), runner)


def test_it_drafts_pads_for_every_request(proposer: Any, config: Any) -> None:
    proposer.load_model(None)
    drafts, valid = proposer.propose(torch.ones(3, dtype=torch.int32), None, None, None)
    assert drafts.tolist() == [[drafter.streaming_pad(config)] * DRAFTS] * 3
    assert drafts.dtype == torch.int32
    assert valid is None  # so vLLM's copy_num_valid_draft_tokens starts none, and nothing waits for it


def test_vllm_trims_none_of_them(proposer: Any) -> None:
    proposer.propose(torch.ones(2, dtype=torch.int32), None, None, None)
    cached = replace(CachedRequestData.make_empty(), req_ids=["a", "b"])
    scheduled = SchedulerOutput.make_empty()
    scheduled.scheduled_cached_reqs = cached
    scheduled.scheduled_spec_decode_tokens = {"a": [-1] * DRAFTS, "b": [-1] * 2}
    scheduled.num_scheduled_tokens = {"a": 1 + DRAFTS, "b": 3}
    scheduled.total_num_scheduled_tokens = 4 + DRAFTS
    event: Any = SimpleNamespace(synchronize=lambda: None)
    ngram_proposer_gpu.update_scheduler_for_invalid_drafts(
        event, proposer.runner._num_valid_draft_tokens_cpu, scheduled, {"a": 0, "b": 1}
    )
    assert scheduled.num_scheduled_tokens == {"a": 1 + DRAFTS, "b": 3}
    assert scheduled.total_num_scheduled_tokens == 4 + DRAFTS


def test_n_grams_stay_n_grams(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shims.require("ngram_pads")
    made: list[Any] = []
    monkeypatch.setattr(
        ngram_proposer_gpu.NgramProposerGPU.__mro__[1], "__init__", lambda self, *args: made.append(args)
    )
    monkeypatch.setattr(config.speculative_config, "model", "ngram_gpu")
    ngram_proposer_gpu.NgramProposerGPU(config, torch.device("cpu"), None)
    assert made == [(config, torch.device("cpu"), None)]
