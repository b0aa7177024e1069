"""How a server ends: told to stop, it finishes what runs; without its engine, it ends with a non-zero status.

On both tested versions of vLLM, with one API process and with several: `make test`, `make test-slow` and
`make test-pinned`.
"""

import base64
import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inputs
import live
import numpy as np
import psutil
import pytest
import requests
import soundfile
from places import DATA, PICO, ROOT
from servers import EAGER, Server
from uploads import AUTHORIZED, upload
from websockets.exceptions import ConnectionClosed

from bench import BenchError
from bench.measure import engine

AT_ONCE, MANY = 16, 32  # on two cores they take some 2 s, and several
SENT_S = 0.8  # in which all of them are on their way, and none is done
GRACE_S = 30  # of profiles/fast.yaml
LONG_S = 30


@pytest.fixture(scope="module")
def clip() -> bytes:
    samples, _ = soundfile.read(DATA / "clips/001.opus", dtype="float32")
    return inputs.encoded(np.tile(samples, 5)[: LONG_S * inputs.RATE])


@contextlib.contextmanager
def server(scratch: Path, processes: int, *flags: str) -> Iterator[tuple[engine.Engine, str, Path]]:
    port, log = engine.free_port(), scratch / "server.log"
    flags = (*EAGER, "--api-server-count", str(processes), *flags)
    with engine.served(ROOT / "profiles/fast.yaml", PICO, port, log, *flags) as process:
        yield process, f"http://127.0.0.1:{port}", log


class Requests:
    """Some at a time, each with a connection of its own; `statuses` are 0 where no answer came."""

    def __init__(self, url: str, clip: bytes, at_once: int = AT_ONCE) -> None:
        self.url, self.clip = url, clip
        self.statuses: list[int] = []
        self.texts: list[str] = []
        self.threads = [threading.Thread(target=self.one) for _ in range(at_once)]
        for thread in self.threads:
            thread.start()
        time.sleep(SENT_S)
        assert self.statuses == []

    def one(self) -> None:
        try:
            answer = upload(self.url, self.clip)
        except requests.RequestException:
            self.statuses.append(0)
        else:
            self.statuses.append(answer.status_code)
            self.texts.append(answer.json().get("text", ""))

    def join(self) -> None:
        for thread in self.threads:
            thread.join(120)


@pytest.mark.last
def test_told_to_stop(fast: Server, clip: bytes) -> None:
    """The server that other tests share. Its live sessions get the text of what they have said."""
    samples = soundfile.read(DATA / "clips/001.opus", dtype="float32")[0]
    with Listener(fast.url) as speaking, Listener(fast.url) as idle:
        live.send(speaking.socket, "input_audio_buffer.commit")
        said = base64.b64encode(live.pcm16(samples)).decode()
        live.send(speaking.socket, "input_audio_buffer.append", audio=said)
        drain(fast.process, fast.url, clip, AT_ONCE // 4)
    for each in (speaking, idle):
        assert each.closed == (1012, "the server is stopping")
    assert idle.events == []
    *deltas, done = speaking.events
    assert {delta["type"] for delta in deltas} == {"transcription.delta"}
    assert done["type"] == "transcription.done"
    assert len(done["text"].split()) > 3


class Listener(threading.Thread):
    """A live session whose events are read in a thread, until the server closes it."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.socket = live.session(url)
        live.receive(self.socket)
        live.send(self.socket, "session.update", model="voxtral")
        self.events: list[dict[str, Any]] = []
        self.closed: tuple[int, str] | None = None

    def __enter__(self) -> "Listener":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(10)
        self.socket.close()

    def run(self) -> None:
        try:
            while True:
                self.events.append(json.loads(self.socket.recv()))
        except ConnectionClosed as closed:
            if closed.rcvd is not None:
                self.closed = closed.rcvd.code, closed.rcvd.reason


@pytest.mark.slow
def test_told_to_stop_with_several_processes(clip: bytes, tmp_path: Path) -> None:
    """They once had 5 s and no more (vLLM 0.20.0): these requests take longer."""
    with server(tmp_path, 2) as (process, url, _):
        drain(process, url, clip, MANY)


def drain(process: engine.Engine, url: str, clip: bytes, at_once: int) -> None:
    undisturbed = upload(url, clip).json()["text"]
    sent = Requests(url, clip, at_once)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    with contextlib.suppress(requests.RequestException):  # refused, or never taken up
        assert requests.get(f"{url}/v1/models", headers=AUTHORIZED, timeout=3).status_code == 503
    start = time.monotonic()
    assert process.wait(GRACE_S + 15) == 0
    sent.join()
    print(f"ended {time.monotonic() - start + 1:.1f} s after SIGTERM, {sent.statuses}")
    assert sent.statuses == [200] * at_once
    assert set(sent.texts) == {undisturbed}


@pytest.mark.slow
def test_the_grace_period_ends(clip: bytes, tmp_path: Path) -> None:
    with server(tmp_path, 1, "--shutdown-timeout", "1") as (process, url, _):
        sent = Requests(url, clip, at_once=MANY)
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert process.wait(20) == 0
        print(f"ended {time.monotonic() - start:.1f} s after SIGTERM, {sent.statuses}")
        sent.join()
    assert set(sent.statuses) == {503}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_dead_engine_ends_the_server(processes: int, clip: bytes, tmp_path: Path) -> None:
    with server(tmp_path, processes) as (process, url, log):
        sent = Requests(url, clip)
        engines = [
            each
            for each in psutil.Process(process.pid).children(recursive=True)
            if "EngineCore" in "".join(each.cmdline())
        ]
        assert len(engines) == 1
        engines[0].kill()
        start = time.monotonic()
        assert process.wait(30) not in (0, None)
        sent.join()
        print(f"{processes} processes: {process.poll()} after {time.monotonic() - start:.1f} s, {sent.statuses}")
        assert 200 not in sent.statuses
        if processes == 1:
            assert "vLLM's engine has died" in log.read_text()


@pytest.mark.slow
def test_a_wrong_limit_stops_the_start(tmp_path: Path) -> None:
    port, log = engine.free_port(), tmp_path / "server.log"
    environment = {"VOXTRAL_SERVE_MAX_IN_FLIGHT": "many"}
    flags = (*EAGER, "--api-server-count", "1")
    with (
        pytest.raises(BenchError, match="exited with status 1"),
        engine.served(ROOT / "profiles/fast.yaml", PICO, port, log, *flags, environment=environment),
    ):
        pass
    assert "VOXTRAL_SERVE_MAX_IN_FLIGHT is 'many': expected a whole number of 1 or more" in log.read_text()
