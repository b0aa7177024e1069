"""vLLM's scheduler with live sessions: whatever one request or one session gets wrong ends that request alone.

vLLM's own scheduler and requests; in place of the worker, each request of a step samples one token.
"""

from typing import Any

import pytest
from scheduling import SPOKEN, TOKEN, Engine, engine_config
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from pico import model
from voxtral_serve.engine.live_audio import step_of
from voxtral_serve.engine.session import OPTION

MOST = 2  # sessions
A, B, C = (f"{number:032x}-0" for number in range(3))


@pytest.fixture(scope="module")
def config() -> Any:
    return engine_config(additional_config={OPTION: MOST})


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest, config: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(config[0].scheduler_config, "async_scheduling", request.param)
    return Engine(*config)


def ended(output: EngineCoreOutput, reason: FinishReason, why: str) -> None:
    assert (output.finish_reason, output.new_token_ids) == (reason, [])
    assert why in str(output.stop_reason)


def left(engine: Engine) -> None:
    """Nothing of any request or session."""
    scheduler = engine.scheduler
    assert not scheduler.has_requests()
    assert (scheduler.requests, scheduler.running, len(scheduler.waiting), scheduler.audio_of) == ({}, [], 0, {})
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 63  # one is vLLM's own


# What a client may write


@pytest.mark.parametrize(
    "name",
    [["x"], {"x": 1}, 7, 2.5, True, "", "x", "x" * 10**6, C, b"x", [A], ()],
    ids=lambda name: f"{name!r:.12}",
)
def test_a_request_that_names_no_session_ends_at_once(engine: Engine, name: Any) -> None:
    engine.begin(A, "live")
    assert engine.step()["live"].new_token_ids == [TOKEN]
    engine.add("wrong", name)
    outputs = engine.step()
    ended(outputs["wrong"], FinishReason.ERROR, "it names no session that is open")
    assert outputs["live"].new_token_ids == [TOKEN]
    assert [*engine.scheduler.requests] == ["live"]


def test_where_nothing_else_runs(engine: Engine) -> None:
    """The engine's loop would wait for the next message, if the request's end gave it nothing to do."""
    engine.add("wrong", "x")
    outputs = engine.step()
    ended(outputs["wrong"], FinishReason.ERROR, "no session")
    # vLLM's histograms of the time in the queue and in the prompt count from these events.
    events = outputs["wrong"].events or []
    assert [event.type for event in events] == [EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED]
    left(engine)


def test_where_all_others_wait_for_audio(engine: Engine) -> None:
    engine.begin(A, "live")
    while engine.scheduler.has_requests():
        engine.step()
    assert "live" in engine.scheduler.requests
    engine.add("wrong", ["x"])
    ended(engine.step()["wrong"], FinishReason.ERROR, "no session")
    assert not engine.scheduler.has_requests()


def test_a_session_has_one_request(engine: Engine) -> None:
    engine.begin(A, "live")
    engine.add("second", A)
    outputs = engine.step()
    ended(outputs["second"], FinishReason.ERROR, "a session that has a request already")
    assert outputs["live"].new_token_ids == [TOKEN]
    engine.scheduler.finish_requests("live", RequestStatus.FINISHED_ABORTED)
    engine.add("third", A)  # nor another one after it
    ended(engine.step()["third"], FinishReason.ERROR, "a request already")
    left(engine)


def test_the_output_goes_to_the_client_of_the_request(engine: Engine) -> None:
    engine.begin(A, "live")
    engine.add("wrong", A, client=1)
    engine.schedule()
    scheduled = engine.in_flight.pop()
    answers = engine.scheduler.update_from_output(scheduled, ModelRunnerOutput(["live"], {"live": 0}, [[TOKEN]]))
    assert {client: [each.request_id for each in answer.outputs] for client, answer in answers.items()} == {
        0: ["live"],
        1: ["wrong"],
    }
    assert answers[1].finished_requests == {"wrong"}


@pytest.mark.parametrize("delay", [None, 1, 30])
def test_a_request_has_the_prompt_of_its_sessions_delay(engine: Engine, delay: int | None) -> None:
    right = engine.scheduler.shape.with_delay(delay).prompt
    audio = bytes(2 * 90 * model.SAMPLES_PER_TOKEN)
    assert engine.scheduler.live([["open", A, delay], ["audio", A, audio]]) == {}
    for name, prompt in (("shorter", right - 1), ("longer", right + 1), ("right", right)):
        engine.add(name, A, prompt)
    outputs = engine.step()
    for name, prompt in (("shorter", right - 1), ("longer", right + 1)):
        ended(outputs[name], FinishReason.ERROR, f"its prompt has {prompt} tokens, and its session one of {right} with")
    assert outputs["right"].new_token_ids == [TOKEN]


