"""Voxtral TTS behind vLLM-Omni: a WAV of a text, formats, streams, voices, refusals, load, lost clients, SIGTERM."""

import base64
import io
import json
import re
import signal
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import soundfile

from speech.conftest import Speech, serving

RATE = 24000  # Hz
FRAME = 1920  # samples: 80 ms
VOICES = 20
AT_ONCE = 32


def samples(content: bytes) -> int:
    """The samples of a WAV file of one channel in 16 bits at 24 kHz."""
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return file.getnframes()


def test_a_text_becomes_a_wav_file(speech: Speech) -> None:
    answer = speech.say()
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    length = samples(answer.content)
    assert 0 < length <= 25 * FRAME
    assert length % FRAME == 0
    assert len(set(answer.content[44:])) > 1  # not silence


def test_the_models_and_voices(speech: Speech) -> None:
    models = requests.get(f"{speech.url}/v1/models", timeout=60).json()["data"]
    assert models[0]["id"] == "voxtral-tts"
    for voice in ("fr_female", "Casual_Male", "hi_female"):  # names in any case
        assert speech.say(voice=voice, max_new_tokens=5).status_code == 200


@pytest.mark.parametrize(("name", "kind"), [("flac", "FLAC"), ("mp3", "MP3"), ("opus", "OGG"), ("wav", "WAV")])
def test_formats(speech: Speech, name: str, kind: str) -> None:
    answer = speech.say(response_format=name)
    assert answer.status_code == 200
    found = soundfile.info(io.BytesIO(answer.content))
    assert (found.format, found.channels) == (kind, 1)
    assert 0 < found.duration <= 2.2  # of 25 frames, and what MP3 and Opus pad


def test_pcm_has_no_header(speech: Speech) -> None:
    answer = speech.say(response_format="pcm")
    assert answer.status_code == 200
    assert len(answer.content) % (2 * FRAME) == 0


def test_a_stream_of_samples_begins_before_its_end(speech: Speech) -> None:
    answer = speech.say(response_format="pcm", max_new_tokens=200, stream=True, stream_format="audio")
    assert answer.status_code == 200
    begin, times, size = time.monotonic(), [], 0
    for chunk in answer.iter_content(None):
        times.append(time.monotonic() - begin)
        size += len(chunk)
    assert size % (2 * FRAME) == 0
    assert size <= 200 * 2 * FRAME
    assert len(times) > 1 or size <= 5 * 2 * FRAME  # random weights may end a speech at once


def test_a_stream_of_events(speech: Speech) -> None:
    answer = speech.say(response_format="pcm", max_new_tokens=60, stream=True, stream_format="sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line != "[DONE]"]
    assert {event["type"] for event in events} <= {"speech.audio.delta", "speech.audio.done"}
    assert events[-1]["type"] == "speech.audio.done"
    audio = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert len(audio) % (2 * FRAME) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"voice": "anna"},
        {"input": ""},
        {"input": " \n"},
        {"response_format": "midi"},
        {"speed": 9},
        {"max_new_tokens": 0},
        {"ref_audio": "http://127.0.0.1:9/a.wav"},
        {"ref_audio": "file:///etc/passwd"},
    ],
    ids=str,
)
def test_refusals(speech: Speech, fields: dict[str, Any]) -> None:
    """Each is answered at once and names what it is about; the server goes on."""
    text = fields.pop("input", "Good morning.")
    answer = speech.say(text, **fields)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


def test_thirty_two_at_once(speech: Speech) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda number: speech.say(f"This is text number {number}."), range(AT_ONCE)))
    assert [answer.status_code for answer in answers] == [200] * AT_ONCE
    assert all(0 < samples(answer.content) <= 25 * FRAME for answer in answers)


def test_a_client_that_leaves(speech: Speech) -> None:
    answer = speech.say(response_format="pcm", max_new_tokens=2000, stream=True, stream_format="audio")
    next(answer.iter_content(None))
    answer.close()
    after = speech.say()
    assert after.status_code == 200


def test_nothing_was_logged_as_an_error(speech: Speech) -> None:
    """By the tests above, but for uvicorn's line about a refused WebSocket. Refusals are no errors of the server."""
    lines = [line for line in speech.log.read_text().splitlines() if re.search(r"\bERROR\b", line)]
    assert [line for line in lines if "completing handshake" not in line] == []


@pytest.mark.slow
def test_sigterm_lets_a_request_finish(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "server.log") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.say, max_new_tokens=100)
        time.sleep(1)
        server.process.send_signal(signal.SIGTERM)
        answer = running.result()
        assert server.process.wait(120) == 0
    assert answer.status_code == 200
    assert samples(answer.content) > 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_ends_the_server(tiny: Path, tmp_path: Path, stage: int) -> None:
    """A restart is what helps: the container's policy does it."""
    with serving(tiny, tmp_path / "server.log") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = (child for child in children if f"stage{stage}" in " ".join(child.cmdline()))
        engine.kill()
        assert server.process.wait(120) == 1
    assert "the engine has lost a stage, so the server stops" in server.log.read_text()
