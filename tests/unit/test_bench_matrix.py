"""Whole matrices with a fake server in place of vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakeserver import write_dataset

from bench import BenchError, compare, dataset, matrix
from bench.__main__ import main

ROOT = Path(__file__).parents[2]
TEXTS = {f"c{number}": f"alpha beta number {number}" for number in range(4)}

# Its config says what it does, starts.jsonl in the directory that it serves what it was given.
FAKE = """\
import json, os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import fakeserver
import yaml
from fakeserver import Answer, FakeServer

def after(flag):
    return sys.argv[sys.argv.index(flag) + 1]

config = yaml.safe_load(Path(after("--config")).read_text())
with open("starts.jsonl", "a") as starts:
    given = dict(config=after("--config"), settings=config, variable=os.environ.get("FAKE_VARIABLE"))
    starts.write(json.dumps(given) + "\\n")
print("the fake starts", flush=True)
if "dies" in config:
    sys.exit(config["dies"])
delay_s = config.get("delay_s", 0)
answers = {{clip + ".wav": Answer(text, delay_s=delay_s) for clip, text in {texts!r}.items()}}
answers |= {{name: Answer(**answer) for name, answer in config.get("answers", {{}}).items()}}
get = fakeserver._Handler.do_GET
fakeserver._Handler.do_GET = lambda self: self._send(200, b"") if self.path == "/health" else get(self)
fake = FakeServer(answers)
fake._lock = threading.Lock()
fakeserver._Server(("127.0.0.1", int(after("--port"))), fake).serve_forever(0.02)
"""


class Bed:
    """A dataset, a fake server, and the file of a matrix."""

    def __init__(self, root: Path) -> None:
        self.root, self.out, self.file = root, root / "out", root / "matrix.yaml"
        self.data = write_dataset(root / "data", TEXTS)
        (root / "checkpoint").mkdir()
        (root / "base.yaml").write_text("model: .\nmax-model-len: 512\ncompilation_config: {mode: 3, sizes: [1]}\n")
        script = root / "fake.py"
        script.write_text(FAKE.format(tests=str(ROOT / "tests/support"), texts=TEXTS))
        self.command = [sys.executable, str(script)]

    def entry(self, name: str, **overrides: Any) -> dict[str, Any]:
        config = str(self.root / "base.yaml")
        return {"name": name, "config": config, "overrides": overrides, "command": self.command}

    def write(self, *configurations: dict[str, Any], **keys: Any) -> None:
        content = {"dataset": str(self.data), "dir": str(self.root / "checkpoint"), "flags": ["--warmup", 0]}
        self.file.write_text(yaml.safe_dump(content | keys | {"configurations": [*configurations]}))

    def arguments(self, *more: str) -> list[str]:
        return ["matrix", str(self.file), "--out", str(self.out), *more]

    def run(self, *more: str) -> int:
        return main(self.arguments(*more))

    def starts(self) -> list[dict[str, Any]]:
        path = self.root / "checkpoint/starts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def served(self) -> list[str]:
        return [Path(start["config"]).parent.name for start in self.starts()]

    def found(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "matrix.json").read_text())
        return found

    def statuses(self) -> dict[str, str]:
        return {run["directory"]: run["status"] for run in self.found()["runs"]}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


# ---- Runs


def test_a_whole_matrix(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    """Two configurations, one of them slow and with a failing clip, the other wrong by one word of 16."""
    slow = bed.entry("slow", delay_s=0.4, answers={"c1.wav": {"status": 500}})
    other = bed.entry("other", answers={"c1.wav": {"text": "alpha gamma number 1"}}, compilation_config=None)
    bed.write(slow, other | {"env": {"FAKE_VARIABLE": 7}}, repeats=3)
    assert bed.run() == 1  # for the failing clip
    assert bed.served() == ["slow", "other", "other", "slow", "slow", "other"]
    assert [start["variable"] for start in bed.starts()[:2]] == [None, "7"]
    assert bed.starts()[1]["settings"] == {
        "model": ".",
        "max-model-len": 512,
        "answers": {"c1.wav": {"text": "alpha gamma number 1"}},
    }
    assert set(bed.statuses().values()) == {"finished"}

    first, second = bed.found()["table"]
    assert (first["name"], first["load"], first["runs"], first["failed"]) == ("slow", "c1", 3, 3)
    assert (second["runs"], second["failed"], second["reason"]) == (3, 0, None)
    assert second["error_rate"]["values"] == [1 / 16] * 3
    # As the runs' own summaries have them
    summaries = [json.loads((bed.out / "slow" / number / "summary.json").read_text()) for number in "123"]
    medians = [matrix._numbers(matrix._summary(bed.out / "slow" / number), "c1")["p50_ms"] for number in "123"]
    assert all(median > 400 for median in medians)
    assert first["p50_ms"] == {
        "median": sorted(medians)[1],
        "min": min(medians),
        "max": max(medians),
        "values": medians,
    }
    assert second["p50_ms"]["max"] < first["p50_ms"]["min"]
    assert first["latency_ratio"]["values"] == [1.0] * 3
    # Against the run of its own round, over the three clips that completed in both
    for number, ratio in zip("123", second["latency_ratio"]["values"], strict=True):
        one, two = (compare.read(bed.out / name / number, "A") for name in ("slow", "other"))
        (load,) = compare.compare(one, two)["loads"]
        assert load["clips"] == 3
        assert ratio == pytest.approx(load["latency_ms"]["ratio_geometric_mean"]["value"])
    assert first["joules_per_audio_second"] is None
    assert first["peak_bytes"]["max"] == max(summary["memory"]["peak_bytes"] for summary in summaries)

    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split("|")[1].strip() == "configuration"
    assert "| 3 of 3 " in printed
    assert "| 6.25% WER" in printed
    report = (bed.out / "matrix.md").read_text()
    assert printed.split("\nreport: ")[0] in report
    assert "FAKE_VARIABLE: '7'" in report
    # The machine and the versions that the figures come from
    environments = [run["environment"] for run in bed.found()["runs"]]
    assert {each["cores"] for each in environments} == {os.cpu_count()}
    assert f"Measured on {os.cpu_count()} cores of {environments[0]['cpu']}, " in report
    assert main(["compare", str(bed.out / "slow/1"), str(bed.out / "other/3")]) == 0
    assert "B is faster: " in capsys.readouterr().out


def test_a_configuration_that_does_not_start(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    """The others go on, it is not tried again, and --resume tries what failed and makes nothing twice."""
    bed.write(bed.entry("good"), bed.entry("bad", dies="ValueError: no such model"), bed.entry("fine"), repeats=2)
    assert bed.run() == 1
    assert bed.served() == ["good", "bad", "fine", "fine", "good"]
    assert bed.statuses() == {
        **{"good/1": "finished", "bad/1": "failed", "fine/1": "finished"},
        **{"fine/2": "finished", "bad/2": "not run", "good/2": "finished"},
    }
    reason = bed.found()["runs"][1]["reason"]
    assert [run["environment"] is None for run in bed.found()["runs"]] == [False, True, False, False, True, False]
    assert "  the fake starts\n" in reason
    assert reason.endswith("cause: ValueError: no such model")
    row = bed.found()["table"][1]
    assert (row["runs"], row["failed"], row["p50_ms"], row["reason"]) == (0, None, None, reason)
    assert "bad failed: cause: ValueError: no such model" in capsys.readouterr().out
    assert reason in (bed.out / "matrix.md").read_text()

    kept = (bed.out / "good/1/requests.jsonl").read_bytes()
    assert bed.run("--resume") == 1
    assert bed.served()[5:] == ["bad"]
    assert (bed.out / "good/1/requests.jsonl").read_bytes() == kept
    assert bed.found()["table"][0]["runs"] == 2


def test_each_run_reads_the_dataset_once(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sources = dataset.load, []
    monkeypatch.setattr(dataset, "load", lambda source: sources.append(source) or read(source))
    bed.write(bed.entry("a"), repeats=2)
    assert bed.run() == 0
    assert sources == [str(bed.data)] * 2


def test_a_command_that_is_not_there(bed: Bed) -> None:
    bed.write(bed.entry("missing") | {"command": ["/no/such/server"]}, bed.entry("good"))
    assert bed.run() == 1
    assert bed.statuses() == {"missing/1": "failed", "good/1": "finished"}
    assert "/no/such/server" in bed.found()["runs"][0]["reason"]


@pytest.mark.slow
def test_killed_and_resumed(bed: Bed) -> None:
    """What a kill cuts off is resumed, with more rounds and another configuration as well."""
    bed.write(bed.entry("a"), bed.entry("b", answers={"c2.wav": {"text": "late", "delay_s": 60}}))
    # with SIGINT on, as it is in a terminal
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_module('bench', run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *bed.arguments()],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = bed.out / "b/1/requests.jsonl"
    deadline = time.monotonic() + 60
    while not (rows.exists() and rows.read_text().count("\n") == 2):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "Add --resume" in stderr
    assert "| b " in stdout
    assert bed.statuses() == {"a/1": "finished", "b/1": "interrupted"}

    starts = len(bed.starts())
    assert bed.run() == 2  # without --resume
    late = bed.entry("b")  # a fake that answers at once is another configuration
    bed.write(bed.entry("a"), late)
    assert bed.run("--resume") == 2
    assert len(bed.starts()) == starts

    config = {"c2.wav": {"text": "late", "delay_s": 60}}
    text = Path(bed.command[1]).read_text()
    Path(bed.command[1]).write_text(text.replace("delay_s=delay_s) for", "delay_s=0) for").replace("answers |=", "_ ="))
    bed.write(bed.entry("a"), bed.entry("b", answers=config), bed.entry("c"), repeats=2)
    assert bed.run("--resume") == 0
    assert bed.served()[starts:] == ["b", "c", "c", "b", "a"]
    rows_of_b = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["id"], row["part"]) for row in rows_of_b] == [("c0", 1), ("c1", 1), ("c2", 2), ("c3", 2)]


def test_resume_refuses_another_matrix(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    bed.write(bed.entry("a"), samples=2)
    assert bed.run() == 0
    assert bed.run() == 2
    assert "already has runs: continue that matrix with --resume" in capsys.readouterr().err
    bed.write(bed.entry("a", max_model_len=1024), samples=3)
    assert bed.run("--resume") == 2
    error = capsys.readouterr().err
    assert "a: settings was {" in error
    assert "samples was 2, is 3" in error
    assert bed.served() == ["a"]


def test_a_mistake_that_all_share_stops_it(bed: Bed, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was measured, so the mended file can have the same --out."""
    bed.write(bed.entry("a"), dataset=str(bed.root / "nowhere"))
    assert bed.run() == 2
    assert "nowhere" in capsys.readouterr().err
    bed.write(bed.entry("a"), flags=["--samplse", 3])
    with pytest.raises(SystemExit, match="2"):
        bed.run()
    assert bed.starts() == []
    bed.write(bed.entry("a"))
    assert bed.run() == 0


