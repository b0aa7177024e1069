"""bench gpu live: the figures of a row; uploads beside the sessions; whole rows against a fake vLLM."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakeserver import Answer, FakeServer, write_dataset
from places import ROOT

from bench import dataset
from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.gpu import live, meanwhile, report
from bench.gpu.command import main
from bench.gpu.meanwhile import Sample, Samples, Uploads
from bench.gpu.plan import Sessions
from bench.measure.gpus import Gpus

FAKE_VLLM = """\
import sys, time
sys.path.insert(0, {tests!r})
from fakerealtime import FakeLive

with FakeLive(lag_s=0.02, dies={dies}, port=int(sys.argv[sys.argv.index("--port") + 1])):
    time.sleep(600)
"""


# ---- Rows


def row(begin: float, end: float, error: str | None = None, duration_s: float = 10.0) -> Row:
    return Row("a", duration_s, 1, begin, end, None if error else 5.0, 101, None if error else "a", "a", error)


def samples_of(*taken: Sample) -> Samples:
    samples = Samples(Gpus(), 0)
    samples._samples = list(taken)
    return samples


LOAD = {
    **{"sessions": 2, "failed": 1, "missing": 0, "fell_behind": 0, "lag_of": "token"},
    **{"lag_ms": {"p50": 20.0, "p90": 30.0, "p99": 40.0, "max": 50.0}, "lag_in_audio_ms": None},
    **{"latency_ms": {"p50": 100.0, "p95": 140.0, "p99": 150.0}, "late_sends_ms": None},
    "harness_cpu_per_session_s": 0.01,
}


def test_a_row() -> None:
    samples = samples_of(*(Sample(at, 100 * (at - 95), 1000 + at) for at in (95, 99, 101, 105, 109, 115)))
    uploads = [row(90, 99), row(98, 104, duration_s=30), row(100, 105, "HTTP 500"), row(105, 111)]
    sessions = [row(100, 110), row(100.5, 102, "closed")]
    figures = live.figures(Sessions("realtime", 2, 8, 10, 660, 2), LOAD, sessions, uploads, samples)
    assert [figures[name] for name in ("sessions", "least_s", "most_s", "age_s", "uploads")] == [2, 8, 10, 660, 2]
    assert (figures["lag_ms"], figures["lag_in_audio_ms"]) == ({"p50": 20.0, "p99": 40.0}, None)
    assert figures["final_ms"] == {"p50": 100.0, "p95": 140.0, "p99": 150.0}
    assert (figures["fell_behind"], figures["failed"]) == (0, 2)  # a session and an upload
    assert figures["errors"] == ["HTTP 500", "closed"]
    # From 100 s to 110 s: 1,000 J for 10 s of live audio and 30 s of an upload
    assert figures["joules_per_audio_second"] == pytest.approx(1000 / 40)
    assert figures["upload_rtfx"] == pytest.approx(30 / 10)
    assert figures["host_bytes"] == 1109


def test_what_was_not_measured_is_null() -> None:
    load = LOAD | {"lag_ms": None, "latency_ms": dict.fromkeys(("p50", "p99")), "fell_behind": None, "failed": 2}
    figures = live.figures(Sessions("realtime", 2), load, [row(0, 1, "x"), row(0, 1, "x")], [], samples_of())
    for name in ("lag_ms", "final_ms", "fell_behind", "joules_per_audio_second", "upload_rtfx", "host_bytes"):
        assert figures[name] is None, name
    assert figures["failed"] == 2


# ---- Beside the sessions


def test_uploads_keep_so_many_in_flight(tmp_path: Path) -> None:
    data = write_dataset(tmp_path, {f"c{number}": "a" for number in range(3)})
    clips = [Clip(clip.id, clip.path, "", 1.0, {"tokens": 3}) for clip in dataset.load(data).clips]
    ended = threading.Semaphore(0)
    with FakeServer({f"c{number}.wav": Answer("a", delay_s=0.05) for number in range(3)}) as server:
        client = Client(server.url, 5)
        client.model = server.models[0]
        send = client.transcribe

        def transcribe(*arguments: Any, **settings: Any) -> Row:
            answer = send(*arguments, **settings)
            ended.release()
            return answer

        client.transcribe = transcribe  # type: ignore[method-assign]
        uploads = Uploads(client, clips, 4)
        for _ in range(9):  # each clip three times
            assert ended.acquire(timeout=30)
        uploads.stop()
        assert len(uploads.rows) == len(server.sent()) > 8
        assert {answer.error for answer in uploads.rows} == {None}


def test_samples_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meanwhile, "INTERVAL_S", 0.01)
    samples = Samples(Gpus(), os.getpid())
    samples.start()
    while len(samples._samples) < 2:
        assert samples.is_alive()
    samples.stop()
    begin, end = samples._samples[0].at, samples._samples[-1].at
    first, last = samples.host_bytes(begin, end)
    assert first is not None and last is not None
    assert first > 10**6
    assert samples.host_bytes(0, 1) == (None, None)
    assert samples.joules(begin, end) is None  # there is no GPU here


def test_joules_between_samples() -> None:
    samples = samples_of(Sample(1, None, 0), Sample(2, 10.0, 0), Sample(4, 30.0, 0))
    assert samples.joules(2.5, 3.5) == pytest.approx(10)
    assert samples.joules(1.5, 3) is None
    assert samples.joules(3, 5) is None


def test_the_server_leaves_cores_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its threads, while its sessions are measured. With few cores, both keep all."""
    code = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    pinned: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: pinned.append((thread, cores)))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline()
        threads = {int(thread) for thread in os.listdir(f"/proc/{server.pid}/task")}
        assert len(threads) == 2
        with live.cores(server.pid, 2):
            assert dict(pinned) == {thread: [0, 1, 2, 3] for thread in threads} | {0: [4, 5]}
        assert dict(pinned) == {thread: [0, 1, 2, 3, 4, 5] for thread in (*threads, 0)}
        pinned.clear()
        for count in (0, 3):
            with live.cores(server.pid, count):
                assert pinned == []
        server.communicate(b"\n")


