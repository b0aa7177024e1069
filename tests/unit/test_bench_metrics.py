"""The numbers, against values computed by hand."""

from typing import Any

import numpy as np
import pytest
from runs import fail, make_rows

from bench import BenchError, loads, metrics
from bench.answers import Row
from bench.measure import scoring, spread


def row(reference: str = "hello", text: str | None = "hello", **changes: Any) -> Row:
    """A completed row of 100 ms, or a failed one where `text` is None."""
    failed = text is None
    fields: dict[str, Any] = {
        "id": "a",
        "duration_s": 2.0,
        "part": 1,
        "start": 10.0,
        "end": 10.1,
        "latency_ms": None if failed else 100.0,
        "status": 500 if failed else 200,
        "text": text,
        "reference": reference,
        "error": "HTTP 500" if failed else None,
    }
    return Row(**{**fields, **changes})


def test_percentiles_interpolate_linearly() -> None:
    values = [40.0, 10.0, 30.0, 20.0]  # rank of P90 = 0.9 * 3 = 2.7, so 30 + 0.7 * 10
    found = spread.percentiles(values, (0, 50, 90, 95, 99, 100))
    assert found == pytest.approx({"p0": 10, "p50": 25, "p90": 37, "p95": 38.5, "p99": 39.7, "p100": 40})
    assert spread.percentiles([7.0], [99]) == {"p99": 7.0}
    assert spread.percentiles([]) is None


def test_latency_is_of_completed_requests_alone() -> None:
    rows = [row(latency_ms=10.0), row(text=None, latency_ms=9000.0), row(latency_ms=30.0)]
    numbers = metrics.latency(rows)
    intervals = numbers.pop("ci95")
    assert numbers == pytest.approx({"p50": 20.0, "p90": 28.0, "p95": 29.0, "p99": 29.8, "mean": 20.0, "max": 30.0})
    # Of two values a resample is (10, 10), (10, 30), (30, 10) or (30, 30).
    assert intervals == {name: [10.0, 30.0] for name in ("p50", "p90", "p95", "p99", "mean")}


def test_one_request_has_percentiles_and_no_interval() -> None:
    numbers = metrics.latency([row(latency_ms=7.0)])
    assert set(numbers.pop("ci95").values()) == {None}
    assert set(numbers.values()) == {7.0}


def test_intervals_of_percentiles() -> None:
    """Normal latencies, so the standard error of the median of n is known: 1.2533 sigma / sqrt(n)."""
    values = np.random.default_rng(3).normal(1000, 100, 400)
    numbers = metrics.latency([row(latency_ms=float(value)) for value in values])
    low, high = numbers["ci95"]["p50"]
    assert high - low == pytest.approx(2 * 1.96 * 1.2533 * 100 / 20, rel=0.25)
    low, high = numbers["ci95"]["mean"]
    assert high - low == pytest.approx(2 * 1.96 * 100 / 20, rel=0.15)
    for name in ("p50", "p90", "p95", "p99", "mean"):
        low, high = numbers["ci95"][name]
        assert low < numbers[name] < high
    assert metrics.latency([row(latency_ms=float(value)) for value in values]) == numbers


def test_resamples_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("alpha beta " * (1 + number % 3), "alpha " * (number % 4), latency_ms=100.0 + number)
        for number in range(70)
    ]
    whole = metrics.wer(rows), metrics.latency(rows)
    monkeypatch.setattr(spread, "CHUNK", 700)
    assert (metrics.wer(rows), metrics.latency(rows)) == whole


def test_nothing_measured_is_null() -> None:
    for rows in ([], [row(text=None)]):
        numbers = metrics.latency(rows)
        assert set(numbers.pop("ci95").values()) == set(numbers.values()) == {None}
        assert metrics.rtfx(rows, 1.0) is None
    assert metrics.wall_seconds([]) is None
    assert metrics.rtfx([row()], None) is None
    nothing = metrics.wer([])
    assert nothing.pop("normalizer").startswith("whisper-english (whisper-normalizer ")
    assert nothing == dict.fromkeys(("value", "ci95", "substitutions", "deletions", "insertions", "words"))


@pytest.mark.parametrize(
    ("reference", "transcript", "expected"),
    [
        ("the cat sat", "the cat sat", (0, 0, 0, 3)),
        ("the cat sat", "the bat sat down", (1, 0, 1, 3)),
        ("the cat sat", "cat", (0, 2, 0, 3)),
        ("the cat sat", "", (0, 3, 0, 3)),
        ("the cat sat", None, (0, 3, 0, 3)),
        ("um, [noise]", "hello there", (0, 0, 2, 0)),  # nothing is left of this reference
        ("um", "", (0, 0, 0, 0)),
        ("Mr. Smith's favourite colour: twenty-one!", "mister smith's favorite color 21", (0, 0, 0, 6)),
    ],
)
def test_word_errors(reference: str, transcript: str | None, expected: tuple[int, int, int, int]) -> None:
    assert scoring.word_errors(reference, transcript) == scoring.Errors(*expected)


