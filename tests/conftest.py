"""What the tests share: the repository's places, and the real vLLM servers, one for each configuration and session.

A test that takes a server's fixture starts it if no test before did. `make test` has four of them; a session without
slow tests that starts more fails (support/starts.py).
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import starts
from uploads import KEY

from bench import dataset, serve
from bench.client import Client, Row
from pico import huggingface

ROOT = Path(__file__).parent.parent
PICO = ROOT / "pico/checkpoint"
CONFIG = ROOT / "vllm_config.yaml"
DATA = ROOT / "bench/data"
# A share of RAM that vLLM wants to be free when it starts, whatever the KV cache takes: all servers have room. Profiles
# ask for 0.9, and for graphs that take minutes to compile.
SMALL = ("--gpu-memory-utilization", "0.3")
EAGER = ("--enforce-eager", *SMALL)
SAMPLES = 60  # of the 500 clips; all of them are `make bench-full`, `make layouts` and `make models`
# Clips whose text the LM ends only after the clip's end, as it does in 16 of the 500. None is among the 60.
LATE = ("057", "154", "162", "499")

starts.count_servers()


class Server(NamedTuple):
    url: str
    log: Path
    process: subprocess.Popen[bytes]


# ---- The slow tests, the last ones, and the number of servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `last` ends a server that others share."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if too_many(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def too_many(session: pytest.Session) -> bool:
    slow = any(item.get_closest_marker("slow") for item in session.items)
    return not slow and len(starts.STARTED) > starts.MOST


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if starts.STARTED:
        terminalreporter.section(f"{len(starts.STARTED)} vLLM servers")
        for start in starts.STARTED:
            terminalreporter.write_line(str(start))
    if too_many(terminalreporter._session):
        terminalreporter.write_line(f"FAILED: a session without slow tests may start {starts.MOST} servers", red=True)


# ---- Servers


def start(directory: Path, config: Path, checkpoint: Path, *flags: str) -> Iterator[Server]:
    """Its log is in `directory`."""
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        pytest.exit("the Makefile sets what vLLM needs on a CPU: run the tests with `make test`", returncode=2)
    port, log = serve.free_port(), directory / "server.log"
    with serve.server(config, checkpoint, port, log, *flags) as process:
        yield Server(f"http://127.0.0.1:{port}", log, process)


@contextlib.contextmanager
def at_once(config: Path, directories: Mapping[str, Path], logs: Path, *flags: str) -> Iterator[dict[str, Server]]:
    """One server for each directory, all started at the same time; their logs are in `logs`."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, directory in directories.items():
            port, log = serve.free_port(), logs / f"{name}.log"
            process = stack.enter_context(serve.server(config, directory, port, log, *flags, wait=False))
            servers[name] = Server(f"http://127.0.0.1:{port}", log, process)
        for server in servers.values():
            serve.wait_until_up(server.process, server.url, server.log)
        yield servers


@pytest.fixture(scope="session")
def pico_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The contest: `vllm serve --config vllm_config.yaml`, vLLM's own model, Mistral's layout, no guard."""
    yield from start(tmp_path_factory.mktemp("pico"), CONFIG, PICO, *SMALL)


@pytest.fixture(scope="session")
def pico_log(pico_server: Server) -> Path:
    return pico_server.log


@pytest.fixture(scope="session")
def pico_url(pico_server: Server) -> str:
    return pico_server.url


# On a CPU: one API process (server/test_shutdown.py has several), and a context in which 37 s are a long file.
FAST = (*EAGER, "--api-server-count", "1", "--max-model-len", "512", "--api-key", KEY)


@pytest.fixture(scope="session")
def fast(hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """profiles/fast.yaml: the encode-once model behind the guard, with an API key, from Hugging Face's layout."""
    yield from start(tmp_path_factory.mktemp("fast"), ROOT / "profiles/fast.yaml", hugging_face, *FAST)


@pytest.fixture(scope="session")
def fast_url(fast: Server) -> str:
    return fast.url


@pytest.fixture(scope="session")
def live_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """profiles/realtime.yaml: vLLM's own model behind the guard.

    In float32, where no two candidates are so close that the order of a sum would decide.
    """
    for server in start(
        tmp_path_factory.mktemp("realtime"), ROOT / "profiles/realtime.yaml", PICO, "--dtype", "float32", *EAGER
    ):
        yield server.url


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pico in Hugging Face's layout, to be read only."""
    directory = tmp_path_factory.mktemp("hugging_face")
    huggingface.write(directory)
    return directory


# ---- Clips, and what the contest's server says of them


@pytest.fixture(scope="session")
def clips() -> list[dataset.Clip]:
    return dataset.select(dataset.load(DATA)[0], SAMPLES, seed=0)


@pytest.fixture(scope="session")
def late() -> list[dataset.Clip]:
    return [clip for clip in dataset.load(DATA)[0] if clip.id in LATE]


def transcribe(url: str, clips: list[dataset.Clip]) -> list[Row]:
    """One clip after the other."""
    client = Client(url, timeout_s=120, api_key=KEY)
    client.model = "voxtral"
    return [client.transcribe(clip, part=1) for clip in clips]


@pytest.fixture(scope="session")
def served(pico_url: str, clips: list[dataset.Clip]) -> list[Row]:
    return transcribe(pico_url, clips)
