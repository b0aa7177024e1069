"""Drafts in vLLM's own scheduler, beside live sessions, ahead of the worker and not: which requests get how many, and
every request has its tokens whatever is rejected, preempted or still to come. The worker is simulated: token i is i."""

import random
from typing import Any, NamedTuple

import pytest
from scheduling import PROMPT, Engine, engine_config
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from pico import model
from voxtral_serve.engine import drafter
from voxtral_serve.engine.draft_watch import PROBE
from voxtral_serve.engine.live_audio import step_of
from voxtral_serve.engine.session import OPTION

ROW = 2 * model.SAMPLES_PER_TOKEN  # bytes
SCHEDULE = [[1, 2, 15], [3, 4, 7], [5, 8, 1]]
DRAFTS = {
    "method": "custom_class",
    "model": "voxtral_serve.drafter.PadDrafter",
    "num_speculative_tokens": 15,
    "num_speculative_tokens_per_batch_size": SCHEDULE,
}
SEQUENCES, CONTEXT = 8, 192


class Told(NamedTuple):
    """What the worker is told to draft after a step."""

    requests: int
    pads: bool
    number: int


def most_drafts(config: Any) -> list[int]:
    """By number of requests, from 0 on."""
    speculation = config.speculative_config
    return build_dynamic_sd_schedule_lookup(
        speculation.num_speculative_tokens_per_batch_size,
        config.scheduler_config.max_num_seqs,
        speculation.num_speculative_tokens,
    )


class Worker(Engine):
    """Accepts some of the drafts, and has the rows of sessions."""

    def __init__(self, config: Any, cache: Any, accept: Any) -> None:
        super().__init__(config, cache)
        self.accept = accept  # (drafts of a request) -> how many are right
        self.most = most_drafts(config)
        self.is_async = config.scheduler_config.async_scheduling
        self.computed: dict[str, int] = {}
        self.prefill: dict[str, int] = {}
        self.rows: dict[str, int] = {}  # of sessions
        self.complete: set[str] = set()  # sessions whose last rows are here
        self.made: dict[str, list[int]] = {}
        self.verified: list[dict[str, int]] = []  # drafts by request, step by step
        self.told: list[Told] = []
        self.before: list[str] = []

    def schedule(self) -> list[str]:
        names = super().schedule()
        step = self.in_flight[-1]
        begun = [new.req_id for new in step.scheduled_new_reqs] + [*step.scheduled_cached_reqs.resumed_req_ids]
        for name in begun:
            self.computed[name], self.prefill[name] = 0, self.scheduler.requests[name].num_tokens
            self.rows.pop(name, None)
            self.complete.discard(name)
        drafts = {name: len(tokens) for name, tokens in step.scheduled_spec_decode_tokens.items()}
        assert all(0 < number <= self.most[len(self.before)] for number in drafts.values())
        if names:
            self.told.append(Told(len(names), drafter.wants_pads(step), step.num_spec_tokens_to_schedule))
            self.verified.append(drafts)
            self.before = names
        return names

    def sampled(self, scheduled: Any) -> list[list[int]]:
        for name, part in step_of(scheduled).parts.items():
            assert part.first == self.rows.get(name, 0) and name not in self.complete
            self.rows[name] = part.first + part.rows
            if part.last:
                self.complete.add(name)
        return [self._tokens(name, count, scheduled) for name, count in scheduled.num_scheduled_tokens.items()]

    def _tokens(self, name: str, count: int, scheduled: Any) -> list[int]:
        drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        right = self.accept(drafts) if drafts else 0
        known = self.computed[name] + count - drafts
        self.computed[name] = known + right
        if name in self.rows and name not in self.complete:
            assert not drafts and known <= self.rows[name]
        return [*range(known, known + right + 1)] if known >= self.prefill[name] else []

    def update(self, faults: dict[str, str] | None = None) -> Any:
        scheduled = self.in_flight[0]
        outputs = super().update(faults)
        for name, output in outputs.items():
            self.made.setdefault(name, []).extend(output.new_token_ids)
        if not self.is_async:
            names = [*scheduled.num_scheduled_tokens]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[model.STREAMING_PAD] * 15 for _ in names]))
        return outputs

    def pass_(self) -> Any:
        """One pass of EngineCore's loop, which has two steps under way if it schedules ahead."""
        if self.scheduler.has_requests():
            self.schedule()
        if self.in_flight and (not self.is_async or len(self.in_flight) == 2 or not self.scheduler.has_requests()):
            return self.update()
        return {}


