"""Names by which configs ask for parts of the package, and what importing and reading the guard's rooms costs."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "src/voxtral_serve"
ROOMS = ("guard", "transcript", "audio")
MODULES = sorted(path for room in ROOMS for path in (PACKAGE / room).glob("*.py"))
LINES = 60  # of a function
# What each room may import of the package, besides itself
ALLOWED = {
    "guard": {"audio", "transcript", "engine.names", "engine.clip_length", "shims", "units"},
    "transcript": {"audio"},
    "audio": set(),
}
# The modules of an upload's stages, in order
STAGES = ("fields", "clip", "pieces", "ask", "answer")


@pytest.mark.parametrize(
    "name",
    ["voxtral_serve.guard.Guard", "voxtral_serve.realtime.WholeClipsOnly", "voxtral_serve.drafter.PadDrafter"],
)
def test_names_of_configs(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), attribute), type)


def test_the_guard_imports_nothing_heavy() -> None:
    """vLLM imports it in every API process, and its tests run without vLLM."""
    heavy = ("torch", "transformers", "vllm", "mistral_common", "silero_vad")
    code = f"import sys, voxtral_serve.guard; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def imported(path: Path) -> set[str]:
    """The package's modules that a file imports, without `voxtral_serve.`: `guard.asgi`, `shims`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "voxtral_serve":
                is_module = (PACKAGE / Path(*parts[1:3])).with_suffix(".py").exists()
                found.add(".".join(parts[1:3] if is_module else parts[1:2]))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_rooms_import_what_they_may(path: Path) -> None:
    room = path.parent.name
    others = {name for name in imported(path) if name.partition(".")[0] != room}
    assert {name for name in others if not {name, name.partition(".")[0]} & ALLOWED[room]} == set()


def test_the_guards_modules_import_in_one_direction() -> None:
    graph = {
        path.stem: {name.partition(".")[2] for name in imported(path) if name.startswith("guard.")}
        for path in (PACKAGE / "guard").glob("*.py")
    }
    settled: set[str] = set()
    while ready := {name for name, needs in graph.items() if name not in settled and needs <= settled}:
        settled |= ready
    assert settled == set(graph), f"imports form a circle among {sorted(set(graph) - settled)}"
    for number, stage in enumerate(STAGES):
        assert not graph[stage] & set(STAGES[number + 1 :]), f"{stage} imports a later stage"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_functions_fit_a_page(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < LINES, f"{node.name} is too long"
