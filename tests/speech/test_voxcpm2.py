"""VoxCPM2 behind vLLM-Omni and the guard: lengths, formats, streams, refusals, a lost client, the benchmark, SIGTERM.

Speech of its random weights ends at the request's limit only, so every length is known. The tests share one server, and
the last one ends it.
"""

import base64
import io
import json
import shutil
import signal
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import soundfile
import yaml
from places import ROOT
from safetensors.torch import load_file, save_file

from bench.gpu import voxcpm2_checkpoint
from bench.loads import closed
from bench.plan import SpeechPlan
from bench.speech.run import measure
from speech.conftest import OMNI, Speech, serving
from speech.test_guarded import line_of, metric, until
from voxtral_serve.check import check_all

PROFILE = ROOT / "profiles/voxcpm2.yaml"
RATE = 48000  # Hz
TOKEN = 7680  # samples: 160 ms
SAMPLE_BYTES = 2
TOKENS = 25  # of a speech here, unless a test says otherwise
CONTEXT = 256  # positions of a text and its speech, which end a speech whose request sets no limit
AT_ONCE = 12  # more than the server speaks together
WAIT_S = 120


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("voxcpm2")
    voxcpm2_checkpoint.write(made, small=True)
    return made


@pytest.fixture(scope="module")
def vox(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speech]:
    """The shared server, with the profile's options for its stage but the share of the memory and the context."""
    stages = yaml.safe_load(PROFILE.read_text(encoding="utf-8"))["stage_overrides"]
    stages["0"] |= {"gpu_memory_utilization": 0.1, "max_model_len": CONTEXT}
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving(directory, log, config=PROFILE, on_cpu=(*OMNI, json.dumps(stages))) as server:
        yield server._replace(voice="default")


def samples(content: bytes) -> bytes:
    """The samples of a WAV file of one channel in 16 bits at 48 kHz."""
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, SAMPLE_BYTES)
        return file.readframes(file.getnframes())


def test_the_profile_and_the_checkpoint_are_right(directory: Path) -> None:
    assert check_all(PROFILE, None, [str(directory), "--omni"]).problems == []


def test_what_check_refuses(directory: Path, tmp_path: Path) -> None:
    """vLLM-Omni drops the first without a word, and voxcpm leaves random numbers in place of a missing tensor."""
    content = yaml.safe_load(PROFILE.read_text(encoding="utf-8"))
    content["stage_overrides"]["1"] = {"max_num_seqs": 8}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    words = [str(copied := Path(shutil.copytree(directory, tmp_path / "model"))), "--omni"]
    assert check_all(tmp_path / "config.yaml", None, words).problems == ["stage_overrides has stage '1': expected 0"]
    weights = load_file(copied / "model.safetensors")
    norm = weights.pop("residual_lm.norm.weight")
    save_file(weights, copied / "model.safetensors")
    assert check_all(PROFILE, None, words).problems == [
        f"{copied} lacks tensor residual_lm.norm.weight: expected (64,)"
    ]
    save_file(weights | {"residual_lm.norm.weight": norm[:32]}, copied / "model.safetensors")
    (problem,) = check_all(PROFILE, None, words).problems
    assert problem.endswith("has tensor residual_lm.norm.weight with the shape (32,): expected (64,)")
    (copied / "config.json").write_text('{"architecture": "voxcpm2"}')
    (problem,) = check_all(PROFILE, None, words).problems
    assert f"voxcpm 2.0.3 cannot make the model of {copied / 'config.json'}" in problem


def test_a_file_a_stream_and_events_have_the_same_samples(vox: Speech) -> None:
    """All of the speech and nothing twice: each chunk of a stream is new, and a file has all chunks."""
    whole = samples(vox.say().content)
    assert len(whole) == TOKENS * TOKEN * SAMPLE_BYTES
    assert len(set(whole)) > 100  # not silence
    begin, times, streamed = time.monotonic(), [], b""
    answer = vox.say(response_format="pcm", stream=True, stream_format="audio")
    for chunk in answer.iter_content(None):
        times.append(time.monotonic() - begin)
        streamed += chunk
    assert streamed == whole
    assert len(times) > 1 and times[0] < 0.8 * times[-1]
    lines = vox.say(response_format="pcm", stream_format="sse").text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"]["output_tokens"] == TOKENS
    assert b"".join(base64.b64decode(event["audio"]) for event in events[:-1]) == whole


