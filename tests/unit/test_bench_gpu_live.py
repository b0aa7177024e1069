"""bench.gpu live: its trials, configs, rows and file; uploads beside them; a whole run against a fake vLLM."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from fakeserver import Answer, FakeServer, write_dataset

from bench import BenchError, dataset
from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.gpu import live, liverows
from bench.gpu.__main__ import main
from bench.gpu.arguments import parse
from bench.gpu.meanwhile import Sample, Samples, Uploads
from bench.gpu.plan import LivePlan, Trial
from bench.measure.gpus import Gpus

pytestmark = pytest.mark.flaky(reruns=2)  # it compares times, and a core may be busy: tests/README.md

OUT = ["--out", "live.json"]
# What the project asks of each row of bench/results/live.json
KEYS = {
    *("name", "vllm", "sessions", "seconds_each", "age_s", "uploads", "lag_ms", "final_ms", "fell_behind"),
    *("joules_per_audio_second", "upload_rtfx", "host_bytes"),
}
FAKE_VLLM = """\
import sys, time
sys.path.insert(0, {tests!r})
from fakerealtime import FakeLive

with FakeLive(lag_s=0.02, dies={dies}, port=int(sys.argv[sys.argv.index("--port") + 1])):
    time.sleep(600)
"""


def plan_of(*flags: str) -> LivePlan:
    plan = parse(["live", *OUT, *flags])
    assert isinstance(plan, LivePlan)
    return plan


# ---- The command line and the config


def test_trials() -> None:
    plan = plan_of(
        "--trials", "sessions=150,seconds=90", "sessions=64,uploads=32", "sessions=80,age=660", "uploads=32,sessions=0"
    )
    assert plan.trials == (*(Trial(150, 90.0), Trial(64, uploads=32), Trial(80, age_s=660.0), Trial(0, uploads=32)),)
    assert plan.profile == ROOT / "profiles/fast.yaml"
    assert plan_of("--trials", "sessions=64,find=256").trials == (Trial(64, find=256),)
    assert plan_of("--trials", "sessions=8,clips=24").trials == (Trial(8, clips=24),)
    assert plan_of("--name", "stock", "--trials", "sessions=1").profile == ROOT / "profiles/realtime-stock.yaml"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trials", "seconds=3"], "expected sessions=N"),
        (["--trials", "sessions=3,hours=1"], "expected sessions=N"),
        (["--trials", "sessions=many"], "expected sessions=N"),
        (["--trials", "sessions=0"], "expected sessions or uploads"),
        (["--trials", "sessions=-1,uploads=1"], "no negative number"),
        (["--trials", "sessions=8,find=4"], "expected find to be"),
        (["--trials", "sessions=8,clips=4"], "at least as many clips as sessions"),
        (["--trials", "sessions=8,clips=8,age=4"], "no age or find"),
        (["--trials", "sessions=1", "--set", "max_num_seqs"], "expected KEY=VALUE"),
        (["--trials", "sessions=1", "--name", "other"], "add --profile"),
    ],
)
def test_wrong_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_of(*flags)
    assert said in capsys.readouterr().err


def test_the_config_has_room_for_all_in_flight() -> None:
    profile = yaml.safe_load((ROOT / "profiles/realtime-stock.yaml").read_text())
    stock = ["--name", "stock", "--trials", "sessions=150", "sessions=64,uploads=100"]
    config = live.config_of(plan_of(*stock))
    assert config == profile | {"served_model_name": "voxtral", "max_num_seqs": 164}
    assert live.config_of(plan_of("--name", "stock", "--trials", "sessions=1"))["max_num_seqs"] == 16
    changed = live.config_of(plan_of(*stock, "--set", "max_num_seqs=160", "dtype=null"))
    assert changed["max_num_seqs"] == 160
    assert "dtype" not in changed
    with pytest.raises(BenchError, match="--profile: cannot read"):
        live.config_of(plan_of("--profile", "none.yaml", "--trials", "sessions=1"))


# ---- Rows


def row(begin: float, end: float, error: str | None = None, duration_s: float = 10.0) -> Row:
    return Row("a", duration_s, 1, begin, end, None if error else 5.0, 101, None if error else "a", "a", error)


def samples_of(*found: Sample) -> Samples:
    samples = Samples(Gpus(), 0)
    samples._samples = list(found)
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
    found = liverows.row(Trial(2, 10, 660, 2), LOAD, [row(100, 110), row(100.5, 102, "closed")], uploads, samples)
    assert KEYS - {"name", "vllm"} <= found.keys()
    assert (found["sessions"], found["seconds_each"], found["age_s"], found["uploads"]) == (2, 10, 660, 2)
    assert (found["lag_ms"], found["lag_in_audio_ms"]) == ({"p50": 20.0, "p99": 40.0}, None)
    assert found["final_ms"] == {"p50": 100.0, "p95": 140.0, "p99": 150.0}
    assert (found["fell_behind"], found["failed"], found["uploads_failed"]) == (0, 1, 1)
    assert found["errors"] == ["HTTP 500", "closed"]
    # From 100 s to 110 s: 1,000 J for 10 s of live audio and 30 s of an upload
    assert found["joules_per_audio_second"] == pytest.approx(1000 / 40)
    assert found["upload_rtfx"] == pytest.approx(30 / 10)
    assert (found["host_bytes_before"], found["host_bytes"]) == (1101, 1109)


def test_what_was_not_measured_is_null() -> None:
    nothing = dict.fromkeys(("p50", "p99"))
    load = LOAD | {"lag_ms": None, "latency_ms": nothing, "fell_behind": None, "failed": 2}
    found = liverows.row(Trial(2, 10), load, [row(0, 1, "x"), row(0, 1, "x")], [], samples_of())
    for name in ("lag_ms", "final_ms", "fell_behind", "joules_per_audio_second", "upload_rtfx", "host_bytes"):
        assert found[name] is None, name
    assert found["failed"] == 2


def test_uploads_alone() -> None:
    found = liverows.row(Trial(0, 10, uploads=2), {"begin": 0, "end": 10}, [], [row(1, 5), row(2, 9)], samples_of())
    assert (found["sessions"], found["upload_rtfx"], found["lag_ms"], found["failed"]) == (0, 2.0, None, 0)


def test_merging() -> None:
    def part(name: str, config: str, lag: float, **lacking: str) -> dict[str, Any]:
        values = dict(zip(liverows.KEY, (name, "0.32.0", 16, 90.0, 0.0, 0), strict=True))
        measured = {**values, "lag_ms": {"p50": lag, "p99": lag}, "config_sha256": config, "run": 0}
        return {"runs": [{"command": name, "not_measured": lacking}], "configs": {config: "a: 1"}, "rows": [measured]}

    outcome = liverows.merge(part("stock", "s", 1), part("live", "l", 2), part("live", "m", 3))
    assert [(each["name"], each["lag_ms"]["p50"], each["run"]) for each in outcome["rows"]] == [
        ("stock", 1, 0),
        ("live", 3, 1),
    ]
    assert outcome["configs"].keys() == {"s", "m"}
    assert len(outcome["runs"]) == 2
    assert len(liverows.merge(outcome, part("live", "m", 3) | {"rows": []})["runs"]) == 2
    assert len(liverows.merge(part("live", "m", 3, trial="died") | {"rows": []})["runs"]) == 1


# ---- Beside the sessions


def test_uploads_keep_so_many_in_flight(tmp_path: Path) -> None:
    data = write_dataset(tmp_path, {f"c{number}": "a" for number in range(3)})
    clips = [Clip(clip.id, clip.path, "", 1.0, {"tokens": 3}) for clip in dataset.load(data).clips]
    with FakeServer({f"c{number}.wav": Answer("a", delay_s=0.05) for number in range(3)}) as server:
        client = Client(server.url, 5)
        client.model = server.models[0]
        begin = time.time()
        uploads = Uploads(client, clips, 4)
        time.sleep(0.6)
        uploads.stop()
        rows = uploads.done(begin, time.time())
        assert len(rows) == len(server.sent()) > 8
        assert {row.error for row in rows} == {None}


def test_samples_of_a_process() -> None:
    samples = Samples(Gpus(), os.getpid())
    begin = time.time()
    samples.start()
    time.sleep(0.7)
    samples.stop()
    first, last = samples.host_bytes(begin, time.time())
    assert first is not None and last is not None
    assert first > 10**6
    assert samples.host_bytes(0, 1) == (None, None)
    assert samples.joules(begin, begin + 0.1) is None  # there is no GPU here


def test_joules_between_samples() -> None:
    samples = samples_of(Sample(1, None, 0), Sample(2, 10.0, 0), Sample(4, 30.0, 0))
    assert samples.joules(2.5, 3.5) == pytest.approx(10)
    assert samples.joules(1.5, 3) is None
    assert samples.joules(3, 5) is None


# ---- A whole run


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(live, "WARM_UP", (0, 0))
    engine, out = tmp_path / "fake_vllm.py", tmp_path / "live.json"
    (tmp_path / "checkpoint").mkdir()
    flags = ["live", "--out", str(out), "--model", str(tmp_path / "checkpoint"), "--client-cores", "0"]
    flags += ["--command", f"{sys.executable} {engine}", "--results", str(tmp_path)]
    for name, dies in (("stock", 2), ("live", None)):
        engine.write_text(FAKE_VLLM.format(tests=str(ROOT / "tests/support"), dies=dies))
        trials = ["sessions=3,seconds=2", "sessions=1,seconds=1,age=4", "sessions=2,clips=3"]
        # The row of stock's that failed stays in the file.
        assert main([*flags, "--name", name, "--trials", *trials[: 3 if name == "live" else 1]]) == 1
    result = json.loads(out.read_text())
    assert [(each["name"], each["sessions"], each["age_s"], each["failed"]) for each in result["rows"]] == [
        *(("stock", 3, 0, 1), ("live", 3, 0, 0), ("live", 1, 4, 0), ("live", 2, 0, 0)),
    ]
    assert [each["clips"] for each in result["rows"]] == [None, None, None, 3]
    assert result["rows"][-1]["seconds_each"] == pytest.approx(result["rows"][-1]["audio_s"] / 3, abs=0.001)
    for each in result["rows"]:
        assert each.keys() >= KEYS
        assert each["vllm"] == "0.0.fake"
        assert each["lag_ms"]["p50"] >= 20
        assert each["fell_behind"] == 0
        assert each["host_bytes"] > 10**6
        assert each["client_cpu_per_session_s"] > 0
        assert (each["joules_per_audio_second"], each["upload_rtfx"]) == (None, None)
        assert yaml.safe_load(result["configs"][each["config_sha256"]])["model"] == "."
    assert len(result["runs"]) == 2
    assert str(tmp_path) not in result["runs"][0]["command"].partition("--command")[0]
    assert "lag P50" in capsys.readouterr().out
