"""summary.json, report.md, report.html and the console's table, of runs made up here, and the schemas they keep to."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fakeserver import Answer, FakeServer, write_dataset
from places import ROOT
from runs import HOSTILE, SCHEMAS, Page, all_valid, fail, is_valid, make_rows, write_run

from bench import BenchError, report, results
from bench.__main__ import main
from bench.answers import Row


def scored(out: Path, rows: list[Row], **changes: Any) -> dict[str, Any]:
    summary, _ = report.score(write_run(out, rows, **changes))
    return summary


# ---- Schemas


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["$id"] == name


@pytest.mark.parametrize("mode", ["whole", "stream", "realtime"])
def test_runs_keep_to_their_schemas(tmp_path: Path, mode: str) -> None:
    rows = make_rows(12, ["c1", "c4", "r2.5"], mode=mode)
    rows[2], rows[13] = fail(rows[2]), fail(rows[13], "ReadTimeout", None)
    scored(tmp_path, rows, mode=mode)
    all_valid(tmp_path)


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([fail(row) for row in make_rows(3, ["c1"])], {}),
        (make_rows(1, ["c1"]), {"language": "zh"}),
        ([replace(row, reference="") for row in make_rows(2, ["c1"])], {"memory": None}),
    ],
)
def test_poor_runs_keep_to_them_as_well(tmp_path: Path, rows: list[Row], changes: dict[str, Any]) -> None:
    scored(tmp_path, rows, **changes)
    all_valid(tmp_path)


def test_a_run_against_a_server_keeps_to_them(tmp_path: Path) -> None:
    texts = {f"c{number}": f"alpha beta {number}" for number in range(4)}
    data = write_dataset(tmp_path / "data", texts)
    answers = {f"{clip}.wav": Answer(text) for clip, text in texts.items()}
    with FakeServer(answers | {"c2.wav": Answer(status=500)}) as server:
        assert main(["run", "--url", server.url, "--dataset", str(data), "--out", str(tmp_path / "out")]) == 1
    all_valid(tmp_path / "out")


def objects(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all objects in a document."""
    found = [path] if isinstance(document, dict) else []
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in children:
        found += objects(value, (*path, key))
    return found


@pytest.mark.parametrize("name", ["run", "requests", "summary"])
def test_drift_fails(tmp_path: Path, name: str) -> None:
    """No object takes a key that its schema does not name, and none can do without one of its keys."""
    scored(tmp_path, make_rows(3, ["c1", "r2"], mode="realtime", wrong=0.5), mode="realtime")
    file = tmp_path / (results.ROWS if name == "requests" else f"{name}.json")
    document = json.loads(file.read_text().splitlines()[0] if name == "requests" else file.read_text())
    free = {"libraries", "patches", "versions", "config"}
    checked = 0
    for path in objects(document):
        changed = copy.deepcopy(document)
        here = changed
        for step in path:
            here = here[step]
        if free & set(path):
            continue
        checked += 1
        here["drift"] = 1
        assert not is_valid(name, changed), path
        del here["drift"]
        if path != ("loads",) or name != "run":
            del here[next(iter(here))]
            assert not is_valid(name, changed), path
    assert checked >= {"run": 6, "requests": 1, "summary": 20}[name]


def test_a_row_without_a_text_has_an_error() -> None:
    row = json.loads(results.row_line(make_rows(1, ["c1"])[0]))
    assert is_valid("requests", row)
    assert not is_valid("requests", row | {"text": None})
    assert not is_valid("requests", row | {"error": "HTTP 500"})
    assert not is_valid("requests", row | {"load": "16"})


# ---- What is scored


def test_loads_are_scored_apart_and_the_first_ones_texts_count(tmp_path: Path) -> None:
    rows = make_rows(10, ["c1", "c4", "c16"], wrong=0)
    rows[0] = fail(rows[0])
    rows[12] = replace(rows[12], text="something else")
    summary = scored(tmp_path, rows)
    assert [summary[name] for name in ("samples", "completed", "failed", "missing")] == [30, 29, 1, 0]
    assert [load["load"] for load in summary["loads"]] == ["c1", "c4", "c16"]
    assert [load["completed"] for load in summary["loads"]] == [9, 10, 10]
    # The failed clip has no text to differ from.
    assert [load["changed_texts"] for load in summary["loads"]] == [None, 1, 0]
    assert summary["quality"]["wer"]["substitutions"] == 0
    assert summary["quality"]["wer"]["deletions"] == len(rows[0].reference.split())
    assert len(summary["quality"]["clips"]) == 10
    assert summary["loads"][2]["rtfx"] > summary["loads"][1]["rtfx"] > summary["loads"][0]["rtfx"]
    for load in summary["loads"]:
        assert load["first_text_ms"]["p50"] <= load["latency_ms"]["p50"]


