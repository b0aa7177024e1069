"""What the tests share: the repository's places, and the real vLLM servers, one for each configuration and session.

A test that takes a server's fixture starts it if no test before did. A session without slow tests that starts more
than two fails (support/starts.py).
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import clock
import pytest
import starts
from places import CONFIG, DATA, PICO, ROOT
from servers import EAGER, LATE, LIVE_AGE_S, MOST_LIVE, SAMPLES, SMALL, Server, begin, transcribe, up
from uploads import KEY

from bench import dataset
from bench.client import Row
from pico import huggingface

starts.count_servers()


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


SHARED: dict[str, tuple[Path, tuple[str, ...]]] = {
    # The contest: vLLM's own model, Mistral's layout, no guard.
    "pico_server": (CONFIG, SMALL),
    # The encode-once model behind the guard, with live sessions and an API key, from Hugging Face's layout. On a CPU:
    # one API process (server/test_shutdown.py has several), and a context in which 37 s are a long file.
    "fast": (
        ROOT / "profiles/fast.yaml",
        (
            *(*EAGER, "--api-server-count", "1", "--max-model-len", "512", "--api-key", KEY),
            *("--additional-config", json.dumps({"max_live_sessions": MOST_LIVE, "max_live_age_s": LIVE_AGE_S})),
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


@pytest.fixture(scope="session")
def late() -> list[dataset.Clip]:
    return [clip for clip in dataset.load(DATA)[0] if clip.id in LATE]


@pytest.fixture(scope="session")
def served(pico_url: str, clips: list[dataset.Clip]) -> list[Row]:
    return transcribe(pico_url, clips)
