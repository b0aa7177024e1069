"""Comparisons of runs that the test writes, with differences it knows."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import compare
from bench.__main__ import main
from bench.measure import spread

CLIPS = [f"c{number:02}" for number in range(40)]
REFERENCE = "the quick brown fox jumps"
ENVIRONMENT = {"cpu": "abacus", "cores": 2, "gpu": None, "server_version": "1.0", "libraries": {"jiwer": "4.0.0"}}

Change = Callable[[dict[str, Any]], dict[str, Any]]


def write_run(directory: Path, change: Change = dict, at: tuple[str, ...] = ("c1",), **record: Any) -> Path:
    """A run of 40 clips of 2 s with latencies of 101 to 140 ms; `change` alters each row, an empty one is left out."""
    run = {"manifest_sha256": "m", "api": "transcriptions", "mode": "whole", "language": None, "warmup": 2}
    run |= {"loads": list(at), "ids": CLIPS, **record.pop("run", {})}
    directory.mkdir(parents=True)
    whole = {"schema_version": 2, "run": run, "loads": {}, "environment": ENVIRONMENT, "memory": None, **record}
    (directory / "run.json").write_text(json.dumps(whole))
    with (directory / "requests.jsonl").open("w") as file:
        for load in at:
            for number, clip in enumerate(run["ids"], 1):
                row = {"id": clip, "load": load, "part": 1, "duration_s": 2.0, "start": float(number)}
                row |= {"end": number + 1.0, "latency_ms": 100.0 + number, "status": 200}
                row |= {"text": REFERENCE, "reference": REFERENCE, "error": None}
                if row := change(row):
                    file.write(json.dumps(row) + "\n")
    return directory


def fail(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"latency_ms": None, "text": None, "status": 500, "error": "HTTP 500"}


def times(factor: float, spread: float = 0.0) -> Change:
    """All latencies times `factor`, and every second one a little more, the others as much less."""
    signs = itertools.cycle((1, -1))
    return lambda row: row | {"latency_ms": row["latency_ms"] * factor * math.exp(next(signs) * spread)}


class Compared:
    """The command's output, and the numbers that it wrote."""

    def __init__(self, status: int, printed: str, json_path: Path) -> None:
        self.status, self.printed = status, printed
        self.pairs = json.loads(json_path.read_text())["pairs"] if json_path.exists() else []

    def load(self) -> dict[str, Any]:
        ((load,),) = (pair["loads"] for pair in self.pairs)
        return dict(load)


@pytest.fixture
def run_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Compared]]:
    def call(*directories: Path) -> Compared:
        path = tmp_path / "compared.json"
        status = main(["compare", *map(str, directories), "--json", str(path)])
        output = capsys.readouterr()
        return Compared(status, output.out + output.err, path)

    yield call


# ---- Verdicts


def test_faster_slower_and_no_difference(tmp_path: Path, run_compare: Any) -> None:
    a = write_run(tmp_path / "a")
    others = {"faster": times(0.9, 0.05), "slower": times(1.1, 0.05), "no difference seen": times(1.0, 0.05)}
    directories = [write_run(tmp_path / name.split()[0], change) for name, change in others.items()]
    done = run_compare(a, *directories)
    assert done.status == 0
    found = [pair["loads"][0]["latency_ms"] for pair in done.pairs]
    assert [each["verdict"] for each in found] == list(others)
    assert "\nB is faster: 0.9" in done.printed
    assert "\nC is slower: 1.1" in done.printed
    assert "\nno difference seen in latency: D has " in done.printed
    assert done.printed.endswith(f"\n\n{compare.CAVEAT}\n")
    # The logarithms have a standard deviation of 0.05, and so the mean of 40 has 0.05 / sqrt(40) = 0.0079.
    low, high = found[2]["ratio_geometric_mean"]["ci95"]
    assert low < 1 < high
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / math.sqrt(40), rel=0.25)


