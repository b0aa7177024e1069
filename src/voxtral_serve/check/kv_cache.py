"""The size of the KV cache, computed with vLLM's own functions.

vLLM gets the spec of each attention layer from the loaded model. A check loads none, so the specs are written here.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from importlib import import_module
from typing import Any

from voxtral_serve.check.plan import Plan
from voxtral_serve.check.report import ConfigError

POOL = 1 << 60  # bytes; large enough that rounding to whole blocks has no effect


@dataclass(frozen=True)
class KvCache:
    """vLLM's layout of the KV cache: bytes of a block, blocks of one sequence of max_model_len, and of each group of
    layers the tokens of a block and of the sliding window (0 for none)."""

    block_bytes: int
    blocks: int
    layers: tuple[tuple[int, int], ...]

    def bytes_of(self, sequences: int) -> int:
        """Bytes for this number of sequences of max_model_len, plus the one block that vLLM reserves."""
        return (sequences * self.blocks + 1) * self.block_bytes

    @classmethod
    def of(cls, params: dict[str, Any], plan: Plan, encode_once: bool) -> "KvCache":
        """The layout for Voxtral Realtime on one device.

        The model has two kinds of layers (vllm.model_executor.models.whisper_causal, .llama). A layer of the language
        model has one entry per token. A layer of the encoder has one entry per audio frame, several per token, within
        a sliding window. vLLM gives both kinds pages of the same size, and groups of the same number of layers. In the
        encode-once model the encoder has no KV cache. Raises ConfigError for a kv_cache_dtype with another page size.
        """
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
        from vllm.v1.core import kv_cache_utils

        config = plan.config
        cache = config.cache_config
        if cache.cache_dtype not in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"):
            raise ConfigError(f"the check does not know the page size of kv_cache_dtype {cache.cache_dtype}")
        dtype = (
            config.model_config.dtype if cache.cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
        )
        if hasattr(cache, "kv_cache_layout"):  # from vLLM 0.32.0 on; backends for this model have layers outermost
            cache.kv_cache_layout = "LBHNC"
        specs = _kv_specs(params, cache.block_size, dtype, encode_once)
        planning: Any = kv_cache_utils
        if not hasattr(kv_cache_utils, "get_kv_cache_groups"):  # vLLM 0.33.0
            planning = import_module("vllm.v1.core.kv_cache_planning")
        groups = planning.get_kv_cache_groups(config, specs)
        layout = planning.get_kv_cache_config_from_groups(config, groups, POOL)
        concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, layout)
        layers = tuple((spec.block_size, _window(spec)) for spec in (group.kv_cache_spec for group in groups))
        return cls(POOL // layout.num_blocks, round(layout.num_blocks / concurrency), layers)


def _window(spec: Any) -> int:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0


def _kv_specs(params: dict[str, Any], block_size: int, dtype: Any, encode_once: bool) -> dict[str, Any]:
    """One spec per attention layer with a KV cache, as the layer's own get_kv_cache_spec returns it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    encoder = params["multimodal"]["whisper_model_args"]["encoder_args"]
    pooled = params["multimodal"]["whisper_model_args"]["downsample_args"]["downsample_factor"]
    heads, window = encoder["n_heads"], encoder["sliding_window"]
    text = {"num_kv_heads": params["n_kv_heads"], "head_size": params["head_dim"]}
    audio: dict[str, Any] = {"head_size": encoder["head_dim"]}
    if "tokens_per_state" in {each.name for each in fields(SlidingWindowSpec)}:
        audio |= {
            "num_kv_heads": heads,
            "tokens_per_state": Fraction(1, pooled),
            "sliding_window": -(-window // pooled) + 1,
        }
    else:  # vLLM 0.20.0: pooled frames count as heads, the window's frames as tokens
        audio |= {"num_kv_heads": heads * pooled, "sliding_window": window}
    common = {"block_size": block_size, "dtype": dtype}
    of_text: Any
    if params.get("sliding_window"):
        of_text = SlidingWindowSpec(**common, **text, sliding_window=params["sliding_window"])
    else:
        of_text = FullAttentionSpec(**common, **text)
    specs = {f"text.{number}": of_text for number in range(params["n_layers"])}
    if not encode_once:
        specs |= {f"encoder.{number}": SlidingWindowSpec(**common, **audio) for number in range(encoder["n_layers"])}
    return specs
