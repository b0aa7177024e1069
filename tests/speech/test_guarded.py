"""The guard before a real vLLM-Omni: its routes, fields, log and metrics, and what ends the server."""

import asyncio
import base64
import io
import json
import re
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
import requests
import soundfile
import websockets

from speech.conftest import Speech
from voxtral_serve.guard.speech.fields import FORMATS
from voxtral_serve.guard.speech.request import SpeechRequest

RATE, SAMPLE_BYTES = 24000, 2
WAIT_S = 120  # for what happens soon on a machine without other work
VOICES = 20
# As vLLM lists them at its start
ROUTE = re.compile(r"Route: (/\S*), Methods: ([A-Z, ]+)")
SOCKET = re.compile(r"Route: (/\S*), Endpoint: \w+")


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.1)


def metric(speech: Speech, name: str) -> float:
    """The sum of a metric's samples, of all its labels."""
    lines = requests.get(f"{speech.url}/metrics", timeout=WAIT_S).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[{{ ]", line))


def line_of(speech: Speech, request_id: str) -> str:
    """The line of the log about this request."""
    found: list[str] = []

    def read() -> bool:
        found[:] = [line for line in speech.log.read_text().splitlines() if f"id {request_id}" in line]
        return bool(found)

    until(read)
    (line,) = found
    return line


def test_every_other_route_of_vllm_omni_is_unknown(speech: Speech) -> None:
    routes = [
        (path, method)
        for path, methods in ROUTE.findall(speech.log.read_text())
        for method in methods.split(", ")
        if method not in ("HEAD", "OPTIONS")
    ]
    assert len(routes) > 30 and ("/v1/omni/sleep", "POST") in routes
    allowed = SpeechRequest.METHODS
    for path, method in sorted({*routes}):
        if method in allowed.get(path, ()):
            continue
        answer = requests.request(method, speech.url + path.replace("{", "").replace("}", ""), timeout=WAIT_S)
        assert answer.status_code == (405 if path in allowed else 404), (path, method)
        assert answer.json()["error"]["code"] == ("method_not_allowed" if path in allowed else "not_found")


def test_no_websocket(speech: Speech) -> None:
    paths = {*SOCKET.findall(speech.log.read_text())}
    assert "/v1/audio/speech/stream" in paths

    async def status(path: str) -> int:
        with pytest.raises(websockets.InvalidStatus) as caught:
            await websockets.connect(speech.url.replace("http", "ws") + path, proxy=None)
        return caught.value.response.status_code

    for path in paths:
        assert asyncio.run(status(path)) == 404


def test_the_voices(speech: Speech) -> None:
    listed = requests.get(f"{speech.url}/v1/audio/voices", timeout=WAIT_S).json()
    assert listed["uploaded_voices"] == [] and len(listed["voices"]) == VOICES
    assert "default" not in listed["voices"]  # vLLM-Omni lists it, and Voxtral TTS has none
    answer = speech.say(voice="default")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "voice_not_found")
    assert answer.json()["error"]["message"].endswith(", ".join(listed["voices"]))


@pytest.mark.parametrize("name", FORMATS)
def test_the_line_of_a_request(speech: Speech, name: str) -> None:
    before = metric(speech, "voxtral_serve_speech_audio_seconds_total")
    answer = speech.say("A secret text.", response_format=name, instructions="Whisper.")
    assert answer.status_code == 200
    assert answer.headers["x-voxtral-ignored"] == "instructions"
    line = line_of(speech, answer.headers["x-request-id"])
    found = re.search(
        rf"POST /v1/audio/speech 200, \d+ bytes, (\d+\.\d\d) s of audio, 14 characters, voice casual_male, {name}, "
        r"first byte (\d+) ms, (\d+) ms, id \w+$",
        line,
    )
    assert found is not None
    assert 0 < float(found[1]) <= 2.2
    assert int(found[2]) <= int(found[3])
    if name == "pcm":
        assert float(found[1]) == pytest.approx(len(answer.content) / (RATE * SAMPLE_BYTES), abs=0.01)
    grown = metric(speech, "voxtral_serve_speech_audio_seconds_total") - before
    assert grown == pytest.approx(float(found[1]), abs=0.02)
    assert "secret" not in speech.log.read_text()


def test_events_and_their_seconds(speech: Speech) -> None:
    answer = speech.say(response_format="pcm", stream_format="sse", max_new_tokens=60)
    events: list[dict[str, Any]] = [
        json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")
    ]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    assert events[-1]["type"] == "speech.audio.done"
    assert {"input_tokens", "output_tokens", "total_tokens"} <= events[-1]["usage"].keys()
    size = sum(len(base64.b64decode(event["audio"])) for event in events[:-1])
    line = line_of(speech, answer.headers["x-request-id"])
    assert f", {size / (RATE * SAMPLE_BYTES):.2f} s of audio, 13 characters, voice casual_male, pcm events," in line
    assert "incomplete" not in line


def test_the_official_client(speech: Speech) -> None:
    client = openai.OpenAI(base_url=f"{speech.url}/v1", api_key="none", timeout=300)
    given: dict[str, Any] = {"model": "tts-1", "input": "Two cups.", "voice": "casual_female"}
    given["extra_body"] = {"max_new_tokens": 25}
    file = client.audio.speech.create(**given).content
    assert soundfile.info(io.BytesIO(file)).format == "MP3"
    with client.audio.speech.with_streaming_response.create(**given, response_format="pcm") as answer:
        assert len(b"".join(answer.iter_bytes())) % SAMPLE_BYTES == 0
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.speech.create(**given | {"voice": "alloy"})
    assert caught.value.param == "voice"
    with pytest.raises(openai.NotFoundError):
        client.audio.speech.create(**given | {"model": "other"})


def test_a_client_that_leaves_ends_its_request(speech: Speech) -> None:
    before = metric(speech, "voxtral_serve_speech_incomplete_total")
    answer = speech.say(response_format="pcm", max_new_tokens=2000, stream=True, stream_format="audio")
    next(answer.iter_content(None))
    answer.close()
    until(lambda: metric(speech, "voxtral_serve_requests_in_flight") == 0)

    def made() -> float:
        return metric(speech, "vllm:generation_tokens_total")

    # vLLM's gauge of running requests stands as its last step left it. 2000 frames would take minutes.
    def stands() -> bool:
        tokens = made()
        time.sleep(3)
        return made() == tokens

    until(stands)
    if ", incomplete, " in line_of(speech, answer.headers["x-request-id"]):  # random weights may end a speech at once
        assert metric(speech, "voxtral_serve_speech_incomplete_total") == before + 1


def test_what_the_server_says_of_itself(speech: Speech) -> None:
    about = requests.get(f"{speech.url}/v1/server", timeout=WAIT_S).json()
    assert about["capabilities"] == {"speech": True}
    assert about["limits"]["characters"] == 4096
    assert requests.get(f"{speech.url}/v1/models/voxtral-tts", timeout=WAIT_S).json()["id"] == "voxtral-tts"
    assert requests.get(f"{speech.url}/health", timeout=WAIT_S).status_code == 200
