"""The timeline of the engine's steps: what the probe writes, and the figures that bench.gpu makes of it."""

import dataclasses
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from bench import BenchError
from bench.gpu import steps
from voxtral_serve.engine.steps import BATCH, VARIABLE, StepProbe, StepsError, probe_of


class Worker:
    """What the probe sees of a worker of vLLM, without a model. `returns`: what `execute_model` returns."""

    def __init__(self, device: str = "cpu", rank: int = 0, index: int = 0, returns: Any = None) -> None:
        self.device_config, self.rank = SimpleNamespace(device_type=device), rank
        self.parallel_config = SimpleNamespace(data_parallel_index=index)
        self.returns, self.stopped = returns, False

    def execute_model(self, scheduled: SchedulerOutput) -> Any:
        time.sleep(0.002)
        return self.returns

    def sample_tokens(self, grammar: Any) -> str:
        time.sleep(0.001)
        return "tokens"

    def shutdown(self) -> None:
        self.stopped = True


def scheduled(new: int = 0, encode: int = 0, tokens: tuple[int, ...] = (1,)) -> SchedulerOutput:
    requests: Any = [None] * new
    return dataclasses.replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=requests,
        num_scheduled_tokens={str(number): count for number, count in enumerate(tokens)},
        total_num_scheduled_tokens=sum(tokens),
        scheduled_encoder_inputs={str(number): [0] for number in range(encode)},
    )


IDLE = scheduled(tokens=())


def probed(file: Path, worker: Worker) -> StepProbe:
    probe = probe_of(worker, {VARIABLE: str(file)})
    assert probe is not None
    probe.attach(worker)
    return probe


def run(worker: Worker, *outputs: SchedulerOutput) -> None:
    for output in outputs:
        if worker.execute_model(output) is None and output.total_num_scheduled_tokens:
            assert worker.sample_tokens(None) == "tokens"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ---- The probe


def test_each_step_is_a_line_that_the_benchmark_reads(tmp_path: Path) -> None:
    """One format in two packages: the engine's file, as it is, through the benchmark's reader."""
    file, worker = tmp_path / "steps.jsonl", Worker()
    probed(file, worker)
    begun = time.time()
    run(worker, scheduled(2, 1, (40, 38)), scheduled(tokens=(1, 1, 1)), scheduled(0, 1, (7,)))
    ended = time.time()
    assert file.read_text() == ""  # not a write for each
    run(worker, IDLE)
    found = steps.read(file, begun, ended)
    assert found == lines(file) and found
    assert all(step.keys() == steps.KEYS for step in found)
    counts = ("requests", "tokens", "new", "encode")
    assert [tuple(step[name] for name in counts) for step in found] == [(2, 78, 2, 1), (3, 3, 0, 0), (1, 7, 0, 1)]
    assert all(step["execute_ms"] >= 2 and step["sample_ms"] >= 1 for step in found)
    assert all(step["gpu_ms"] is step["gpu_idle_ms"] is None for step in found)
    assert [figures["kind"] for figures in steps.summary(found) or ()] == ["decode", "begin", "idle"]
    run(worker, scheduled())
    worker.shutdown()
    assert worker.stopped
    assert len(lines(file)) == 4
    assert len(steps.read(file, begun, ended) or ()) == 3  # the others began later


def test_a_step_without_sampling_is_whole_when_execute_model_returns(tmp_path: Path) -> None:
    worker = Worker(returns="tokens")
    probed(tmp_path / "steps.jsonl", worker)
    run(worker, scheduled(), scheduled(), IDLE)
    assert [step["sample_ms"] for step in lines(tmp_path / "steps.jsonl")] == [0, 0]


def test_a_busy_engine_writes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr("voxtral_serve.engine.steps.FLUSH_S", 3600)
    worker = Worker()
    probed(tmp_path / "steps.jsonl", worker)
    run(worker, *[scheduled()] * (BATCH + 1))
    assert len(lines(tmp_path / "steps.jsonl")) == BATCH
    monkeypatch.setattr("voxtral_serve.engine.steps.FLUSH_S", 0)
    run(worker, scheduled())
    assert len(lines(tmp_path / "steps.jsonl")) == BATCH + 2


def test_a_step_costs_the_host_less_than_a_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 ms, the shortest step of 64 requests on an H200. Seen: 3 us, without the two CUDA events."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    step, worker, turns = scheduled(tokens=(1,) * 64), Worker(), 2000

    def microseconds() -> float:
        begun = time.thread_time()
        run(worker, *[step] * turns)
        return 1e6 * (time.thread_time() - begun) / turns

    bare = min(microseconds() for _ in range(3))
    probed(tmp_path / "steps.jsonl", worker)
    assert min(microseconds() for _ in range(5)) - bare < 30


def test_without_the_variable_and_on_other_workers_nothing_is_wrapped(tmp_path: Path) -> None:
    assert probe_of(Worker(), {}) is None
    assert probe_of(Worker(), {VARIABLE: ""}) is None
    named = {VARIABLE: str(tmp_path / "steps.jsonl")}
    assert probe_of(Worker(rank=1), named) is None
    assert probe_of(Worker(index=1), named) is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    name = str(tmp_path / "missing/steps.jsonl")
    with pytest.raises(StepsError, match=f"VOXTRAL_SERVE_STEPS is '{name}', which cannot be written .No such file"):
        probe_of(Worker(), {VARIABLE: name})