def test_a_prompt_that_comes_before_its_audio(engine: Engine) -> None:
    assert engine.scheduler.live([["open", A]]) == {}
    engine.add("early", A)
    ended(engine.step()["early"], FinishReason.ERROR, "with 0 rows")
    left(engine)


@pytest.mark.parametrize("options", [{"resumable": True}, {"mm_features": ["a clip"]}], ids=str)
def test_a_request_of_a_session_has_no_other_audio(
    engine: Engine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.scheduler.live([["open", A], ["audio", A, SPOKEN]]) == {}
    manager = engine.scheduler.encoder_cache_manager
    monkeypatch.setattr(type(manager), "free", lambda self, request: None)  # of features that are none
    engine.add("both", A, **options)
    ended(engine.step()["both"], FinishReason.ERROR, "a session and brings audio of its own")
    left(engine)


# Sessions that are closed


@pytest.mark.parametrize("steps", [0, 1, 99], ids=["before its first step", "running", "waiting for audio"])
def test_a_closed_session_leaves_nothing(engine: Engine, steps: int) -> None:
    engine.begin(A, "live")
    for _ in range(steps):
        if engine.scheduler.has_requests():
            engine.step()
    assert engine.scheduler.live([["close", A]]) == {}
    ended(engine.step()["live"], FinishReason.ABORT, "the session is closed")
    left(engine)
    assert engine.scheduler.sessions == {}


def test_a_session_is_closed_while_its_step_runs(engine: Engine) -> None:
    engine.begin(A, "live")
    assert engine.schedule() == ["live"]
    assert engine.scheduler.live([["close", A]]) == {}
    ended(engine.update()["live"], FinishReason.ABORT, "the session is closed")
    engine.step()  # which tells the worker
    left(engine)


def test_a_preempted_session_is_closed(engine: Engine) -> None:
    engine.begin(A, "live")
    engine.step()
    scheduler = engine.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    assert scheduler.live([["close", A]]) == {}
    ended(engine.step()["live"], FinishReason.ABORT, "the session is closed")
    left(engine)


def test_there_are_no_more_requests_than_sessions(engine: Engine) -> None:
    """The worker has a slot for each: one that begins takes that of one whose end comes with the same step."""
    held: set[str] = set()
    for number in range(20):
        session, name = f"{number:032x}-0", f"live {number}"
        if number >= MOST:
            assert engine.scheduler.live([["close", f"{number - MOST:032x}-0"]]) == {}
        engine.begin(session, name)
        engine.schedule()
        step = engine.in_flight[-1]
        held -= step.finished_req_ids
        held |= step_of(step).parts.keys()
        assert len(held) == min(number + 1, MOST)
        engine.update()


# Faults that are found in a step


def test_a_session_whose_rows_are_not_there(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.begin(A, "wrong")
    engine.begin(B, "live")

    def next_part(*arguments: Any) -> Any:
        return engine.scheduler.sessions[A].part(500, 1)

    monkeypatch.setattr(engine.scheduler.sessions[A], "next_part", next_part)
    engine.schedule()
    assert [*step_of(engine.in_flight[0]).parts] == ["live"]
    outputs = engine.update()
    ended(outputs["wrong"], FinishReason.ERROR, "rows 500 to 500 of a session with")
    assert outputs["live"].new_token_ids == [TOKEN]
    assert [*engine.scheduler.requests] == ["live"]


def test_a_request_that_the_worker_marks(engine: Engine) -> None:
    """It gets no token of that step, nor of one that was under way."""
    engine.begin(A, "wrong")
    engine.begin(B, "live")
    engine.step()
    engine.schedule()
    if engine.scheduler.scheduler_config.async_scheduling:
        assert engine.schedule() == ["wrong", "live"]
    outputs = engine.update({"wrong": "no slot", "gone": "nobody knows it"})
    ended(outputs["wrong"], FinishReason.ERROR, "no slot")
    assert outputs["live"].new_token_ids == [TOKEN]
    while engine.in_flight:
        assert [*engine.update()] == ["live"]
    assert [*engine.step()] == ["live"]
    assert engine.scheduler.live([["close", A], ["open", C]]) == {}


def test_the_worker_is_told_of_all_that_were_preempted(engine: Engine) -> None:
    """Also of those that were since a step without tokens."""
    engine.begin(A, "live")
    engine.step()
    scheduler = engine.scheduler
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    assert scheduler.live([["audio", A, b""]]) == {}
    scheduler.sessions[A].rows -= 13  # so that it waits
    assert engine.schedule() == []
    engine.update()
    scheduler.sessions[A].rows += 13
    assert engine.schedule() == ["live"]
    assert step_of(engine.in_flight[-1]).preempted == {"live"}
    engine.update()
    engine.step()
    assert step_of(scheduler.schedule()).preempted == set()
