"""What these tests share: both layouts of pico on the encode-once model, each served for the whole session.

Stock vLLM 0.20.0 has no CPU attention for Voxtral's own encoder, so the `pico_url` of the other tests cannot start.
"""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from places import CONFIG, PICO
from servers import Server, at_once

LAYOUTS = ("mistral", "hugging_face")


@pytest.fixture(scope="session", autouse=True)
def pinned() -> None:
    if not version("vllm").startswith("0.20.0"):
        pytest.exit("these tests are of vLLM 0.20.0: run them with `make test-pinned`", returncode=2)


@pytest.fixture(scope="session")
def directories(hugging_face: Path) -> dict[str, Path]:
    return {"mistral": PICO, "hugging_face": hugging_face}


@pytest.fixture(scope="session")
def encode_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vllm_config.yaml for the encode-once model. Both servers are up at once: the shares of RAM must fit beside each
    other, and beside whatever else runs here."""
    options = yaml.safe_load(CONFIG.read_text()) | {
        "hf_overrides": {"architectures": ["VoxtralRealtimeEncodeOnce"]},
        "gpu_memory_utilization": 0.3,
    }
    path = tmp_path_factory.mktemp("config") / "encode_once.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


@pytest.fixture(scope="session")
def servers(
    directories: dict[str, Path], encode_once: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    with at_once(encode_once, directories, tmp_path_factory.mktemp("logs")) as running:
        yield running