def test_the_stages_of_the_server_are_a_table(tmp_path: Path) -> None:
    rows = [replace(row, server_ms={"decode": 2.5, "steps": 40.25}) for row in make_rows(2, ["c1", "c4"])]
    scored(tmp_path, rows)
    for name in (results.REPORT, results.PAGE):
        assert "Stages of the server" in (tmp_path / name).read_text()
    assert re.search(
        r"\| load +\| decode +\| steps +\|\n.*\n\| c1 +\| +2\.5 +\| +40\.2 +\|", (tmp_path / results.REPORT).read_text()
    )


def test_of_a_clip_that_was_sent_again_the_last_row_counts(tmp_path: Path) -> None:
    rows = make_rows(3, ["c1"])
    again = replace(rows[1], part=2, start=rows[2].end + 1000, end=rows[2].end + 1002, latency_ms=2000.0)
    summary = scored(tmp_path, [rows[0], fail(rows[1]), rows[2], again])
    (load,) = summary["loads"]
    assert (load["completed"], load["failed"], load["latency_ms"]["max"]) == (3, 0, 2000.0)
    assert load["wall_s"] == pytest.approx(rows[2].end - rows[0].start + 2)
    assert load["wait_rate"] == 0
    assert load["harness_ms_per_request"] == pytest.approx(250 / 4)  # of four requests


def test_rows_of_another_run_are_refused(tmp_path: Path) -> None:
    rows = make_rows(2, ["c1"])
    out = write_run(tmp_path, rows)
    for stray, named in ((replace(rows[0], load="c9"), "'c9'"), (replace(rows[0], id="other"), "'other'")):
        results.write(out / results.ROWS, results.row_line(rows[0]) + results.row_line(stray))
        with pytest.raises(BenchError, match=f"line 2: .*{named}.* not part of the run"):
            report.score(out)


def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    out = write_run(tmp_path, make_rows(1, ["c1"]), schema_version=3)
    with pytest.raises(BenchError, match=r"schema_version 3; this bench reads 2"):
        report.score(out)


def test_the_committed_run_is_what_its_rows_say(tmp_path: Path) -> None:
    committed = ROOT / "bench/results/pico-cpu"
    all_valid(committed)
    for name in (results.RUN, results.ROWS):
        shutil.copy(committed / name, tmp_path)
    report.score(tmp_path)
    assert json.loads((tmp_path / results.SUMMARY).read_text()) == json.loads((committed / results.SUMMARY).read_text())


# ---- The reports


def test_console_of_one_load(tmp_path: Path) -> None:
    rows = make_rows(20, ["c1"], mode="whole")
    out = write_run(tmp_path, rows, mode="whole")
    record = results.read_run(out)
    record["memory"] |= {"peak_bytes": None, "source": None, "reason": "another machine"}
    results.write_json(out / results.RUN, record)
    summary, rows = report.score(out)
    lines = report.console(tmp_path, summary, rows).splitlines()
    (load,) = summary["loads"]
    assert lines[:4] == [
        "samples      20/20 completed, 0 failed",
        *(f"latency {q.upper()}  {load['latency_ms'][q]:.1f} ms" for q in ("p50", "p90", "p95")),
    ]
    assert f"RTFx         {load['rtfx']:.2f}" in lines
    assert f"energy       {load['joules_per_request']:.2f} J per request, " in "\n".join(lines)
    wer = re.compile(r"WER          \d+\.\d\d% \(95 % interval \d+\.\d\d% to \d+\.\d\d%\)")
    assert any(wer.fullmatch(line) for line in lines)
    assert "peak memory  not measured: another machine" in lines
    assert "start-up     41.5 s" in lines
    assert not any(line.startswith("first text") for line in lines)


