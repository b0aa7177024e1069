"""What a client may write to vLLM's own API, without the guard before it: the engine answers at once, and lives on."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import servers
from places import DATA, PICO, ROOT
from servers import EAGER
from uploads import upload

from bench import dataset
from pico import model
from voxtral_serve.engine.session import SESSION

pytestmark = pytest.mark.slow
AT_ONCE_S = 5  # a busy core's; without an answer the client would wait for ever
NAMED = f"{0:032x}-0"  # as the API server names sessions
WRONG = [["x"], "x", 7, NAMED, "x" * 10**5, [[]], [NAMED]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """With live sessions."""
    folder = tmp_path_factory.mktemp("unguarded")
    lines = (ROOT / "profiles/fast.yaml").read_text().splitlines(keepends=True)
    config: Path = folder / "fast.yaml"
    config.write_text("".join(line for line in lines if not line.startswith("middleware")))
    flags = (*EAGER, "--api-server-count", "1", "--max-model-len", "512", "--additional-config")
    with servers.at_once(config, {"unguarded": PICO}, folder, *flags, '{"max_live_sessions": 2}') as started:
        yield started["unguarded"]


@pytest.fixture(scope="module")
def clip() -> dataset.Clip:
    return dataset.load(DATA)[0][0]


@pytest.fixture(scope="module")
def text(server: servers.Server, clip: dataset.Clip) -> str:
    return str(upload(server.url, clip.path).json()["text"])


def complete(url: str, session: Any, **options: Any) -> requests.Response:
    body = {"model": "voxtral", "prompt": [model.BOS] * model.PROMPT_TOKENS, "vllm_xargs": {SESSION: session}}
    return requests.post(f"{url}/v1/completions", json=body | options, timeout=60)


def transcribe(url: str, clip: dataset.Clip, session: Any) -> requests.Response:
    return upload(url, clip.path, vllm_xargs=json.dumps({SESSION: session}))


@pytest.mark.parametrize("session", WRONG, ids=lambda session: f"{session!r:.12}")
def test_a_name_of_a_session_is_refused_at_once(
    server: servers.Server, clip: dataset.Clip, text: str, session: Any
) -> None:
    """And an upload beside it has its text."""
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(upload, server.url, clip.path)
        for answer in (transcribe(server.url, clip, session), complete(server.url, session)):
            assert 400 <= answer.status_code <= 500, answer.text
            assert answer.elapsed.total_seconds() < AT_ONCE_S
        assert beside.result().json()["text"] == text
    assert server.process.poll() is None


def test_one_that_only_the_scheduler_knows_to_be_wrong(server: servers.Server, text: str) -> None:
    """No other request gives the engine a step."""
    start = time.monotonic()
    answer = complete(server.url, NAMED)
    assert (answer.status_code, time.monotonic() - start < AT_ONCE_S) == (500, True), answer.text
    assert "ends with an error: it names no session that is open" in server.log.read_text()
    streamed = complete(server.url, NAMED, stream=True)
    assert '"error"' in streamed.text


def test_a_request_without_audio_is_refused(server: servers.Server) -> None:
    answer = requests.post(
        f"{server.url}/v1/completions", json={"model": "voxtral", "prompt": "What did they say?"}, timeout=60
    )
    assert answer.status_code == 400
    assert "the request has no audio: expected one clip" in answer.text