def test_a_shift_of_every_clip_is_found_exactly(tmp_path: Path, run_compare: Any) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", lambda row: row | {"latency_ms": row["latency_ms"] + 7})
    latency = run_compare(a, b).load()["latency_ms"]
    assert latency["a"] == {"median": 120.5, "mean": 120.5}
    assert latency["b"] == {"median": 127.5, "mean": 127.5}
    for name in ("difference_mean", "difference_median"):
        assert latency[name] == {"value": 7.0, "ci95": [7.0, 7.0]}
    ratios = [(100 + number + 7) / (100 + number) for number in range(1, 41)]
    expected = math.exp(sum(map(math.log, ratios)) / 40)
    assert latency["ratio_geometric_mean"]["value"] == pytest.approx(expected)
    assert latency["ratio_median"]["value"] == pytest.approx((ratios[19] + ratios[20]) / 2)
    low, high = latency["ratio_geometric_mean"]["ci95"]
    assert 1 < low < expected < high


def test_identical_runs(tmp_path: Path, run_compare: Any) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    done = run_compare(a, b)
    load = done.load()
    assert load["latency_ms"]["ratio_geometric_mean"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    assert load["latency_ms"]["verdict"] == load["wer"]["verdict"] == "no difference seen"
    assert load["changed"] == {"count": 0, "only_form": 0, "ids": [], "first": []}
    assert "transcripts: none changed" in done.printed
    assert "warning" not in done.printed
    assert "differs" not in done.printed
    assert run_compare(a, b).pairs == done.pairs  # the picks are seeded


def test_pairs_see_what_their_means_hide(tmp_path: Path, run_compare: Any) -> None:
    """Clips between 1 and 40 times as long, each 2 % faster: the spread of the clips is not that of the differences."""
    a = write_run(tmp_path / "a", lambda row: row | {"latency_ms": (row["latency_ms"] - 100) * 100})
    b = write_run(tmp_path / "b", lambda row: row | {"latency_ms": (row["latency_ms"] - 100) * 98})
    latency = run_compare(a, b).load()["latency_ms"]
    assert latency["verdict"] == "faster"
    assert latency["ratio_geometric_mean"]["ci95"] == pytest.approx([0.98, 0.98])


def test_intervals_do_not_depend_on_how_many_picks_are_held(
    tmp_path: Path, run_compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", times(1.0, 0.05))
    whole = run_compare(a, b).load()
    monkeypatch.setattr(spread, "CHUNK", 130)  # three resamples of 40 clips, the last block not full
    assert run_compare(a, b).load() == whole


def test_one_clip_has_no_verdict(tmp_path: Path, run_compare: Any) -> None:
    a, b = (write_run(tmp_path / name, run={"ids": ["c00"]}) for name in "ab")
    done = run_compare(a, b)
    assert done.load()["latency_ms"]["verdict"] is None
    assert done.load()["latency_ms"]["difference_mean"] == {"value": 0.0, "ci95": None}
    assert "no verdict on latency: one clip gives no interval" in done.printed
    assert "fewer than 20 clips" in done.printed


def test_first_text_is_compared_where_both_have_it(tmp_path: Path, run_compare: Any) -> None:
    def streamed(factor: float) -> Change:
        return lambda row: row | {"first_text_ms": None if row["id"] == "c00" else row["latency_ms"] / 2 * factor}

    a = write_run(tmp_path / "a", streamed(1), run={"mode": "stream"})
    b = write_run(tmp_path / "b", streamed(1.5), run={"mode": "stream"})
    done = run_compare(a, b)
    first = done.load()["first_text_ms"]
    assert (first["clips"], first["verdict"]) == (39, "slower")
    assert first["ratio_geometric_mean"]["value"] == pytest.approx(1.5)
    assert "B is slower: 1.500 (1.500 to 1.500) times A's first text" in done.printed
    assert "no difference seen in latency" in done.printed


# ---- Texts


@pytest.mark.parametrize(("worse", "verdict"), [(1, "higher"), (0, "lower")])
def test_wer_difference(tmp_path: Path, run_compare: Any, worse: int, verdict: str) -> None:
    """20 of 40 clips lose 1 of their 5 words: 20 / 200."""
    names = ["a", "b"]
    right = write_run(tmp_path / names[1 - worse])
    wrong = write_run(
        tmp_path / names[worse],
        lambda row: row | {"text": "the quick brown cat jumps"} if int(row["id"][1:]) % 2 else row,
    )
    done = run_compare(*((right, wrong) if worse else (wrong, right)))
    wer = done.load()["wer"]
    sign = 1 if worse else -1
    assert wer["difference"]["value"] == pytest.approx(sign * 0.1)
    assert (wer["a"], wer["b"], wer["words"]) == ((0.0, 0.1, 200) if worse else (0.1, 0.0, 200))
    # Half of 40 clips: 0.2 * sqrt(0.25 / 40) = 0.0158 is the standard error.
    low, high = sorted(sign * bound for bound in wer["difference"]["ci95"])
    assert (low, high) == pytest.approx((0.1 - 1.96 * 0.0158, 0.1 + 1.96 * 0.0158), abs=0.008)
    assert wer["verdict"] == verdict
    assert f"B has the {verdict} WER: " in done.printed


def test_a_language_without_spaces_has_its_letters_compared(tmp_path: Path, run_compare: Any) -> None:
    """One of five letters in half of the clips."""
    texts = [
        lambda row: row | {"reference": "\u4eca\u5929\u5929\u6c14\u597d", "text": "\u4eca\u5929\u5929\u6c14\u597d"}
    ]
    texts.append(
        lambda row: texts[0](row) | ({"text": "\u4eca\u5929\u5929\u6c14\u574f"} if int(row["id"][1:]) % 2 else {})
    )
    a, b = (write_run(tmp_path / name, each, run={"language": "zh"}) for name, each in zip("ab", texts, strict=True))
    done = run_compare(a, b)
    assert (done.load()["wer"]["name"], done.load()["wer"]["b"]) == ("CER", pytest.approx(0.1))
    assert "B has the higher CER: " in done.printed


def test_changed_transcripts(tmp_path: Path, run_compare: Any) -> None:
    changed = dict.fromkeys(CLIPS[5:17], "a quick brown fox jumps high") | {"c03": "The quick, brown fox jumps"}
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", lambda row: row | {"text": changed.get(row["id"], row["text"])})
    done = run_compare(a, b)
    found = done.load()["changed"]
    assert (found["count"], found["only_form"]) == (13, 1)
    assert found["ids"] == sorted(changed)
    assert [each["id"] for each in found["first"]] == sorted(changed)[:10]
    assert found["first"][0]["diff"] == "[-the quick-] {+The quick,+} brown fox jumps"
    assert found["first"][1]["diff"] == "[-the-] {+a+} quick brown fox jumps {+high+}"
    assert found["first"][1]["errors"] == [0, 2]
    assert "transcripts: 13 changed, 1 only in case or punctuation: c03, c05, " in done.printed
    assert "  c05: word errors A 0, B 2\n    [-the-] {+a+} quick" in done.printed


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "a b", "{+a b+}"),
        ("a b", "", "[-a b-]"),
        ("a b c", "a c", "a [-b-] c"),
        ("a", "a ", "a (same words, different whitespace)"),
    ],
)
def test_word_diff(before: str, after: str, expected: str) -> None:
    assert compare.word_diff(before, after) == expected


