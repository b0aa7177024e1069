"""Whole runs of the command line against a fake server."""

import json
import random
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakeserver import MODEL, Answer, FakeServer, write_dataset

from bench import dataset
from bench.__main__ import main
from bench.measure import upload

ROOT = Path(__file__).parents[2]
TEXTS = {f"c{number:02}": f"alpha beta gamma number {number}" for number in range(12)}


def files(ids: list[str]) -> list[str]:
    return [f"{clip}.wav" for clip in ids]


def echo(texts: dict[str, str] = TEXTS, **changes: Any) -> dict[str, Answer]:
    """Perfect transcripts for every file."""
    return {f"{clip}.wav": Answer(text, **changes) for clip, text in texts.items()}


def rows_of(out: Path) -> list[dict[str, Any]]:
    path = out / "requests.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary_of(out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def load_of(out: Path) -> dict[str, Any]:
    """The numbers of a run's only load."""
    (load,) = summary_of(out)["loads"]
    numbers: dict[str, Any] = load
    return numbers


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Case:
    """A dataset, a server, and the command lines that join them."""

    def __init__(self, directory: Path, server: FakeServer) -> None:
        self.data = write_dataset(directory / "data", TEXTS)
        self.out = directory / "out"
        self.server = server

    def flags(self, *more: str) -> list[str]:
        return ["run", "--url", self.server.url, "--dataset", str(self.data), "--out", str(self.out), *more]

    def run(self, *more: str) -> int:
        """Run in this process; later flags win over earlier ones."""
        self.server.received.clear()
        return main(self.flags(*more))

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Run in a process that can be killed, with SIGINT on, which a test run in the background has off."""
        code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        code += "runpy.run_module('bench', run_name='__main__')"
        command = [sys.executable, "-c", code, *self.flags(*more)]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def case(tmp_path: Path) -> Any:
    with FakeServer(echo()) as server:
        yield Case(tmp_path, server)


# ---- A run that goes well


def test_a_whole_run(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run() == 0
    assert case.server.sent() == files(["c00", "c01", *TEXTS])  # 2 warm-ups, then each clip once, in order
    first = case.server.received[2]
    assert first.fields == {"model": MODEL, "response_format": "json", "temperature": "0"}
    assert first.size == (case.data / "c00.wav").stat().st_size

    rows = rows_of(case.out)
    assert [row["id"] for row in rows] == list(TEXTS)
    assert rows[2]["text"] == rows[2]["reference"] == TEXTS["c02"]
    assert rows[2]["duration_s"] == pytest.approx(0.15)
    assert (rows[2]["status"], rows[2]["error"]) == (200, None)
    assert abs(rows[2]["start"] - time.time()) < 60
    assert rows[2]["latency_ms"] == pytest.approx((rows[2]["end"] - rows[2]["start"]) * 1000, abs=0.01)

    summary = summary_of(case.out)
    assert (summary["schema_version"], summary["samples"], summary["completed"]) == (2, 12, 12)
    assert (summary["failed"], summary["quality"]["wer"]["value"]) == (0, 0.0)
    (load,) = summary["loads"]
    assert load["rtfx"] == pytest.approx(0.05 * 78 / load["wall_s"])  # 1 + 2 + ... + 12 = 78
    assert summary["memory"]["source"] == "rss_process_tree"
    assert summary["environment"]["server_version"] == "0.0.fake"
    assert summary["run"]["model"] == MODEL
    assert summary["run"]["ids"] == list(TEXTS)

    printed = capsys.readouterr().out
    assert "12/12 completed, 0 failed" in printed
    assert "latency P95" in printed
    assert "WER          0.00% (95 % interval 0.00% to 0.00%)" in printed
    assert "c00 (first)" in printed
    assert "c11 (longest)" in printed
    assert f"report: {case.out / 'report.md'}" in printed


def test_the_dataset_is_read_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    read, sources = dataset.load, []
    monkeypatch.setattr(dataset, "load", lambda source: sources.append(source) or read(source))
    assert case.run("--samples", "1") == 0
    assert sources == [str(case.data)]


def test_samples_are_a_seeded_choice(case: Case) -> None:
    assert case.run("--samples", "3", "--seed", "7", "--warmup", "0") == 0
    expected = [f"c{index:02}" for index in sorted(random.Random(7).sample(range(12), 3))]
    assert case.server.sent() == files(expected)
    assert summary_of(case.out)["run"]["ids"] == expected


def test_warm_up_goes_round_and_is_not_counted(case: Case) -> None:
    class SlowStart(dict[str, Answer]):
        """The first 5 answers are slow, as those of a server that still compiles."""

        asked = 0

        def get(self, name: str, default: Any = None) -> Any:
            self.asked += 1
            return Answer("alpha", delay_s=3.0 if self.asked <= 5 else 0.0)

    case.server.answers = SlowStart()
    assert case.run("--samples", "3", "--warmup", "5", "--concurrency", "5") == 0
    chosen = files(summary_of(case.out)["run"]["ids"])
    assert sorted(case.server.sent()[:5]) == sorted(chosen + chosen[:2])
    assert sorted(case.server.sent()[5:]) == chosen
    assert len(rows_of(case.out)) == summary_of(case.out)["completed"] == 3
    assert load_of(case.out)["wall_s"] < 3.0
    assert load_of(case.out)["latency_ms"]["max"] < 3000


@pytest.mark.parametrize("concurrency", [1, 4])
def test_concurrency_overlaps(case: Case, concurrency: int) -> None:
    case.server.answers = echo(delay_s=0.1, together=threading.Barrier(concurrency))
    assert case.run("--concurrency", str(concurrency), "--samples", "8", "--warmup", "0") == 0
    assert case.server.max_in_flight == concurrency
    load = load_of(case.out)
    assert load["wall_s"] >= 8 / concurrency * 0.1
    assert load["latency_ms"]["p50"] >= 100


def test_the_order_of_answers_leaves_the_numbers_alone(case: Case) -> None:
    case.server.answers = {name: Answer("omega " * number) for number, name in enumerate(files(list(TEXTS)))}
    assert case.run() == 0
    summary = summary_of(case.out)
    wer = summary["quality"]["wer"]
    assert wer["ci95"][0] < wer["value"] < wer["ci95"][1]
    lines = (case.out / "requests.jsonl").read_text().splitlines(keepends=True)
    (case.out / "requests.jsonl").write_text("".join(reversed(lines)))
    assert main(["report", str(case.out)]) == 0
    assert summary_of(case.out) == summary


def test_api_key_is_sent_and_not_written(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("BENCH_TEST_KEY", "s3cret")
    assert case.run("--samples", "1", "--api-key-env", "BENCH_TEST_KEY") == 0
    assert {each.authorization for each in case.server.received} == {"Bearer s3cret"}
    assert not [path for path in case.out.iterdir() if "s3cret" in path.read_text()]
    monkeypatch.delenv("BENCH_TEST_KEY")
    assert case.run("--resume", "--api-key-env", "BENCH_TEST_KEY") == 2


# ---- Failures


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent again, after waits that tests have no time for."""
    monkeypatch.setattr(upload, "WAIT_S", 0.001)


