"""The longest clip that `voxtral-serve check` states is the longest that a server takes."""

import io

import numpy as np
import requests
import soundfile
from conftest import CONFIG, PICO

from voxtral_serve import check, checkpoint


def post(url: str, samples: int) -> requests.Response:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(samples, np.float32), 16000, format="WAV")
    return requests.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": ("clip.wav", file.getvalue())},
        data={"model": "voxtral"},
        timeout=120,
    )


def test_longest_clip(pico_url: str) -> None:
    (served,) = requests.get(f"{pico_url}/v1/models", timeout=10).json()["data"]
    longest, _, rate = check.longest_clip(checkpoint.read(PICO).tekken, served["max_model_len"])
    assert f"{longest / rate:.2f} s" in "\n".join(check.check(CONFIG, PICO).lines)
    assert post(pico_url, longest).status_code == 200
    refused = post(pico_url, longest + 1)
    assert refused.status_code == 400
    assert f"this server takes at most {longest / rate:.2f} s" in refused.json()["error"]["message"]
