"""The experiment of shared left padding in vLLM's own scheduler: what clips share, and that nothing else is shared.

In place of the worker, each request of a step samples one token.
"""

import dataclasses
from typing import Any

import pytest
from scheduling import PROMPT, Engine, engine_config
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler

from voxtral_serve import shims
from voxtral_serve.engine import scheduler
from voxtral_serve.engine.experiments import VARIABLE
from voxtral_serve.engine.padding_scheduler import SharedPadding
from voxtral_serve.engine.session import OPTION

SHARED = 31  # of pico's 39 positions: BOS and the left padding, but for its last position
SESSION = f"{1:032x}-0"
BLOCK = 32  # the smallest of a CPU
FREE = 63  # blocks of 64; one is vLLM's own

pytestmark = pytest.mark.skipif(shims.installed("vllm") == "0.20.0", reason="its scheduler copies no blocks")


@pytest.fixture(scope="module")
def config() -> Any:
    return engine_config(additional_config={OPTION: 2}, block_size=BLOCK)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest, config: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv(VARIABLE, "share-padding")
    monkeypatch.setattr(config[0].scheduler_config, "async_scheduling", request.param)
    return Engine(*config)


def add(engine: Engine, name: str, **options: Any) -> None:
    """An uploaded clip, of which vLLM knows the prompt's positions (patches/clip_end.py)."""
    clip = MultiModalFeatureSpec(None, "audio", name, PlaceholderRange(0, PROMPT), name)
    engine.add(name, mm_features=[clip], **options)


def begun(engine: Engine, name: str) -> Any:
    """The step that begins a request."""
    engine.schedule()
    step = engine.in_flight[-1]
    engine.update()
    assert name in step.num_scheduled_tokens
    return step


def blocks(engine: Engine, name: str) -> list[int]:
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    return [*ids]


def test_a_clip_computes_its_padding_only_if_none_has_before(engine: Engine) -> None:
    add(engine, "first")
    add(engine, "beside")
    step = begun(engine, "first")
    assert step.num_scheduled_tokens == {"first": PROMPT, "beside": PROMPT} and not step.kv_cache_block_copies
    add(engine, "later")
    step = begun(engine, "later")
    assert step.num_scheduled_tokens == {"first": 1, "beside": 1, "later": PROMPT - SHARED}
    assert step.scheduled_encoder_inputs == {"later": [0]}  # the clip is encoded all the same
    (new,) = step.scheduled_new_reqs
    assert new.num_computed_tokens == SHARED
    (copy,) = step.kv_cache_block_copies
    assert (copy.src_block_id, copy.dst_block_id) == (blocks(engine, "first")[0], blocks(engine, "later")[0])


def test_the_padding_outlives_its_clip_and_nothing_else_is_left(engine: Engine) -> None:
    pool = engine.scheduler.kv_cache_manager.block_pool
    for name, computed in (("first", PROMPT), ("second", PROMPT - SHARED), ("third", PROMPT - SHARED)):
        add(engine, name, tokens=40)
        assert begun(engine, name).num_scheduled_tokens == {name: computed}
        while engine.scheduler.has_requests():
            engine.step()
        assert pool.get_num_free_blocks() == FREE - 1
    assert engine.scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == FREE
    add(engine, "again")
    assert begun(engine, "again").num_scheduled_tokens == {"again": PROMPT}


def test_a_preempted_clip_begins_again_with_the_padding_and_is_encoded_again(engine: Engine) -> None:
    for name in ("first", "second"):
        add(engine, name)
        begun(engine, name)
    while engine.scheduler.requests["second"].num_tokens < 3 * BLOCK:
        engine.step()
    request = engine.scheduler.running.pop()
    engine.scheduler.encoder_cache_manager.reset()  # its rows are not kept for ever
    engine.scheduler._preempt_request(request, 0.0)
    step = begun(engine, "second")
    assert step.num_scheduled_tokens["second"] == request.num_prompt_tokens + 3 * BLOCK - PROMPT - SHARED
    assert step.scheduled_encoder_inputs == {"second": [0]}


def test_sessions_and_other_prompts_share_nothing(engine: Engine) -> None:
    engine.begin(SESSION, "live")
    assert begun(engine, "live").num_scheduled_tokens == {"live": PROMPT}
    assert not engine.scheduler.shared_blocks
    add(engine, "first")
    begun(engine, "first")
    engine.scheduler.live([["close", SESSION]])
    engine.begin(SESSION[:-1] + "1", "live again")
    assert begun(engine, "live again").num_scheduled_tokens["live again"] == PROMPT
    add(engine, "short", prompt=SHARED)
    assert begun(engine, "short").num_scheduled_tokens["short"] == SHARED
    clip = MultiModalFeatureSpec(None, "audio", "other", PlaceholderRange(0, PROMPT), "other")
    other = engine.scheduler.requests["first"]
    engine.add("other", mm_features=[clip])
    engine.scheduler.requests["other"].prompt_token_ids[3] = other.prompt_token_ids[3] + 1
    assert begun(engine, "other").num_scheduled_tokens["other"] == PROMPT


def test_whole_blocks_are_shared_without_a_copy(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "share-blocks")
    with pytest.raises(ValueError, match="a block has 32 tokens: expected a block_size of 16"):
        Engine(*config)
    vllm_config, cache = config
    (group,) = cache.kv_cache_groups
    spec = dataclasses.replace(group.kv_cache_spec, block_size=16)
    monkeypatch.setattr(vllm_config.cache_config, "block_size", 16)  # a GPU's
    smaller = dataclasses.replace(cache, kv_cache_groups=[dataclasses.replace(group, kv_cache_spec=spec)])
    engine = Engine(vllm_config, smaller)
    add(engine, "first")
    begun(engine, "first")
    add(engine, "later")
    step = begun(engine, "later")
    assert step.num_scheduled_tokens["later"] == PROMPT - 16 and not step.kv_cache_block_copies
    assert blocks(engine, "later")[0] == blocks(engine, "first")[0]
    assert blocks(engine, "later")[1] != blocks(engine, "first")[1]


def test_vllms_scheduler_is_as_expected() -> None:
    assert scheduler.expected(Scheduler, SharedPadding) == []
