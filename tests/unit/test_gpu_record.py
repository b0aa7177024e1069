"""What `make test-gpu` records, and when a record is of this state of the engine."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from gpu import run
from places import ROOT

from bench import BenchError
from bench.gpu import tested


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for pattern in tested.FILES:
        for path in (ROOT / "src/voxtral_serve").glob(pattern):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return tmp_path


def change(checkout: Path, old: str, new: str, file: str = "engine/ring_attention.py") -> None:
    path = checkout / "src/voxtral_serve" / file
    source = path.read_text(encoding="utf-8")
    assert old in source
    path.write_text(source.replace(old, new, 1), encoding="utf-8")


def test_the_hash_is_of_what_the_engine_does(checkout: Path) -> None:
    digest = tested.engine_hash(checkout)
    assert digest == tested.engine_hash(ROOT)
    change(checkout, "KEYS = 64  # of one turn", "KEYS = 64 # of each turn")
    change(checkout, '"""Attention of live sessions: a few', '"""Attention: a few')
    assert tested.engine_hash(checkout) == digest
    seen = {digest}
    for old, new, file in (
        ("KEYS = 64", "KEYS = 32", "engine/ring_attention.py"),
        ("the session's next row", "the next row", "engine/live_encoder.py"),  # within an f-string
        ("\n\n\n", "\n\nADDED = 1\n\n\n", "patches/drain.py"),
        ("\n\n\n", "\n\nADDED = 1\n\n\n", "shims.py"),
    ):
        change(checkout, old, new, file)
        seen.add(tested.engine_hash(checkout))
    (checkout / "src/voxtral_serve/engine/added.py").write_text("")
    assert len({*seen, tested.engine_hash(checkout)}) == 6


def record(checkout: Path, name: str = "a", **changes: Any) -> None:
    content = {
        "date_utc": "2026-11-25T05:00:00+00:00",
        "commit": "0123456789",
        "engine_sha256": tested.engine_hash(checkout),
        "gpu": "NVIDIA H200",
        "versions": {"vllm": "0.32.0"},
        "counts": {"passed": 99, "failed": 0, "skipped": 1},
    }
    (checkout / tested.FOLDER).mkdir(parents=True, exist_ok=True)
    (checkout / tested.FOLDER / f"{name}.json").write_text(json.dumps(content | changes))


def test_a_release_needs_a_record_of_this_state(checkout: Path) -> None:
    refused = r"no record of this state of the engine, \w{12}, in which every test passed: run `make test-gpu`"
    with pytest.raises(BenchError, match=refused):
        tested.check(checkout)
    for counts in ({"passed": 99, "failed": 1, "skipped": 0}, {"passed": 0, "failed": 0, "skipped": 99}):
        record(checkout, counts=counts)
        with pytest.raises(BenchError, match=refused):
            tested.check(checkout)
    record(checkout, "b")
    assert tested.check(checkout) == "99 passed on NVIDIA H200, commit 0123456"
    change(checkout, "KEYS = 64", "KEYS = 32")
    with pytest.raises(BenchError, match=refused):
        tested.check(checkout)


def test_the_table_says_which_records_are_of_this_state(checkout: Path) -> None:
    heads, rows = tested.table(checkout)
    assert rows == [("no record", *"-" * (len(heads) - 1))]
    record(checkout)
    record(checkout, "b", gpu="NVIDIA H100", engine_sha256="0" * 64)
    rows = tested.table(checkout)[1]
    counts = "99 passed, 0 failed, 1 skipped"
    assert rows[0] == ("NVIDIA H200", "0.32.0", counts, "0123456, 2026-11-25", "yes")
    assert [row[-1] for row in rows] == ["yes", "**no**"]


TESTS = """
import time
import pytest
pytestmark = pytest.mark.gpu

def test_right(record_property):
    record_property("rows", "1e-6")

def test_wrong():
    assert 1 == 2

@pytest.mark.skip(reason="for want of a GPU")
def test_skipped():
    pass
"""


def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str) -> dict[str, Any]:
    (tmp_path / f"test_{name}.py").write_text(source)
    monkeypatch.setitem(run.GROUPS, name, (str(tmp_path / f"test_{name}.py"),))
    group = run.start(name, run.variables("cpu", tmp_path / name), tmp_path)
    return run.watch([group], time.monotonic())[name]


def test_a_group_has_its_counts_figures_and_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = outcome(tmp_path, monkeypatch, TESTS, "mixed")
    assert made["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert made["figures"] == {"rows": "1e-6"}
    assert made["skipped"] == {"test_mixed::test_skipped": "for want of a GPU"}
    assert [*made["failed"]] == ["test_mixed::test_wrong"] and "assert 1 == 2" in made["failed"][
        "test_mixed::test_wrong"
    ]


@pytest.mark.parametrize(
    ("source", "limit_s", "why"),
    [
        ("import os\nos.abort()", 60, "pytest ended with -6, 0 or 1 expected"),
        ("import nothing_of_this_name", 60, "pytest ended with 2, 0 or 1 expected"),
        (f"{TESTS}\ndef test_hangs():\n    time.sleep(600)", 8, "not done after 8 s"),
    ],
    ids=["crash", "import", "hangs"],
)
def test_a_group_that_does_not_end_well_has_failed(
    source: str, limit_s: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LIMIT_S", limit_s)
    made = outcome(tmp_path, monkeypatch, source, "group")
    assert made["counts"]["failed"] >= 1
    assert made["failed"]["group"] == why