def test_wer_is_of_the_corpus_and_counts_failures_as_deleted() -> None:
    rows = [
        row("alpha beta gamma delta", "alpha beta gamma delta"),
        row("alpha", "omega"),  # 1 substitution
        row("alpha beta", None),  # failed: 2 deletions
        row("alpha beta gamma", "alpha beta gamma delta"),  # 1 insertion
        row("um", "alpha"),  # 1 insertion, no words
    ]
    result = metrics.wer(rows)
    assert (result["substitutions"], result["deletions"], result["insertions"]) == (1, 2, 2)
    assert result["words"] == 10
    assert result["value"] == pytest.approx(0.5)


def test_references_without_words_give_no_rate() -> None:
    result = metrics.wer([row("um", "alpha"), row("uh", "")])
    assert (result["value"], result["ci95"], result["words"], result["insertions"]) == (None, None, 0, 1)


def test_bootstrap_interval() -> None:
    right, wrong = row("alpha", "alpha"), row("alpha", "omega")
    # Two clips: a resample's rate is 0, 1/2 or 1 with probability 1/4, 1/2 and 1/4.
    assert metrics.wer([right, wrong])["ci95"] == [0.0, 1.0]
    assert metrics.wer([wrong] * 5)["ci95"] == [1.0, 1.0]
    assert metrics.wer([wrong])["ci95"] is None
    # 100 clips, p = 0.3: the normal approximation is 0.3 +- 1.96 * sqrt(0.3 * 0.7 / 100) = 0.21 to 0.39.
    assert metrics.wer([wrong] * 30 + [right] * 70)["ci95"] == pytest.approx([0.21, 0.39], abs=0.02)


def test_bootstrap_is_seeded() -> None:
    rows = [row("alpha " * (1 + number % 7), "alpha " * (number % 5)) for number in range(50)]
    first = metrics.wer(rows)
    assert first["ci95"][0] < first["value"] < first["ci95"][1]
    assert metrics.wer(rows) == first


def test_bootstrap_weighs_clips_by_their_words() -> None:
    # 50 one-word clips all wrong, 50 three-word clips all right: 50 of 200 words, though half of the clips.
    rows = [row("alpha", "omega")] * 50 + [row("alpha beta gamma", "alpha beta gamma")] * 50
    result = metrics.wer(rows)
    assert result["value"] == 0.25
    assert 0.15 < result["ci95"][0] < 0.25 < result["ci95"][1] < 0.35


def test_wall_clock_adds_up_parts_without_the_time_between() -> None:
    rows = [
        row(part=1, start=100.0, end=102.0),
        row(part=1, start=101.0, end=103.0),  # overlaps: 3 s in all
        row(part=2, start=500.0, end=501.0),
        row(part=2, text=None, start=501.0, end=502.5),  # a failure takes time as well
    ]
    assert metrics.wall_seconds(rows) == pytest.approx(3.0 + 2.5)
    # 3 completed clips of 2 s in 5.5 s
    assert metrics.rtfx(rows, metrics.wall_seconds(rows)) == pytest.approx(6.0 / 5.5)


# ---- A level of load


RESOURCES = {"joules": 60.0, "joules_reason": None, "queued": 1, "queue_threshold_s": 0.3, "harness_cpu_s": 0.006}


def of_load(rows: list[Row], load: str = "c2", clips: int = 4, mode: str = "stream", **changes: Any) -> dict[str, Any]:
    first = changes.pop("first", None)
    resources = changes.pop("resources", RESOURCES)
    return metrics.of_load(load, rows, changes.pop("attempts", rows), clips, resources, mode, first)


