"""Temperatures of requests for their drafts, on a CPU."""

from types import SimpleNamespace

import torch

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
