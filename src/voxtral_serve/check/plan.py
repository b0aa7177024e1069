"""The sizes that vLLM derives from its options before it measures memory."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from voxtral_serve.check.report import ConfigError
from voxtral_serve.checkpoint import Checkpoint
from voxtral_serve.engine.clip_length import OPTION as POSITIONS
from voxtral_serve.engine.session import OPTION as SESSIONS


@dataclass(frozen=True)
class Plan:
    """Lengths are in token positions of 80 ms."""

    max_model_len: int
    max_num_seqs: int
    cache: Any  # vllm.config.CacheConfig
    scheduler: Any  # vllm.config.SchedulerConfig
    element_bytes: int  # of weights and activations
    clip_positions: int  # of the longest clip; below max_model_len where additional_config says so
    sessions: int  # max_live_sessions

    @property
    def encoder_cache(self) -> int:
        """Audio tokens that the encoder cache holds (vllm.v1.core.encoder_cache_manager.compute_mm_encoder_budget)."""
        return max(self.scheduler.max_num_batched_tokens, self.clip_positions)

    @property
    def audio_rows(self) -> int:
        """Rows of the LM's width that the encode-once model keeps (voxtral_serve.engine.audio_rows.AudioRows)."""
        tokens = int(self.scheduler.max_num_batched_tokens)
        # One ring more than sessions: of the unused places of the live encoder's graphs.
        live = (self.sessions + 1) * min(tokens, self.max_model_len) if self.sessions else 0
        return self.max_num_seqs * self.clip_positions + tokens + live

    @classmethod
    def of(cls, values: Namespace, held: Checkpoint) -> "Plan":
        """From vLLM's options and a checkpoint. Raises ConfigError for values that vLLM rejects."""
        length = _context_length(values, held)
        tokens, seqs = _batch_sizes(values, length)
        cache, scheduler = _vllm_configs(values, length, tokens, seqs)
        # `auto` keeps 16-bit weights and rounds 32-bit weights to 16 bits (vllm.config.model._resolve_auto_dtype).
        element_bytes = 4 if values.dtype in ("float", "float32") else 2
        ours = _additional(values, length)
        return cls(length, seqs, cache, scheduler, element_bytes, *ours)


def _additional(values: Namespace, length: int) -> tuple[int, int]:
    """(positions of the longest clip, live sessions) by additional_config. Raises ConfigError for values
    that the engine refuses."""
    options = values.additional_config or {}
    most, positions = options.get(SESSIONS, 0), options.get(POSITIONS, length)
    for name, value, least, largest in ((SESSIONS, most, 0, 2**31 - 1), (POSITIONS, positions, 1, length)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
            raise ConfigError(
                f"additional_config: {name} is {value!r}: expected a whole number of {least} to {largest}"
            )
    return positions, most


def _context_length(values: Namespace, held: Checkpoint) -> int:
    """max_model_len as vLLM's ModelConfig derives it: model_max_length overrides max_position_embeddings."""
    longest: int | None = held.params.get("model_max_length") or held.params.get("max_position_embeddings")
    length: int | None = values.max_model_len
    if length is None or length == -1:
        if longest is None:
            raise ConfigError(
                "max_model_len is not set, and the checkpoint has no max_position_embeddings: set max_model_len"
            )
        return longest
    if length < 1:
        raise ConfigError(f"max_model_len is {length}, expected at least 1")
    if longest is not None and length > longest:
        raise ConfigError(f"max_model_len is {length}, but the checkpoint supports at most {longest}")
    return length


def _batch_sizes(values: Namespace, length: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs), as EngineArgs._set_default_max_num_seqs_and_batched_tokens_args."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    defaults = AsyncEngineArgs.get_batch_defaults(values.pipeline_parallel_size * values.tensor_parallel_size)
    tokens, seqs = (default[UsageContext.OPENAI_API_SERVER] for default in defaults)
    seqs = values.max_num_seqs or seqs
    tokens = values.max_num_batched_tokens or min(tokens, seqs * length)
    return tokens, seqs if values.max_num_seqs is not None else min(seqs, tokens)


def _vllm_configs(values: Namespace, length: int, tokens: int, seqs: int) -> list[Any]:
    """vLLM's CacheConfig and SchedulerConfig. Raises ConfigError with all values that they reject."""
    from pydantic import ValidationError
    from vllm.config import CacheConfig, SchedulerConfig

    arguments = {
        CacheConfig: {
            "gpu_memory_utilization": values.gpu_memory_utilization,
            "cache_dtype": values.kv_cache_dtype,
            **({} if values.block_size is None else {"block_size": values.block_size}),
        },
        SchedulerConfig: {
            "max_model_len": length,
            "is_encoder_decoder": False,
            "max_num_batched_tokens": tokens,
            "max_num_seqs": seqs,
            "disable_hybrid_kv_cache_manager": values.disable_hybrid_kv_cache_manager,
        },
    }
    configs, refused = [], []
    for make, named in arguments.items():
        try:
            configs.append(make(**named))
        except ValidationError as error:
            for each in error.errors():
                where = f"{each['loc'][0]} is {each['input']!r}: " if each["loc"] else ""
                refused.append(where + each["msg"].removeprefix("Value error, "))
    if refused:
        raise ConfigError("; ".join(refused))
    return configs
