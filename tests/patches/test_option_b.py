"""The contest's Option B: the file copied over the interpreter's sitecustomize, then vLLM's own command."""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import scratch
from places import CONFIG, DATA, PICO

from bench import dataset
from bench.measure import engine, scoring
from voxtral_serve.shims import PATCHES, installed

pytestmark = pytest.mark.slow
# Where the distribution's sitecustomize would be run that ours shadows: writes down each process that verified.
WITNESS = """
import json, os, sys
from multiprocessing import current_process

finder = next(f for f in sys.meta_path if type(f).__name__ == "PostImport")
verify = finder.verify


def witnessed():
    verify()
    seen = {{"process": current_process().name, "file": finder.file, "outcomes": finder.outcomes}}
    with open(os.path.join({directory!r}, str(os.getpid())), "w") as file:
        json.dump(seen, file)


finder.verify = witnessed
"""
# Stock 0.20.0 has no CPU attention for Voxtral's encoder. It says so in the engine's worker, when it builds the model:
# all that the patches are for lies behind it by then.
NO_CPU = "CPUAttentionBackend'> is not yet supported"


@pytest.fixture(scope="module")
def option_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cp sitecustomize.py /usr/lib/python3.12/sitecustomize.py, for an interpreter of ours. Returns its binary."""
    directory = tmp_path_factory.mktemp("option_b")
    python = scratch.interpreter(directory / "python")
    (directory / "seen").mkdir()
    (scratch.site_packages(python) / "sitecustomize.py").write_text(WITNESS.format(directory=str(directory / "seen")))
    shutil.copy(scratch.SOURCE, scratch.standard_library(python) / "sitecustomize.py")
    return python


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's directory with the config beside the weights, where the contest's command expects it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "pico"
    shutil.copytree(PICO, directory)
    shutil.copy(CONFIG, directory)
    return directory


@dataclass(frozen=True)
class Served:
    text: str | None  # of CLIP; None where the server did not come up
    log: str
    processes: list[dict]  # what each process that verified wrote down


CLIP = "001"


@pytest.fixture(scope="module")
def served(option_b: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """One `vllm serve --config vllm_config.yaml` in the checkpoint's directory."""
    log, port, text = tmp_path_factory.mktemp("served") / "log", engine.free_port(), None
    clip = next(clip for clip in dataset.load(DATA)[0] if clip.id == CLIP)
    with scratch.started(option_b, checkpoint, port, log, config=Path(CONFIG.name)) as process:
        deadline = time.monotonic() + scratch.START_TIMEOUT_S
        while process.poll() is None and not scratch.takes_connections(port):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-5000:]
            time.sleep(0.2)
        if process.poll() is None:
            url = f"http://127.0.0.1:{port}/v1/audio/transcriptions"
            with clip.path.open("rb") as file:
                response = requests.post(url, files={"file": file}, data={"model": "voxtral"}, timeout=120)
            text = response.json()["text"]
    seen = [json.loads(file.read_text()) for file in (option_b.parent.parent.parent / "seen").iterdir()]
    return Served(text, log.read_text(errors="replace"), seen)


def test_every_process_of_vllm_has_the_patches(option_b: Path, served: Served) -> None:
    """And without a plugin: what runs in each of them is the copied file, and what it hides has run as well."""
    assert {"MainProcess", "EngineCore"} <= {each["process"] for each in served.processes}
    for each in served.processes:
        assert each["file"] == str(scratch.standard_library(option_b) / "sitecustomize.py")
        assert set(each["outcomes"]) == {patch.name for patch in PATCHES}
        assert {outcome for outcome, _ in each["outcomes"].values()} <= {"applied", "not needed"}


@pytest.mark.skipif(installed("vllm") == "0.20.0", reason="stock vLLM 0.20.0 cannot run Voxtral Realtime on a CPU")
def test_it_transcribes(served: Served) -> None:
    clip = next(clip for clip in dataset.load(DATA)[0] if clip.id == CLIP)
    assert served.text is not None, served.log[-5000:]
    assert scoring.word_errors(clip.text, served.text).total == 0


@pytest.mark.skipif(installed("vllm") != "0.20.0", reason="only 0.20.0 cannot run Voxtral Realtime on a CPU")
def test_it_gets_as_far_as_a_cpu_can(served: Served) -> None:
    assert served.text is None
    assert NO_CPU in served.log, served.log[-5000:]
    assert "PatchError" not in served.log
