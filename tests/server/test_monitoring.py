"""What a real server says of itself: the guard's metrics, and its log as lines of JSON."""

import json
import re
import time
from pathlib import Path
from typing import Any

import live
import numpy as np
import pytest
import requests
import soundfile
from live import opened
from places import DATA, PICO, ROOT
from servers import EAGER, UNBOUND
from uploads import AUTHORIZED, KEY, samples, upload
from websockets.exceptions import InvalidStatus

from bench import BenchError
from bench.measure import engine
from voxtral_serve.guard.timing import STAGES

UPLOAD, RATE = "/v1/audio/transcriptions", 16000
SECRET = "a-secret-in-the-query"


class Growth:
    def __init__(self, url: str) -> None:
        self.url, self.before = url, samples(url)

    def of(self, *key: str) -> float:
        return samples(self.url).get(key, 0.0) - self.before.get(key, 0.0)


def audio(seconds: float) -> np.ndarray:
    read, _ = soundfile.read(DATA / "clips/010.opus", round(seconds * RATE), dtype="float32")
    return np.asarray(read)


def test_requests_and_refusals_are_counted(fast_url: str) -> None:
    growth = Growth(fast_url)
    assert upload(fast_url, audio(2)).status_code == 200
    assert upload(fast_url, b"nonsense").status_code == 400
    assert requests.post(fast_url + UPLOAD, timeout=60).status_code == 401
    assert growth.of("requests_total", UPLOAD, "200") == 1
    assert growth.of("requests_total", UPLOAD, "401") == 1
    assert growth.of("requests_refused_total", "invalid_api_key") == 1
    assert growth.of("requests_refused_total", "invalid_audio") == 1
    assert growth.of("audio_seconds_total", "upload") == pytest.approx(2)
    assert 64_000 < growth.of("received_bytes_total") < 66_000
    now = samples(fast_url)
    assert now["requests_in_flight",] == 0
    assert now["requests_in_flight_limit",] == 256  # 4 x max_num_seqs of profiles/fast.yaml


def test_an_upload_says_where_its_time_went(fast_url: str) -> None:
    begun = time.monotonic()
    answer = upload(fast_url, audio(2))
    took_ms = 1000 * (time.monotonic() - begun)
    found = re.findall(r"(\w+);dur=([0-9.]+)(?:, |$)", answer.headers["server-timing"])
    stages = {stage: float(spent_ms) for stage, spent_ms in found}
    assert [*stages] == [stage for stage in STAGES if stage not in ("engine", "speakers")]
    assert 0 < sum(stages.values()) < took_ms
    assert stages["steps"] > stages["queue"]


def test_live_clients_are_counted(fast_url: str) -> None:
    growth = Growth(fast_url)
    with pytest.raises(InvalidStatus):
        opened(fast_url, additional_headers={})
    with pytest.raises(InvalidStatus):
        opened(fast_url, origin="https://evil.example")
    with pytest.raises(InvalidStatus):
        opened(fast_url, path="/v1/elsewhere")
    for code in ("invalid_api_key", "origin_not_allowed", "not_found"):
        assert growth.of("live_refused_total", code) == 1, code
    *_, done = live.transcribe(fast_url, audio(2), 1280)
    assert done["type"] == "transcription.done"
    assert growth.of("audio_seconds_total", "live") == pytest.approx(2)


def spoken(url: str) -> str:
    """A session with an id of its own; the text."""
    with opened(url, f"api_key={SECRET}", additional_headers={**AUTHORIZED, "X-Request-Id": "live-1"}) as socket:
        live.receive(socket)
        live.send(socket, "session.update", model="voxtral")
        live.send(socket, "input_audio_buffer.commit")
        content = live.base64.b64encode(live.pcm16(audio(2))).decode()
        live.send(socket, "input_audio_buffer.append", audio=content)
        live.send(socket, "input_audio_buffer.commit", final=True)
        while (event := live.receive(socket))["type"] != "transcription.done":
            pass
        text: str = event["text"]
        return text


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_log_of_json(tmp_path: Path) -> None:
    """Of two API processes, whose metrics are one."""
    port, log = engine.free_port(), tmp_path / "server.log"
    environment = {**UNBOUND, "VOXTRAL_SERVE_LOG": "json", "VOXTRAL_SERVE_REPLICA": "replica-0"}
    flags = (*EAGER, "--api-server-count", "2", "--max-model-len", "512", "--api-key", KEY)
    flags += ("--additional-config", json.dumps({"max_live_sessions": 2}))
    with engine.served(ROOT / "profiles/fast.yaml", PICO, port, log, *flags, environment=environment):
        url = f"http://127.0.0.1:{port}"
        headers = {**AUTHORIZED, "X-Request-Id": "upload-1"}
        file = {"file": ("clip.opus", (DATA / "clips/010.opus").read_bytes())}
        answer = requests.post(
            f"{url}{UPLOAD}?key={SECRET}", files=file, data={"model": "voxtral"}, headers=headers, timeout=600
        )
        assert answer.status_code == 200
        growth = Growth(url)
        for _ in range(8):  # new connections, which reach both processes
            requests.post(url + UPLOAD, timeout=60)
        assert growth.of("requests_refused_total", "invalid_api_key") == 8
        assert samples(url)["requests_in_flight_limit",] == 256
        text = spoken(url)
    found = lines_of(log)
    assert {line["replica"] for line in found} == {"replica-0"}
    (own,) = [line for line in found if line.get("request_id") == "upload-1" and "status" in line]
    assert (own["path"], own["status"], own["method"]) == (UPLOAD, 200, "POST")
    (session,) = [line for line in found if line.get("request_id") == "live-1" and "status" in line]
    assert (session["status"], session["ended"], session["texts"]) == (101, "done", 1)
    assert len(session["session_id"]) == 32
    loggers = {line["logger"].partition(".")[0] for line in found}
    assert {"vllm", "uvicorn"} <= loggers
    assert len({line["pid"] for line in found}) >= 4  # vLLM's parent, two API processes, the engine
    whole = log.read_text()
    for secret in (SECRET, answer.json()["text"].strip(), text.strip()):
        assert secret and secret not in whole
    # What is no JSON comes of libraries that print by themselves, and not of vLLM, uvicorn or the guard.
    others = [line for line in whole.splitlines() if line and not line.startswith("{")]
    assert [line for line in others if re.search(r"\b(INFO|WARNING|ERROR)( \d\d-\d\d |: )", line)] == []


@pytest.mark.slow
def test_a_form_of_log_that_there_is_not(tmp_path: Path) -> None:
    port, log = engine.free_port(), tmp_path / "server.log"
    with (
        pytest.raises(BenchError, match="exited with status"),
        engine.served(ROOT / "profiles/fast.yaml", PICO, port, log, *EAGER, environment={"VOXTRAL_SERVE_LOG": "xml"}),
    ):
        pass
    assert "VOXTRAL_SERVE_LOG is 'xml': expected json, or text" in log.read_text()
