"""README.md and the pages of docs/ say what is there: files, links, figures, commands, messages, generated parts."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from places import ROOT

from tools import field_tables, patch_table, rooms_picture
from voxtral_serve import shims

README = ROOT / "README.md"
PAGES = ROOT / "docs/pages"
DOCUMENTS = [README, *sorted(PAGES.glob("*.md"))]
LINKED = [*DOCUMENTS, ROOT / "ROUND1_METHODOLOGY.md", ROOT / "SECURITY.md"]
LONGEST_README = 200  # lines
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PATCHES = (PAGES / "checkpoints.md").read_text(encoding="utf-8")
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
    copy = Path(shutil.copy(patch_table.PAGE, tmp_path))
    patch = patch_table.records()[-1]
    old = {"an older word": PATCHES.replace(patch.breaks, "AttributeError: another"), "an older row": without_row()}[
        stale
    ]
    assert old != PATCHES
    copy.write_text(old, encoding="utf-8")
    assert patch_table.main(["--check"], copy) == 1
    assert "checkpoints.md's table of patches is stale: run `python -m tools.patch_table`" in capsys.readouterr().err
    assert copy.read_text(encoding="utf-8") == old
    assert patch_table.main([], copy) == 0
    assert copy.read_text(encoding="utf-8") == PATCHES
    assert patch_table.main(["--check"], copy) == 0


def test_the_tables_of_fields_are_not_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert field_tables.main(["--check"]) == 0
    for name in field_tables.TABLES:
        old = (PAGES / name).read_text(encoding="utf-8").replace("| `seed` | a whole", "| `seed` | a half")
        (tmp_path / name).write_text(old, encoding="utf-8")
    assert field_tables.main(["--check"], tmp_path) == 1
    told = capsys.readouterr().err
    for name in field_tables.TABLES:
        assert f"{name}'s table of fields is stale: run `python -m tools.field_tables`" in told
    assert field_tables.main([], tmp_path) == 0
    for name in field_tables.TABLES:
        assert (tmp_path / name).read_bytes() == (PAGES / name).read_bytes()


def without_row() -> str:
    lines = PATCHES.splitlines(keepends=True)
    del lines[next(number for number, line in enumerate(lines) if line.strip() == patch_table.END) - 2]
    return "".join(lines)


@pytest.mark.parametrize("mark", [patch_table.BEGIN, patch_table.END])
@pytest.mark.parametrize("times", [0, 2])
def test_marks_that_are_not_there_once(
    mark: str, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "checkpoints.md"
    copy.write_text(PATCHES.replace(mark, "\n".join([mark] * times)), encoding="utf-8")
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


# ---- The picture of the rooms


def test_the_picture_is_not_stale() -> None:
    """As a process of its own, without site-packages: the tool needs the standard library only."""
    command = [sys.executable, "-S", "-m", "tools.rooms_picture", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_picture_is_told_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copy(rooms_picture.PICTURE, tmp_path))
    current = copy.read_text(encoding="utf-8")
    copy.write_text(current.replace("guard", "porch"), encoding="utf-8")
    assert rooms_picture.main(["--check"], copy) == 1
    assert "rooms.svg is stale: run `python -m tools.rooms_picture`" in capsys.readouterr().err
    assert rooms_picture.main([], copy) == 0
    assert copy.read_text(encoding="utf-8") == current


def test_every_arrow_of_the_picture_leads_down_and_no_box_covers_another() -> None:
    graph, left_out = rooms_picture.rooms()
    assert left_out == ["shims", "units"]
    row = rooms_picture.rows(graph)
    assert [(room, each) for room, others in graph.items() for each in others if row[room] >= row[each]] == []
    x, arrows = rooms_picture.places(graph, row)
    assert {(room, each) for room, others in graph.items() for each in others} == set(arrows)
    for line in range(max(row.values()) + 1):
        boxes = sorted(x[room] for room in graph if row[room] == line)
        assert boxes[0] >= rooms_picture.BOX / 2 and boxes[-1] <= rooms_picture.WIDTH - rooms_picture.BOX / 2
        assert all(right - left >= rooms_picture.BOX for left, right in pairwise(boxes))


# ---- Files, sections and links


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The text without fenced blocks, in which `#` begins a comment and brackets are no links."""
    return re.sub(r"^ *```.*?^ *```$", "", read(path), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub and as MkDocs make them, which must be the same."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"[^\w -]", "", title).strip().lower() for title in titles]
    by_github = [title.replace(" ", "-") for title in plain]
    assert by_github == [re.sub(r"[-\s]+", "-", title) for title in plain]
    assert len(set(by_github)) == len(by_github), path
    return set(by_github)


def links(path: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    return [link for link in found if not link.startswith("https://")]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("document", LINKED, ids=names(LINKED))
def test_the_links_lead_somewhere(document: Path) -> None:
    anchors(document)
    lost = []
    for link in links(document):
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_the_pages_link_to_pages_only_and_the_readme_to_each() -> None:
    """What lies outside of docs/pages is not on the site."""
    for page in DOCUMENTS[1:]:
        outside = [link for link in links(page) if "/" in link]
        assert outside == [], page
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(README)}
    assert set(DOCUMENTS[1:]) - linked == set()


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load(read(ROOT / "docs/mkdocs.yml"))
    listed = re.findall(r"[\w-]+\.md", json.dumps(site["nav"]))
    assert sorted(listed) == [page.name for page in DOCUMENTS[1:]]


def test_the_readme_is_short_and_its_two_commands_are_near_the_top() -> None:
    lines = read(README).splitlines()
    assert len(lines) <= LONGEST_README
    for command in ("make demo ", "make test "):
        assert any(line.startswith(command) for line in lines[:45])


def test_the_files_of_the_repository_are_there() -> None:
    block = (
        read(PAGES / "architecture.md").partition("## The repository\n")[2].partition("```\n")[2].partition("```")[0]
    )
    paths = [line.split()[0] for line in block.splitlines()]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", LINKED, ids=names(LINKED))
def test_the_files_that_are_named_are_there(document: Path) -> None:
    places = "tests|tools|bench|src|deploy|profiles|docs|pico|requirements"
    named = re.findall(rf"(?<![\w./])/?((?:{places})/[\w./-]*\w)(?=[`\s,;)])", read(document))
    made = ("docs/pages/rooms.svg",)
    assert [path for path in named if path not in made and not (ROOT / path).exists()] == []


# ---- Figures


def test_every_line_of_the_speech_api_has_its_test() -> None:
    section = read(PAGES / "speech-api.md").partition("## What is supported")[2].partition("\n## ")[0]
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
    page = read(PAGES / "performance.md")
    table = page.partition("| vLLM | configuration | requests at once |")[2].partition("\n\n")[0]
    assert set(table.splitlines()[2:]) == measured


def test_the_speed_in_the_readme_is_what_was_measured() -> None:
    """Rows of vLLM 0.32.0: requests, P50, RTFx and energy."""
    rows = json.loads((ROOT / "bench/results/gpu.json").read_text())["rows"]
    measured = {
        f"{row['concurrency']} | {row['p50_ms']:.0f} | {row['rtfx']:.1f} | {row['joules_per_audio_second']:.2f} |": row[
            "name"
        ]
        for row in rows
        if row["vllm"] == "0.32.0" and not row["name"].startswith("long-") and "-vram" not in row["name"]
    }
    table = read(README).partition("| configuration | requests at once |")[2].partition("\n\n")[0].splitlines()[2:]
    words = {"stock-eager": "stock, eager", "stock-full": "stock, full CUDA graphs"}
    assert len(table) >= 5
    for line in table:
        (name,) = [name for figures, name in measured.items() if line.endswith(f"| {figures}")]
        assert words.get(name, f"`profiles/{name}.yaml`") in line


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
    (alone,) = json.loads((ROOT / "bench/results/gpu-begin/start.json").read_text())["rows"]
    begun = json.loads((ROOT / "bench/results/gpu-begin/start-processes.json").read_text())
    first, forked, again = (f"{row['start_warm_s']:.0f}" for row in begun["rows"])
    assert [run["settings"].get("VLLM_WORKER_MULTIPROC_METHOD") for run in begun["runs"]] == [None, "fork", None]
    new, old = (
        [f"{starts[vllm][f'start_{state}_s']:.0f}" for state in ("cold", "warm")] for vllm in ("0.32.0", "0.20.0")
    )
    expected = [
        f"{peaks[0]} at the peak, {a_token[0]} ms a token |",
        f"one sequence, 2 GiB of KV cache) | {peaks[1]} |",
        f"| {seconds[0]}, {seconds[1]} and {seconds[2]} s; {a_token[1]}, {a_token[2]} and {a_token[3]} ms a token |",
        f"| {long[0]['peak_vram_bytes'] / 1e9:.2f} and {long[2]['peak_vram_bytes'] / 1e9:.2f} GB |",
        f"| {new[0]} and {new[1]} s (vLLM 0.20.0: {old[0]} and {old[1]} s) |",
        f"another H200, everything cached | {alone['start_warm_s']:.0f} s |",
        f"bytecode cached as well, twice | {first} and {again} s |",
        f"`VLLM_WORKER_MULTIPROC_METHOD=fork` | {forked} s |",
        f"{alone['p50_ms']:.0f} ms with `fast` as the only server",
    ]
    page = read(PAGES / "performance.md")
    assert [words for words in expected if words not in page] == []


# ---- Live clients

CLIENTS_PAGE = PAGES / "live-clients.md"
PROGRAMS = ROOT / "tests/clients/programs"


def test_the_versions_of_live_clients_are_those_that_are_installed() -> None:
    locked = dict(re.findall(r"^([\w-]+)==(\S+)", read(ROOT / "requirements/clients.txt"), re.MULTILINE))
    shown = re.findall(r"^\| \[`([\w-]+)`\]\S+ \| ([\d.]+) \|", read(CLIENTS_PAGE), re.MULTILINE)
    assert len(shown) == 6
    assert {name: locked[name] for name, _ in shown} == dict(shown)


def test_each_example_of_a_live_client_is_part_of_a_program_that_is_tested() -> None:
    """But for the server, its key, the model and the audio."""
    values = {
        'f"{server.url}/v1"': '"http://gpu-box:8000/v1"',
        'server.url.replace("http", "ws", 1) + "/v1/realtime"': '"ws://gpu-box:8000/v1/realtime"',
        "server.url": '"http://gpu-box:8000"',
        "server.model": '"voxtral"',
        "KEY": "key",
        "clip.spoken_async(RATE)": "audio",
    }
    texts = []
    for path in PROGRAMS.glob("*.py"):
        text = read(path)
        for name, value in values.items():
            text = text.replace(name, value)
        texts.append("".join(text.split()))
    blocks = re.findall(r"^```python\n(.*?)^```", read(CLIENTS_PAGE), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        words = "".join(block.replace("voxtral-mini-transcribe-realtime-2602", "voxtral").split())
        assert any(words in text for text in texts), block
    assert all(path.name in read(CLIENTS_PAGE) for path in PROGRAMS.glob("*.py") if "__main__" in read(path))


def test_the_final_texts_of_live_clients_are_those_that_were_measured() -> None:
    found = json.loads(read(ROOT / "bench/results/live-clients-cpu.json"))["results"]
    shown = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", read(CLIENTS_PAGE), re.MULTILINE)
    expected = {
        name: " | ".join(
            [str(each["turns"]), f"{each['other_words']} of {each['words']}"]
            + [f"{each['final_s'][share]:.2f}" for share in ("p50", "p95", "p99")]
        )
        for name, each in found.items()
    }
    assert dict(shown) == expected
    assert found.keys() == {path.stem for path in PROGRAMS.glob("*.py") if "__main__" in read(path)}


# ---- Commands, by what their sources say


def commands(document: Path, pattern: str) -> list[tuple[str, str]]:
    """Each (what `pattern` takes, the rest of the command) in a document, whether in a block or in a sentence."""
    text = re.sub(r"\\\n\s*", "", read(document))  # a command goes on behind a backslash
    text = re.sub(r"`[^`\n]+\n[^`\n]+`", lambda span: span[0].replace("\n", " "), text)  # a code span on two lines
    return re.findall(pattern + r"([^`\n#|]*)", text)


@pytest.mark.parametrize("document", LINKED, ids=names(LINKED))
def test_every_make_target_is_there(document: Path) -> None:
    shown = re.findall(r"(?:`|^|SAMPLES=500 )make ([a-z][a-z-]*)((?: [A-Z]+=\S+)*)", read(document), re.MULTILINE)
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z0-9]+) \?=", MAKEFILE, re.MULTILINE))
    if document == README:
        assert {"demo", "test", "bench", "serve"} <= {target for target, _ in shown}
    assert {target for target, _ in shown} <= targets
    assert {name for _, given in shown for name in re.findall(r"([A-Z]+)=", given)} <= variables