def test_the_table_of_summaries(tmp_path: Path) -> None:
    """Two loads, CER as the headline, energy and start-up measured, in two of three rounds."""
    configurations = [matrix.Configuration("a", {}, ".", {}, [])]
    plan = matrix.Matrix("data", None, ["c1", "c16"], 3, [], configurations)
    runs = [{"name": "a", "round": number, "directory": f"a/{number}", "status": "finished"} for number in (1, 2, 3)]
    runs[2] |= {"status": "failed", "reason": "it died\nno cause"}
    for number in (1, 2):
        loads = [
            {"load": load, "samples": 9, "completed": 9 - number, "rtfx": 3.0, "joules_per_audio_second": 0.5 * number}
            | {"latency_ms": {f"p{q}": float(q * number) for q in (50, 90, 95, 99)}}
            for load in ("c1", "c16")
        ]
        quality = {"headline": "cer", "wer": {"value": 0.9}, "cer": {"value": 0.25}}
        summary = {"loads": loads, "quality": quality, "memory": {"peak_bytes": 2**31}}
        summary |= {"server": {"startup_s": 7.0}}
        (tmp_path / f"a/{number}").mkdir(parents=True)
        (tmp_path / f"a/{number}/summary.json").write_text(json.dumps(summary))
    rows = matrix.tabulate(tmp_path, plan, runs)
    assert [row["load"] for row in rows] == ["c1", "c16"]
    assert rows[1]["p90_ms"] == {"median": 135.0, "min": 90.0, "max": 180.0, "values": [90.0, 180.0]}
    assert (rows[1]["failed"], rows[1]["latency_ratio"]) == (1 + 2, None)
    first, cells = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in matrix._markdown(rows).splitlines()[2:4]
    )
    assert first[-4:] == ["2.00", "7.0", "25.00% CER", "3"]
    assert cells == [
        *("a", "c16", "2 of 3 (failed)", "75.0 (50.0 to 100.0)", "135.0 (90.0 to 180.0)", "142.5 (95.0 to 190.0)"),
        *("-", "3.00", "0.750 (0.500 to 1.000)", "-", "-", "-", "3"),
    ]
    assert matrix._markdown(rows).endswith("\na failed: it died")


