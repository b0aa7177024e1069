"""What these tests share: scratch interpreters, pico in Hugging Face's layout, and what becomes of the patches here."""

import json
from pathlib import Path

import pytest
import scratch


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This environment's libraries without anything of ours in force."""
    return scratch.interpreter(tmp_path_factory.mktemp("interpreter") / "stock")


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard library alone."""
    return scratch.interpreter(tmp_path_factory.mktemp("interpreter") / "bare", libraries=False)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds a copy of sitecustomize.py, and no package beside it."""
    return scratch.sitecustomize(tmp_path_factory.mktemp("copied"), scratch.SOURCE.read_text())


@pytest.fixture(scope="session")
def outcomes(stock: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each patch's (outcome, what was found) in a spawned child that has the copied file and no plugin of ours."""
    script = tmp_path_factory.mktemp("spawned") / "script.py"
    script.write_text(
        f"""
import multiprocessing

def child():
    {scratch.VERIFY.strip().replace(chr(10), chr(10) + "    ")}

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    )
    done = scratch.run(stock, str(script), PYTHONPATH=str(alone), VLLM_PLUGINS="")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
