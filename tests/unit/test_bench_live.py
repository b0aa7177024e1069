"""Many live sessions: what they send, their lag, the search, the age, failures, and what the client itself costs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from fakerealtime import RATE, FakeLive
from fakeserver import write_dataset
from runs import all_valid

from bench import live, plots, sound
from bench.__main__ import main
from bench.answers import Row
from bench.dataset import Clip
from bench.loads import Load, parse
from bench.measure import lag
from bench.search import search


def data(directory: Path, clips: int = 6, seconds: float = 0.6) -> Path:
    return write_dataset(directory / "data", {f"c{number}": "a a a a" for number in range(clips)}, seconds=seconds)


def run(server: FakeLive, directory: Path, *flags: str) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """Exit status, summary.json and the rows."""
    out = directory / "out"
    base = ["run", "--url", server.url, "--dataset", str(data(directory)), "--out", str(out), "--realtime"]
    status = main([*base, "--warmup", "0", *flags])
    rows = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    all_valid(out)
    return status, json.loads((out / "summary.json").read_text()), rows


# ---- Lag


def test_what_a_token_needs() -> None:
    """Token 0 has row 38 with a delay of 6: (38 + 1 - 32) * 1280 + 40 samples."""
    sent = [0.08 * piece for piece in range(9)]
    arrivals = [0.7, 0.8, 0.9, 0.9]
    found = lag.token_lags(arrivals, sent, 0.65, 9 * 1280, 0, 6)
    # 9000 and 10280 samples are full with pieces 7 and 8; the last two need the audio's end.
    assert [age for age, _ in found] == pytest.approx([0.5625, 0.6425, 0.7225, 0.8025], abs=0.0006)
    assert [ms for _, ms in found] == pytest.approx([140, 160, 250, 250])
    assert lag.token_lags(arrivals, sent, 0.65, 9 * 1280, 9000, 6) == found[1:]
    assert lag.token_lags([], sent, 0.65, 9 * 1280, 0, 6) == []


@pytest.mark.parametrize(("samples", "tokens"), [(0, 0), (8999, 0), (9000, 1), (10279, 1), (10280, 2)])
def test_complete_tokens(samples: int, tokens: int) -> None:
    assert lag.complete_tokens(samples, 6) == tokens


@pytest.mark.parametrize(
    ("deltas", "counted", "expected"),
    [
        *((20, 20, True), (21, 20, True), (19, 20, False), (22, 20, False)),
        *((20, None, True), (21, None, True), (22, None, True), (18, None, False), (24, None, False)),
    ],
)
def test_deltas_are_tokens_or_not(deltas: int, counted: int | None, expected: bool) -> None:
    """11 pieces: 32 + 11 + 17 rows, less the prompt's 38 before the first token."""
    assert lag.is_one_delta_a_token(deltas, counted, 11 * 1280, 6) is expected


def test_fell_behind() -> None:
    assert not lag.fell_behind([(2.0, 900.0), (9.0, 499.0), (10.5, 900.0)], 10.0, True)
    assert lag.fell_behind([(9.0, 501.0)], 10.0, True)
    assert lag.fell_behind([], 10.0, False)  # text is missing


def test_delays() -> None:
    assert lag.delay_tokens(480) == 6
    for wrong in (0, 100, -80):
        with pytest.raises(ValueError, match="multiple of 80 ms"):
            lag.delay_tokens(wrong)
    assert lag.word_lags([(1.0, 500.0)]) == [(1.0, 20.0)]


# ---- What a session sends


def write_clips(directory: Path, *seconds: float) -> list[Clip]:
    clips = []
    for number, length in enumerate(seconds, 1):
        path = directory / f"{number}.wav"
        soundfile.write(path, np.full(round(length * RATE), number / 10), RATE)
        words = [[f"w{number}", 0.0, length / 2], [f"x{number}", length / 2, length]]
        clips.append(Clip(str(number), path, f"w{number} x{number}", length, {"words": words}))
    return clips


