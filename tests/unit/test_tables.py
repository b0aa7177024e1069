"""The generated tables: the pages have what `python -m tools.tables` writes, and what that is of a prepared report."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import delays
from bench.gpu import rows
from bench.gpu.plan import Sessions
from bench.speakers import score
from pico import keywords
from tools import tables


def test_the_pages_are_not_stale() -> None:
    assert tables.main(["--check"]) == 0, "run `python -m tools.tables`"


def prepared(item: Any) -> dict[str, Any]:
    """A row of a report, with figures that tell it from the others."""
    row = {"row": item.row, "kind": item.kind, "server": item.server, "vllm": "0.32.0", "failed": 0}
    spread = {"p50": 31.7, "p95": 140.0, "p99": 154.6}
    row |= {"joules_per_audio_second": 0.723, "peak_vram_bytes": 21_700_000_000}
    row |= {"start_s": 45.6, "start_caches": "warm"}
    if isinstance(item, Sessions):
        lags = {"lag_ms": spread, "lag_in_audio_ms": None, "final_ms": spread}
        lengths = {"least_s": 30.0, "most_s": 60.0, "uploads": item.uploads}
        return row | lags | lengths | {"sessions": item.sessions, "fell_behind": 0}
    times = {"p50_ms": 1234.5, "p95_ms": 2345.6}
    drafting = item.server in ("fast", "throughput", "useless", "pico")
    times |= {"acceptance": [0.9, 0.6] if drafting else None, "tokens_per_step": 2.5 if drafting else None}
    return row | times | {"in_flight": item.in_flight, "clips": item.clips, "rtfx": 4.0 * item.in_flight}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Pages with marks, and a report."""
    machine = {"gpu": ["NVIDIA H200"], "git_commit": "0123456789"}
    fast = {"kv_cache_memory_bytes": 4 * 2**30, "additional_config": {"max_live_sessions": 16}}
    content: dict[str, Any] = {"date_utc": "2026-11-24T10:00:00+00:00", "machine": machine}
    content |= {"rows": list(map(prepared, rows.REPORT)), "configs": {"fast": {"config": fast}}}
    (tmp_path / tables.REPORT).parent.mkdir(parents=True)
    (tmp_path / tables.REPORT).write_text(json.dumps(content))
    for name in (tables.SPEECH, tables.STOCK, *tables.LIVE_FILES, score.OUT, delays.OUT, keywords.OUT):
        shutil.copy(tables.ROOT / name, tmp_path / name)
    for page, made in tables.PAGES.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        marks = "\n\nbetween\n\n".join(f"<!-- table: {name} -->\n<!-- end -->" for name in made)
        (tmp_path / page).write_text(f"before\n\n{marks}\n\nafter\n")
    return tmp_path


def test_each_page_has_its_tables(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"], checkout) == 1
    assert "README.md is stale: run `python -m tools.tables`" in capsys.readouterr().err
    assert tables.main([], checkout) == 0
    assert tables.main(["--check"], checkout) == 0
    readme = (checkout / "README.md").read_text().splitlines()
    assert (readme[0], readme[2], readme[-3], readme[-1]) == (
        "before",
        "<!-- table: speed -->",
        "<!-- end -->",
        "after",
    )
    assert "| `profiles/fast.yaml` | 64 | 1,234 | 256 | 0.72 |" in readme
    assert "| `profiles/realtime.yaml`, live | 150 sessions | lag 32 / 155 (P99) | - | 0.72 |" in readme
    assert "NVIDIA H200, vLLM 0.32.0, random weights" in readme[-5]
    assert "(`bench/results/report-h200.json`)" in readme[-5]
    pages = {name: (checkout / name).read_text() for name in tables.PAGES}
    assert "| stock, full CUDA graphs | 1 | 698 | 13.8 | 24.8 |" in pages["docs/pages/performance.md"]
    assert "| `profiles/fast.yaml` without drafts | 1 | 353 | 26.6 | 18.9 |" in pages["docs/pages/performance.md"]
    assert "| `profiles/fast.yaml` | 46 | - | 21.7 |" in pages["docs/pages/performance.md"]
    assert "| 16 | 30 to 40 s | 60 of 78 s | 75 / 197 | 73 / 196 |" in pages["docs/pages/performance.md"]
    assert (
        "pico" not in pages["docs/pages/performance.md"] and "random drafter" not in pages["docs/pages/performance.md"]
    )
    drafts = pages["docs/pages/drafts.md"].splitlines()
    assert "| `profiles/fast.yaml` | 16 | 2.50 | 1,234 | 1,234 | 64.0 | 64.0 | 0.72 | 0.72 |" in drafts
    assert "| pico with its drafter | 64 | 2.50 | - | 1,234 | - | 256 | - | 0.72 |" in drafts
    assert sum("without drafts" in line for line in drafts) == 1  # the head of the table
    assert "| `profiles/throughput.yaml` | 256 | 1,024 | 98 | 293 | 72 |" in pages["docs/pages/batch.md"]


def test_bounds_of_a_gpu(checkout: Path) -> None:
    """The weights of the language model are read for each token; a GPU that was measured says so."""
    by_gpu = {line.split(" | ")[0].strip("| "): line for line in tables.gpus(tables.Reports(checkout)).splitlines()}
    # 3.43 billion parameters of 2 bytes at 4.8 TB/s
    assert "| 1.4 |" in by_gpu["H200"] and by_gpu["H200"].endswith("| 1,024 |")
    assert by_gpu["L4"].endswith("| not measured |")
    # 144 steps without drafts; with them, of 1 + 0.9 + 0.6 tokens
    assert "| 22.9 | 3.30 | 1.32 |" in by_gpu["L4"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(), None),
        (lambda rows: rows.pop(3), "has no row 'fast@1' without failures: run its `bench gpu report` again"),
        (lambda rows: rows[3].update(failed=2), "has no row 'fast@1' without failures"),
        (lambda rows: rows[-1].update(failed=2), "has no row 'contest@1' without failures"),
    ],
)
def test_a_row_that_a_table_needs_is_named(
    checkout: Path, change: Any, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((checkout / tables.REPORT).read_text())
    change(content["rows"])
    (checkout / tables.REPORT).write_text(json.dumps(content))
    assert tables.main([], checkout) == int(said is not None)
    assert (said or "") in capsys.readouterr().err


def test_without_a_report_it_says_how_to_make_it(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / tables.REPORT).unlink()
    assert tables.main(["--check"], checkout) == 1
    told = capsys.readouterr().err
    assert (
        "report-h200.json (No such file or directory): make it on a GPU with `python -m bench gpu report --out" in told
    )


def test_other_marks_are_an_error(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = checkout / "docs/pages/batch.md"
    page.write_text("<!-- table: totals -->\n<!-- end -->\n")
    assert tables.main([], checkout) == 1
    assert "docs/pages/batch.md: marks of the tables ['totals']: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "span"),
    [("plain", "`plain`"), ("a `b` c", "``a `b` c``"), ("`a`", "`` `a` ``"), ("a `` b ` c", "```a `` b ` c```")],
)
def test_a_code_span(text: str, span: str) -> None:
    assert tables.code(text) == span