# ---- The file


def test_order() -> None:
    configurations = [matrix.Configuration(name, {}, ".", {}, []) for name in "ABC"]
    plan = matrix.Matrix("data", None, ["c1"], 4, [], configurations)
    order = [(number, each.name) for number, each in plan.order()]
    assert "".join(name for _, name in order) == "ABCCBAABCCBA"
    assert [number for number, _ in order] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    # What each loses to a machine that gets steadily slower is the same for all, over an even number of rounds.
    places = {name: sum(place for place, (_, each) in enumerate(order) if each == name) for name in "ABC"}
    assert len(set(places.values())) == 1


def test_merge() -> None:
    settings = {"model": ".", "max-model-len": 512, "compilation_config": {"mode": 3, "sizes": [1]}, "seed": 1}
    overrides = {"max_model_len": 1024, "compilation_config": {"mode": 0}, "seed": None, "dtype": "float32"}
    expected = {"model": ".", "max_model_len": 1024, "compilation_config": {"mode": 0}, "dtype": "float32"}
    assert matrix.merge(settings, overrides) == expected


@pytest.mark.parametrize(
    ("loads", "flags"), [(["c1", "c16"], ["--concurrency", "1,16"]), (["r2.5", "r10"], ["--rate", "2.5,10"])]
)
def test_loads_become_flags(bed: Bed, loads: list[str], flags: list[str]) -> None:
    bed.write(bed.entry("a"), samples=3, loads=loads)
    plan = matrix.read(bed.file)
    arguments = matrix._arguments(plan, plan.configurations[0], bed.out / "a/1")
    assert arguments == [
        *("--warmup", "0", "--serve", str(bed.out / "a/config.yaml"), "--dir", str(bed.root / "checkpoint")),
        *("--dataset", str(bed.data), "--out", str(bed.out / "a/1"), "--samples", "3", *flags),
    ]


