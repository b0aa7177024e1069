"""Voxtral-Mini-3B-2507 and Whisper, each served by a real vLLM as its profile says, behind the guard.

Their weights are random (pico/others.py): nothing here says how well they hear. What is shown: vLLM loads files of
their layout and starts with the profile, and answers and refusals have the right form.
"""

import base64
import io
import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import requests
import soundfile
import yaml
from places import DATA, ROOT
from servers import EAGER

from bench.measure import engine
from pico import others

CLIP = DATA / "clips/001.opus"
RATE = 16000
WRITERS = {"voxtral-3b": others.write_voxtral_3b, "whisper": others.write_whisper}
LINE = r"POST /v1/audio/transcriptions (\d+), \d+ bytes, ([\d.]+) s of audio, \d+ ms, id "
SHORT = {"max_completion_tokens": 8}  # random weights say no EOS


class Server(NamedTuple):
    name: str
    url: str
    log: Path
    profile: dict[str, Any]

    def upload(self, path: str = "transcriptions", clip: bytes | None = None, **fields: Any) -> requests.Response:
        return requests.post(
            f"{self.url}/v1/audio/{path}",
            files={"file": ("clip", CLIP.read_bytes() if clip is None else clip)},
            data={"model": "whisper-1", "language": "en", **SHORT, **fields},
            timeout=120,
        )

    def chat(self, url: str) -> requests.Response:
        parts = [{"type": "audio_url", "audio_url": {"url": url}}, {"type": "text", "text": "Transcribe this audio."}]
        asked = {"model": "mistralai/Voxtral-Mini-3B-2507", "messages": [{"role": "user", "content": parts}]}
        asked |= {"max_tokens": 256, "temperature": 0}
        return requests.post(f"{self.url}/v1/chat/completions", json=asked, timeout=120)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    name, port = request.param, engine.free_port()
    directory, log = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("log") / "server.log"
    WRITERS[name](directory)
    profile = ROOT / f"profiles/{name}.yaml"
    with engine.served(profile, directory, port, log, *EAGER):
        yield Server(name, f"http://127.0.0.1:{port}", log, yaml.safe_load(profile.read_text()))


VOXTRAL_3B, WHISPER = "voxtral-3b", "whisper"
pytestmark = pytest.mark.slow
both = pytest.mark.parametrize("server", [VOXTRAL_3B, WHISPER], indirect=True)
voxtral_3b = pytest.mark.parametrize("server", [VOXTRAL_3B], indirect=True)
whisper = pytest.mark.parametrize("server", [WHISPER], indirect=True)


def speech(seconds: float | None = None) -> np.ndarray:
    samples, rate = soundfile.read(CLIP, dtype="float32")
    assert rate == RATE
    return samples if seconds is None else np.resize(samples, round(seconds * RATE))


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


