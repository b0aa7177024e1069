"""The numbers, against values computed by hand."""

from typing import Any

import pytest

from bench import metrics
from bench.client import Row


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
    found = [metrics.percentile(values, q) for q in (0, 50, 90, 95, 99, 100)]
    assert found == pytest.approx([10, 25, 37, 38.5, 39.7, 40])
    assert metrics.percentile([7.0], 99) == 7.0
    assert metrics.percentile([], 50) is None


def test_latency_is_of_completed_requests_alone() -> None:
    rows = [row(latency_ms=10.0), row(text=None, latency_ms=9000.0), row(latency_ms=30.0)]
    assert metrics.latency(rows) == pytest.approx(
        {"p50": 20.0, "p90": 28.0, "p95": 29.0, "p99": 29.8, "mean": 20.0, "max": 30.0}
    )


def test_nothing_measured_is_null() -> None:
    for rows in ([], [row(text=None)]):
        assert set(metrics.latency(rows).values()) == {None}
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
    assert metrics.word_errors(reference, transcript) == metrics.WordErrors(*expected)


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
