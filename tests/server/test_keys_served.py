"""VOXTRAL_SERVE_KEYS on a real server of two API processes: limits over both, and a file that changes."""

import base64
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live
import numpy as np
import pytest
import requests
from live import opened
from places import DATA, PICO, ROOT
from servers import EAGER, UNBOUND
from uploads import RATE, samples
from websockets.exceptions import ConnectionClosed

from bench.measure import engine

BILLING, CALLS, LATER = "billing-0123456789abcdef", "calls-0123456789abcdef", "later-0123456789abcdef"
CLIP = DATA / "clips/001.opus"  # of 7.35 s
KEYS = f"""
- {{name: billing, key: {BILLING}, audio_seconds_per_minute: 15}}
- {{name: calls, key: {CALLS}, live_sessions: 2}}
"""
CONNECTIONS = 12  # enough to reach both processes


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def posted(url: str, key: str) -> requests.Response:
    """Over a connection of its own."""
    return requests.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": (CLIP.name, CLIP.read_bytes())},
        data={"model": "voxtral"},
        headers=bearer(key),
        timeout=600,
    )


def statuses(url: str, key: str) -> set[int]:
    """Of several connections."""
    found = (requests.get(f"{url}/v1/models", headers=bearer(key), timeout=60) for _ in range(CONNECTIONS))
    return {answer.status_code for answer in found}


def until(true: Callable[[], bool], within_s: float = 120) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.5)


def first_events(socket: Any) -> list[dict[str, Any]]:
    """session.created; and the error of a client that is refused."""
    events = [live.receive(socket)]
    with contextlib.suppress(TimeoutError, ConnectionClosed):
        events.append(json.loads(socket.recv(timeout=10)))
    return events


@pytest.mark.slow
def test_keys(tmp_path: Path) -> None:
    file, port, log = tmp_path / "keys.yaml", engine.free_port(), tmp_path / "server.log"
    file.write_text(KEYS)
    flags = (*EAGER, "--api-server-count", "2", "--max-model-len", "512")
    flags += ("--additional-config", json.dumps({"max_live_sessions": 4}))
    environment = {**UNBOUND, "VOXTRAL_SERVE_KEYS": str(file)}
    with engine.served(ROOT / "profiles/fast.yaml", PICO, port, log, *flags, environment=environment) as process:
        url = f"http://127.0.0.1:{port}"
        assert statuses(url, BILLING) == statuses(url, CALLS) == {200}
        assert statuses(url, LATER) == {401}
        seconds_of_audio(url)
        live_sessions(url)
        reloaded(url, file, process.pid, log)
    whole = log.read_text()
    assert whole.count(", key billing") >= CONNECTIONS and whole.count(", key calls") >= CONNECTIONS
    assert not any(key in whole for key in (BILLING, CALLS, LATER))


def seconds_of_audio(url: str) -> None:
    """Both processes count together."""
    start, answers = time.monotonic(), list[requests.Response]()
    while not answers or answers[-1].status_code == 200:
        answers.append(posted(url, BILLING))
        assert len(answers) < 40
    refused = answers[-1]
    minutes = (time.monotonic() - start) / 60
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "the limit audio_seconds_per_minute of the key billing is reached, which is 15" in error["message"]
    assert not any(name.startswith("key_") for name, *_ in samples(url))
    counted = samples(url, CALLS)
    sent_s = counted["key_audio_seconds_total", "billing", "upload"]
    assert 15 - 7.4 <= sent_s <= 15 + 15 * minutes
    assert counted["key_refused_total", "billing", "audio_seconds_per_minute"] == 1
    assert posted(url, CALLS).status_code == 200


def live_sessions(url: str) -> None:
    """Two of eight connections at a time are taken, whichever process they reach."""
    sockets = [opened(url, "", additional_headers=bearer(CALLS)) for _ in range(8)]
    found = [first_events(socket) for socket in sockets]
    assert [len(events) for events in found].count(1) == 2
    errors = [events[1] for events in found if len(events) == 2]
    assert {each["code"] for each in errors} == {"rate_limit_exceeded"}
    assert "the limit live_sessions of the key calls is reached, which is 2" in errors[0]["error"]
    assert samples(url, CALLS)["key_live_connections", "calls"] == 2
    for socket in sockets:
        socket.close()
    assert {socket.close_code for socket in sockets} == {1000, 1013}
    until(lambda: samples(url, CALLS)["key_live_connections", "calls"] == 0)


def reloaded(url: str, file: Path, pid: int, log: Path) -> None:
    """Sessions of a key that is gone end, with audio and without; a file that is not valid changes nothing; SIGHUP ends
    nothing."""
    with (
        opened(url, "", additional_headers=bearer(CALLS)) as silent,
        opened(url, "", additional_headers=bearer(CALLS)) as speaking,
    ):
        for socket in (silent, speaking):
            live.receive(socket)
        live.send(speaking, "session.update", model="voxtral")
        live.send(speaking, "input_audio_buffer.commit")
        pcm = base64.b64encode(live.pcm16(np.zeros(2 * RATE, np.float32))).decode()
        live.send(speaking, "input_audio_buffer.append", audio=pcm)
        file.write_text(f"- {{name: later, key: {LATER}}}\n")
        os.kill(pid, signal.SIGHUP)
        start = time.monotonic()
        for socket in (silent, speaking):
            with pytest.raises(ConnectionClosed):
                while True:
                    socket.recv(timeout=10)
            assert socket.close_code == 1008
        assert time.monotonic() - start < 10
    until(lambda: statuses(url, LATER) == {200} and statuses(url, CALLS) == {401})
    file.write_text("- {name: later, key: short}\n")
    until(lambda: log.read_text().count("the keys stay as they are") == 2)
    assert "its key is text of 5 characters: expected text of 16" in log.read_text()
    assert statuses(url, LATER) == {200}