def test_a_full_disk_ends_the_timeline_and_not_the_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    probed(Path("/dev/full"), worker)
    log = logging.getLogger("vllm.voxtral_serve")
    monkeypatch.setattr(log, "propagate", False)  # as vLLM's logging has it
    log.addHandler(caplog.handler)
    try:
        run(worker, scheduled(), IDLE, scheduled(), IDLE)
    finally:
        log.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == [
        "VOXTRAL_SERVE_STEPS: /dev/full cannot be written any more: [Errno 28] No space left on device. It ends here."
    ]
    worker.shutdown()
    assert worker.stopped


class Stream:
    """A GPU's stream: 3 ms for each step, 1 ms before each, which the host is ahead of by some steps."""

    def __init__(self) -> None:
        self.at_ms, self.reached_ms, self.events = 0.0, 0.0, 0

    def event(self) -> "Event":
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at_ms = stream, -1.0

    def record(self) -> None:
        self.stream.at_ms += 1 if self.stream.at_ms % 4 == 0 else 3
        self.at_ms = self.stream.at_ms

    def query(self) -> bool:
        return self.at_ms <= self.stream.reached_ms

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query()  # CUDA's refuses an event that is not reached
        return other.at_ms - self.at_ms


def test_the_gpus_times_are_read_when_it_has_reached_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: stream.event())
    file, worker = tmp_path / "steps.jsonl", Worker("cuda")
    probed(file, worker)
    for number in range(20):
        run(worker, scheduled(tokens=(1,) * (number + 1)))
        stream.reached_ms = stream.at_ms - 4  # the GPU is a step behind
    run(worker, IDLE)
    assert [step["requests"] for step in lines(file)] == list(range(1, 20))  # without the one that runs
    stream.reached_ms = stream.at_ms
    worker.shutdown()
    assert [step["requests"] for step in lines(file)] == list(range(1, 21))
    assert [step["gpu_ms"] for step in lines(file)] == [3.0] * 20
    assert [step["gpu_idle_ms"] for step in lines(file)] == [None] + [1.0] * 19
    assert stream.events <= 8  # each is used again


# ---- The figures


def step(at: float, gpu: float | None, idle: float | None, new: int = 0, requests: int = 1, **more: Any) -> steps.Step:
    own = {"at": at, "execute_ms": 1.0, "sample_ms": 1.0, "gpu_ms": gpu, "gpu_idle_ms": idle}
    return own | {"requests": requests, "tokens": requests, "new": new, "encode": new} | more


def test_figures_by_kind() -> None:
    found = [
        step(10.000, 8.0, 500.0, new=1, requests=2, tokens=40),  # idle since before the row
        step(10.010, 4.0, 2.0, requests=4),
        step(10.016, 2.0, 0.0, requests=2),
        step(10.020, 10.0, 6.0, tokens=7, encode=1),  # an encoder's pass of a request that has begun
    ]
    decode, begin, idle = steps.summary(found) or ()
    assert decode == {
        "kind": "decode",
        "count": 2,
        "share_of_time": pytest.approx(6 / 32),
        "ms": {"mean": 3.0, "p50": 3.0, "p99": pytest.approx(3.98)},
        "host_ms": {"mean": 2.0, "p50": 2.0, "p99": 2.0},
        "requests_mean": 3.0,
        "tokens_mean": 3.0,
        "gpu_busy_share": pytest.approx(6 / 8),
    }
    assert (begin["kind"], begin["count"], begin["ms"]["mean"], begin["tokens_mean"]) == ("begin", 2, 9.0, 23.5)
    assert (begin["share_of_time"], begin["gpu_busy_share"]) == (pytest.approx(18 / 32), pytest.approx(18 / 24))
    assert (idle["kind"], idle["count"], idle["share_of_time"]) == ("idle", 3, pytest.approx(8 / 32))
    assert idle["ms"] == {"mean": pytest.approx(8 / 3), "p50": 2.0, "p99": pytest.approx(5.92)}
    assert idle["host_ms"] == pytest.approx({"mean": 14 / 3, "p50": 4, "p99": 7.92})
    assert (idle["requests_mean"], idle["tokens_mean"], idle["gpu_busy_share"]) == (None, None, 0)
    assert begin.keys() == decode.keys() == idle.keys()
    shown = steps.table([decode, begin, idle]).splitlines()
    assert [line.split()[:3] for line in shown[1:]] == [
        ["decode", "2", "18.8%"],
        ["begin", "2", "56.2%"],
        ["idle", "3", "25.0%"],
    ]


def test_without_a_gpu_the_shares_are_the_hosts() -> None:
    decode, idle = steps.summary([step(1.0, None, None), step(1.004, None, None), step(1.012, None, None)]) or ()
    assert (decode["share_of_time"], idle["share_of_time"]) == (pytest.approx(6 / 14), pytest.approx(8 / 14))
    assert all(figures["ms"] is figures["gpu_busy_share"] is None for figures in (decode, idle))
    assert "-" in steps.table([decode])


def test_no_file_and_no_steps(tmp_path: Path) -> None:
    assert steps.read(tmp_path / "steps.jsonl", 0, 1) is None
    assert steps.summary(None) is None
    assert "this server has written none" in steps.table(None)
    assert steps.summary([]) == []
    assert "no steps between" in steps.table([])


def test_a_line_that_is_being_written_is_left_out_and_another_form_refused(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(json.dumps(step(1.0, 1.0, None)) + '\n{"at": 1.0')
    assert len(steps.read(file, 0, 2) or ()) == 1
    file.write_text('{"at": 1.0}\n')
    with pytest.raises(BenchError, match=r"steps.jsonl, line 1 is '\{\"at\": 1.0\}': expected a step with \['at', "):
        steps.read(file, 0, 2)