def test_terminal_escapes_are_not_printed(tmp_path: Path, run_compare: Any) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", lambda row: row | {"text": "the \x1b[31m\nfox"})
    done = run_compare(a, b)
    assert "\ufffd[31m" in done.printed
    assert "\x1b" not in done.printed


# ---- Which clips


def test_failed_and_missing_clips_are_left_out_and_counted(tmp_path: Path, run_compare: Any) -> None:
    slow = {"c09": 99_999.0}

    def of_a(row: dict[str, Any]) -> dict[str, Any]:
        row |= {"latency_ms": slow.get(row["id"], row["latency_ms"])}
        return {} if row["id"] == "c02" else fail(row) if row["id"] in ("c00", "c01") else row

    def of_b(row: dict[str, Any]) -> dict[str, Any]:
        return fail(row) if row["id"] in ("c01", "c02", "c09") else row

    a = write_run(tmp_path / "a", of_a)
    b = write_run(tmp_path / "b", of_b, run={"ids": CLIPS[:-2]})
    done = run_compare(a, b)
    load = done.load()
    assert load["clips"] == 40 - 6
    assert load["left_out"] == {
        "failed in A": 1,
        "failed in A and B": 1,
        "without an answer in A, failed in B": 1,
        "failed in B": 1,
        "not chosen in B": 2,
    }
    assert load["latency_ms"]["difference_mean"]["value"] == 0  # the slow one had no partner
    assert "34 clips completed in both, 6 left out (1 failed in A; " in done.printed


def test_the_last_attempt_at_a_clip_counts(tmp_path: Path, run_compare: Any) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", lambda row: fail(row) if row["id"] == "c00" else row)
    with (b / "requests.jsonl").open("a") as file:
        again = json.loads((a / "requests.jsonl").read_text().splitlines()[0])
        file.write(json.dumps(again | {"part": 2}) + "\n" + '{"id": "c01", "cut')
    assert run_compare(a, b).load()["clips"] == 40


def test_loads_are_compared_each_with_its_own(tmp_path: Path, run_compare: Any) -> None:
    def slower_at_16(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"latency_ms": row["latency_ms"] * (2 if row["load"] == "c16" else 1)}

    a = write_run(tmp_path / "a", at=("c1", "c16", "c4"))
    b = write_run(tmp_path / "b", slower_at_16, at=("c16", "c1"))
    done = run_compare(a, b)
    verdicts = {load["load"]: load["latency_ms"]["verdict"] for load in done.pairs[0]["loads"]}
    assert verdicts == {"c1": "no difference seen", "c16": "slower"}
    assert "not compared, because only one run has this load: c4 in A" in done.printed


# ---- Side by side


def test_one_figure_each(tmp_path: Path, run_compare: Any) -> None:
    memory = {"peak_bytes": 3 * 2**30, "source": "nvml_device"}
    a = write_run(tmp_path / "a", memory=memory)
    b = write_run(
        tmp_path / "b",
        lambda row: fail(row) if row["id"] == "c00" else row,
        memory=memory | {"peak_bytes": 2**30},
        loads={"c1": {"joules": 156.0}},
    )
    done = run_compare(a, b)
    load = done.load()
    # Clips of 2 s, of which 40 and 39 completed between second 1 and second 41
    assert load["rtfx"] == {"a": pytest.approx(80 / 40), "b": pytest.approx(78 / 40)}
    assert load["joules_per_audio_second"] == {"a": None, "b": pytest.approx(2.0)}
    assert done.pairs[0]["memory"]["b"] == {"peak_bytes": 2**30, "source": "nvml_device"}
    peaks = "peak memory: A 3.00 GiB (nvml_device), B 1.00 GiB (nvml_device); one value per run, no interval"
    assert peaks in done.printed
    lines = {line.split("  ")[0]: line for line in done.printed.splitlines()}
    assert lines["RTFx"].endswith("one value per run: no interval")
    assert lines["J per audio s"].split() == ["J", "per", "audio", "s", "not", "measured", "2.00"]


# ---- What cannot be compared, and what should not be without a word


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ({"manifest_sha256": "n"}, "manifest_sha256 is 'm' in the first, 'n' in the second"),
        ({"mode": "realtime"}, "mode is 'whole' in the first, 'realtime' in the second"),
        ({"api": "chat"}, "api is 'transcriptions' in the first, 'chat' in the second"),
        ({"ids": ["d00"]}, "they have no clip in common"),
    ],
)
def test_refusals(tmp_path: Path, run_compare: Any, run: dict[str, Any], named: str) -> None:
    done = run_compare(write_run(tmp_path / "a"), write_run(tmp_path / "same"), write_run(tmp_path / "b", run=run))
    assert done.status == 2
    assert done.printed.startswith(f"error: cannot compare {tmp_path / 'a'} with {tmp_path / 'b'}: {named}")
    assert done.pairs == []