def test_a_session_is_clips_joined(tmp_path: Path) -> None:
    clips = write_clips(tmp_path, 1.0, 0.5, 0.25)
    made = sound.session(1, clips, 2.0, 0.4, seed=0)
    assert sound.session(1, clips, 2.0, 0.4, seed=0) == made
    assert {sound.session(number, clips, 2.0, 0.4, seed=0).text for number in range(1, 9)} != {made.text}
    assert made.id == "session-0001"
    assert made.duration_s == 2.0
    spoken = sound.of(made)
    assert spoken.samples == round(2.4 * RATE)
    whole = spoken.read(0, 10**9)
    assert np.array_equal(np.concatenate([spoken.read(at, 1280) for at in range(0, spoken.samples, 1280)]), whole)
    at = 0
    for part in made.parts:
        length = round(part.duration_s * RATE)
        assert np.abs(whole[at : at + length] - int(part.id) / 10 * 32767).max() <= 1
        at += length
    assert not whole[at:].any()
    assert len(whole) - at < 0.25 * RATE  # no clip fits any more
    assert made.text == " ".join(part.text for part in made.parts)
    begins = np.cumsum([0, *(part.duration_s for part in made.parts)])
    assert [word[1] for word in made.extra["words"][::2]] == pytest.approx(begins[:-1].tolist())


def test_a_session_shorter_than_any_clip(tmp_path: Path) -> None:
    made = sound.session(1, write_clips(tmp_path, 2.0), 1.2, 0.0, seed=0)
    assert made.text == "w1"
    assert sound.of(made).samples == round(1.2 * RATE)
    assert sound.of(made).read(0, 10**9).all()


def test_whole_pieces() -> None:
    assert [sound.whole_pieces(seconds) for seconds in (0, 0.08, 0.1, 90)] == [0, 0.08, 0.16, 90]


# ---- Runs


def test_a_run_of_sessions(tmp_path: Path) -> None:
    with FakeLive(lag_s=0.05) as server:
        status, summary, rows = run(server, tmp_path, "--sessions", "3,20", "--seconds", "2")
    assert status == 0
    assert server.most == 20
    assert [load["load"] for load in summary["loads"]] == ["s3", "s20"]
    for load, sessions in zip(summary["loads"], (3, 20), strict=True):
        assert (load["sessions"], load["samples"], load["completed"], load["failed"]) == (
            sessions,
            sessions,
            sessions,
            0,
        )
        assert (load["lag_of"], load["lag_unknown"]) == ("token", 0)
        assert load["fell_behind"] == sum(row["fell_behind"] for row in rows if row["load"] == load["load"])
        assert load["lag_ms"]["count"] == sessions * (24 - 6 + 17)
        assert load["lag_in_audio_ms"]["count"] == sessions * (24 - 6)
        assert load["lag_ms"]["p50"] >= 50 and load["latency_ms"]["p50"] >= 50
        assert load["harness_cpu_per_session_s"] > 0
        assert 0 <= load["late_sends_ms"]["p50"] <= load["late_sends_ms"]["p99"] <= load["late_sends_ms"]["max"]
    assert {row["duration_s"] for row in rows} == {2.0}
    assert {tuple(session.sizes) for session in server.sessions} == {(1280,) * 25}
    page = (tmp_path / "out/report.html").read_text()
    assert "Lag against session age" in page
    assert "Lag against number of sessions" in page


def test_an_age(tmp_path: Path) -> None:
    with FakeLive() as server:
        status, _, rows = run(server, tmp_path, "--sessions", "2", "--seconds", "1", "--age", "8")
    assert status == 0
    for session in server.sessions:
        assert session.sizes == [1280] * 113  # of 8 s, and of 1 s rounded up
    for row in rows:
        assert row["duration_s"] == 1.04
        assert min(age for age, _ in row["lags"]) > 8
        assert len(row["lags"]) == 1 + 12 + 17  # from the first piece that is sent at the pace of speech
        assert not row["deltas_ms"] or min(row["deltas_ms"]) >= 0