def test_console_of_several_loads_is_a_table(tmp_path: Path) -> None:
    text = report.console(tmp_path, *report.score(write_run(tmp_path, make_rows(20, ["c1", "c16"]))))
    summary = json.loads((tmp_path / results.SUMMARY).read_text())
    header, first, second = next(
        text.splitlines()[at : at + 3] for at, line in enumerate(text.splitlines()) if line.lstrip().startswith("load ")
    )
    assert header.split("  ")[0].strip() == "load"
    assert first.split()[0] == "c1"
    assert f"{summary['loads'][1]['latency_ms']['p50']:.1f}" in second.split()
    assert len(header) == len(first) == len(second)
    assert "latency P50  " not in text
    assert "WER  " in text


def test_languages_without_spaces_have_character_errors_as_their_headline(tmp_path: Path) -> None:
    rows = [replace(row, reference="今天天气很好", text="今天天汽很好") for row in make_rows(3, ["c1"])]
    summary = scored(tmp_path, rows, language="zh")
    assert "CER          16.67%" in report.console(tmp_path, summary, rows)
    assert "CER by duration" in Page(tmp_path / results.PAGE).text


def test_markdown(tmp_path: Path) -> None:
    rows = make_rows(20, ["c1", "c4"], wrong=0.1)
    rows[20] = fail(rows[20])
    summary = scored(tmp_path, rows)
    text = (tmp_path / results.REPORT).read_text()
    low, high = summary["loads"][0]["latency_ms"]["ci95"]["p50"]
    for expected in (
        f"| c1 | {summary['loads'][0]['latency_ms']['p50']:.1f} ({low:.1f} to {high:.1f}) |",
        "| c4 | c0000 | 500 | HTTP 500: made to fail |",
        "## Failures: 1",
        "| environment.libraries.jiwer | 4.0.0 |",
        "| server.config.max_model_len | 1024 |",
        "| weights | 9.00 GiB |",
        "voxtral · server version 0.32.0 · NVIDIA H200 · profiles/fast.yaml (sha256 9f86d081)",
        "- **RTFx**: ",
    ):
        assert expected in text
    worst = summary["quality"]["worst"][0]
    step = next(step for step in worst["alignment"] if step[0] == "substitute")
    assert f"[{step[1]} → {step[2]}]" in text


def test_long_stretches_of_right_words_are_cut(tmp_path: Path) -> None:
    words = ["w" + f"{number:03}".translate(str.maketrans("0123456789", "abcdefghij")) for number in range(300)]
    heard = words.copy()
    heard[100] = "wrong"
    row = replace(make_rows(1, ["c1"])[0], reference=" ".join(words), text=" ".join(heard))
    summary = scored(tmp_path, [row])
    shown = "| […] wajh waji wajj [wbaa → wrong] wbab wbac wbad […] |"
    assert shown in (tmp_path / results.REPORT).read_text()
    assert len(summary["quality"]["worst"][0]["alignment"]) == 300


def test_what_a_server_wrote_stays_text(tmp_path: Path) -> None:
    rows = make_rows(4, ["c1", "c2"])
    rows[0] = replace(rows[0], text=HOSTILE, reference=f"alpha {HOSTILE}")
    rows[1] = fail(rows[1], HOSTILE)
    scored(tmp_path, rows, model=HOSTILE, dataset="<b>data</b>")
    page = Page(tmp_path / results.PAGE)
    assert {"script", "img", "b"} & {name for name, _ in page.elements} == {"b"}
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in page.text
    assert "<b>data</b>" in page.text
    markdown = (tmp_path / results.REPORT).read_text()
    assert "<" not in markdown
    assert "&lt;script>alert(1)&lt;/script>" in markdown
    for text in (page.text, markdown):
        assert not {"\x1b", "\u2028", "\ud800"} & set(text)


