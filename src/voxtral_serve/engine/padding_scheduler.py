"""vLLM's scheduler with shared left padding: uploaded clips do not compute the keys and values of their silence.

Each clip begins with the same tokens and the same audio rows: BOS and the left padding, but for its last position,
whose row sees the clip. Their keys and values are the same in every request, so the blocks in which the first clip has
them are kept, and every later clip begins as if vLLM had found them in its prefix cache: full blocks are shared, and
the rest is copied by vLLM into a block of the request. No block is hashed, and nothing else is shared.

The clip is encoded as ever, because vLLM encodes audio whose positions are not all computed. Live sessions compute
their whole prompt: keys and values depend on the delay, and theirs may be another.
"""

import dataclasses
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from voxtral_serve.engine.experiments import SHARE_BLOCKS, experiments
from voxtral_serve.engine.session import SessionShape

logger = init_logger("vllm.voxtral_serve")


class SharedPadding:
    """Mixin for vLLM's scheduler classes. What it uses of them is in METHODS and ATTRIBUTES (scheduler.expected)."""

    SERVES = "shared left padding"
    METHODS: ClassVar[dict[str, tuple[str, ...]]] = {
        "schedule": (),
        "reset_prefix_cache": (),
        "_get_local_prefix_cache_hit": ("request",),
    }
    ATTRIBUTES: ClassVar[tuple[str, ...]] = (
        *("take_kv_cache_block_copies", "skip_reading_prefix_cache", "hit_diverged", "num_new_local_computed_tokens"),
        *("self.kv_cache_manager.block_pool", "self.connector is not None"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        tokenizer: Any = cached_tokenizer_from_config(config.model_config)
        coordinator = self.kv_cache_manager.coordinator  # type: ignore[attr-defined]
        if len(coordinator.single_type_managers) != 1 or self.connector is not None:  # type: ignore[attr-defined]
            raise ValueError("shared left padding: expected one kind of KV cache, and no kv_transfer_config")
        (manager,) = coordinator.single_type_managers
        # Row i is that of position i, and BOS is at position 0.
        self.shared = SessionShape.of(tokenizer.instruct.audio_encoder.audio_config).left - 1  # positions
        if SHARE_BLOCKS in experiments():
            self.shared -= self.shared % manager.block_size
        if not self.shared:
            raise ValueError(f"{SHARE_BLOCKS}: a block has {manager.block_size} tokens: expected a block_size of 16")
        self.shared_tokens: list[int] = []
        self.shared_blocks: list[Any] = []  # vLLM's KVCacheBlock, once a clip has computed them

        add = manager.add_local_computed_blocks

        def add_shared(request_id: str, blocks: Any, *counts: int) -> None:
            """Without prefix caching, vLLM expects no blocks of other requests."""
            manager.enable_caching = bool(blocks)
            try:
                add(request_id, blocks, *counts)
            finally:
                manager.enable_caching = False

        manager.add_local_computed_blocks = add_shared

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        if self.shared_blocks and self._has_padding(request, self.shared_tokens):
            # vLLM encodes a clip in the step that computes its first position: patches/clip_end.py has it at 0.
            (clip,) = request.mm_features
            place = dataclasses.replace(clip.mm_position, offset=self.shared)
            request.mm_features[0] = dataclasses.replace(clip, mm_position=place)
            return KVCacheBlocks((self.shared_blocks,)), self.shared, 0, False
        none: tuple[Any, int, int, bool] = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        return none

    def _has_padding(self, request: Any, tokens: list[int] | None = None) -> bool:
        """Whether a request is an uploaded clip that begins with these tokens."""
        prompt = request.prompt_token_ids or []
        return bool(
            request.mm_features
            and not request.skip_reading_prefix_cache
            and request.lora_request is None
            and len(prompt) > self.shared
            and (tokens is None or prompt[: self.shared] == tokens)
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if not self.shared_blocks:
            self._keep(output.num_scheduled_tokens)
        return output

    def _keep(self, scheduled: dict[str, int]) -> None:
        """Keep the blocks of a clip that has its left padding by the end of the step. Later steps read them."""
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        for name in scheduled:
            request = self.requests[name]  # type: ignore[attr-defined]
            if self._has_padding(request) and request.num_computed_tokens >= self.shared:
                (blocks,) = manager.coordinator.get_blocks(name)
                (kind,) = manager.coordinator.single_type_managers
                self.shared_blocks = blocks[: -(-self.shared // kind.block_size)]
                self.shared_tokens = request.prompt_token_ids[: self.shared]
                manager.block_pool.touch(self.shared_blocks)
                logger.info("the first %d positions of later clips are not computed", self.shared)
                return

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM calls it where the KV cache is lost, or other weights are loaded."""
        self.kv_cache_manager.block_pool.free_blocks(self.shared_blocks)  # type: ignore[attr-defined]
        self.shared_blocks = []
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
