"""Names by which configs ask for parts of the package, what importing the guard costs, and the order of its stages.

(What each room may import: test_house.py.)
"""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "src/voxtral_serve"
# The modules of an upload's stages, in order
STAGES = ("form", "fields", "budget", "decoders", "pieces", "transcriber", "answer")


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


def test_no_stage_imports_a_later_one() -> None:
    graph = {
        path.stem: {name.partition(".")[2] for name in imported(path) if name.startswith("guard.")}
        for path in (PACKAGE / "guard").glob("*.py")
    }
    for number, stage in enumerate(STAGES):
        assert not graph[stage] & set(STAGES[number + 1 :]), f"{stage} imports a later stage"