def test_the_page_stands_alone(tmp_path: Path) -> None:
    scored(tmp_path, make_rows(20, ["c1", "c4", "c16"], wrong=0.2))
    page = Page(tmp_path / results.PAGE)
    text = (tmp_path / results.PAGE).read_text()
    assert not {"script", "link", "iframe", "object", "img", "base"} & {name for name, _ in page.elements}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "action")]
    assert not re.search(r"url\(|@import|https?://", text)
    metas = [attributes for name, attributes in page.elements if name == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert any("default-src 'none'" in (each.get("content") or "") for each in metas)
    assert "prefers-color-scheme:dark" in text
    tables = [at for at, (name, _) in enumerate(page.elements) if name == "table"]
    assert tables
    assert all(page.elements[at - 1][1].get("class") == "scroll" for at in tables)


@pytest.mark.parametrize(
    ("loads", "mode", "titles"),
    [
        (["c1"], "whole", ["Latency distribution", "Latency against duration", "WER by duration"]),
        (
            ["c1", "c4"],
            "stream",
            [
                *("Latency distribution", "Latency against duration", "Time to first text"),
                *("Latency against concurrency", "RTFx against concurrency", "WER by duration"),
            ],
        ),
        (
            ["r1", "r2"],
            "whole",
            [
                *("Latency distribution", "Latency against duration", "Latency against rate"),
                *("RTFx against rate", "WER by duration"),
            ],
        ),
    ],
)
def test_figures_are_those_that_there_is_data_for(
    tmp_path: Path, loads: list[str], mode: str, titles: list[str]
) -> None:
    scored(tmp_path, make_rows(20, loads, mode=mode), mode=mode)
    page = Page(tmp_path / results.PAGE)
    assert page.count("svg") == page.count("figcaption") == len(titles)
    at = [page.text.index(title) for title in titles]
    assert at == sorted(at)
    # The machine, the version and the config stand by every figure.
    setup = (
        "voxtral · server version 0.32.0 · NVIDIA H200 · profiles/fast.yaml (sha256 9f86d081) · 20 clips of bench/data"
    )
    assert page.text.count(setup) == 1 + len(titles)


def test_every_number_of_a_figure_is_in_the_figure(tmp_path: Path) -> None:
    """No coordinate outside of the picture, none that is not a number, and a point for every request."""
    rows = make_rows(50, ["c1", "c64"], wrong=0.2)
    rows[3] = replace(rows[3], latency_ms=0.0)
    rows[4] = replace(rows[4], latency_ms=90_000.0)
    scored(tmp_path, rows)
    page = Page(tmp_path / results.PAGE)
    dots = 0
    for name, attributes in page.elements:
        if name in ("path", "circle", "rect", "text"):
            numbers = re.findall(
                r"-?[\d.]+(?:e-?\d+)?|nan|inf",
                " ".join(attributes.get(each) or "" for each in ("d", "x", "y", "cx", "cy", "width", "height")),
            )
            assert numbers
            assert all(-1 <= float(number) <= 401 for number in numbers), attributes
        if name == "path" and str(attributes["class"]).startswith("dots"):
            dots += str(attributes["d"]).count("M")
    assert 90 <= dots <= 100  # those that fall together are one


@pytest.mark.parametrize(
    "change",
    [
        lambda row: fail(row),
        lambda row: replace(row, text="", latency_ms=5.0),
        lambda row: replace(row, reference="", text=""),
    ],
)
def test_reports_of_runs_with_little_to_show(tmp_path: Path, change: Callable[[Row], Row]) -> None:
    for count in (1, 2):
        rows = [change(row) for row in make_rows(count, ["c1", "c2"], mode="whole")]
        out = write_run(tmp_path / str(count), rows, mode="whole")
        assert report.console(out, *report.score(out)).startswith("samples  ")
        assert (out / results.PAGE).read_text().endswith("</html>\n")
        assert "nan" not in (out / results.REPORT).read_text()


def test_a_killed_run_is_scored_as_far_as_it_got(tmp_path: Path) -> None:
    rows = make_rows(5, ["c1", "c4"])
    out = write_run(tmp_path, rows, memory=None)
    record = results.read_run(out)
    del record["loads"]["c4"]
    results.write_json(out / results.RUN, record)
    results.write(out / results.ROWS, "".join(map(results.row_line, rows[:3])))
    summary, _ = report.score(out)
    assert [load["missing"] for load in summary["loads"]] == [2, 5]
    assert summary["loads"][1]["joules_reason"] == "the run was killed before this load ended"
    assert summary["memory"]["reason"] == "the run was killed"
    assert summary["quality"]["wer"]["words"] == sum(len(row.reference.split()) for row in rows[:3])
    assert "7 without an answer yet" in report.console(out, summary, rows[:3])
    all_valid(out)
