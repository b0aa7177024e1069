"""The fast profiles are profiles/fast.yaml with what their names say, and nothing else."""

from typing import Any

import yaml
from conftest import ROOT


def profile(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / f"profiles/{name}.yaml").read_text(encoding="utf-8"))
    return content


def test_fp8_is_fast_with_quantized_weights() -> None:
    assert profile("fast-fp8") == profile("fast") | {"quantization": "fp8"}


def test_spec_is_fast_with_drafts() -> None:
    """And without what is compiled for steps of one token, which drafts make longer."""
    fast, spec = profile("fast"), profile("fast-spec")
    drafts = spec.pop("speculative_config")
    assert fast["compilation_config"].pop("compile_sizes") == [1]
    assert spec == fast
    by_requests = drafts["num_speculative_tokens_per_batch_size"]
    assert by_requests[0][2] == drafts["num_speculative_tokens"]
    assert by_requests[-1][1] == fast["max_num_seqs"]


def test_spec_of_0_20_0_drafts_as_many_whatever_runs() -> None:
    """Of the two numbers of drafts, that vLLM knows one."""
    spec, older = profile("fast-spec"), profile("fast-spec-0.20.0")
    del spec["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert older == spec