@pytest.fixture(scope="module")
def config() -> Any:
    return engine_config(
        blocks=128,
        additional_config={OPTION: 4},
        speculative_config=DRAFTS,
        max_num_seqs=SEQUENCES,
        max_model_len=CONTEXT,
        block_size=16,
    )


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def options(request: pytest.FixtureRequest, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(config[0].scheduler_config, "async_scheduling", request.param)
    return config


def session(number: int) -> str:
    return f"{number:032x}-0"


@pytest.mark.parametrize("blocks", [64, 26], ids=["room for all", "preempted"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_has_its_tokens(options: Any, blocks: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = options
    chosen = random.Random(seed)
    monkeypatch.setattr(config.cache_config, "num_gpu_blocks", blocks)
    monkeypatch.setattr(cache, "num_blocks", blocks)
    worker = Worker(config, cache, lambda drafts: chosen.choice([0, drafts, chosen.randint(0, drafts)]))
    worker.scheduler.session_limit = 4  # more than the smaller KV cache holds, so that sessions are preempted
    expected = {f"upload {number}": chosen.randint(1, 130) for number in range(6)}
    for name, tokens in expected.items():
        worker.add(name, tokens=tokens)
    audio = {session(number): 0 for number in range(4)}  # rows sent
    ends = {name: chosen.randint(20, 70) for name in audio}
    drafted_live = 0
    while worker.scheduler.has_requests() or worker.in_flight or ends:
        for name, last in [*ends.items()]:
            if chosen.random() < 0.3:
                continue
            if not audio[name]:
                assert worker.scheduler.live([["open", name]]) == {}
            rows = min(chosen.choice([0, 1, 1, 2, 5]) if audio[name] else 9, last - audio[name])
            assert worker.scheduler.live([["audio", name, bytes(ROW * rows)]]) == {}
            if not audio[name]:
                worker.add(f"live {name}", name, tokens=300)
            audio[name] += rows
            if audio[name] == last:
                assert worker.scheduler.live([["end", name]]) == {}
                expected[f"live {name}"] = worker.scheduler.sessions[name].rows - PROMPT + 1
                del ends[name]
        worker.pass_()
        drafted_live += any(name.startswith("live") for name in worker.verified[-1]) if worker.verified else 0
    assert worker.made == {name: [*range(PROMPT, PROMPT + tokens)] for name, tokens in expected.items()}
    assert drafted_live
    assert worker.complete == {name for name in expected if name.startswith("live")}
    pool = worker.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == blocks - 1
    assert (worker.scheduler.requests, worker.scheduler.audio_of) == ({}, {})


def test_the_tail_of_a_session_takes_a_few_steps(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "head_file", lambda config: "a file")
    worker = Worker(*options, lambda drafts: drafts)
    assert worker.scheduler.live([["open", session(0)], ["audio", session(0), bytes(30 * ROW)]]) == {}
    worker.add("live", session(0), tokens=300)
    while worker.scheduler.has_requests() or worker.in_flight:
        worker.pass_()
    assert not any(worker.verified)
    steps = len(worker.verified)
    assert worker.scheduler.live([["end", session(0)]]) == {}
    while worker.scheduler.has_requests() or worker.in_flight:
        worker.pass_()
    drafts = [step.get("live", 0) for step in worker.verified[steps:]]
    assert drafts[:2] == [0, 15] and len(drafts) <= 4
    assert len(worker.made["live"]) == worker.scheduler.sessions[session(0)].rows - PROMPT + 1


def test_a_session_with_a_delay_of_its_own_has_no_drafts(options: Any) -> None:
    worker = Worker(*options, lambda drafts: drafts)
    messages = [["open", session(0), 3], ["audio", session(0), bytes(30 * ROW)], ["end", session(0)]]
    assert worker.scheduler.live(messages) == {}
    worker.add("live", session(0), PROMPT - model.DELAY_TOKENS + 3, tokens=300)
    while worker.scheduler.has_requests() or worker.in_flight:
        worker.pass_()
    assert not any(worker.verified)
    assert len(worker.made["live"]) == 30 + 3 + 10 - 3 + 1  # audio, and what follows it, of both delays


def test_a_useless_head_is_left(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of simulated tokens have no pads: after some hundred drafts nothing is drafted but in one step of 64."""
    monkeypatch.setattr(drafter, "head_file", lambda config: "a file")
    worker = Worker(*options, lambda drafts: 0)
    for number in range(40):
        worker.add(f"upload {number}", tokens=130)
    while worker.scheduler.has_requests() or worker.in_flight:
        worker.pass_()
    full = [told for told in worker.told if told.requests == SEQUENCES]
    assert full[:5] == [Told(8, False, 1)] * 5
    probes = [told for told in full[200:] if told != Told(8, False, 0)]
    assert probes == [Told(8, False, 1)] * len(probes)
    assert 1 <= len(probes) <= len(full[200:]) / PROBE + 1
    steps = [drafts for drafts in worker.verified[200:] if drafts]
    assert len(steps) <= len(worker.verified[200:]) / PROBE + 1


def test_without_a_head_the_worker_drafts_pads(options: Any) -> None:
    worker = Worker(*options, lambda drafts: drafts)
    worker.add("upload", tokens=130)
    while worker.scheduler.has_requests() or worker.in_flight:
        worker.pass_()
    assert {told for told in worker.told if told.requests} == {Told(1, True, 7)}
