"""One server of Voxtral TTS for the tests of this folder, and one of VoxCPM2: vLLM-Omni on a CPU, with random weights.

Random weights make noise. These tests judge the server: what starts, what is refused, what a stream is made of.
"""

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import requests
from places import ROOT
from servers import NOBIND

from bench.gpu import speech_checkpoint
from bench.measure import engine

# They need .venv-omni: `make test-speech`.
collect_ignore_glob = [] if find_spec("vllm_omni") else ["test_*"]

CONFIG = ROOT / "profiles/voxtral-tts.yaml"
# What a CPU needs: less memory, no graphs, one thread for each process. A start takes minutes beside other work.
OMNI = ("--omni", "--stage-init-timeout", "1800", "--init-timeout", "2400", "--stage-overrides")
ON_CPU = (
    *OMNI,
    '{"0": {"gpu_memory_utilization": 0.1, "enforce_eager": true, "max_num_seqs": 32, "max_num_batched_tokens": 4096}, '
    '"1": {"gpu_memory_utilization": 0.1, "enforce_eager": true, "max_num_seqs": 32}}',
)
ENVIRONMENT = {**NOBIND, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_COLOR": "0"}
START_TIMEOUT_S = 2400


class Speech(NamedTuple):
    """A server that is up."""

    url: str
    log: Path
    process: engine.Engine
    voice: str = "casual_male"

    def say(self, text: str = "Good morning.", timeout_s: float = 300, **fields: Any) -> requests.Response:
        """POST /v1/audio/speech. Without other fields: WAV, at most 25 tokens of speech."""
        body = {"input": text, "voice": self.voice, "response_format": "wav", "max_new_tokens": 25, **fields}
        with requests.Session() as session:
            session.trust_env = False
            return session.post(f"{self.url}/v1/audio/speech", json=body, timeout=timeout_s, stream="stream" in fields)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint, to be read only."""
    directory = tmp_path_factory.mktemp("tiny")
    speech_checkpoint.write(directory, small=True)
    return directory


@contextlib.contextmanager
def serving(
    directory: Path, log: Path, *flags: str, config: Path = CONFIG, on_cpu: tuple[str, ...] = ON_CPU
) -> Iterator[Speech]:
    """A server of its own with a profile, for a test that ends it."""
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        pytest.exit("the Makefile sets what vLLM needs on a CPU: run the tests with `make test-speech`", returncode=2)
    port = engine.free_port()
    command = (str(ROOT / ".venv-omni/bin/vllm-omni"),)
    with (
        mock.patch.object(engine, "START_TIMEOUT_S", START_TIMEOUT_S),
        engine.served(
            config, directory, port, log, *on_cpu, *flags, command=command, model=".", environment=ENVIRONMENT
        ) as process,
    ):
        yield Speech(f"http://127.0.0.1:{port}", log, process)


@pytest.fixture(scope="session")
def speech(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speech]:
    """The shared server. Nothing may end it or change its voices."""
    with serving(tiny, tmp_path_factory.mktemp("speech") / "server.log") as server:
        yield server