BROKEN = {
    "c01.wav": Answer(status=500),
    "c02.wav": Answer(drop="before"),
    "c03.wav": Answer("alpha beta", drop="inside"),
    "c04.wav": Answer(body=b"<html>"),
    "c05.wav": Answer(body=b'{"text": null}'),
    "c06.wav": Answer(body=b"[]"),
    "c07.wav": Answer(body=b'{"txt": "alpha"}'),
    "c08.wav": Answer(status=307),
}


def test_failures_are_rows_and_deleted_words_but_no_latency(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.answers = echo() | BROKEN
    assert case.run("--warmup", "1") == 1
    summary, rows = summary_of(case.out), {f"{row['id']}.wav": row for row in rows_of(case.out)}
    assert (summary["samples"], summary["completed"], summary["failed"]) == (12, 4, 8)
    for name, row in rows.items():
        assert (row["error"] is not None) == (name in BROKEN)
        assert (row["latency_ms"] is None) == (row["text"] is None) == (name in BROKEN)
    assert [rows[name]["status"] for name in BROKEN] == [500, None, 200, 200, 200, 200, 200, 307]
    assert "made to fail" in rows["c01.wav"]["error"]
    assert "<html>" in rows["c04.wav"]["error"]
    assert load_of(case.out)["latency_ms"]["max"] == max(row["latency_ms"] or 0 for row in rows.values())
    assert (summary["quality"]["wer"]["deletions"], summary["quality"]["wer"]["words"]) == (8 * 5, 12 * 5)
    assert summary["quality"]["wer"]["value"] == pytest.approx(8 / 12)
    assert load_of(case.out)["rtfx"] == pytest.approx(0.05 * (1 + 10 + 11 + 12) / load_of(case.out)["wall_s"])
    report = (case.out / "report.md").read_text()
    assert "## Failures: 8" in report
    assert '| c01 | 500 | HTTP 500: {"error": "made to fail"} |' in report
    assert "--resume" in capsys.readouterr().err


def test_silence_is_a_failure_after_the_timeout(case: Case) -> None:
    case.server.answers = {**echo(), "c01.wav": Answer("late", delay_s=3)}
    assert case.run("--samples", "12", "--warmup", "1", "--timeout", "1") == 1
    row = rows_of(case.out)[1]
    assert (row["status"], row["latency_ms"]) == (None, None)
    assert "ReadTimeout after " in row["error"]


def test_when_all_fail_nothing_is_measured(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.answers = {}
    case.server.default = Answer(status=500)
    assert case.run() == 1
    summary = summary_of(case.out)
    assert (summary["completed"], summary["failed"]) == (0, 12)
    assert load_of(case.out)["latency_ms"]["p50"] is None
    assert load_of(case.out)["rtfx"] is None
    assert summary["quality"]["wer"]["value"] == 1.0
    captured = capsys.readouterr()
    assert "latency P50  not measured" in captured.out
    assert "warm-up with c00 failed, the measurement continues: HTTP 500" in captured.err


def test_empty_transcripts_are_complete_and_listed(case: Case) -> None:
    case.server.answers = {**echo(), "c01.wav": Answer(""), "c02.wav": Answer(" \n")}
    assert case.run() == 0
    summary = summary_of(case.out)
    assert (summary["completed"], summary["quality"]["wer"]["deletions"]) == (12, 10)
    report = (case.out / "report.md").read_text()
    assert "## Empty transcripts: 2" in report
    assert f"| c01 | 0.1 | {TEXTS['c01']} |" in report
    assert "## Failures: 0\n\nNone." in report


def test_report_survives_hostile_text(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.answers = {**echo(), "c01.wav": Answer("alpha | beta\n\x1b[31m \ud800\u2028omega")}
    assert case.run() == 0
    assert rows_of(case.out)[1]["text"] == "alpha | beta\n\x1b[31m \ud800\u2028omega"
    report = (case.out / "report.md").read_text()
    assert f"| {TEXTS['c01']} | alpha \\| beta \ufffd[31m \ufffd omega |" in report
    assert "\x1b" not in report + capsys.readouterr().out


def test_report_contents(case: Case) -> None:
    wrong = {f"c{number:02}.wav": Answer("omega " * number) for number in range(12)}
    case.server.answers = wrong
    assert case.run() == 0
    report = (case.out / "report.md").read_text()
    summary = summary_of(case.out)
    for text in (
        "| samples | 12/12 completed, 0 failed |",
        f"| latency P50 | {load_of(case.out)['latency_ms']['p50']:.1f} ms |",
        f"| RTFx | {load_of(case.out)['rtfx']:.2f} |",
        f"| quality.wer.value | {summary['quality']['wer']['value']} |",
        f"| quality.normalizer | {summary['quality']['normalizer']} |",
        "- **latency**: ",
        "- **RTFx**: ",
        "- **WER**: ",
        f"| environment.python | {sys.version.split()[0]} |",
        "| environment.libraries.jiwer | ",
        "| environment.server_version | 0.0.fake |",
        f"| run.url | {case.server.url} |",
        "| run.loads | ['c1'] |",
    ):
        assert text in report
    worst = [line for line in report.partition("worst clips")[2].splitlines() if line.startswith("| c")]
    assert [line.split(" | ")[0] for line in worst[1:3]] == ["| c11", "| c10"]
    assert len(worst) == 11  # the header and ten clips


# ---- Refusals, all with exit status 2


def test_no_server(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as gone:
        url = gone.url
    assert case.run("--url", url) == 2
    error = capsys.readouterr().err
    assert f"cannot transcribe with {url}" in error
    assert "Connection refused" in error
    assert f"curl {url}/v1/models" in error
    assert not (case.out / "requests.jsonl").exists()


@pytest.mark.parametrize("answer", [Answer(drop="before"), Answer(status=401), Answer(status=404)])
def test_a_hopeless_warm_up_stops_the_run(case: Case, answer: Answer) -> None:
    case.server.answers = {**echo(), "c01.wav": answer}
    assert case.run() == 2
    assert set(case.server.sent()) == set(files(["c00", "c01"]))
    assert not (case.out / "requests.jsonl").exists()
    case.server.answers = echo()
    assert case.run() == 0  # and the directory is still free


def test_no_model_name(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.models = ()
    assert case.run() == 2
    assert "lists no model" in capsys.readouterr().err
    assert case.run("--model", "mine", "--samples", "1") == 0
    assert case.server.received[0].fields["model"] == "mine"


def test_a_broken_dataset_sends_nothing(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    (case.data / "c03.wav").write_bytes(b"changed")
    (case.data / "c05.wav").unlink()
    assert case.run() == 2
    error = capsys.readouterr().err
    assert "2 problem(s)" in error
    assert "line 4: the sha256 of 'c03.wav'" in error
    assert "line 6: cannot read 'c05.wav'" in error
    assert case.server.sent() == []


def test_too_many_samples(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--samples", "13") == 2
    assert "more than the 12 clips" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        *(
            ["--samples", "0"],
            *(["--concurrency", "0"], ["--concurrency", "1,1"], ["--concurrency", "1,"], ["--concurrency", "1000000"]),
            *(["--rate", "0"], ["--rate", "inf"], ["--rate", "nan"], ["--rate", "2", "--concurrency", "2"]),
            *(["--stream", "--realtime"], ["--api", "chat", "--realtime"], ["--prompt", "x"]),
            ["--warmup", "-1"],
            ["--timeout", "0"],
            ["--samples", "x"],
        ),
        *(["--url", "127.0.0.1:8000"], ["--url", "http://[::1"], ["--url", "http://host:port"]),
    ],
)
def test_wrong_flags(case: Case, flags: list[str]) -> None:
    try:
        status: Any = case.run(*flags)
    except SystemExit as stopped:  # argparse
        status = stopped.code
    assert status == 2
    assert case.server.sent() == []


def test_a_url_may_end_in_v1_but_hold_no_password(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--samples", "1", "--url", case.server.url + "/v1/") == 0
    assert summary_of(case.out)["run"]["url"] == case.server.url
    assert case.run("--resume", "--samples", "1") == 0
    assert case.run("--out", str(case.out / "b"), "--url", case.server.url.replace("//", "//me:s3cret@")) == 2
    assert "--api-key-env" in capsys.readouterr().err


def test_a_used_directory_is_not_overwritten(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--samples", "2") == 0
    before = (case.out / "requests.jsonl").read_bytes()
    assert case.run("--samples", "2") == 2
    assert "--resume" in capsys.readouterr().err
    assert case.server.sent() == []
    assert (case.out / "requests.jsonl").read_bytes() == before


def test_out_that_cannot_be_made(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--out", str(case.data / "manifest.jsonl" / "out")) == 2
    assert "--out" in capsys.readouterr().err


# ---- Kill, Ctrl-C and --resume


def test_resume_after_a_kill_repeats_only_what_was_in_flight(case: Case) -> None:
    case.server.answers = echo(delay_s=0.1) | {name: Answer("late", delay_s=60) for name in files(["c06", "c07"])}
    process = case.start("--concurrency", "2", "--warmup", "1")
    rows = case.out / "requests.jsonl"
    wait_until(lambda: len(case.server.sent()) == 1 + 8 and len(rows_of(case.out)) == 6)
    process.kill()
    process.communicate()
    assert sorted(row["id"] for row in rows_of(case.out)) == list(TEXTS)[:6]
    assert not (case.out / "summary.json").exists()

    case.server.answers = echo(delay_s=0.1)
    assert case.run("--concurrency", "2", "--warmup", "0", "--resume") == 0
    assert sorted(case.server.sent()) == files(list(TEXTS)[6:])  # c06 and c07 were in flight
    assert sorted(row["id"] for row in rows_of(case.out)) == list(TEXTS)
    summary = summary_of(case.out)
    assert (summary["completed"], summary["quality"]["wer"]["value"]) == (12, 0.0)
    assert [row["part"] for row in rows_of(case.out)] == [1] * 6 + [2] * 6
    spans = 0.0  # the pause between the parts is not in the wall clock
    for part in (1, 2):
        times = [(row["start"], row["end"]) for row in rows_of(case.out) if row["part"] == part]
        spans += max(end for _, end in times) - min(start for start, _ in times)
    assert load_of(case.out)["wall_s"] == pytest.approx(spans)
    assert rows.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize(("cut", "again"), [(20, ["c11"]), (1, [])])
def test_resume_tolerates_a_cut_last_line(case: Case, cut: int, again: list[str]) -> None:
    """Cut within the row, and cut just before its newline."""
    assert case.run() == 0
    rows = case.out / "requests.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-cut])
    assert main(["report", str(case.out)]) == len(again)
    assert case.run("--resume", "--warmup", "0") == 0
    assert case.server.sent() == files(again)
    assert [row["id"] for row in rows_of(case.out)] == list(TEXTS)
    assert rows.read_bytes().splitlines()[:-1] == whole.splitlines()[:-1]
    assert rows.read_bytes().endswith(b"}\n")


def test_damage_before_the_last_line_is_an_error(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run() == 0
    rows = case.out / "requests.jsonl"
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([lines[0], lines[1][:30] + b"\n", *lines[2:]]))
    assert case.run("--resume") == 2
    assert "requests.jsonl line 2 is damaged" in capsys.readouterr().err
    assert case.server.sent() == []


def test_resume_repeats_failures(case: Case) -> None:
    case.server.answers = echo() | BROKEN
    assert case.run("--warmup", "1") == 1
    case.server.answers = echo()
    assert case.run("--warmup", "0", "--resume") == 0
    assert case.server.sent() == list(BROKEN)
    summary = summary_of(case.out)
    assert (summary["completed"], summary["failed"], summary["quality"]["wer"]["value"]) == (12, 0, 0.0)
    assert len(rows_of(case.out)) == 12 + len(BROKEN)  # the failed attempts stay on record


def test_time_spent_on_failures_counts(case: Case) -> None:
    case.server.answers = echo() | {"c11.wav": Answer(status=500, delay_s=0.5)}
    assert case.run("--warmup", "0") == 1
    case.server.answers = echo()
    assert case.run("--warmup", "0", "--resume") == 0
    assert load_of(case.out)["wall_s"] > 0.5


def test_resume_of_nothing_starts_and_of_everything_sends_nothing(case: Case) -> None:
    assert case.run("--resume", "--samples", "2", "--warmup", "0") == 0
    assert len(case.server.sent()) == 2
    assert case.run("--resume", "--samples", "2") == 0
    assert case.server.sent() == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--samples", "5"], "ids: 1 clips are in only one of the selections"),
        (["--seed", "1"], "ids: "),
        (["--model", "other"], f"model was '{MODEL}', is 'other'"),
        (["--concurrency", "2"], "loads was ['c1'], is ['c2']"),
        (["--rate", "1"], "loads was ['c1'], is ['r1']"),
        (["--stream"], "mode was 'whole', is 'stream'"),
        (["--language", "de"], "language was None, is 'de'"),
        (["--api", "chat"], "api was 'transcriptions', is 'chat'"),
    ],
)
def test_resume_refuses_other_flags(
    case: Case, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case.server.answers = echo() | {"c00.wav": Answer(status=500)}
    assert case.run("--samples", "6", "--warmup", "0") in (0, 1)
    assert case.run("--samples", "6", "--resume", *flags) == 2
    assert named in capsys.readouterr().err
    assert case.server.sent() == []


def test_resume_refuses_another_server_or_dataset(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run() == 0
    with FakeServer(echo()) as other:
        assert case.run("--resume", "--url", other.url) == 2
        assert f"url was '{case.server.url}', is '{other.url}'" in capsys.readouterr().err
    case.server.version = "1.0"
    assert case.run("--resume") == 2
    assert "server_version was '0.0.fake', is '1.0'" in capsys.readouterr().err
    case.server.version = "0.0.fake"
    write_dataset(case.data, TEXTS | {"c00": "another reference"})
    assert case.run("--resume") == 2
    assert "manifest_sha256 was" in capsys.readouterr().err
    (case.out / "run.json").unlink()
    assert case.run("--resume") == 2
    assert "run.json" in capsys.readouterr().err


def test_ctrl_c_leaves_usable_files(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.answers = {**echo(delay_s=0.05), "c04.wav": Answer("late", delay_s=60)}
    process = case.start("--warmup", "0")
    wait_until(lambda: "c04.wav" in case.server.sent())
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=50)  # long before the answer that it waited for
    assert process.returncode == 130
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    assert "4/12 completed, 0 failed, 8 without an answer yet" in stdout
    assert [row["id"] for row in rows_of(case.out)] == ["c00", "c01", "c02", "c03"]
    summary = summary_of(case.out)
    assert (summary["samples"], summary["completed"], summary["failed"]) == (12, 4, 0)
    assert summary["quality"]["wer"]["words"] == 4 * 5
    assert summary["memory"]["source"] == "rss_process_tree"

    case.server.answers = echo()
    assert case.run("--resume", "--warmup", "0") == 0
    assert case.server.sent() == files(list(TEXTS)[4:])
    assert summary_of(case.out)["completed"] == 12


def test_ctrl_c_in_the_warm_up(case: Case) -> None:
    case.server.answers = echo(delay_s=60)
    process = case.start()
    wait_until(lambda: len(case.server.sent()) == 1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=50)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert not (case.out / "requests.jsonl").exists()


# ---- Scoring again, and the package's borders


def test_report_scores_again_without_a_server(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.answers = echo() | {"c01.wav": Answer(status=500)}
    assert case.run("--warmup", "1") == 1
    kept = {name: (case.out / name).read_bytes() for name in ("summary.json", "report.md")}
    printed = capsys.readouterr().out
    for name in kept:
        (case.out / name).unlink()
    assert main(["report", str(case.out)]) == 1
    assert kept == {name: (case.out / name).read_bytes() for name in kept}
    assert capsys.readouterr().out == printed
    assert main(["report", str(case.data)]) == 2


def test_the_command_exits_with_the_status() -> None:
    command = [sys.executable, "-m", "bench", "report", "no/such/run"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no/such/run/run.json" in ended.stderr


def test_bench_needs_no_vllm_and_no_voxtral_serve() -> None:
    """Nor their .pth files; also not the core that it shares with voxtral_serve, which it sees through a link."""
    code = f"""if True:
        import importlib, pkgutil, sys
        sys.path += [{str(ROOT)!r}, {sysconfig.get_path("purelib")!r}]  # added after the start: no .pth file is read
        sys.modules |= dict.fromkeys(("vllm", "torch", "transformers", "voxtral_serve"))  # an import of them fails
        import bench.__main__, bench.measure
        for module in pkgutil.iter_modules(bench.measure.__path__, "bench.measure."):
            importlib.import_module(module.name)
        print(*sys.modules)"""
    names = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True).split()
    assert {"bench.run", "bench.measure.engine", "bench.measure.gpus"} <= set(names)
    assert not {name for name in names if name.startswith("voxtral_serve.")}
