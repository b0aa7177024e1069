"""The longest clip that `voxtral-serve check` states is the longest that a server takes."""

import numpy as np
import pytest
import requests
from places import CONFIG, PICO
from uploads import upload

from voxtral_serve import checkpoint
from voxtral_serve.check import check_all, clip_length


@pytest.mark.slow
def test_longest_clip(pico_url: str) -> None:
    (served,) = requests.get(f"{pico_url}/v1/models", timeout=10).json()["data"]
    length = clip_length(checkpoint.read(PICO).tekken)
    longest, rate = length.longest(served["max_model_len"]), length.rate_hz
    assert f"{longest / rate:.2f} s" in "\n".join(check_all(CONFIG, PICO).lines)
    assert upload(pico_url, np.zeros(longest, np.float32)).status_code == 200
    refused = upload(pico_url, np.zeros(longest + 1, np.float32))
    assert refused.status_code == 400
    assert f"this server takes at most {longest / rate:.2f} s" in refused.json()["error"]["message"]