def test_repeats_and_other_texts(vox: Speech) -> None:
    """The deploy file's seed makes equal requests equal, alone on the server."""
    first = vox.say().content
    assert vox.say().content == first
    assert vox.say("Good evening.").content != first


@pytest.mark.parametrize(("name", "kind"), [("flac", "FLAC"), ("mp3", "MP3"), ("opus", "OGG"), ("wav", "WAV")])
def test_formats(vox: Speech, name: str, kind: str) -> None:
    answer = vox.say(response_format=name)
    found = soundfile.info(io.BytesIO(answer.content))
    assert (answer.status_code, found.format, found.channels, found.samplerate) == (200, kind, 1, RATE)
    assert found.duration == pytest.approx(TOKENS * TOKEN / RATE, abs=0.1)


@pytest.mark.parametrize("form", [{"stream_format": "audio"}, {"stream_format": "sse"}])
def test_the_guard_counts_seconds_at_this_rate(vox: Speech, form: dict[str, str]) -> None:
    before = metric(vox, "voxtral_serve_speech_audio_seconds_total")
    answer = vox.say(response_format="pcm", **form)
    assert "4.00 s of audio, 13 characters, voice default, pcm" in line_of(vox, answer.headers["x-request-id"])
    assert metric(vox, "voxtral_serve_speech_audio_seconds_total") - before == pytest.approx(4)


def test_names(vox: Speech) -> None:
    listed = requests.get(f"{vox.url}/v1/audio/voices", timeout=WAIT_S).json()
    assert listed == {"voices": ["default"], "uploaded_voices": []}
    models = requests.get(f"{vox.url}/v1/models", timeout=WAIT_S).json()["data"]
    assert models[0]["id"] == "voxcpm2"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"voice": "alloy"}, 400, "voice_not_found"),
        ({"input": " "}, 400, "invalid_value"),
        ({"response_format": "midi"}, 400, "invalid_value"),
        ({"max_new_tokens": 0}, 400, "invalid_value"),
        ({"model": "voxtral-tts"}, 404, "model_not_found"),
        ({"ref_audio": "file:///etc/passwd"}, 400, "reference_not_allowed"),
        ({"ref_audio": "http://127.0.0.1:9/a.wav", "ref_text": "A."}, 400, "reference_not_allowed"),
    ],
)
def test_refusals(vox: Speech, fields: dict[str, Any], status: int, code: str) -> None:
    text = fields.pop("input", "Good morning.")
    answer = vox.say(text, **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_voices_are_not_taken(vox: Speech) -> None:
    answer = requests.post(f"{vox.url}/v1/audio/voices", json={"name": "a"}, timeout=WAIT_S)
    assert answer.status_code == 405


def test_more_at_once_than_the_server_speaks_together(vox: Speech) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda number: vox.say(f"This is text number {number}."), range(AT_ONCE)))
    assert [len(samples(answer.content)) for answer in answers] == [TOKENS * TOKEN * SAMPLE_BYTES] * AT_ONCE
    assert len({answer.content for answer in answers}) == AT_ONCE


def test_a_client_that_leaves_ends_its_request(vox: Speech) -> None:
    before = metric(vox, "voxtral_serve_speech_incomplete_total")
    answer = vox.say(response_format="pcm", max_new_tokens=2000, stream=True, stream_format="audio")
    next(answer.iter_content(None))
    answer.close()
    until(lambda: metric(vox, "voxtral_serve_requests_in_flight") == 0)
    assert metric(vox, "voxtral_serve_speech_incomplete_total") == before + 1
    assert ", incomplete, " in line_of(vox, answer.headers["x-request-id"])
    assert vox.say().status_code == 200


def test_the_benchmark(vox: Speech, tmp_path: Path) -> None:
    plan = SpeechPlan(vox.url, tmp_path / "run", loads=tuple(closed("1,2")), samples=2, random_weights=True)
    summary = measure(plan)
    for load in summary["loads"]:
        assert (load["completed"], load["failed"]) == (2, 0)
        assert 0 < load["audio_s"] < 2 * CONTEXT * TOKEN / RATE


def test_sigterm_lets_a_request_finish(vox: Speech) -> None:
    """The last test: it ends the server."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(vox.say, max_new_tokens=150)
        time.sleep(1)
        vox.process.send_signal(signal.SIGTERM)
        answer = running.result()
        assert vox.process.wait(WAIT_S) == 0
    assert len(samples(answer.content)) == 150 * TOKEN * SAMPLE_BYTES
    assert [line for line in vox.log.read_text().splitlines() if "Traceback" in line] == []
