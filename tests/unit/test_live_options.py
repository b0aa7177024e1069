"""`additional_config` of the encode-once model: what the engine takes, and what it refuses before it starts."""

from types import SimpleNamespace
from typing import Any

import pytest

from voxtral_serve import shims
from voxtral_serve.engine import config
from voxtral_serve.engine.clip_length import clip_positions

SCHEDULER = "voxtral_serve.engine.scheduler.scheduler"
LENGTH = 512


@pytest.fixture(autouse=True)
def no_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/patches/test_live_audio.py has the record."""
    monkeypatch.setattr(shims, "require", lambda *patches: None)


def options_of(additional: Any, seqs: int = 32, replicas: int = 1, threshold: int = 0, **others: Any) -> Any:
    """Of the form of vLLM's VllmConfig."""
    model = SimpleNamespace(max_model_len=LENGTH, hf_config=SimpleNamespace())
    scheduler = SimpleNamespace(
        max_num_seqs=seqs, scheduler_cls=None, policy="fcfs", long_prefill_token_threshold=threshold
    )
    whole = {"speculative_config": None, "model_config": model, "scheduler_config": scheduler} | others
    return SimpleNamespace(
        additional_config=additional, parallel_config=SimpleNamespace(data_parallel_size=replicas), **whole
    )


def take(options: Any) -> None:
    config._take_options(options)
    config._choose_scheduler(options)


@pytest.mark.parametrize("additional", [{}, None, object(), {"max_live_sessions": 0}, {"max_clip_positions": LENGTH}])
def test_the_scheduler_without_live_sessions(additional: Any) -> None:
    """additional_config is a dict, or an object of a platform's own."""
    options = options_of(additional, seqs=1)
    take(options)
    assert options.scheduler_config.scheduler_cls == SCHEDULER
    assert clip_positions(options.model_config) == LENGTH
    assert config.live_sessions(options) == 0


def test_live_sessions_have_a_scheduler_of_their_own() -> None:
    options = options_of({"max_live_sessions": 16, "max_clip_positions": 256}, seqs=17)
    take(options)
    take(options)  # each process completes the config it was given
    assert options.scheduler_config.scheduler_cls == SCHEDULER
    assert clip_positions(options.model_config) == 256
    assert config.live_sessions(options) == 16


@pytest.mark.parametrize(("threshold", "expected"), [(0, 40), (16, 16)])
def test_uploads_yield_to_live_sessions(threshold: int, expected: int) -> None:
    options = options_of({"max_live_sessions": 16}, threshold=threshold)
    take(options)
    scheduler = options.scheduler_config
    assert (scheduler.policy, scheduler.long_prefill_token_threshold) == ("priority", expected)


@pytest.mark.parametrize("sessions", [0, 16])
@pytest.mark.parametrize(("replicas", "watched"), [(1, True), (2, False)])
def test_drafts_are_watched_with_and_without_live_sessions(sessions: int, replicas: int, watched: bool) -> None:
    """vLLM lets replicas that are one server draft one number only."""
    drafts = SimpleNamespace(model="voxtral_serve.drafter.PadDrafter")
    options = options_of({"max_live_sessions": sessions}, speculative_config=drafts, replicas=replicas)
    if sessions and replicas > 1:
        with pytest.raises(ValueError, match="data_parallel_size is 2"):
            take(options)
        return
    take(options)
    assert options.scheduler_config.scheduler_cls == SCHEDULER


def test_another_scheduler_is_refused() -> None:
    options = options_of({})
    options.scheduler_config.scheduler_cls = "a.Scheduler"
    with pytest.raises(ValueError, match=r"scheduler_cls is 'a\.Scheduler': expected None, because"):
        take(options)


def test_the_switch_of_the_gate_is_not_for_the_engine() -> None:
    options = options_of({"voxtral_serve": {"api_key": "none"}, "max_live_sessions": 1})
    take(options)
    assert options.scheduler_config.scheduler_cls == SCHEDULER


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        (
            {"max_live_session": 2},
            "additional_config has 'max_live_session': expected max_live_sessions, max_live_age_s, "
            "max_clip_positions, upload_delay_ms or draft_head",
        ),
        ({"max_live_sessions": -1}, "max_live_sessions is -1: expected a whole number of 0 to 2147483647"),
        ({"max_live_sessions": True}, "max_live_sessions is True: expected a whole number"),
        ({"max_live_sessions": "16"}, "max_live_sessions is '16': expected a whole number"),
        ({"draft_head": 3}, "additional_config: draft_head is 3: expected the path of a file"),
        ({"draft_head": ""}, "additional_config: draft_head is '': expected the path of a file"),
        ({"max_live_sessions": 1.5}, "max_live_sessions is 1.5: expected a whole number"),
        ({"max_live_sessions": None}, "max_live_sessions is None: expected a whole number"),
        ({"max_live_age_s": 0}, "max_live_age_s is 0: expected a whole number of 1 to 2147483647"),
        ({"max_live_age_s": 90.0}, "max_live_age_s is 90.0: expected a whole number"),
        *(
            ({"upload_delay_ms": wrong}, f"upload_delay_ms is {wrong!r}: expected a multiple of 80 of 80 to 2400")
            for wrong in (0, 100, 2480, "480", 480.0, True, None)
        ),
        ({"max_clip_positions": 0}, f"max_clip_positions is 0: expected a whole number of 1 to {LENGTH}"),
        ({"max_clip_positions": LENGTH + 1}, f"max_clip_positions is 513: expected a whole number of 1 to {LENGTH}"),
    ],
)
def test_an_option_that_is_not_valid(additional: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        take(options_of(additional))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"speculative_config": SimpleNamespace(model="other")},
            f"speculative_config has model 'other' with max_live_sessions 16, on vllm {shims.installed('vllm')}: "
            "expected voxtral_serve.drafter.Drafter, or on 0.20.0 no drafts. Set it, or remove one of the two",
        ),
        ({"replicas": 2}, "data_parallel_size is 2 with max_live_sessions 16: expected 1"),
        ({"seqs": 15}, "max_num_seqs is 15 with max_live_sessions 16: expected 16 or more"),
        ({"threshold": 41}, "long_prefill_token_threshold is 41 with max_live_sessions: expected 0, or at most 40"),
    ],
)
def test_what_live_sessions_exclude(others: dict[str, Any], message: str) -> None:
    take(options_of({"max_live_sessions": 0}, **others))
    with pytest.raises(ValueError) as refused:
        take(options_of({"max_live_sessions": 16}, **others))
    assert str(refused.value) == message
