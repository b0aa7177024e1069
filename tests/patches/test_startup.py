"""What the file does at the start of any Python, which may have nothing to do with vLLM."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scratch
from places import ROOT

SHOW = """
import json, sys
print(json.dumps([sorted(sys.modules), [getattr(f, "file", type(f).__name__) for f in sys.meta_path]]))
"""
PAIRS = 40
LIMIT_MS = 5


def shown(python: Path, code: str = SHOW, **variables: str) -> tuple[list[str], list[str]]:
    """Modules that were imported, and the files of our finders; nothing may have been said on the way."""
    done = scratch.run(python, "-c", code, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    modules, finders = json.loads(done.stdout.splitlines()[-1])
    return modules, [finder for finder in finders if finder.endswith(".py")]


def saying(directory: Path, word: str, more: str = "") -> Path:
    """A sitecustomize that prints a word, and whether the patches were in force by then."""
    says = f"import sys\nprint({word!r}, any(type(f).__name__ == 'PostImport' for f in sys.meta_path))"
    return scratch.sitecustomize(directory, says, more)


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard library and this package, by the .pth files that an editable install has."""
    python = scratch.interpreter(tmp_path_factory.mktemp("interpreter") / "packaged", libraries=False)
    site_packages = scratch.site_packages(python)
    (site_packages / "_voxtral_serve.pth").write_text(str(ROOT / "src"))
    (site_packages / "voxtral_serve.pth").write_text((ROOT / "src/voxtral_serve.pth").read_text())
    return python


def test_one_copied_file_needs_the_standard_library_only(bare: Path, alone: Path) -> None:
    assert shown(bare, PYTHONPATH=str(alone))[1] == [str(alone / "sitecustomize.py")]


def test_it_imports_nothing_else_where_there_is_more(stock: Path, alone: Path) -> None:
    modules, finders = shown(stock, PYTHONPATH=str(alone))
    assert len(finders) == 1
    assert {name.partition(".")[0] for name in modules} <= sys.stdlib_module_names | {"__main__", "sitecustomize"}


def test_a_process_that_does_not_import_transformers_never_does(stock: Path, alone: Path) -> None:
    modules, finders = shown(stock, "import requests, numpy" + SHOW, PYTHONPATH=str(alone))
    assert len(finders) == 1
    assert "numpy" in modules
    assert not {"transformers", "vllm", "torch", "mistral_common"} & set(modules)


def test_the_package_and_a_copy_of_the_file_install_one_finder(packaged: Path, alone: Path) -> None:
    assert [Path(file).resolve() for file in shown(packaged)[1]] == [scratch.SOURCE]
    assert [Path(file).resolve() for file in shown(packaged, PYTHONPATH=str(alone))[1]] == [scratch.SOURCE]


def test_a_shadowed_sitecustomize_runs_once_and_after_ours(bare: Path, alone: Path, tmp_path: Path) -> None:
    first, second = saying(tmp_path / "first", "first"), saying(tmp_path / "second", "second")
    done = scratch.run(bare, "-c", "print('main')", PYTHONPATH=f"{alone}:{first}:{second}")
    assert (done.stdout.splitlines(), done.stderr) == (["first True", "main"], "")


def test_a_sitecustomize_that_shadows_ours_is_left_alone(bare: Path, alone: Path, tmp_path: Path) -> None:
    before = saying(tmp_path / "before", "before")
    done = scratch.run(bare, "-c", "print('main')", PYTHONPATH=f"{before}:{alone}")
    assert done.stdout.splitlines() == ["before False", "main"]


def test_two_copies_run_the_one_that_they_shadow_once(bare: Path, alone: Path, tmp_path: Path) -> None:
    copy = scratch.sitecustomize(tmp_path / "copy", scratch.SOURCE.read_text())
    link = tmp_path / "link"
    link.symlink_to(alone)
    shadowed = saying(tmp_path / "shadowed", "shadowed")
    for places in ([alone, copy], [alone, link], [alone, alone, copy]):
        path = ":".join(map(str, [*places, shadowed]))
        done = scratch.run(bare, "-c", SHOW, PYTHONPATH=path)
        assert (done.stdout.splitlines()[0], done.stderr) == ("shadowed True", "")
        assert done.stdout.count("shadowed True") == 1
        assert done.stdout.count('/sitecustomize.py"') == 1


def test_a_file_that_is_a_link_is_not_what_it_shadows(bare: Path, alone: Path, tmp_path: Path) -> None:
    """As in Debian and the official image, where /usr/lib/python3.12/sitecustomize.py leads to /etc/python3.12."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/sitecustomize.py").symlink_to(alone / "sitecustomize.py")
    shadowed = saying(tmp_path / "shadowed", "shadowed")
    done = scratch.run(bare, "-c", "print('main')", PYTHONPATH=f"{tmp_path / 'usr'}:{shadowed}")
    assert (done.stdout.splitlines(), done.stderr) == (["shadowed True", "main"], "")


def test_python_goes_on_after_an_exception_in_sitecustomize(bare: Path, tmp_path: Path) -> None:
    """Why vLLM is made to verify the patches. Where this fails, an exception there would be enough."""
    failing = scratch.sitecustomize(tmp_path, "raise RuntimeError('of the patches')")
    done = scratch.run(bare, "-c", "print('main')", PYTHONPATH=str(failing))
    assert (done.returncode, done.stdout) == (0, "main\n")
    assert "RuntimeError: of the patches" in done.stderr


def test_an_error_in_the_shadowed_one_is_told_and_does_not_undo_ours(bare: Path, alone: Path, tmp_path: Path) -> None:
    failing = saying(tmp_path / "failing", "failing", "raise RuntimeError('of the distribution')")
    done = scratch.run(bare, "-c", SHOW, PYTHONPATH=f"{alone}:{failing}")
    assert done.stdout.startswith("failing True\n")
    assert str(alone / "sitecustomize.py") in done.stdout
    assert "RuntimeError: of the distribution" in done.stderr


def milliseconds(python: Path, environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=environment, check=True)
    return (time.perf_counter() - start) * 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copied file", "package"])
def test_a_python_that_does_nothing_starts_as_fast(
    bare: Path, packaged: Path, alone: Path, tmp_path: Path, kind: str
) -> None:
    """In turns, so that whatever else the machine does falls on both; the median, since it does not fall evenly."""
    without = (bare, scratch.environment(PYTHONPATH=str(tmp_path)))
    ours = (packaged, without[1]) if kind == "package" else (bare, scratch.environment(PYTHONPATH=str(alone)))
    milliseconds(*ours), milliseconds(*without)  # bytecode is compiled, and files are read, once
    pairs = [(milliseconds(*ours), milliseconds(*without)) for _ in range(PAIRS)]
    added = statistics.median(a for a, _ in pairs) - statistics.median(b for _, b in pairs)
    assert added < LIMIT_MS, f"{added:.1f} ms"
