"""What the tests share: the repository's places, and the real vLLM servers, one for each configuration and session.

A test that takes a server's fixture starts it if no test before did. `make test` has four of them; a session without
slow tests that starts more fails (support/starts.py).
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import clock
import pytest
import starts
from uploads import KEY

from bench import dataset
from bench.client import Client, Row
from bench.measure import engine
from pico import huggingface

ROOT = Path(__file__).parent.parent
PICO = ROOT / "pico/checkpoint"
CONFIG = ROOT / "vllm_config.yaml"
DATA = ROOT / "bench/data"
# A share of RAM that vLLM wants to be free when it starts, whatever the KV cache takes: all servers have room. Profiles
# ask for 0.9, and for graphs that take minutes to compile.
SMALL = ("--gpu-memory-utilization", "0.3")
EAGER = ("--enforce-eager", *SMALL)
# vLLM would bind the workers of all servers to the same one of two cores. 0.20.0 does not start without binding them
# (IndexError in OMPProcessManager).
NOBIND = {} if version("vllm").startswith("0.20.0") else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Nor do they compile vLLM's sampling of log probabilities, which takes 8 s.
UNBOUND = {**NOBIND, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
SAMPLES = 30  # of the 500 clips; all of them are `make bench-full`, `make layouts` and `make models`
# pico says no EOS within a clip: a text ends with its clip. Further clips that show it; none is among the 30.
LATE = ("057", "154", "162", "499")

MOST_LIVE = 8  # live sessions of the server `fast`

starts.count_servers()


class Server(NamedTuple):
    url: str
    log: Path
    process: engine.Engine


# ---- Options


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", metavar="FOLDER", help="where to write the pictures of docs/pages/page.md")


# ---- The slow tests, the last ones, and the number of servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `last` ends a server that others share."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if too_many(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def too_many(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow" and len(starts.STARTED) > starts.MOST


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if starts.STARTED:
        terminalreporter.section(f"{len(starts.STARTED)} vLLM servers")
        for start in starts.STARTED:
            terminalreporter.write_line(str(start))
    if too_many(terminalreporter.config):
        terminalreporter.write_line(f"FAILED: a session without slow tests may start {starts.MOST} servers", red=True)


# ---- Time


@pytest.fixture
def turned_clock() -> Iterator[clock.Clock]:
    """The clock of asyncio and of time.monotonic goes on when nothing else is left to do: support/clock.py."""
    with clock.turned() as turned:
        yield turned


# ---- Servers


def begin(stack: contextlib.ExitStack, log: Path, config: Path, checkpoint: Path, *flags: str) -> Server:
    """One that is not up yet; the end of `stack` ends it."""
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        pytest.exit("the Makefile sets what vLLM needs on a CPU: run the tests with `make test`", returncode=2)
    port = engine.free_port()
    process = stack.enter_context(engine.served(config, checkpoint, port, log, *flags, environment=UNBOUND, wait=False))
    return Server(f"http://127.0.0.1:{port}", log, process)


def up(server: Server) -> Server:
    server.process.wait_until_up()
    return server


@contextlib.contextmanager
def at_once(config: Path, directories: Mapping[str, Path], logs: Path, *flags: str) -> Iterator[dict[str, Server]]:
    """One server for each directory, all started at the same time; their logs are in `logs`."""
    with contextlib.ExitStack() as stack:
        servers = {
            name: begin(stack, logs / f"{name}.log", config, directory, *flags)
            for name, directory in directories.items()
        }
        yield {name: up(server) for name, server in servers.items()}


SHARED: dict[str, tuple[Path, tuple[str, ...]]] = {
    # The contest: vLLM's own model, Mistral's layout, no guard.
    "pico_server": (CONFIG, SMALL),
    # The encode-once model behind the guard, with live sessions and an API key, from Hugging Face's layout. On a CPU:
    # one API process (server/test_shutdown.py has several), and a context in which 37 s are a long file.
    "fast": (
        ROOT / "profiles/fast.yaml",
        (
            *(*EAGER, "--api-server-count", "1", "--max-model-len", "512", "--api-key", KEY),
            *("--additional-config", json.dumps({"max_live_sessions": MOST_LIVE})),
        ),
    ),
    # vLLM's own model behind the guard. In float32, where no two candidates are so close that the order of a sum would
    # decide.
    "live_server": (ROOT / "tests/support/vllm-live.yaml", ("--dtype", "float32", *EAGER)),
}


@pytest.fixture(scope="session")
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Those of SHARED that tests of this session take, all begun at once."""
    taken = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, (config, flags) in SHARED.items():
            if name in taken:
                checkpoint = request.getfixturevalue("hugging_face") if name == "fast" else PICO
                servers[name] = begin(stack, tmp_path_factory.mktemp(name) / "server.log", config, checkpoint, *flags)
        yield servers


@pytest.fixture(scope="session")
def pico_server(begun: dict[str, Server]) -> Server:
    return up(begun["pico_server"])


@pytest.fixture(scope="session")
def pico_log(pico_server: Server) -> Path:
    return pico_server.log


@pytest.fixture(scope="session")
def pico_url(pico_server: Server) -> str:
    return pico_server.url


@pytest.fixture(scope="session")
def fast(begun: dict[str, Server]) -> Server:
    return up(begun["fast"])


@pytest.fixture(scope="session")
def fast_url(fast: Server) -> str:
    return fast.url


@pytest.fixture(scope="session")
def live_server(begun: dict[str, Server]) -> Server:
    return up(begun["live_server"])


@pytest.fixture(scope="session")
def live_url(live_server: Server) -> str:
    return live_server.url


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


def short(clips: list[dataset.Clip], count: int, longest_s: float = 8) -> list[dataset.Clip]:
    """The shortest `count`, none longer: `make test` has minutes for all."""
    found = sorted((clip for clip in clips if clip.duration_s <= longest_s), key=lambda clip: clip.duration_s)[:count]
    assert len(found) == count
    return found


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
