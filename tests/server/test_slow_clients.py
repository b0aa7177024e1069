"""A real server while 1,000 clients send one byte a second, with its key and without: others are served as before.

A client whose request is answered or whose connection is closed comes again at once.
"""

import asyncio
import logging
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import inputs
import numpy as np
import psutil
import pytest
import servers
import soundfile
from places import DATA, ROOT
from servers import EAGER
from uploads import RATE, upload

from bench.measure import engine
from voxtral_serve.guard.limits import OPEN_BODIES
from voxtral_serve.units import MIB

CLIENTS, PERIOD_S = 1000, 1.0
STORM_S = 10  # before the first good request
GOOD, ROUNDS = 5, 3  # requests of a round; one round must be in time, as a busy machine works in gusts
LATER_S = 2.0  # than alone
GROWTH = 512 * MIB  # bytes of resident memory, of all processes
FILES = 4096
HEAD = (
    "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: here\r\n{key}Content-Length: 1000000\r\n"
    "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    port, log = engine.free_port(), tmp_path_factory.mktemp("slow_clients") / "server.log"
    # Without live sessions, whose longest clip is longer than this context
    uploads = ("--max-model-len", "512", "--additional-config", "{}")
    flags = (*EAGER, "--api-server-count", "1", *uploads, "--api-key", inputs.KEY)
    with engine.served(ROOT / "profiles/fast.yaml", hugging_face, port, log, *flags) as process:
        yield servers.Server(f"http://127.0.0.1:{port}", log, process)


@pytest.fixture(scope="module")
def good() -> bytes:
    """A file of 1 MB: 8.2 s in samples of 8 bytes."""
    samples, _ = soundfile.read(DATA / "clips/001.opus", dtype="float32")
    made = inputs.encoded(np.pad(samples, (0, round(8.2 * RATE) - len(samples))), subtype="DOUBLE")
    assert 1_000_000 < len(made) < 1_100_000
    return made


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], FILES), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Storm:
    """CLIENTS clients in a thread of their own. `begun` counts connections, `open` those that are open now."""

    def __init__(self, url: str, head: str) -> None:
        self.host, self.port, self.head = urlsplit(url).hostname, urlsplit(url).port, head.encode()
        self.begun = self.open = 0
        self.answers: dict[bytes, int] = {}  # first line -> how often

    async def run(self, stop: threading.Event) -> None:
        tasks = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def client(self) -> None:
        while True:
            try:
                await self.request()
            except OSError:
                await asyncio.sleep(0)

    async def request(self) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        self.begun += 1
        self.open += 1
        ended = asyncio.create_task(reader.readline())
        try:
            writer.write(self.head)
            while not ended.done():
                writer.write(b"a")
                await asyncio.wait([ended], timeout=PERIOD_S)
            line = ended.result()
            self.answers[line] = self.answers.get(line, 0) + 1
        finally:
            ended.cancel()
            writer.close()
            self.open -= 1


@contextmanager
def storm(url: str, head: str) -> Iterator[Storm]:
    made, stop = Storm(url, head), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(made.run(stop)))
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join()


def memory(server: servers.Server) -> int:
    parent = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in [parent, *parent.children(recursive=True)])


def took(url: str, good: bytes) -> float:
    start = time.monotonic()
    answer = upload(url, good)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"]
    return time.monotonic() - start


@pytest.mark.parametrize("key", [f"Authorization: Bearer {inputs.KEY}\r\n", ""], ids=["with the key", "without a key"])
def test_a_good_request_among_slow_clients(server: servers.Server, good: bytes, key: str) -> None:
    took(server.url, good)
    alone_s = sorted(took(server.url, good) for _ in range(3))[1]
    before = memory(server)
    sizes: list[int] = []
    among_s: list[list[float]] = []
    with storm(server.url, HEAD.format(key=key)) as slow:
        deadline = time.monotonic() + STORM_S
        while time.monotonic() < deadline:
            sizes.append(memory(server))
            time.sleep(0.5)
        for _ in range(ROUNDS):
            among_s.append([took(server.url, good) for _ in range(GOOD)])
            sizes.append(memory(server))
            if max(among_s[-1]) <= alone_s + LATER_S:
                break
        begun, opened, answers = slow.begun, slow.open, dict(slow.answers)
    logging.getLogger(__name__).warning(
        "%s: %.2f s alone, %s s among them; memory grew by %.0f MiB; %d connections begun, %d open, answers %s",
        "with the key" if key else "without a key",
        alone_s,
        [[round(each, 2) for each in part] for part in among_s],
        (max(sizes) - before) / MIB,
        begun,
        opened,
        answers,
    )
    assert begun >= CLIENTS
    expected = b"HTTP/1.1 408" if key else b"HTTP/1.1 401"
    assert sum(count for line, count in answers.items() if line.startswith(expected)) >= CLIENTS - OPEN_BODIES
    assert max(among_s[-1]) <= alone_s + LATER_S
    assert max(sizes) - before <= GROWTH
    assert took(server.url, good) <= alone_s + LATER_S
