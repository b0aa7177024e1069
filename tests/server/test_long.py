"""Clips beyond the fast profile's context: profiles/long.yaml transcribes them, in pieces, and the fast one names both
lengths. (That the pieces give the rows of the whole clip: test_encode_once_exact.py.)"""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import yaml
from places import DATA, PICO, ROOT
from uploads import upload

from bench import dataset
from bench.measure import engine
from pico import evaluate, model
from voxtral_serve.engine.encoder import FRAMES

SECONDS = 180
# At its start vLLM encodes a clip as long as the context: of an hour, a minute on two cores. This is 5.4 minutes.
CONTEXT = 4096


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory, port = tmp_path_factory.mktemp("long"), engine.free_port()
    options = yaml.safe_load((ROOT / "profiles/long.yaml").read_text())
    config = directory / "long.yaml"
    ours = {"max_model_len": CONTEXT, "enforce_eager": True, "gpu_memory_utilization": 0.3}
    config.write_text(yaml.safe_dump(options | ours))
    with engine.served(config, PICO, port, directory / "server.log"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def audio() -> np.ndarray:
    """Clips of the benchmark, in their order and half a second apart."""
    pause, parts = np.zeros(model.SAMPLE_RATE // 2, np.float32), list[np.ndarray]()
    for clip in dataset.load(DATA)[0]:
        parts += [evaluate.read_audio(clip.path), pause]
        if sum(map(len, parts)) >= SECONDS * model.SAMPLE_RATE:
            break
    return np.concatenate(parts)[: SECONDS * model.SAMPLE_RATE]


@pytest.mark.slow
def test_a_clip_of_three_minutes_is_transcribed(url: str, audio: np.ndarray) -> None:
    """The model is causal: what it says of the first 20 s, the rest does not change. (Pico has learnt from 35 s.)"""
    assert model.n_tokens(len(audio)) * 4 > FRAMES  # so it is encoded in pieces
    whole, beginning = upload(url, audio), upload(url, audio[: 20 * model.SAMPLE_RATE])
    assert (whole.status_code, beginning.status_code) == (200, 200), whole.text
    assert whole.json()["usage"]["seconds"] == SECONDS
    said = beginning.json()["text"].rsplit(maxsplit=1)[0]  # the last word may lack its end
    assert len(said.split()) > 30
    assert whole.json()["text"].startswith(said)


def test_the_profile_takes_an_hour() -> None:
    """In whole blocks of KV cache, and with vLLM's limits on uploads raised as its comment says."""
    path = ROOT / "profiles/long.yaml"
    profile = yaml.safe_load(path.read_text())
    context, delay = profile["max_model_len"], profile["additional_config"]["upload_delay_ms"] // 80
    assert model.n_tokens(3600 * model.SAMPLE_RATE, delay) <= context
    assert context % 16 == 0
    limits = {name: int(value) for name, value in re.findall(r"(VLLM_MAX_\w+)=(\d+)", path.read_text())}
    longest = context * model.SAMPLES_PER_TOKEN / model.SAMPLE_RATE
    assert limits["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] << 20 > longest * 48000 * 2 * 2
    assert limits["VLLM_MAX_AUDIO_DECODE_DURATION_S"] >= longest - 0.08 * model.n_tokens(0, delay)
    assert limits["VLLM_MAX_AUDIO_DECODE_BYTES"] > longest * 48000 * 2 * 4
