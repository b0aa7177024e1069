"""In which processes the patches are in force, and how the plugin refuses where they are not."""

import sys
from pathlib import Path

import pytest
import scratch
from places import ROOT

from voxtral_serve.shims import PATCHES

TRANSFORMERS = next(patch for patch in PATCHES if patch.target.startswith("transformers."))
OUTCOME = f"""
import sys, {TRANSFORMERS.target}
print([finder.outcomes[{TRANSFORMERS.name!r}] for finder in sys.meta_path if type(finder).__name__ == "PostImport"])
"""
REGISTER = "from voxtral_serve import plugin; plugin.register()"


def test_the_copied_file_serves_a_spawned_child_without_any_plugin(outcomes: dict[str, list[str]]) -> None:
    assert set(outcomes) == {patch.name for patch in PATCHES}
    assert {outcome for outcome, _ in outcomes.values()} <= {"applied", "not needed"}


def test_the_installed_package_is_in_force_in_isolated_mode(tmp_path: Path) -> None:
    """-I ignores PYTHONPATH and the working directory, and reads .pth files."""
    done = scratch.run(sys.executable, "-I", "-c", OUTCOME, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[('applied', "), done.stdout


def test_without_site_there_is_nothing_to_patch(tmp_path: Path) -> None:
    """-S reads neither .pth files nor sitecustomize, and finds no vLLM either."""
    ask = "import sys, importlib.util as u; print([type(f).__name__ for f in sys.meta_path], u.find_spec('vllm'))"
    with_site = scratch.run(sys.executable, "-c", ask, cwd=tmp_path).stdout
    without = scratch.run(sys.executable, "-S", "-c", ask, cwd=tmp_path).stdout
    assert "PostImport" in with_site
    assert "vllm" in with_site
    assert "PostImport" not in without
    assert without.endswith("None\n")


def test_the_plugin_refuses_where_the_patches_are_not_in_force(stock: Path, tmp_path: Path) -> None:
    done = scratch.run(stock, "-c", REGISTER, cwd=tmp_path, PYTHONPATH=str(ROOT / "src"))
    assert done.returncode != 0
    assert "PatchError: the patches of voxtral-serve are not active in this process" in done.stderr


def test_the_plugin_refuses_an_older_copy_of_the_file(stock: Path, tmp_path: Path) -> None:
    older = scratch.sitecustomize(tmp_path / "older", scratch.SOURCE.read_text(), "# an older version")
    done = scratch.run(stock, "-c", REGISTER, cwd=tmp_path, PYTHONPATH=f"{older}:{ROOT / 'src'}")
    assert done.returncode != 0
    assert f"PatchError: the active patches are those of {older / 'sitecustomize.py'}, which differs" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [{}, {"VLLM_PLUGINS": ""}], ids=["plugins as installed", "no plugins"])
def test_the_target_is_patched_before_anybody_binds_its_names(
    stock: Path, alone: Path, plugins: dict[str, str]
) -> None:
    ask = f"from {TRANSFORMERS.target} import MistralCommonBackend as bound; print(bound.from_pretrained.__code__)"
    done = scratch.run(stock, "-c", ask, PYTHONPATH=str(alone), **plugins)
    assert f'file "{alone / "sitecustomize.py"}"' in done.stdout, done.stderr