def test_a_session_that_falls_behind(tmp_path: Path) -> None:
    with FakeLive(holds=1, slower_s=0.12) as server:
        status, summary, _ = run(server, tmp_path, "--sessions", "3", "--seconds", "3")
    (load,) = summary["loads"]
    assert status == 0
    assert load["fell_behind"] >= 2
    assert load["lag_ms"]["p99"] > 500


def test_a_session_that_dies_stays_in_the_results(tmp_path: Path) -> None:
    with FakeLive(dies=2) as server:
        status, summary, rows = run(server, tmp_path, "--sessions", "3", "--seconds", "1")
    (load,) = summary["loads"]
    assert status == 1
    assert (load["samples"], load["completed"], load["failed"], load["missing"]) == (3, 2, 1, 0)
    assert load["lag_ms"]["count"] == 2 * (13 - 6 - 1 + 17)
    (dead,) = [row for row in rows if row["error"]]
    assert "closed before transcription.done" in dead["error"]
    assert (dead["lags"], dead["fell_behind"], dead["latency_ms"]) == (None, None, None)
    assert not live.holds(load, load["failed"], 10_000)


def test_all_sessions_die(tmp_path: Path) -> None:
    """Percentiles of nothing are not 0."""
    with FakeLive(dies=1) as server:
        status, summary, _ = run(server, tmp_path, "--sessions", "1", "--seconds", "1")
    (load,) = summary["loads"]
    assert status == 1
    assert (load["lag_ms"], load["lag_in_audio_ms"], load["fell_behind"], load["lag_of"]) == (None, None, None, None)
    assert load["latency_ms"]["p50"] is None
    assert not live.holds(load, 0, 10_000)


def test_merged_deltas_have_no_lag_of_tokens(tmp_path: Path) -> None:
    """Without the words' times, no lag is known at all; with them it is that of words."""
    with FakeLive(merges=3) as server:
        _, summary, rows = run(server, tmp_path, "--sessions", "1", "--seconds", "1")
    (load,) = summary["loads"]
    assert (load["lag_ms"], load["lag_unknown"], load["fell_behind"]) == (None, 1, None)
    assert rows[0]["lags"] is None
    assert not live.holds(load, 0, 10_000)


def test_merged_deltas_beside_words(tmp_path: Path) -> None:
    source = data(tmp_path)
    entries = [json.loads(line) for line in (source / "manifest.jsonl").read_text().splitlines()]
    words = [["a", 0.0, 0.1], ["a", 0.1, 0.2]]
    (source / "manifest.jsonl").write_text("".join(json.dumps(entry | {"words": words}) + "\n" for entry in entries))
    with FakeLive(merges=3) as server:
        flags = ["--sessions", "1", "--seconds", "1", "--warmup", "0", "--out", str(tmp_path / "out"), "--realtime"]
        assert main(["run", "--url", server.url, "--dataset", str(source), *flags]) == 0
    row = json.loads((tmp_path / "out/requests.jsonl").read_text())
    assert row["lag_of"] == "word"
    assert row["words_ms"]
    assert [ms for _, ms in row["lags"]] == pytest.approx([delay - 480 for delay in row["words_ms"]], abs=0.01)


def test_without_usage_the_audio_says_how_many_tokens(tmp_path: Path) -> None:
    with FakeLive(counts=False) as server:
        _, summary, _ = run(server, tmp_path, "--sessions", "1", "--seconds", "1")
    assert summary["loads"][0]["lag_of"] == "token"


def test_clips_have_a_lag_as_well(tmp_path: Path) -> None:
    with FakeLive(lag_s=0.02) as server:
        status, summary, rows = run(server, tmp_path, "--concurrency", "3")
    (load,) = summary["loads"]
    assert status == 0
    assert (load["sessions"], load["concurrency"], load["completed"]) == (None, 3, 6)
    assert load["lag_ms"]["count"] == sum(len(row["lags"]) for row in rows) > 0
    assert server.most <= 3