# ---- Whole rows


@pytest.mark.slow
def test_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A session that dies counts as failed, and its row is measured again. Sessions end at different times."""
    monkeypatch.setattr(report, "WARM_UP", (0, 0))
    engine, out = tmp_path / "fake_vllm.py", tmp_path / "live.json"
    (tmp_path / "checkpoint").mkdir()
    flags = ["live", "--out", str(out), "--model", str(tmp_path / "checkpoint"), "--results", str(tmp_path)]
    flags += ["--command", f"{sys.executable} {engine}", "--sessions", "1,3", "--seconds", "1-3"]
    for dies, status in ((2, 1), (None, 0)):
        engine.write_text(FAKE_VLLM.format(tests=str(ROOT / "tests/support"), dies=dies))
        assert main(flags) == status
        result = json.loads(out.read_text())
        names = [(row["row"], row["failed"]) for row in result["rows"]]
        assert names == [("realtime@1live", 0), ("realtime@3live", int(dies is not None))]
    for row in result["rows"]:
        assert (row["kind"], row["server"], row["vllm"]) == ("live", "realtime", "0.0.fake")
        assert row["lag_ms"]["p50"] >= 20
        assert row["final_ms"]["p50"] > 0
        assert 0 <= row["fell_behind"] <= row["sessions"]  # a busy core may hold the fake server up
        assert row["host_bytes"] > 10**6
        assert row["client_cpu_per_session_s"] > 0
        assert (row["joules_per_audio_second"], row["upload_rtfx"], row["peak_vram_bytes"]) == (None, None, None)
    (directory,) = sorted(tmp_path.glob("realtime@3live-*"))[-1:]
    lengths = {json.loads(line)["duration_s"] for line in (directory / "requests.jsonl").read_text().splitlines()}
    assert len(lengths) == 3 and 1 <= min(lengths) <= max(lengths) <= 3
    profile = yaml.safe_load((ROOT / "profiles/realtime.yaml").read_text())
    config = result["configs"]["realtime"]["config"]
    assert {key: config[key] for key in ("max_num_seqs", "additional_config")} == {
        key: profile[key] for key in ("max_num_seqs", "additional_config")
    }
    assert "realtime@3live" in capsys.readouterr().out


def test_more_sessions_than_the_server_decodes_are_refused(tmp_path: Path) -> None:
    engine, out = tmp_path / "fake_vllm.py", tmp_path / "live.json"
    engine.write_text(FAKE_VLLM.format(tests=str(ROOT / "tests/support"), dies=None))
    (tmp_path / "checkpoint").mkdir()
    flags = ["live", "--out", str(out), "--model", str(tmp_path / "checkpoint"), "--sessions", "286", "--uploads", "3"]
    assert main([*flags, "--command", f"{sys.executable} {engine}"]) == 1
    told = "realtime@286live,uploads=3: realtime has max_num_seqs 288: add --set max_num_seqs=NUMBER"
    assert json.loads(out.read_text())["not_measured"] == {"realtime@286live,uploads=3": told}
