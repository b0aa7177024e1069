"""README.md and docs/pages: links, files, commands, code and generated tables are those of the repository."""

import argparse
import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from fakeserver import Answer, FakeServer
from places import ROOT

from bench import arguments
from bench.gpu import arguments as gpu_arguments
from bench.speakers import command as speakers
from voxtral_serve import cli, shims

README = ROOT / "README.md"
PAGES = ROOT / "docs/pages"
SITE = sorted(PAGES.glob("*.md"))
OTHERS = ("ROUND1_METHODOLOGY.md", "CHANGELOG.md", "SECURITY.md", "pico/README.md", "tests/README.md")
DOCUMENTS = [README, *SITE, *(ROOT / name for name in OTHERS)]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
LONGEST_README = 150  # lines
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
OF_CHANGES = "CHANGELOG.md"  # it names what went

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The text without fenced blocks, in which `#` begins a comment and brackets are no links."""
    return FENCE.sub("", read(path))


def blocks(path: Path, language: str) -> list[str]:
    return [block for _, named, block in FENCE.findall(read(path)) if named == language]


def command_lines(path: Path) -> list[str]:
    """The lines of shell blocks that run a command of this repository or pip: continued lines joined, no comments."""
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks(path, ""))).splitlines()
    commands = [re.sub(r"^(?:[A-Z_0-9]+=\S+ )+", "", line.partition("  #")[0].strip()) for line in lines]
    return [line for line in commands if re.match(r"(?:python -m|voxtral-serve|pip install) ", line)]


# ---- Links and files


def anchors(path: Path) -> set[str]:
    """The anchors of the headings, as GitHub and MkDocs make them: a title for which they differ is an error."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"[^\w -]", "", title).strip().lower() for title in titles]
    by_github = [title.replace(" ", "-") for title in plain]
    assert by_github == [re.sub(r"[-\s]+", "-", title) for title in plain]
    return set(by_github)


def links(path: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    return [target for target in targets if not target.startswith("https://")]


@every_document
def test_the_links_lead_somewhere(document: Path) -> None:
    lost = []
    for link in links(document):
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def test_every_page_is_on_the_site_and_in_the_readme() -> None:
    """Pages link to pages only: what lies outside of docs/pages is not on the site."""
    assert [(page.name, link) for page in SITE for link in links(page) if "/" in link] == []
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(README)}
    assert set(SITE) - linked == set()
    site = yaml.safe_load(read(ROOT / "docs/mkdocs.yml"))
    assert sorted(re.findall(r"[\w-]+\.md", json.dumps(site["nav"]))) == [page.name for page in SITE]


@every_document
def test_the_files_that_are_named_are_there(document: Path) -> None:
    places = "tests|tools|bench|src|deploy|profiles|docs|pico|requirements"
    named = re.findall(rf"(?<![\w./])/?((?:{places})/[\w./-]*\w)(?=[`\s,;)])", read(document))
    named += re.findall(r"--config (?:\.\./)*/?([\w./-]+\.yaml)", read(document))
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == [] or document.name == OF_CHANGES


def test_the_profiles_of_the_tables_are_those_of_the_repository() -> None:
    profiles = {f"profiles/{path.name}" for path in (ROOT / "profiles").glob("*.yaml")} | {"vllm_config.yaml"}
    for document in (README, PAGES / "profiles.md"):
        assert set(re.findall(r"^\| `((?:profiles/)?[\w.-]+\.yaml)` \|", read(document), re.MULTILINE)) == profiles


# ---- Commands


def test_a_newcomer_sees_the_commands_at_once() -> None:
    lines = read(README).splitlines()
    assert len(lines) <= LONGEST_README
    for command in ("make demo ", "make test ", "pip install -e '.[gpu]' ", "(cd voxtral-realtime ", "curl "):
        assert any(line.startswith(command) for line in lines[:60]), command


def test_make_targets_are_named_and_what_is_named_is_a_target() -> None:
    """The changelog names those that went."""
    texts = [read(path) for path in DOCUMENTS if path.name != OF_CHANGES]
    targets = set(re.findall(r"^([a-z][a-z-]*):.*$", MAKEFILE, re.MULTILINE))
    assert targets == set(re.findall(r"^([a-z][a-z-]*):.* ## ", MAKEFILE, re.MULTILINE)) and len(targets) <= 20
    assert targets - {name for text in texts for name in re.findall(r"\bmake ([a-z-]+)", text)} == set()
    commands = [found for text in texts for found in re.findall(r"(?:`|^)make ([a-z-]+)((?: [A-Z]+=\S+)*)", text, re.M)]
    assert {name for name, _ in commands} - targets == set()
    variables = {name for _, values in commands for name in re.findall(r"([A-Z]+)=", values)}
    assert variables <= set(re.findall(r"^([A-Z0-9]+) \?=", MAKEFILE, re.MULTILINE))