def test_runs_without_a_completed_pair(tmp_path: Path, run_compare: Any) -> None:
    done = run_compare(write_run(tmp_path / "a"), write_run(tmp_path / "b", fail))
    assert done.status == 2
    assert "no clip that completed in both at the same load: c1: 40 failed in B" in done.printed


def test_data_errors(tmp_path: Path, run_compare: Any) -> None:
    a = write_run(tmp_path / "a")
    done = run_compare(a, tmp_path / "nowhere")
    assert (done.status, "nowhere/run.json" in done.printed) == (2, True)
    done = run_compare(a, write_run(tmp_path / "zero", lambda row: row | {"latency_ms": 0}))
    assert (done.status, "latency_ms of c00 is 0, expected more than 0" in done.printed) == (2, True)
    (a / "run.json").write_text('{"run": {}}')
    done = run_compare(a, a)
    assert (done.status, "run.json has schema_version None; this bench reads 2" in done.printed) == (2, True)


def test_warnings_and_settings(tmp_path: Path, run_compare: Any) -> None:
    config = {"max_model_len": 512, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    memory = {"peak_bytes": 1, "source": "nvml_device"}
    a = write_run(
        tmp_path / "a",
        memory=memory,
        environment=ENVIRONMENT | {"server": {"config": config, "versions": {"vllm": "0.20.0"}}},
    )
    b = write_run(
        tmp_path / "b",
        environment=ENVIRONMENT
        | {"cpu": "slide rule", "libraries": {"jiwer": "4.1.0"}, "git_commit": "unknown in A"}
        | {"server": {"config": config | {"max_model_len": 1024, "seed": 1}, "versions": {"vllm": "0.32.0"}}},
        memory=memory | {"source": "rss_process_tree"},
        run={"language": "de", "config_sha256": "hidden, as both configs are known"},
    )
    (a / "summary.json").write_text('{"quality": {"normalizer": "one"}}')
    (b / "summary.json").write_text('{"quality": {"normalizer": "two"}}')
    done = run_compare(a, b)
    assert done.status == 0
    assert done.pairs[0]["warnings"] == [
        'different machines: cpu: "abacus" in A, "slide rule" in B',
        'different versions: libraries.jiwer: "4.0.0" in A, "4.1.0" in B',
        'different versions: server.vllm: "0.20.0" in A, "0.32.0" in B',
        'different measurement: language: null in A, "de" in B',
        'different normalisers: normalizer: "one" in A, "two" in B '
        "(the WERs below are scored again with one normaliser)",
        'peak memory from different sources: memory.source: "nvml_device" in A, "rss_process_tree" in B',
    ]
    assert done.pairs[0]["settings"] == [
        "server.config.max_model_len: 512 in A, 1024 in B",
        "server.config.seed: null in A, 1 in B",
    ]
    assert done.printed.count("\nwarning: ") == 6
    assert done.printed.count("\ndiffers: ") == 2


def test_of_two_runs_of_the_repository(run_compare: Any) -> None:
    """Real files: 500 clips."""
    run = Path(__file__).parents[2] / "bench/results/pico-cpu"
    done = run_compare(run, run)
    assert (done.status, done.load()["clips"], done.load()["wer"]["words"]) == (0, 500, 13546)
