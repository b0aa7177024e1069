"""Levels of load: closed and open loop, what each of them took, what it costs to send, and kills between them."""

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakeserver import Answer, FakeServer, write_dataset

from bench import BenchError, loads, run
from bench.__main__ import main
from bench.dataset import Clip
from bench.loads import Load

ROOT = Path(__file__).parents[2]
TEXTS = {f"c{number:02}": f"alpha beta {number}" for number in range(10)}
QUEUE = """\
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.3",model_name="m"}} {quick}
vllm:request_queue_time_seconds_bucket{{engine="0",le="0.5",model_name="m"}} {quick}
vllm:request_queue_time_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {all}
vllm:request_queue_time_seconds_bucket{{engine="1",le="0.3",model_name="m"}} 1.0
vllm:request_queue_time_seconds_bucket{{engine="1",le="0.5",model_name="m"}} 2.0
vllm:request_queue_time_seconds_bucket{{engine="1",le="+Inf",model_name="m"}} 3.0
vllm:request_queue_time_seconds_count{{engine="0",model_name="m"}} {all}
"""


class Case:
    def __init__(self, directory: Path, url: str, texts: dict[str, str]) -> None:
        self.data = write_dataset(directory / "data", texts, seconds=0.002)
        self.out, self.url = directory / "out", url

    def flags(self, *more: str) -> list[str]:
        return ["run", "--url", self.url, "--dataset", str(self.data), "--out", str(self.out), "--warmup", "0", *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bench", *self.flags(*more)]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def rows(self) -> list[dict[str, Any]]:
        path = self.out / "requests.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [json.loads(line) for line in whole.splitlines()]

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.out / "run.json").read_text())
        return record


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(default=Answer("alpha beta")) as fake:
        yield fake


@pytest.fixture
def case(tmp_path: Path, server: FakeServer) -> Case:
    return Case(tmp_path, server.url, TEXTS)


@pytest.fixture
def fast_url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(ROOT / "tests/support/fastserver.py")], stdout=subprocess.PIPE)
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


# ---- Flags


def test_names() -> None:
    assert loads.closed("1,16") == [Load("c1", concurrency=1), Load("c16", concurrency=16)]
    assert loads.open_loop("2.5,10") == [Load("r2.5", rate=2.5), Load("r10", rate=10.0)]
    for wrong in ("", "1,", "0", "-1", "1,1", "1.5"):
        with pytest.raises(ValueError):
            loads.closed(wrong)
    for wrong in ("0", "inf", "nan", "2,2.0", "x"):
        with pytest.raises(ValueError):
            loads.open_loop(wrong)


# ---- Closed loop