@pytest.mark.parametrize("document", LINKED, ids=names(LINKED))
def test_every_module_that_is_run_is_there_with_its_flags(document: Path) -> None:
    for module, rest in commands(document, r"python -m ([\w.]+)"):
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


@pytest.mark.parametrize("document", LINKED, ids=names(LINKED))
def test_every_command_of_voxtral_serve_is_there_with_its_flags(document: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["voxtral-serve"].partition(":")
    source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    assert f"def {function}(" in source
    known = set(re.findall(r'add_parser\(\s*"([a-z-]+)"', source))
    for command, rest in commands(document, r"(?:^|[`/$]|\w )voxtral-serve (check|transcribe|batch|[a-z-]+(?= --))"):
        assert command in known, (command, rest)
        taken = set(re.findall(r'"(--[a-z-]+)"', source))
        if command == "check":  # it takes what `vllm serve` takes
            taken.add("--omni")
        assert set(FLAG.findall(rest.replace("[", ""))) <= taken, rest


def test_the_flags_of_the_benchmark_are_in_its_table() -> None:
    source = (ROOT / "bench/arguments.py").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(--[^`]+)`", read(PAGES / "benchmark.md"), re.MULTILINE)
    assert len(table) > 5
    for cell in table:
        assert set(FLAG.findall(cell)) <= set(re.findall(r'"(--[a-z-]+)"', source)), cell


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_config_and_extra_that_a_command_names_is_there(document: Path) -> None:
    for config in re.findall(r"--config (?:\.\./)*/?([\w./-]+\.yaml)", read(document)):
        assert (ROOT / config).is_file(), config
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r"`?'?\.\[([\w,]+)\]['`]", read(document)):
        assert set(named.split(",")) <= set(extras), named


CONTEST_BUILD = "docker build --build-arg VLLM=0.20.0 -t vllm-voxtral ."
CONTEST_RUN = (
    'docker run --gpus all --rm --shm-size 4g -v "$(pwd)":/model:ro -w /model -p 8000:8000 vllm-voxtral '
    "--config vllm_config.yaml"
)


@pytest.mark.parametrize("document", [README, PAGES / "container.md"], ids=["README.md", "container.md"])
def test_the_contest_s_command_is_shown_with_the_image_that_it_is_for(document: Path) -> None:
    """It is what others run: its words do not change."""
    lines = [line.partition("   ")[0] for line in read(document).splitlines()]
    assert lines.index(CONTEST_BUILD) < lines.index(CONTEST_RUN)


def test_the_recommended_vllm_comes_first() -> None:
    recommended = shims.TESTED["vllm"][-1]
    for document in (README, PAGES / "install.md"):
        first = read(document).index("pip install -e '.[gpu]'")
        assert f"# vLLM {recommended}," in read(document)[first:].partition("\n")[0]
        assert first < read(document).index("[contest]")
        table = read(document).partition("| vLLM | transformers |")[2].splitlines()[2:4]
        expected = zip(*(shims.TESTED[name] for name in ("vllm", "transformers", "mistral-common")), strict=True)
        shown = [re.findall(r"[\d]+\.[\d.]*\d", line)[:3] for line in table]
        assert shown == [[*versions] for versions in reversed([*expected])]


def test_every_variable_that_a_command_names_is_explained() -> None:
    page = read(PAGES / "environment.md")
    prefixes = "VLLM|VOXTRAL_SERVE|HF|OPENAI|PYTORCH"
    for document in DOCUMENTS:
        for name in set(re.findall(rf"\b((?:{prefixes})_[A-Z_]+)\b(?!_)", read(document))):
            assert f"`{name}`" in page, (document.name, name)


# ---- Messages: what the sources say when they refuse something is in docs/pages/troubleshooting.md

SOURCES = ("src/voxtral_serve", "bench", "sitecustomize.py")
REFUSALS = {
    *(
        "RefusedError",
        "AudioError",
        "LimitError",
        "KeysError",
        "CheckpointError",
        "ConfigError",
        "PatchError",
        "EngineDeadError",
    ),
    *(
        "KeysError",
        "LogError",
        "StepsError",
        "UsageError",
        "RequestError",
        "JobError",
        "BenchError",
        "LiveError",
        "StreamError",
        "VLLMValidationError",
        "PageError",
        "report.problem",
        "PydanticCustomError",
    ),
}


def template(node: ast.AST) -> str:
    """The text of a message with `…` for what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) for value in values)
        case ast.BinOp(left=left, right=right):
            return template(left) + template(right)
    return "…"


def messages() -> Iterator[tuple[str, str]]:
    """(where it is raised, the message) of each refusal whose text is written there."""
    paths = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py")) or [ROOT / source]]
    for path in paths:
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("shims.") in REFUSALS:
                position = int(ast.unparse(node.func) in ("RefusedError", "PydanticCustomError"))
                found = " ".join(template(node.args[position]).split()).replace("`", "")
                found = "…" if found == "{words}" else found  # the text is an argument
                if re.search(r"[a-z]{4}", found):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", found


def fragments() -> list[re.Pattern[str]]:
    """What the page has in code spans, as patterns; `…` stands for anything."""
    spans = re.findall(r"`([^`]+)`", prose(PAGES / "troubleshooting.md"))
    spans = [span for span in spans if len(re.findall(r"[A-Za-z]", span)) >= 5 and " " in span]
    return [re.compile(".*".join(re.escape(part) for part in span.split("…"))) for span in spans]


def test_every_refusal_is_explained() -> None:
    known = fragments()
    found = list(messages())
    assert len(found) > 150
    assert [f"{where}: {text}" for where, text in found if not any(each.search(text) for each in known)] == []


def test_every_code_of_an_error_is_explained() -> None:
    page = read(PAGES / "troubleshooting.md")
    calls = [
        node
        for path in (ROOT / "src/voxtral_serve").rglob("*.py")
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("RefusedError", "AudioError")
    ]
    given = {
        template(each)
        for call in calls
        for each in call.args[2 if ast.unparse(call.func) == "RefusedError" else 1 :][:1]
    }
    codes = {each for each in given if re.fullmatch(r"[a-z]+_[a-z_]+", each)}
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in page} == set()


def test_every_refusal_of_the_entrypoint_is_explained() -> None:
    found = re.findall(r'refuse "(.+?)"', read(ROOT / "entrypoint.sh"))
    assert len(found) >= 5
    for message in found:
        words = re.sub(r"\$\([^)]*\)|\$\{[^}]*\}|\$\w+|\$", "…", message)
        assert any(each.search(words) for each in fragments()), message
