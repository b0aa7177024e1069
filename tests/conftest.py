"""What the tests share: the repository's places, and one real vLLM on pico for the whole session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import serve
from pico import huggingface

ROOT = Path(__file__).parent.parent
PICO = ROOT / "pico/checkpoint"
CONFIG = ROOT / "vllm_config.yaml"
DATA = ROOT / "bench/data"


@pytest.fixture(scope="session")
def pico_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of the server at `pico_url`."""
    return tmp_path_factory.mktemp("pico") / "server.log"


@pytest.fixture(scope="session")
def pico_url(pico_log: Path) -> Iterator[str]:
    """Root URL of `vllm serve --config vllm_config.yaml` on the tiny checkpoint."""
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        pytest.exit("the Makefile sets what vLLM needs on a CPU: run the tests with `make test`", returncode=2)
    port = serve.free_port()
    with serve.server(CONFIG, PICO, port, pico_log):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def fast_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Root URL of `vllm serve --config profiles/fast.yaml` on the tiny checkpoint, without minutes of compiling.

    0.9 of the RAM would be more than other servers leave.
    """
    port, log = serve.free_port(), tmp_path_factory.mktemp("fast") / "server.log"
    flags = ("--enforce-eager", "--gpu-memory-utilization", "0.3")
    with serve.server(ROOT / "profiles/fast.yaml", PICO, port, log, *flags):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pico in Hugging Face's layout, to be read only."""
    directory = tmp_path_factory.mktemp("hugging_face")
    huggingface.write(directory)
    return directory