def test_resume_measures_the_sessions_of_a_load_together(tmp_path: Path) -> None:
    with FakeLive(dies=2) as server:
        assert run(server, tmp_path, "--sessions", "2", "--seconds", "1")[0] == 1
        status, summary, rows = run(server, tmp_path, "--sessions", "2", "--seconds", "1", "--resume")
    assert status == 0
    assert len(rows) == 4
    assert summary["completed"] == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sessions", "2", "--stream"], "--sessions: only with --realtime"),
        (["--realtime", "--age", "3"], "--age: only with --sessions"),
        (["--realtime", "--find-sessions"], "--find-sessions: only with --sessions"),
        (["--realtime", "--find-sessions", "--sessions", "2,3"], "--sessions takes one number"),
        (["--realtime", "--find-sessions", "--sessions", "2", "--resume"], "not allowed with --resume"),
        (["--realtime", "--sessions", "2", "--delay-ms", "90"], "--delay-ms 90: expected a multiple of 80 ms"),
        (["--realtime", "--sessions", "2", "--seconds", "0"], "--seconds 0.0: must be at least 1"),
        (["--realtime", "--sessions", "0"], "expected numbers"),
    ],
)
def test_wrong_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--url", "http://127.0.0.1:1", "--out", "x", *flags])
    assert said in capsys.readouterr().err


def test_the_load_of_a_name() -> None:
    assert parse("s64") == Load("s64", sessions=64)


# ---- The search


@pytest.mark.parametrize(
    ("capacity", "first", "most", "found", "tried"),
    [
        (5, 1, 100, 5, [1, 2, 4, 8, 6, 5]),
        (0, 4, 100, 0, [4, 2, 1]),
        (1000, 8, 30, 30, [8, 16, 30]),
        (100, 16, 512, 100, [16, 32, 64, 128, 96, 112, 104, 100]),
        (3, 64, 8, 3, [8, 4, 2, 3]),
    ],
)
def test_search(capacity: int, first: int, most: int, found: int, tried: list[int]) -> None:
    trials, asked = search(first, most), []
    number = next(trials)
    with pytest.raises(StopIteration) as end:
        while True:
            asked.append(number)
            number = trials.send(number <= capacity)
    assert end.value.value == found
    assert asked == tried
    assert capacity - found <= max(1, found // 16) or capacity > most


@pytest.mark.slow
def test_find_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeLive(holds=3, slower_s=0.5) as server:
        flags = ["--sessions", "1", "--find-sessions", "--most-sessions", "8", "--seconds", "2", "--lag-ms", "400"]
        status, summary, rows = run(server, tmp_path, *flags)
    assert status == 0
    found = summary["search"]
    assert found["trials"] == [
        {"sessions": 1, "held": True},
        {"sessions": 2, "held": True},
        {"sessions": 4, "held": False},
        {"sessions": 3, "held": True},
    ]
    assert (found["held"], found["lag_ms"], found["most"]) == (3, 400, 8)
    assert len(rows) == 1 + 2 + 4 + 3
    said = capsys.readouterr()
    assert "4 sessions: lag P99" in said.err
    assert "sessions held" in said.out


# ---- Plots


def test_lag_by_age() -> None:
    def row(lags: list[tuple[float, float]] | None) -> Row:
        return Row("a", 10, 1, 0, 10, 5, 101, "a", "a", None, lags=lags, load="s2")

    rows = [row([(age / 10, 100.0) for age in range(6000)]), row([(599.0, 300.0)]), row(None)]
    found = live.by_age(rows)
    assert len(found) <= live.AGES + 1
    assert found[0] == (pytest.approx(5, abs=1), 100, 100)
    assert live.by_age([row(None)]) == live.by_age([]) == []
    assert list(plots._lags([], {"s2": [row(None)]})) == []
