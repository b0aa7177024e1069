"""When the attention backend CUSTOM computes with the kernel of this package, and when it leaves a step to vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from places import ROOT
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from voxtral_serve import plugin
from voxtral_serve.engine import attention_backend, config, names

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
CUSTOM = AttentionBackendEnum.CUSTOM


def implementation(**changes: Any) -> attention_backend.PagedAttentionImpl:
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"} | changes
    return attention_backend.PagedAttentionImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, **given)


def step(requests: int = 64, most: int = 1, **changes: Any) -> Any:
    """Of the form of vLLM's metadata."""
    starts, lengths = torch.arange(requests + 1).int(), torch.ones(requests).int()
    given = {"num_actual_tokens": requests, "max_query_len": most, "query_start_loc": starts, "seq_lens": lengths}
    special = {"seq_threshold_3D": 16, "mm_prefix_range_tensor": None, "rswa_window": None, "causal": True}
    return SimpleNamespace(**given | {"block_table": torch.zeros(requests, 1).int()} | special | changes)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who computed each step."""
    calls: list[str] = []
    monkeypatch.setattr(attention_backend, "paged_attention", lambda *_: calls.append("ours"))
    monkeypatch.setattr(TritonAttentionImpl, "forward", lambda *_: calls.append("vllm"))
    return calls


def run(
    attention: attention_backend.PagedAttentionImpl,
    metadata: Any,
    dtype: torch.dtype = torch.bfloat16,
    of_cache: torch.dtype | None = None,
) -> None:
    query = torch.zeros(64, HEADS, DIM, dtype=dtype)
    cache = torch.zeros(1, KV_HEADS, PAGE, 2 * DIM, dtype=of_cache or dtype)
    attention.forward(torch.nn.Module(), query, query, query, cache, metadata, torch.empty_like(query))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ours"),
        ({"requests": 17}, "ours"),
        ({"requests": 16}, "vllm"),  # so few that vLLM splits their contexts
        ({"requests": 17, "most": 6}, "ours"),
        ({"requests": 1, "most": 6}, "vllm"),
        ({"mm_prefix_range_tensor": torch.zeros(1)}, "vllm"),
        ({"rswa_window": 4}, "vllm"),
        ({"causal": False}, "vllm"),
        ({"causal": torch.ones(64)}, "vllm"),
    ],
)
def test_steps(computed: list[str], changes: dict[str, Any], expected: str) -> None:
    run(implementation(), step(**changes))
    assert computed == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": [0.5] * HEADS},
        {"logits_soft_cap": 30.0},
        {"sinks": torch.zeros(HEADS)},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"chunk_lookback": 2},
    ],
)
def test_layers_that_the_kernel_does_not_compute(computed: list[str], changes: dict[str, Any]) -> None:
    run(implementation(**changes), step())
    assert computed == ["vllm"]


@pytest.mark.parametrize(("heads", "dim"), [(6, 64), (8, 80), (8, 256)])
def test_sizes_that_the_kernel_does_not_compute(computed: list[str], heads: int, dim: int) -> None:
    attention = attention_backend.PagedAttentionImpl(heads, dim, 1.0, KV_HEADS, None, None, "auto")
    assert not attention.plain
    run(attention, step())
    assert computed == ["vllm"]


def test_a_profiling_run_and_other_types_are_vllms(computed: list[str]) -> None:
    run(implementation(), None)
    run(implementation(), step(), torch.float32)
    run(implementation(), step(), torch.float16, torch.bfloat16)
    run(implementation(), step(), torch.bfloat16, torch.uint8)
    assert computed == ["vllm"] * 4


def test_texts_may_depend_on_the_batch() -> None:
    assert not attention_backend.PagedAttentionBackend.supports_batch_invariance()


def test_the_window_counts_the_token_itself() -> None:
    assert implementation(sliding_window=50).window == 50
    assert implementation().window is None


def test_keys_and_values_of_both_layouts() -> None:
    content = torch.arange(3 * PAGE * KV_HEADS * 2 * DIM)
    keys, values = attention_backend.halves(content.view(3, 2, PAGE, KV_HEADS, DIM), DIM)
    assert keys.shape == values.shape == (3, PAGE, KV_HEADS, DIM)
    assert values[0, 0, 0, 0] == PAGE * KV_HEADS * DIM
    keys, values = attention_backend.halves(content.view(3, KV_HEADS, PAGE, 2 * DIM), DIM)
    assert keys.shape == values.shape == (3, PAGE, KV_HEADS, DIM)
    assert values[0, 0, 0, 0] == DIM
    assert keys[0, 1, 0, 0] == 2 * DIM


@pytest.fixture
def no_backend() -> Any:
    before = CUSTOM.get_path() if CUSTOM.is_overridden() else None
    CUSTOM.clear_override()
    yield
    CUSTOM.clear_override()
    if before is not None:
        register_backend(CUSTOM, before)


@pytest.mark.usefixtures("no_backend")
def test_the_backend_of_another_plugin_is_refused() -> None:
    options: Any = SimpleNamespace(attention_config=SimpleNamespace(backend=CUSTOM))
    register_backend(CUSTOM, names.ATTENTION)
    config._check_attention(options)
    assert issubclass(CUSTOM.get_class(), TritonAttentionBackend)
    register_backend(CUSTOM, "other.Backend")
    with pytest.raises(ValueError, match=r"attention_backend is CUSTOM, which is other\.Backend of another plugin"):
        config._check_attention(options)
    options.attention_config.backend = AttentionBackendEnum.TRITON_ATTN
    config._check_attention(options)


@pytest.mark.usefixtures("no_backend")
def test_it_is_refused_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_choose_worker", "_take_options", "_choose_processors", "_choose_scheduler", "_choose_graphs"):
        monkeypatch.setattr(config, name, lambda _: None)
    monkeypatch.setattr(config.drafter, "check", lambda _: None)
    monkeypatch.setattr(config.shims, "require", lambda *_: None)
    register_backend(CUSTOM, "other.Backend")
    one = SimpleNamespace(**dict.fromkeys(names.SPLITS, 1))
    options: Any = SimpleNamespace(attention_config=SimpleNamespace(backend=CUSTOM), parallel_config=one)
    with pytest.raises(ValueError, match="attention_backend is CUSTOM"):
        config.EncodeOnce.verify_and_update_config(options)


@pytest.mark.usefixtures("no_backend")
def test_the_plugin_registers_it_unless_another_plugin_has() -> None:
    plugin.register()
    assert CUSTOM.get_class() is attention_backend.PagedAttentionBackend
    assert CUSTOM.get_class().get_impl_cls() is attention_backend.PagedAttentionImpl
    register_backend(CUSTOM, "other.Backend")
    plugin.register()
    assert CUSTOM.get_path() == "other.Backend"


@pytest.mark.parametrize("name", ["fast", "realtime", "throughput"])
def test_the_profiles_use_it(name: str) -> None:
    assert yaml.safe_load((ROOT / f"profiles/{name}.yaml").read_text())["attention_backend"] == CUSTOM.name