def test_one_row_per_clip_and_load_in_their_order(case: Case, server: FakeServer) -> None:
    numbers = itertools.count()

    class Together(dict[str, Answer]):
        """As many answers wait for each other as the load has requests in flight."""

        barriers = tuple(threading.Barrier(count) for count in (1, 5, 2))

        def get(self, name: str, default: Any = None) -> Any:
            return Answer("alpha", together=self.barriers[next(numbers) // len(TEXTS)])

    server.answers = Together()
    assert main(case.flags("--concurrency", "1,5,2")) == 0
    rows = case.rows()
    assert [row["load"] for row in rows] == ["c1"] * 10 + ["c5"] * 10 + ["c2"] * 10
    for load in ("c1", "c5", "c2"):
        assert sorted(row["id"] for row in rows if row["load"] == load) == list(TEXTS)
    assert [row["id"] for row in rows[:10]] == list(TEXTS)
    assert {row["due"] for row in rows} == {None}
    spans = {load: [(row["start"], row["end"]) for row in rows if row["load"] == load] for load in ("c1", "c5", "c2")}
    assert {load: most_at_once(times) for load, times in spans.items()} == {"c1": 1, "c5": 5, "c2": 2}
    record = case.record()
    assert record["schema_version"] == 2
    assert record["run"]["loads"] == list(record["loads"]) == ["c1", "c5", "c2"]
    for took in record["loads"].values():
        assert took["harness_cpu_s"] > 0
        assert (took["joules"], took["queued"], took["queue_threshold_s"]) == (None, None, None)
        assert took["joules_reason"] == "this machine has no NVIDIA GPU"


def most_at_once(times: list[tuple[float, float]]) -> int:
    return max(sum(start <= at < end for start, end in times) for at, _ in times)


def test_more_connections_than_files_may_be_open(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert main(case.flags("--concurrency", str(limit))) == 2
    assert f"--concurrency {limit}: the limit of open files allows {limit - 100}" in capsys.readouterr().err


# ---- Open loop


def test_requests_start_when_due_whatever_is_in_flight(case: Case, server: FakeServer) -> None:
    server.default = Answer("alpha", together=threading.Barrier(10))
    assert main(case.flags("--rate", "20,40", "--seed", "3")) == 0
    rows = case.rows()
    assert [row["load"] for row in rows] == ["r20"] * 10 + ["r40"] * 10
    for load, rate in ((rows[:10], 20), (rows[10:], 40)):
        load.sort(key=lambda row: str(row["id"]))
        draw = random.Random(3)
        gaps = [draw.expovariate(rate) for _ in load][1:]
        dues = [row["due"] for row in load]
        assert [after - before for before, after in itertools.pairwise(dues)] == pytest.approx(gaps, abs=1e-5)
        assert most_at_once([(row["start"], row["end"]) for row in load]) == 10
        for row in load:
            assert row["start"] >= row["due"]
            assert row["latency_ms"] == pytest.approx((row["end"] - row["due"]) * 1000, abs=0.01)
    assert server.max_in_flight == 10


def test_rows_are_written_while_requests_are_in_flight(case: Case, server: FakeServer) -> None:
    server.answers = {"c00.wav": Answer("late", delay_s=60)}
    process = case.start("--rate", "50")
    wait_until(lambda: len(case.rows()) == 9)
    process.kill()
    process.communicate()


def test_open_loop_stops_where_it_may_open_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [Clip(str(number), Path(), "", 1.0, {}) for number in range(9)]
    done: list[str] = []

    def one(clip: Clip, due: float | None) -> Any:
        time.sleep(0.5)
        done.append(clip.id)

    monkeypatch.setattr(loads, "_most_connections", lambda: 4)
    load = Load("r1000", rate=1000.0)
    threads = loads.pool(load, len(clips))
    with pytest.raises(BenchError, match=r"--rate 1000\.0: 4 requests are in flight.*ulimit -n"):
        list(loads.send(load, threads, clips, one, seed=0))
    threads.shutdown()
    assert sorted(done) == ["0", "1", "2", "3"]


# ---- What a load took


def test_queued_requests_are_those_above_the_lowest_edge(case: Case, server: FakeServer) -> None:
    def metrics() -> str:
        sent = len(server.sent())
        return QUEUE.format(quick=float(100 + sent - sent // 5), all=float(200 + sent))

    server.metrics = metrics
    assert main(case.flags("--concurrency", "1,2", "--warmup", "5")) == 0
    took = case.record()["loads"]
    assert {name: (load["queued"], load["queue_threshold_s"]) for name, load in took.items()} == {
        **{"c1": (2, 0.3), "c2": (2, 0.3)},
    }


class FakeGpus:
    """One GPU, which counts 2 J for each look at its counter, and the server's process holds it open or does not."""

    def __init__(self, opened: bool = True) -> None:
        self.handles, self.opened, self.count = {0: "gpu"}, opened, 1.0

    def of_processes(self, pids: set[int]) -> int | None:
        return 7 if self.opened else None

    def opened_by(self, pids: set[int]) -> set[int]:
        return {0} if self.opened and os.getpid() in pids else set()

    def in_use(self, minors: set[int]) -> int | None:
        return 9 if minors else None

    def joules(self, minors: set[int]) -> float | None:
        self.count += 2.0
        return self.count if minors else None


def test_joules_are_of_each_load_and_add_up_over_parts(
    case: Case, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = FakeGpus()
    monkeypatch.setattr("bench.measure.gpus.Gpus", lambda: gpus)
    server.answers = {"c03.wav": Answer(status=500)}
    assert main(case.flags("--concurrency", "1,2")) == 1
    took = case.record()["loads"]
    assert [(load["joules"], load["joules_reason"]) for load in took.values()] == [(2.0, None)] * 2
    server.answers = {}
    assert main(case.flags("--concurrency", "1,2", "--resume")) == 0
    resumed = case.record()["loads"]
    assert [load["joules"] for load in resumed.values()] == [4.0, 4.0]
    assert all(resumed[name]["harness_cpu_s"] >= took[name]["harness_cpu_s"] for name in took)
    assert [row["part"] for row in case.rows()] == [1] * 20 + [2] * 2
    figures = case.record()["memory"]
    assert (figures["peak_bytes"], figures["end_bytes"], figures["source"]) == (7, 7, "nvml_process_tree")
    assert figures["device_peak_bytes"] == 9
    assert figures["host_rss_peak_bytes"] > 2**20
    assert (figures["weights_bytes"], figures["kv_cache_bytes"], figures["other_bytes"]) == (None, None, None)

    gpus.opened = False
    assert main(case.flags("--out", str(case.out / "b"))) == 0
    took = json.loads((case.out / "b/run.json").read_text())["loads"]["c1"]
    assert (took["joules"], took["joules_reason"]) == (
        None,
        "the server has no GPU open, or this user may not see it",
    )


def test_parts_of_memory() -> None:
    def part(source: str | None, peak: int | None, end: int | None, device: int | None = None) -> dict[str, Any]:
        figures = {"peak_bytes": peak, "end_bytes": end, "source": source, "reason": None}
        return figures | {"device_peak_bytes": device, "host_rss_peak_bytes": 5}

    split: dict[str, int | None] = {"weights_bytes": 30, "kv_cache_bytes": 50}
    unknown: dict[str, int | None] = dict.fromkeys(split)
    gpu = run._memory(part("nvml_device", 90, 80, 90), part("nvml_device", 85, 85, 85), split)
    assert (gpu["peak_bytes"], gpu["end_bytes"], gpu["device_peak_bytes"], gpu["other_bytes"]) == (90, 85, 90, 10)
    assert run._memory(None, part("nvml_device", 90, 80), unknown)["other_bytes"] is None
    assert run._memory(None, part("rss_process_tree", 90, 80), split)["other_bytes"] is None
    kept = run._memory(part("nvml_device", 90, 80, 90), part(None, None, None), unknown)
    assert (kept["peak_bytes"], kept["end_bytes"], kept["source"]) == (90, 80, "nvml_device")
    other = run._memory(part("rss_process_tree", 90, 80), part("nvml_device", 70, 60, 70), unknown)
    assert (other["peak_bytes"], other["source"]) == (70, "nvml_device")


# ---- Kills and --resume


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_what_was_in_flight(tmp_path: Path, fast_url: str) -> None:
    """Killed again and again in the midst of its loads, each time resumed."""
    case = Case(tmp_path, fast_url, {f"c{number:03}": "alpha beta" for number in range(300)})
    levels = ("--concurrency", "8,1,4")
    more: list[str] = []
    for rows in (20, 350, 700):
        process = case.start(*levels, *more)
        path = case.out / "requests.jsonl"
        wait_until(lambda rows=rows, path=path: path.exists() and path.read_bytes().count(b"\n") >= rows)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        more = ["--resume"]
        done = case.rows()
        assert len({(row["id"], row["load"]) for row in done}) == len(done) >= rows  # none was sent twice
    assert main(case.flags(*levels, "--resume")) == 0
    rows = case.rows()
    assert len(rows) == 900
    assert {(row["id"], row["load"]) for row in rows} == {
        (f"c{number:03}", load) for number in range(300) for load in ("c8", "c1", "c4")
    }
    took = case.record()["loads"]
    assert took["c8"]["harness_cpu_s"] is None  # of the part that was killed nothing is known
    assert took["c8"]["joules_reason"] == "a part of this load was killed"


def test_resume_is_per_clip_and_load(case: Case, server: FakeServer) -> None:
    class FailsAtTwo(dict[str, Answer]):
        """c04 fails when it is sent for the second time, at the second load."""

        asked = 0

        def get(self, name: str, default: Any = None) -> Any:
            self.asked += name == "c04.wav"
            return Answer(status=500) if name == "c04.wav" and self.asked == 2 else Answer("alpha")

    server.answers = FailsAtTwo()
    assert main(case.flags("--concurrency", "1,2,3")) == 1
    server.received.clear()
    assert main(case.flags("--concurrency", "1,2,3", "--resume")) == 0
    assert server.sent() == ["c04.wav"]
    last = case.rows()[-1]
    assert (last["id"], last["load"], last["part"], last["error"]) == ("c04", "c2", 2, None)
    server.received.clear()
    assert main(case.flags("--concurrency", "1,2,3", "--resume")) == 0
    assert server.sent() == []


def test_a_run_of_another_form_is_not_continued(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(case.flags()) == 0
    (case.out / "run.json").write_text(json.dumps(case.record() | {"schema_version": 1}))
    assert main(case.flags("--resume")) == 2
    assert "has schema version 1, this bench writes 2" in capsys.readouterr().err


# ---- What it costs


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--stream"]])
def test_a_request_costs_less_than_2_ms(tmp_path: Path, fast_url: str, more: list[str]) -> None:
    """CPU time of the whole process, at concurrency 64, against a server that answers at once."""
    case = Case(tmp_path, fast_url, {f"c{number:04}": "alpha beta" for number in range(1500)})
    process = case.start("--concurrency", "64", "--warmup", "64", *more)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    milliseconds = case.record()["loads"]["c64"]["harness_cpu_s"] / 1500 * 1000
    assert 0.05 < milliseconds < 2


@pytest.mark.slow
def test_memory_is_flat_over_10_000_requests(fast_url: str, tmp_path: Path) -> None:
    texts = {f"c{number:03}": "alpha beta" for number in range(500)}
    case = Case(tmp_path, fast_url, texts)
    process = case.start("--concurrency", ",".join(str(8 + level) for level in range(20)))
    resident = psutil.Process(process.pid)
    sizes: dict[int, int] = {}
    path = case.out / "requests.jsonl"
    while process.poll() is None:
        with contextlib.suppress(psutil.Error, OSError):
            sizes[path.read_bytes().count(b"\n")] = resident.memory_info().rss
        time.sleep(0.1)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert len(case.rows()) == 10_000
    early = max(size for rows, size in sizes.items() if 500 <= rows <= 2500)
    late = max(size for rows, size in sizes.items() if 7500 <= rows < 10_000)
    assert late - early < 4 * 2**20


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