def test_a_load_by_hand() -> None:
    rows = [
        row(id="a", start=10.0, end=11.0, latency_ms=1000.0, first_text_ms=200.0, deltas_ms=[200.0, 500.0, 600.0]),
        row(id="b", start=10.0, end=12.0, latency_ms=2000.0, first_text_ms=400.0, deltas_ms=[400.0]),
        row(id="c", text=None, start=11.0, end=14.0),
    ]
    numbers = of_load(rows)
    assert (numbers["concurrency"], numbers["rate"]) == (2, None)
    assert [numbers[name] for name in ("samples", "completed", "failed", "missing")] == [4, 2, 1, 1]
    assert numbers["wall_s"] == pytest.approx(4.0)
    assert numbers["rtfx"] == pytest.approx(2 * 2.0 / 4.0)
    assert numbers["rtfx_clip"] == pytest.approx({"p50": 1.5, "p10": 1.1})  # 2 s in 1 s and in 2 s
    assert numbers["throughput_rps"] == pytest.approx(0.5)
    assert numbers["first_text_ms"]["p50"] == pytest.approx(300.0)
    assert (numbers["gap_ms"]["p50"], numbers["gap_ms"]["max"]) == pytest.approx((200.0, 300.0))  # of 300 and 100
    assert numbers["wait_rate"] == pytest.approx(1 / 3)
    assert (numbers["joules_per_request"], numbers["joules_per_audio_second"]) == pytest.approx((30.0, 15.0))
    assert numbers["harness_ms_per_request"] == pytest.approx(2.0)
    assert (numbers["start_delay_ms"], numbers["word_delay_ms"], numbers["changed_texts"]) == (None, None, None)


def test_the_stages_of_the_server() -> None:
    stages = [{"decode": 2.0, "speech": 9.0, "text": 1.0}, {"decode": 4.0, "text": 1.0}, {"decode": 3.0, "text": 4.0}]
    rows = [*(row(server_ms=each) for each in stages), row(), row(text=None, server_ms={"decode": 1000.0})]
    assert of_load(rows)["server_ms"] == {"decode": 3.0, "speech": 0.0, "text": 1.0}
    assert "server_ms" not in of_load([row()])


def test_an_open_loop_tells_how_late_it_was() -> None:
    rows = [row(due=9.9, start=10.0, words_ms=[400.0, 600.0]), row(due=10.0, start=10.0), row(text=None, due=9.0)]
    numbers = of_load(rows, load="r2.5", mode="realtime")
    assert (numbers["concurrency"], numbers["rate"]) == (None, 2.5)
    assert numbers["start_delay_ms"] == pytest.approx({"p50": 100.0, "p99": 982.0, "max": 1000.0})
    assert numbers["word_delay_ms"] == pytest.approx(
        {"p50": 500.0, "p90": 580.0, "p95": 590.0, "p99": 598.0, "words": 2}
    )
    # The last words' delay is no time in which a clip was done.
    assert numbers["rtfx_clip"] == {"p50": None, "p10": None}


def test_what_a_load_did_not_measure_is_null() -> None:
    numbers = of_load([], resources=None)
    assert numbers["joules_reason"] == "the run was killed before this load ended"
    for name in ("wall_s", "rtfx", "throughput_rps", "wait_rate", "first_text_ms", "gap_ms", "joules_per_request"):
        assert numbers[name] is None, name
    assert (numbers["completed"], numbers["missing"]) == (0, 4)
    whole = of_load([row()], resources=RESOURCES | {"joules": None, "joules_reason": "no GPU", "queued": None})
    assert (whole["joules_per_audio_second"], whole["joules_reason"], whole["wait_rate"]) == (None, "no GPU", None)
    assert (whole["first_text_ms"], whole["gap_ms"]) == (None, None)
    assert of_load([row()], resources=RESOURCES | {"queued": 0})["wait_rate"] == 0.0


def test_changed_texts_are_those_of_clips_that_completed_twice() -> None:
    first = [row(id="a", text="x"), row(id="b", text="y"), row(id="c", text=None), row(id="d", text="z")]
    rows = [row(id="a", text="x"), row(id="b", text="Y"), row(id="c", text="z"), row(id="d", text=None)]
    assert of_load(rows, first=first)["changed_texts"] == 1


@pytest.mark.parametrize("load", ["", "16", "c", "c1.5", "rx", "x4"])
def test_names_of_loads_are_checked(load: str) -> None:
    with pytest.raises(BenchError, match="expected one like c16"):
        loads.parse(load)


# ---- Characters, languages, and the clips that went worst


def test_character_errors_by_hand() -> None:
    result = metrics.quality([row("ab cd", "ab xd"), row("efg", "ef"), row("hi", None)])
    # "ab cd" is 5 characters with its space: 1 substitution. Then 1 deletion of 3, then 2 of 2.
    assert (result["cer"]["substitutions"], result["cer"]["deletions"], result["cer"]["insertions"]) == (1, 3, 0)
    assert result["cer"]["value"] == pytest.approx(4 / 10)
    assert [clip["character_errors"] for clip in result["clips"]] == [1, 1, 2]
    assert [clip["errors"] for clip in result["clips"]] == [1, 1, 1]


def test_raw_scores_count_case_and_punctuation() -> None:
    result = metrics.quality([row("Hello, World!", " hello world")])
    assert (result["wer"]["value"], result["cer"]["value"]) == (0.0, 0.0)
    assert result["raw"]["wer"] == 1.0
    assert result["raw"]["cer"] == pytest.approx(4 / 13)  # H, the comma, W and the exclamation mark