def refusal(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


@both
def test_it_answers_to_all_its_names(server: Server) -> None:
    assert requests.get(f"{server.url}/health", timeout=10).status_code == 200
    models = requests.get(f"{server.url}/v1/models", timeout=10).json()["data"]
    assert [model["id"] for model in models] == server.profile["served_model_name"]
    assert {model["max_model_len"] for model in models} == {server.profile["max_model_len"]}
    for name in server.profile["served_model_name"]:
        assert server.upload(model=name).status_code == 200
    status, message = refusal(server.upload(model="voxtral"))
    assert (status, "`voxtral` does not exist" in message) == (404, True)


@both
@pytest.mark.parametrize("language", ["en", "de"])
def test_a_transcription(server: Server, language: str) -> None:
    answer = server.upload(language=language)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
    content = answer.json()
    assert content["text"].strip()
    assert content["usage"] == {"type": "duration", "seconds": 8}  # of 7.35
    written = server.upload(language=language, response_format="text")
    assert (written.status_code, written.headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert written.text == content["text"].strip() + "\n"


@both
def test_the_official_client(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    said = client.audio.transcriptions.create(model="whisper-1", file=CLIP, language="en", extra_body=SHORT)
    assert said.text.strip()
    events = client.audio.transcriptions.create(
        model="whisper-1", file=CLIP, language="en", stream=True, extra_body=SHORT
    )
    *deltas, done = events
    assert {delta.type for delta in deltas} == {"transcript.text.delta"}
    assert (done.type, done.text) == ("transcript.text.done", said.text.strip())


@both
def test_other_forms(server: Server) -> None:
    """Segments are what was sent to the model at a time, with the times of its speech: the tokens have none."""
    verbose = server.upload(response_format="verbose_json", clip=wav(speech(20))).json()
    segments = verbose["segments"]
    assert len(segments) > 1 and verbose["duration"] == 20
    for segment, after in itertools.pairwise(segments):
        assert 0 <= segment["start"] < segment["end"] <= after["start"] and segment["end"] - segment["start"] <= 8
    assert " ".join(segment["text"] for segment in segments) == verbose["text"]
    srt = server.upload(response_format="srt", clip=wav(speech(20))).text
    assert srt.count(" --> ") == len(segments) and srt.startswith("1\n00:00:00,")
    assert server.upload(response_format="vtt").text.startswith("WEBVTT\n\n00:00:00.")
    words = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    status, message = refusal(server.upload(**words))
    assert (status, "this model gives no word times" in message) == (400, True)


@both
def test_silence_and_what_has_no_effect(server: Server) -> None:
    answer = server.upload(clip=wav(np.zeros(3 * RATE, np.float32)), prompt="Names.", hotwords="Hazel")
    assert (answer.status_code, answer.json()["text"]) == (200, "")
    ignored = {"voxtral-3b": "prompt, hotwords", "whisper": "hotwords"}[server.name]
    assert answer.headers.get("x-voxtral-ignored") == ignored


@both
def test_what_is_refused(server: Server) -> None:
    """By the guard, but for the language, of which each model has its own."""
    status, message = refusal(server.upload(clip=b"no audio"))
    assert (status, "file: the file is no audio that this server reads" in message) == (400, True)
    status, message = refusal(server.upload(clip=b""))
    assert (status, "the file is empty" in message) == (400, True)
    status, message = refusal(server.upload(clip=wav(np.zeros(600 * RATE + 1, np.float32))))
    assert (status, "and this server takes at most 600.00 s" in message) == (400, True)
    status, message = refusal(server.upload(language="xx"))
    assert (status, "xx" in message) == (400, True)
    assert requests.get(f"{server.url}/docs", timeout=10).status_code == 404
    assert server.upload().status_code == 200


@both
def test_one_line_of_the_log_for_each_request(server: Server) -> None:
    answer = server.upload()
    line = re.compile(LINE + re.escape(answer.headers["X-Request-Id"]))
    deadline = time.monotonic() + 10  # it is written once the answer is sent
    while not (lines := line.findall(server.log.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lines == [("200", "7.35")]


# ---- Voxtral-Mini-3B-2507


@voxtral_3b
def test_a_chat_about_audio(server: Server) -> None:
    audio_b64 = base64.b64encode(wav(speech())).decode()
    answer = server.chat(f"data:audio/wav;base64,{audio_b64}")
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["choices"][0]["message"]["content"].strip()
    assert content["usage"]["completion_tokens"] == 256
    assert content["usage"]["prompt_tokens"] > 375  # of 30 s, to which audio is padded


@voxtral_3b
def test_a_chat_takes_what_the_context_holds(server: Server) -> None:
    silence = base64.b64encode(wav(np.zeros(300 * RATE + 1, np.int16))).decode()
    status, message = refusal(server.chat(f"data:audio/wav;base64,{silence}"))
    assert (status, "at most 300.00 s (its max_model_len is 4096 tokens" in message) == (400, True)
    answer = server.upload(clip=wav(speech(300)))  # in pieces
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"].strip()


@voxtral_3b
def test_it_does_not_translate(server: Server) -> None:
    status, message = refusal(server.upload("translations"))
    assert (status, "does not translate" in message) == (400, True)


@voxtral_3b
@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:1/a.wav", "https://example.org/a.wav"])
def test_a_url_that_is_not_fetched(server: Server, url: str) -> None:
    status, message = refusal(server.chat(url))
    assert (status, "this server accepts data: URLs" in message) == (400, True)


# ---- Whisper


@whisper
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_as_written_for_the_name_on_the_hub(server: Server, tmp_path: Path) -> None:
    (tmp_path / "harvard.wav").write_bytes(wav(speech()))
    command = (
        f"curl -X POST {server.url}/v1/audio/transcriptions \\\n"
        "  -F file=@harvard.wav \\\n"
        "  -F model=openai/whisper-tiny.en \\\n"
        "  -F language=en \\\n"
        "  -F response_format=text"
    )
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and not done.stdout.startswith("{")


@whisper
def test_whisper_translates(server: Server) -> None:
    answer = server.upload("translations", language="de")
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"].strip()
    for endpoint, told in (("translations", "english"), ("transcriptions", "polish")):
        assert server.upload(endpoint, language="pl", response_format="verbose_json").json()["language"] == told
    assert server.upload("translations", response_format="text").text.endswith("\n")


@whisper
def test_a_language_is_found(server: Server) -> None:
    """Where none is given."""
    assert server.upload(language=None).status_code == 200
    assert re.search(r"detected language: [a-z]{2}, id ", server.log.read_text())


@whisper
def test_a_clip_of_more_than_one_piece(server: Server) -> None:
    piece = server.upload(max_completion_tokens=4).json()["text"]
    content = server.upload(clip=wav(speech(70)), max_completion_tokens=4).json()
    assert content["usage"]["seconds"] == 70
    assert len(content["text"]) > 2 * len(piece)


@whisper
def test_whisper_does_not_chat(server: Server) -> None:
    data = base64.b64encode(wav(speech(1))).decode()
    status, message = refusal(server.chat(f"data:audio/wav;base64,{data}"))
    assert (status, message) == (400, "this model does not chat: send audio to /v1/audio/transcriptions")