@every_document
def test_every_command_can_be_parsed(document: Path) -> None:
    """Each line of a shell block, by the parser of its command. The files that it names need not exist."""
    parser = argparse.ArgumentParser()
    subcommands = parser.add_subparsers()
    for add, _ in cli.COMMANDS.values():
        add(subcommands)
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for line in command_lines(document):
        words = shlex.split(line)
        if words[:4] == ["python", "-m", "bench", "gpu"]:
            gpu_arguments.parse(words[4:])
        elif words[:4] == ["python", "-m", "bench", "speakers"]:
            speakers.parse(words[4:])
        elif words[:3] == ["python", "-m", "bench"]:
            arguments.parse(words[3:])
        elif words[0] == "python":
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), line
        elif words[0] == "voxtral-serve":
            own = words[1 : words.index("--")] if "--" in words else words[1:]
            _, unknown = parser.parse_known_args(own)
            assert unknown == [] or own[0] == "check", line  # it takes what `vllm serve` takes
        elif words[0] == "pip":
            for named in re.findall(r"\.\[([\w,]+)\]", line):
                assert set(named.split(",")) <= set(extras), line


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


def test_the_versions_are_those_that_are_tested() -> None:
    table = read(PAGES / "install.md").partition("| vLLM | transformers |")[2].splitlines()[2:4]
    tested = [*zip(*(shims.TESTED[name] for name in ("vllm", "transformers", "mistral-common")), strict=True)]
    assert [tuple(re.findall(r"\d+\.[\d.]*\d", line)[:3]) for line in table] == tested[::-1]
    for document in (README, PAGES / "install.md"):
        assert f"pip install -e '.[gpu]'                # vLLM {tested[-1][0]}," in read(document)


def test_every_variable_that_a_page_names_is_explained() -> None:
    page = read(PAGES / "environment.md")
    for document in (README, *SITE):
        for name in set(re.findall(r"\b((?:VLLM|VOXTRAL_SERVE|HF|OPENAI|PYTORCH)_[A-Z_]+)\b(?!_)", read(document))):
            assert f"`{name}`" in page, (document.name, name)


# ---- Code


@pytest.mark.parametrize("document", [README, PAGES / "from-openai.md"], ids=["README.md", "from-openai.md"])
def test_the_example_of_the_openai_client_runs(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks(document, "python") if "transcriptions.create" in block]
    with FakeServer({"001.opus": Answer("hello")}) as server:
        code = block.replace("http://127.0.0.1:8000", server.url).replace("bench/data", str(ROOT / "bench/data"))
        exec(compile(code, str(document), "exec"), {})
    assert capsys.readouterr().out == "hello\n"


def test_each_example_of_a_client_is_part_of_a_program_that_is_tested() -> None:
    """But for the server, its key, the model and the audio."""
    values = {
        'f"{server.url}/v1"': '"http://gpu-box:8000/v1"',
        'server.url.replace("http", "ws", 1) + "/v1/realtime"': '"ws://gpu-box:8000/v1/realtime"',
        "server.url": '"http://gpu-box:8000"',
        "server.model": '"voxtral"',
        "KEY": "key",
        "clip.spoken_async(RATE)": "audio",
        "clip.file()": "audio",
        "await ": "",
        "complete_async": "complete",
    }
    programs = []
    for path in (ROOT / "tests/clients/programs").glob("*.py"):
        text = read(path)
        for name, value in values.items():
            text = text.replace(name, value)
        programs.append("".join(text.split()))
    examples = [*blocks(PAGES / "live.md", "python"), *blocks(PAGES / "from-mistral.md", "python")]
    assert len(examples) > 6
    for example in examples:
        code = re.sub(r"^# .*\n", "", example).replace("voxtral-mini-transcribe-realtime-2602", "voxtral")
        assert any("".join(code.split()) in text for text in programs), example


def test_every_code_of_an_error_is_in_troubleshooting() -> None:
    """A code is part of the promise of a release: the third argument of RefusedError, the second of AudioError."""
    page = read(PAGES / "troubleshooting.md")
    places = {"RefusedError": 2, "AudioError": 1}
    words = {
        ast.unparse(call.args[places[name]])
        for path in (ROOT / "src/voxtral_serve").rglob("*.py")
        for call in ast.walk(ast.parse(read(path)))
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func)) in places and len(call.args) > places[name]
    }
    codes = {word.strip("'") for word in words if re.fullmatch(r"'[a-z]+_[a-z_]+'", word)}
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in page} == set()