@pytest.mark.parametrize(
    ("language", "reference", "transcript", "headline", "wer", "cer"),
    [
        (None, "It's colour", "it is color", "wer", 0.0, 0.0),
        ("en-GB", "It's colour", "it is color", "wer", 0.0, 0.0),
        ("de", "Grüße aus Köln!", "grüße aus Koln", "wer", 1 / 3, 1 / 14),
        ("zh-TW", "今天,天氣很好。", "今天天气很好", "cer", 1 / 6, 1 / 6),
        ("ja", "東京 タワー", "東京タワ", "cer", 1 / 5, 1 / 5),
        # Two letters with their vowel and tone marks, of which one mark is another.
        ("th", "ที่นี่", "ที่นี้", "cer", 1 / 2, 1 / 6),
        ("hi", "हिन्दी है", "हन्दी है", "wer", 1 / 2, 1 / 9),  # a vowel sign is missing
    ],
)
def test_languages(language: str, reference: str, transcript: str, headline: str, wer: float, cer: float) -> None:
    result = metrics.quality([row(reference, transcript)], language)
    assert result["headline"] == headline
    assert result["wer"]["value"] == pytest.approx(wer)
    assert result["cer"]["value"] == pytest.approx(cer)
    assert result["normalizer"].startswith("whisper-english" if language in (None, "en-GB") else "whisper-basic")
    assert ("every letter a word" in result["normalizer"]) == (headline == "cer")


def test_the_worst_clips_are_aligned_by_words() -> None:
    rows = [
        row("one two three", "one two three", id="right"),
        row("alpha beta gamma delta", "alpha BETTER gamma, delta epsilon", id="two"),
        row("alpha beta", "alpha", id="one"),
        row("alpha beta gamma delta epsilon zeta", None, id="failed"),
        row("alpha", "", id="empty"),
    ]
    result = metrics.quality(rows)
    assert [(each["id"], each["errors"], each["words"]) for each in result["worst"]] == [
        *(("two", 2, 4), ("empty", 1, 1), ("one", 1, 2)),  # of equally many, the greater share first
    ]
    assert result["worst"][0]["wer"] == 0.5
    assert result["worst"][0]["alignment"] == [
        ["equal", "alpha", "alpha"],
        ["substitute", "beta", "better"],
        ["equal", "gamma", "gamma"],
        ["equal", "delta", "delta"],
        ["insert", None, "epsilon"],
    ]
    assert result["worst"][2]["alignment"][1] == ["delete", "beta", None]
    assert result["empty"] == ["empty"]
    assert result["wer"]["deletions"] == 6 + 1 + 1


def test_alignments_hold_both_texts_whole() -> None:
    for each in metrics.quality(make_rows(30, ["c1"], wrong=0.3))["worst"]:
        reference = [step[1] for step in each["alignment"] if step[1] is not None]
        transcript = [step[2] for step in each["alignment"] if step[2] is not None]
        assert reference == scoring.normalize(each["reference"]).split()
        assert transcript == scoring.normalize(each["transcript"]).split()
        assert sum(step[0] != "equal" for step in each["alignment"]) == each["errors"]


def test_error_rates_by_duration() -> None:
    rows = [
        row("alpha beta", "alpha", duration_s=1.999),
        row("alpha beta", "alpha beta", duration_s=2.0),
        row("alpha beta", None, duration_s=4.0),
        row("um", "", duration_s=29.0),  # has no words
        row("alpha", "omega", duration_s=9000.0),
    ]
    assert metrics.quality(rows)["by_duration"] == [
        {"from_s": 0, "to_s": 2, "clips": 1, "wer": 0.5},
        {"from_s": 2, "to_s": 5, "clips": 2, "wer": 0.5},
        {"from_s": 20, "to_s": 30, "clips": 1, "wer": None},
        {"from_s": 3600, "to_s": None, "clips": 1, "wer": 1.0},
    ]


def test_per_clip_counts_add_up_to_the_corpus() -> None:
    rows = make_rows(40, ["c1"], wrong=0.2)
    rows[3] = fail(rows[3])
    result = metrics.quality(rows)
    for rate, errors, units in (("wer", "errors", "words"), ("cer", "character_errors", "characters")):
        total = sum(clip[errors] for clip in result["clips"])
        assert total == sum(result[rate][name] for name in ("substitutions", "deletions", "insertions"))
        assert result[rate]["value"] == pytest.approx(total / sum(clip[units] for clip in result["clips"]))
    wer = metrics.wer(rows)
    assert wer.pop("normalizer") == result["normalizer"]
    assert wer == result["wer"]