@pytest.mark.parametrize(
    ("keys", "changes", "named"),
    [
        ({"sample": 3}, {}, "the file: unknown key 'sample'; did you mean 'samples'?"),
        ({}, {"enviroment": {}}, "configuration 1 ('a'): unknown key 'enviroment'; did you mean 'env'?"),
        ({"dataset": 3}, {}, "the file: 'dataset' must be a string, found 3"),
        ({"repeats": True}, {}, "the file: 'repeats' must be a whole number, found True"),
        ({"repeats": 0}, {}, "'repeats' must be at least 1, found 0"),
        ({"loads": ["c0"]}, {}, "'loads' must be a list such as [c16]"),
        ({"loads": ["r2.0"]}, {}, "'loads' must be a list such as [c16]"),
        ({"loads": ["c1", "r2.5"]}, {}, "'loads' must all start with c or all with r, without repetition"),
        ({"flags": ["--out=x"]}, {}, "'flags' has '--out=x': use its key of the matrix file"),
        ({"flags": ["--conc", 3]}, {}, "'flags' has '--conc': use its key of the matrix file"),
        ({}, {"name": "../a"}, "'name' may contain only letters, digits"),
        ({}, {"overrides": [1]}, "'overrides' must be a mapping, found [1]"),
        ({}, {"env": {"A": True}}, "'env' must contain strings or numbers, found 'A': True (put it in quotes)"),
        ({}, {"command": "vllm"}, "'command' must be a list, found 'vllm'"),
        ({}, {"command": []}, "'command' must be a list of strings, found []"),
        ({}, {"dir": "no/such"}, "'dir' must be a directory, found 'no/such'"),
        ({}, {"config": "no/such.yaml"}, "cannot read no/such.yaml"),
    ],
)
def test_what_is_wrong_with_the_file(bed: Bed, keys: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    bed.write(bed.entry("a") | changes, **keys)
    with pytest.raises(BenchError) as raised:
        matrix.read(bed.file)
    assert named in str(raised.value)


def test_all_that_is_wrong_is_named_at_once(bed: Bed) -> None:
    bed.write(bed.entry("a"), bed.entry("a"), {"name": "b"}, repeats=0)
    with pytest.raises(BenchError, match="3 problem") as raised:
        matrix.read(bed.file)
    assert "configuration 2 ('a'): another configuration has this name" in str(raised.value)
    assert "configuration 3 ('b'): the key 'config' is missing" in str(raised.value)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "1: 2"])
def test_files_that_hold_no_mapping(bed: Bed, text: str) -> None:
    bed.file.write_text(text)
    with pytest.raises(BenchError, match=r"not valid YAML|must contain a mapping"):
        matrix.read(bed.file)


@pytest.mark.parametrize("name", ["contest-cpu", "contest-gpu"])
def test_the_files_of_the_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checkpoint is beside them, which for a GPU is not part of it."""
    for part in ("bench", "pico", "profiles", "vllm_config.yaml"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "voxtral-realtime").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = matrix.read(Path(f"bench/matrices/{name}.yaml"))
    contest, *others = plan.configurations
    assert contest.settings == yaml.safe_load((ROOT / "vllm_config.yaml").read_text())
    assert others and all(each.settings != contest.settings for each in others)
