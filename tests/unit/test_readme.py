"""README.md says what is there: its table of patches, its files, its commands."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from tools import patch_table

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")


# ---- The table of patches


def test_the_table_is_not_stale() -> None:
    """As a process of its own, without site-packages: the tool needs the standard library only."""
    command = [sys.executable, "-S", "-m", "tools.patch_table", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reading_the_records_puts_nothing_in_force() -> None:
    before = list(sys.meta_path)
    assert [patch.name for patch in patch_table.records()]
    assert sys.meta_path == before


@pytest.mark.parametrize("stale", ["an older word", "an older row"])
def test_a_stale_table_is_told_and_rewritten(stale: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copy(ROOT / "README.md", tmp_path))
    patch = patch_table.records()[-1]
    old = {"an older word": README.replace(patch.breaks, "AttributeError: another"), "an older row": without_row()}[
        stale
    ]
    assert old != README
    copy.write_text(old, encoding="utf-8")
    assert patch_table.main(["--check"], copy) == 1
    assert "README.md's table of patches is stale: run `python -m tools.patch_table`" in capsys.readouterr().err
    assert copy.read_text(encoding="utf-8") == old
    assert patch_table.main([], copy) == 0
    assert copy.read_text(encoding="utf-8") == README
    assert patch_table.main(["--check"], copy) == 0


def without_row() -> str:
    lines = README.splitlines(keepends=True)
    del lines[next(number for number, line in enumerate(lines) if line.strip() == patch_table.END) - 2]
    return "".join(lines)


@pytest.mark.parametrize("mark", [patch_table.BEGIN, patch_table.END])
@pytest.mark.parametrize("times", [0, 2])
def test_marks_that_are_not_there_once(
    mark: str, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(README.replace(mark, "\n".join([mark] * times)), encoding="utf-8")
    assert patch_table.main([], copy) == 1
    assert f"expected one {patch_table.BEGIN} and one {patch_table.END}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "span"),
    [("plain", "`plain`"), ("a `b` c", "``a `b` c``"), ("`a`", "`` `a` ``"), ("a `` b ` c", "```a `` b ` c```")],
)
def test_a_code_span(text: str, span: str) -> None:
    assert patch_table.code(text) == span


def test_a_row_has_as_many_cells_as_the_head() -> None:
    for line in patch_table.table(patch_table.records()).splitlines():
        assert len(re.findall(r"(?<!\\)\|", line)) == len(patch_table.HEADS) + 1


# ---- Files and sections


def test_the_files_of_the_layout_are_there() -> None:
    block = README.partition("## Layout\n")[2].partition("```\n")[2].partition("```")[0]
    paths = [line.split()[0] for line in block.splitlines()]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("https://")]
    assert links
    assert [link for link in links if link not in anchors and not (ROOT / link).exists()] == []


def test_the_tests_that_are_named_are_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", README)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


# ---- Figures


def test_every_line_of_the_speech_api_has_its_test() -> None:
    section = README.partition("## The speech API")[2].partition("\n## ")[0]
    files = {letter: (ROOT / path).read_text() for path, letter in re.findall(r"`(tests/\S+)` \((\w)\)", section)}
    assert len(files) == 4
    lines = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(lines) > 12
    for line in lines:
        named = re.findall(r"\b([A-Z]) `(test_\w+)`", line)
        assert named, line
        for letter, name in named:
            assert f"def {name}(" in files[letter], name


def test_the_speed_on_a_gpu_is_what_was_measured() -> None:
    """Each row of the results is a line of the table, and each line a row."""
    names = {
        "stock-eager": "stock, eager",
        "stock-piecewise": "stock, piecewise graphs",
        "stock-full": "stock, full graphs",
    }
    measured = {
        f"| {row['vllm']} | {names.get(row['name'], row['name'])} | {row['concurrency']} | {row['p50_ms']:.0f} "
        f"| {row['p95_ms']:.0f} | {row['ms_per_token']:.2f} | {row['rtfx']:.1f} "
        f"| {row['joules_per_audio_second']:.2f} |"
        for row in json.loads((ROOT / "bench/results/gpu.json").read_text())["rows"]
        if not row["name"].startswith("long-") and "-vram" not in row["name"]
    }
    table = README.partition("| vLLM | configuration | requests at once |")[2].partition("\n\n")[0]
    assert set(table.splitlines()[2:]) == measured


def test_memory_long_clips_and_starts_are_what_was_measured() -> None:
    rows = {
        (row["vllm"], row["name"]): row for row in json.loads((ROOT / "bench/results/gpu.json").read_text())["rows"]
    }
    starts = {row["vllm"]: row for row in json.loads((ROOT / "bench/results/gpu-start.json").read_text())["rows"]}
    least, stock, *long = (rows["0.32.0", name] for name in ("fast-vram", "stock-vram", "long-1", "long-10", "long-60"))
    peaks = [
        f"{row['peak_vram_bytes'] / 1e9:.2f} GB ({row['peak_vram_bytes'] / 2**30:.2f} GiB)" for row in (least, stock)
    ]
    seconds = [f"{row['p50_ms'] / 1000:.1f}" for row in long]
    a_token = [f"{row['ms_per_token']:.2f}" for row in (least, *long)]
    new, old = (
        [f"{starts[vllm][f'start_{state}_s']:.0f}" for state in ("cold", "warm")] for vllm in ("0.32.0", "0.20.0")
    )
    expected = [
        f"{peaks[0]} at the peak, {a_token[0]} ms a token |",
        f"one sequence, 2 GiB of KV cache) | {peaks[1]} |",
        f"| {seconds[0]}, {seconds[1]} and {seconds[2]} s; {a_token[1]}, {a_token[2]} and {a_token[3]} ms a token |",
        f"| {long[0]['peak_vram_bytes'] / 1e9:.2f} and {long[2]['peak_vram_bytes'] / 1e9:.2f} GB |",
        f"| {new[0]} and {new[1]} s (vLLM 0.20.0: {old[0]} and {old[1]} s) |",
    ]
    assert [words for words in expected if words not in README] == []


# ---- Commands, by what their sources say


def commands(pattern: str) -> list[tuple[str, str]]:
    """Each (what `pattern` takes, the rest of the command) in README, whether in a block or in a sentence."""
    found = re.findall(pattern + r"([^`\n#]*)", README.replace("`voxtral-serve\ncheck`", "`voxtral-serve check`"))
    assert found
    return found


def test_every_make_target_is_there() -> None:
    shown = re.findall(r"(?:`|^|SAMPLES=500 )make ([a-z][a-z-]*)((?: [A-Z]+=\S+)*)", README, re.MULTILINE)
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z0-9]+) \?=", MAKEFILE, re.MULTILINE))
    assert {"demo", "test", "bench"} <= {target for target, _ in shown} <= targets
    assert {name for _, given in shown for name in re.findall(r"([A-Z]+)=", given)} <= variables


def test_every_module_that_is_run_is_there_with_its_flags() -> None:
    for module, rest in commands(r"python -m ([\w.]+)"):
        place = ROOT / module.replace(".", "/")
        file = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
        assert file.is_file(), module
        # A package's command line is a module of its own.
        parser = place / "arguments.py" if place.is_dir() else file
        source = parser.read_text(encoding="utf-8")
        assert "__main__" in source or file.name == "__main__.py", module
        flags = set(FLAG.findall(rest))
        assert flags <= set(re.findall(r'"(--[a-z-]+)"', source)), (module, rest)
        for word in rest.split()[:1]:
            if place.is_dir() and word.isalpha():
                assert f'add_parser("{word}"' in source, (module, word)


def test_every_command_of_voxtral_serve_is_there_with_its_flags() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["voxtral-serve"].partition(":")
    source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert f"def {function}(" in source
    known = set(re.findall(r'add_parser\(\s*"([a-z-]+)"', source))
    for command, rest in commands(r"(?:^|[ `/])voxtral-serve ([a-z-]+)(?=[ `])"):
        assert command in known, (command, rest)
        assert set(FLAG.findall(rest.replace("[", ""))) <= set(re.findall(r'"(--[a-z-]+)"', source)), rest
