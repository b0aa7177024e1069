"""vLLM's scheduler with live sessions: whatever one request or one session gets wrong ends that request alone.

vLLM's own scheduler and requests; in place of the worker, each request of a step samples one token.
"""

import random
from collections import Counter
from typing import Any

import pytest
from scheduling import SPOKEN, TOKEN, Engine, engine_config
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from pico import model
from voxtral_serve.engine.live_audio import step_of
from voxtral_serve.engine.live_scheduler import MOST_AHEAD, RESUMING
from voxtral_serve.engine.session import AGE, OPTION, PART, RING

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
    if "right" not in outputs:  # vLLM 0.20.0 computes 63 tokens in two steps
        assert right > PART
        outputs |= engine.step()
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


# Memory

SPEECH_S = 12  # of a session
ROW = bytes(2 * model.SAMPLES_PER_TOKEN)
BLOCKS = 64
MORE = 40  # sessions that the option allows
CROWD = 31  # sessions of SPEECH_S that the KV cache holds: two blocks of 128 tokens each


@pytest.fixture(scope="module")
def small() -> Any:
    """A KV cache that is too small for the sessions of the option."""
    options = {OPTION: MORE, AGE: SPEECH_S}
    return engine_config(BLOCKS, additional_config=options, max_num_seqs=64, block_size=128)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def crowd(request: pytest.FixtureRequest, small: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(small[0].scheduler_config, "async_scheduling", request.param)
    return Engine(*small)


def named(number: int) -> str:
    return f"{number:032x}-0"


def test_a_session_is_admitted_if_the_kv_cache_can_hold_it(crowd: Engine) -> None:
    refused = crowd.scheduler.live([["open", named(number)] for number in range(MORE)])
    assert refused == {
        named(number): f"the KV cache holds {CROWD} live sessions of {SPEECH_S} s" for number in range(CROWD, MORE)
    }
    assert crowd.scheduler.live([["close", named(3)], ["open", named(99)]]) == {}
    assert [*crowd.scheduler.live([["open", named(100)]])] == [named(100)]


def test_a_session_has_no_more_audio_than_it_was_admitted_for(crowd: Engine) -> None:
    assert crowd.scheduler.live([["open", A], ["audio", A, ROW * 150]]) == {}
    spare = crowd.scheduler.positions - model.PROMPT_TOKENS - 150
    refused = crowd.scheduler.live([["audio", A, ROW * (spare + 8)]])
    assert "samples: a request has at most" in refused[A]


def test_no_session_is_preempted_at_its_age_and_uploads_yield(crowd: Engine) -> None:
    """As many sessions as are admitted, each as long as it may be, beside uploads that came first."""
    scheduler = crowd.scheduler
    uploads = [f"upload {number}" for number in range(12)]
    for upload in uploads:
        crowd.add(upload, tokens=450)
    sessions = {f"live {number}": named(number) for number in range(CROWD)}
    for name, session in sessions.items():
        assert scheduler.live([["open", session], ["audio", session, ROW * 8]]) == {}
        crowd.add(name, session, priority=-1)
    requests = {name: scheduler.requests[name] for name in (*sessions, *uploads)}
    for second in range(SPEECH_S * 25 // 2 - 8):
        messages = [["audio", session, ROW] for session in sessions.values()]
        assert scheduler.live(messages) == {}
        crowd.step()
        assert sum(request.num_preemptions for name, request in requests.items() if name in sessions) == 0, second
    assert scheduler.live([["end", session] for session in sessions.values()]) == {}
    while scheduler.has_requests():
        crowd.step()
    assert sum(requests[name].num_preemptions for name in sessions) == 0
    assert sum(requests[name].num_preemptions for name in uploads) > 0
    assert all(request.is_finished() for request in requests.values())
    rows = model.n_tokens(len(ROW) // 2 * 150)
    assert {len(requests[name].output_token_ids) for name in sessions} == {rows - model.PROMPT_TOKENS + 1}
    assert {len(requests[name].output_token_ids) for name in uploads} == {450}


@pytest.mark.parametrize("number", [1, 2, 8])
def test_preempted_sessions_are_computed_again_in_parts(crowd: Engine, number: int) -> None:
    """Of few at a time. A session that goes on has a token in each step, and an upload, too."""
    scheduler = crowd.scheduler
    names = [f"live {n}" for n in range(number)]
    for n, name in enumerate(names):
        assert scheduler.live([["open", named(n)], ["audio", named(n), ROW * 140]]) == {}
        crowd.add(name, named(n), priority=-1)
    while len(scheduler.requests[names[0]].output_token_ids) < 130:
        crowd.step()
    before = {name: len(scheduler.requests[name].output_token_ids) for name in names}
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    others = ["goes on", "upload"] if number > 1 else []
    if others:
        goes_on = named(number)
        assert scheduler.live([["open", goes_on], ["audio", goes_on, ROW * 140]]) == {}
        crowd.add("goes on", goes_on, priority=-1)
        crowd.add("upload", tokens=300)
    most = []
    while any(len(scheduler.requests[name].output_token_ids) == before[name] for name in names):
        assert {*others} <= {*crowd.schedule()}
        scheduled = crowd.in_flight[-1].num_scheduled_tokens
        again = {name: count for name, count in scheduled.items() if name in names and count > 1}
        most.append(len(again))
        assert max(again.values(), default=0) <= PART and len(again) <= RESUMING
        parts = step_of(crowd.in_flight[-1]).parts
        assert sum(parts[name].rows for name in again) <= MOST_AHEAD
        crowd.update()
    assert max(most) == min(number, RESUMING)
    assert len(most) >= 5  # 169 tokens


# Sessions that begin and end in every way


def test_a_thousand_sessions_leave_nothing(crowd: Engine) -> None:
    Crowd(crowd, seed=1).run(1_000)


@pytest.mark.slow
def test_ten_thousand_sessions_leave_nothing(crowd: Engine) -> None:
    Crowd(crowd, seed=2).run(10_000)


class Crowd:
    """Clients that come and go. `slots` are the requests that a worker holds audio for."""

    ENDS = ("heard", "closed", "aborted", "aborted first", "worker", "rows", "unused", "early", "second", "unclosed")

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.open: dict[str, tuple[str, str]] = {}  # by request: the session's name, and the way in which it ends
        self.slots: set[str] = set()
        self.begun, self.refused, self.ways = 0, 0, Counter[str]()
        self.depth = 1 if engine.scheduler.scheduler_config.async_scheduling else 0

    def run(self, sessions: int) -> None:
        live = self.engine.scheduler.live
        while self.begun < sessions or self.open:
            while self.begun < sessions and self.random.random() < 0.6:
                self.begin(named(self.begun + self.refused))
            for request in self.random.sample([*self.open], k=min(len(self.open), 6)):
                self.go_on(request)
            if self.random.random() < 0.05:
                self.preempt()
            self.step()
        while self.engine.scheduler.has_requests() or self.engine.in_flight:
            self.step()
        assert live([["open", named(10**6)], ["close", named(10**6)]]) == {}
        assert min(self.ways[way] for way in (*self.ENDS, "rolled over", "preempted")) > 0
        assert self.refused > 0
        self.nothing_is_left()

    def begin(self, session: str) -> None:
        scheduler, delay = self.engine.scheduler, self.random.choice([None, 1, 30])
        if scheduler.live([["open", session, delay]]):
            assert len(scheduler.sessions) == CROWD
            self.refused += 1
            return
        self.begun += 1
        request, way = f"request of {session}", self.random.choice(self.ENDS)
        self.ways[way] += 1
        self.open[request] = session, way
        if way == "unused":
            return
        shape = scheduler.sessions[session].shape
        if way != "early":
            assert scheduler.live([["audio", session, ROW * self.random.randint(shape.delay + 2, 90)]]) == {}
        self.engine.add(request, session, shape.prompt, priority=-1)
        if way == "second":
            self.engine.add(f"second {request}", session, shape.prompt)
        if self.random.random() < 0.2:
            self.engine.add(f"upload beside {request}", tokens=self.random.randint(1, 40))

    def go_on(self, request: str) -> None:
        """More audio for a session, or its end."""
        session, way = self.open[request]
        scheduler = self.engine.scheduler
        if way in ("heard", "second") and scheduler.sessions[session].ended:
            if request in scheduler.requests:
                return
            way = "closed"
        elif self.random.random() < 0.7:
            if not scheduler.sessions[session].ended:
                scheduler.live([["audio", session, ROW * self.random.randint(0, 5)], ["audio", session, b"x"]])
            return
        elif way in ("heard", "second"):
            assert scheduler.live([["end", session], ["audio", session, b"xx"]]) == {session: "audio after the end"}
            return
        if way == "aborted first":
            scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
        if way == "rows" and request in scheduler.requests:
            scheduler.faults[request] = "its rows are not there"
        if way == "worker" and request in scheduler.requests:
            self.step({request: "the worker says so"})
        if way == "unclosed" and request in scheduler.requests:
            scheduler.finish_requests([request], RequestStatus.FINISHED_ABORTED)
        messages: list[list[Any]] = [["close", session]]
        if self.random.random() < 0.2:
            self.ways["rolled over"] += 1
            messages += [
                ["open", f"{session[:-1]}1"],
                ["audio", f"{session[:-1]}1", ROW],
                ["close", f"{session[:-1]}1"],
            ]
        assert scheduler.live(messages) == {}
        if way == "aborted":
            scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
        del self.open[request]

    def preempt(self) -> None:
        self.ways["preempted"] += len(self.engine.scheduler.running)
        assert self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self, faults: dict[str, str] | None = None) -> None:
        engine = self.engine
        if engine.scheduler.has_requests():
            engine.schedule()
            scheduled = engine.in_flight[-1]
            told = step_of(scheduled)
            self.slots -= scheduled.finished_req_ids | told.preempted
            self.slots |= told.parts.keys()
            assert len(self.slots) <= CROWD
            for name, part in told.parts.items():
                assert 0 < part.rows <= RING and scheduled.num_scheduled_tokens[name] <= max(PART, 63)
        while len(engine.in_flight) > (self.depth if engine.scheduler.has_requests() else 0):
            engine.update(faults)

    def nothing_is_left(self) -> None:
        scheduler = self.engine.scheduler
        left(self.engine)
        assert self.slots == set()
        assert (scheduler.sessions, scheduler._preempted(), scheduler.faults, scheduler.ended) == ({}, [], {}, [])
        assert scheduler.untold == set() or not scheduler.untold & scheduler.requests.keys()
        assert scheduler.finished_req_ids == set()
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not any(manager.req_to_blocks.values())
        assert scheduler.encoder_cache_manager.cached == {}
