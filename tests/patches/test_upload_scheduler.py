"""vLLM's scheduler with uploads: how much audio a step encodes, in which order, and what stays in the encoder cache.

vLLM's own scheduler and requests; in place of the worker, `Encoder` has the encoder cache and the slots of requests.
"""

import random
from typing import Any

import pytest
import torch
from scheduling import Engine, engine_config
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from voxtral_serve import shims
from voxtral_serve.engine import scheduler
from voxtral_serve.engine.scheduler import StepCache, Uploads

CONTEXT, SEQUENCES, CLIP = 192, 8, 128  # CLIP: rows of the longest
CAP = 2 * CLIP


@pytest.fixture(scope="module")
def config() -> Any:
    return engine_config(
        max_num_batched_tokens=CAP,
        max_num_seqs=SEQUENCES,
        max_model_len=CONTEXT,
        block_size=16,
        scheduling_policy="priority",
        additional_config={"max_clip_positions": CLIP},
    )


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def options(request: pytest.FixtureRequest, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(config[0].scheduler_config, "async_scheduling", request.param)
    return config


class Encoder(Engine):
    """Does with each step what the workers do: free, encode, store the rows of the requests that begin."""

    def __init__(self, config: Any, cache: Any) -> None:
        super().__init__(config, cache)
        self.rows: dict[str, int] = {}  # of the clips, by identifier
        self.cache: set[str] = set()
        self.encoded: list[list[str]] = []  # identifiers, step by step
        self.begun: list[str] = []  # requests, in their order

    def upload(self, name: str, rows: int, clip: str | None = None, tokens: int = 20, priority: int = 0) -> None:
        clip = clip or f"clip of {name}"
        place = PlaceholderRange(offset=0, length=1, is_embed=torch.tensor([rows]))  # as patches/clip_end.py has it
        self.rows[clip] = rows
        self.add(
            name, tokens=tokens, mm_features=[MultiModalFeatureSpec(None, "audio", clip, place)], priority=priority
        )

    def schedule(self) -> list[str]:
        names = super().schedule()
        step, requests = self.in_flight[-1], self.scheduler.requests
        self.cache -= {*step.free_encoder_mm_hashes}
        clips = [
            requests[name].mm_features[i].identifier for name, i in step.scheduled_encoder_inputs.items() for i in i
        ]
        assert sum(self.rows[clip] for clip in clips) <= CAP
        self.cache |= {*clips}
        assert sum(self.rows[clip] for clip in self.cache) <= CAP
        begun = [new.req_id for new in step.scheduled_new_reqs] + [*step.scheduled_cached_reqs.resumed_req_ids]
        assert {requests[name].mm_features[0].identifier for name in begun} <= self.cache  # their rows are stored now
        self.encoded.append(clips)
        self.begun += begun
        return names

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()


def test_a_step_encodes_as_much_as_the_profile_says(options: Any) -> None:
    engine = Encoder(*options)
    for number in range(7):
        engine.upload(f"{number}", CLIP)
    engine.run()
    assert [len(clips) for clips in engine.encoded[:5]] == [2, 2, 2, 1, 0]
    assert engine.begun == [f"{number}" for number in range(7)]
    assert engine.cache == set()


def test_short_clips_do_not_overtake_a_long_one(options: Any) -> None:
    engine = Encoder(*options)
    for name, rows in {"a": 100, "b": 60, "c": CLIP, "d": 50, "e": 50}.items():
        engine.upload(name, rows)
    engine.step()
    assert engine.begun == ["a", "b"]  # 160 rows; with the third, 288
    engine.step()
    assert engine.begun == ["a", "b", "c", "d", "e"]


def test_who_has_priority_begins_first(options: Any) -> None:
    engine = Encoder(*options)
    for number in range(4):
        engine.upload(f"{number}", CLIP)
    engine.upload("first", CLIP, priority=-1)
    engine.step()
    assert engine.begun == ["first", "0"]


def test_a_clip_longer_than_the_tokens_of_a_step_is_encoded_alone(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in long.yaml, which has 512 tokens a step and clips of an hour."""
    monkeypatch.setattr(config[0].scheduler_config, "max_num_batched_tokens", 64)
    monkeypatch.setattr(config[0].scheduler_config, "max_num_encoder_input_tokens", 64)
    monkeypatch.setattr(config[0].scheduler_config, "encoder_cache_size", 64)
    engine = Encoder(*config)
    for name in "abc":
        engine.upload(name, CLIP)
    engine.run()
    assert engine.encoded[:4] == [["clip of a"], ["clip of b"], ["clip of c"], []]


@pytest.mark.parametrize("blocks", [64, 26], ids=["room for all", "preempted"])
@pytest.mark.parametrize("seed", range(3))
def test_a_clip_is_there_whenever_its_request_begins(
    options: Any, blocks: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that several requests have, in the same step, in successive ones and later, and after preemption."""
    config, cache = options
    chosen = random.Random(seed)
    monkeypatch.setattr(config.cache_config, "num_gpu_blocks", blocks)
    monkeypatch.setattr(cache, "num_blocks", blocks)
    engine, number = Encoder(config, cache), 0
    rows = {f"clip {clip}": chosen.randint(50, CLIP) for clip in range(6)}
    while number < 40 or engine.scheduler.has_requests():
        for _ in range(chosen.choice([0, 0, 1, 3]) if number < 40 else 0):
            clip = chosen.choice([*rows])
            engine.upload(f"{number}", rows[clip], clip, tokens=chosen.randint(1, 60))
            number += 1
        if engine.scheduler.has_requests():
            engine.step()
    assert engine.cache == set()
    assert {*engine.begun} == {f"{each}" for each in range(number)}
    assert (len(engine.begun) > number) == (blocks == 26)


def test_vllms_scheduler_and_encoder_cache_are_as_expected(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduler.expected(Scheduler, Uploads) == scheduler.expected(EncoderCacheManager, StepCache) == []
    monkeypatch.delattr(Scheduler, "_try_schedule_encoder_inputs")
    with pytest.raises(shims.PatchError, match=r"no _try_schedule_encoder_inputs\(request, .*: the encode-once model"):
        scheduler.scheduler(vllm_config=config[0])
