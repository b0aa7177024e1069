"""Temperatures of requests for their drafts, on a CPU."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

from voxtral_serve import shims
from voxtral_serve.patches.cpu_sampling import CpuSampling, expand


def test_each_value_is_repeated_for_the_drafts_of_its_request() -> None:
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)  # ends: the second request has no drafts
    for values in (torch.tensor([0.7, 9.0, 0.0]), torch.tensor([50, 9, 0], dtype=torch.int32)):
        out = values.new_empty(5)
        expand(out, values, counts, 0, 1, 64)
        assert out.tolist() == [values[0].item()] * 2 + [1] * 3


def test_a_module_of_another_form_needs_nothing() -> None:
    assert not CpuSampling().probe(SimpleNamespace())


def test_one_that_drops_its_result_is_replaced() -> None:
    module = SimpleNamespace(_expand_kernel_impl=lambda output, *_: output.long().fill_(1))
    assert CpuSampling().probe(module)
    CpuSampling().apply(module)
    assert not CpuSampling().probe(module)


@pytest.mark.skipif(shims.installed("vllm") == "0.20.0", reason="no drafter of ours on a CPU")
def test_with_it_vllm_makes_tokens_with_the_probabilities_of_the_model() -> None:
    """In a process of its own: vLLM reads all modules there to put its functions for a CPU into their places."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(compare_with_the_probabilities).result()


def compare_with_the_probabilities() -> None:
    """vLLM's own rejection sampling: of 4,000 requests at temperature 2, each with three drafts of token 7."""
    load_general_plugins()
    shims.require("cpu_sampling")
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler

    torch.manual_seed(0)
    requests, drafts = 4000, 3
    ends = torch.arange(drafts, requests * drafts + 1, drafts, dtype=torch.int32)
    repeated = rejection_sampler.expand_batch_to_tokens
    temperatures = repeated(torch.full((requests,), 2.0), ends, requests * drafts, replace_from=0, replace_to=1)
    logits = torch.full((requests * drafts, 50), -60.0)
    logits[:, 7], logits[:, 9] = 2.0, 1.0
    logits /= temperatures[:, None]
    chance = logits[0].softmax(0)[7]
    metadata = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.full((requests,), 2.0), generators={}
    )
    said = rejection_sampler.rejection_sample(
        torch.full((requests * drafts,), 7, dtype=torch.int32), [drafts] * requests, drafts, ends, None, logits,
        torch.full((requests, 1), 5, dtype=torch.int32), metadata,
    )  # fmt: skip
    for number in range(drafts):
        those = said[(said[:, :number] == 7).all(1), number]
        assert abs((those == 7).float().mean() - chance) < 4 * (chance * (1 - chance) / len(those)) ** 0.5
        assert ((those == 7) | (those == 9)).all()
