"""A clip sent to a server by `requests`, as any client would."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import requests
import soundfile
from inputs import KEY
from prometheus_client.parser import text_string_to_metric_families

RATE = 16000  # Hz, of arrays
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}  # for servers that have this key; those without one take it as well


def upload(url: str, clip: Path | bytes | np.ndarray, **fields: Any) -> requests.Response:
    """`clip` is a file, what is in one, or float32 samples."""
    if isinstance(clip, np.ndarray):
        file = io.BytesIO()
        soundfile.write(file, clip, RATE, format="WAV")
        clip = file.getvalue()
    name, content = (clip.name, clip.read_bytes()) if isinstance(clip, Path) else ("clip", clip)
    return requests.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": (name, content)},
        data={"model": "voxtral", **fields},
        headers=AUTHORIZED,
        timeout=600,
    )


def samples(url: str, key: str | None = None) -> dict[tuple[str, ...], float]:
    """Values at /metrics by name, without `voxtral_serve_`, and values of labels."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    text = requests.get(f"{url}/metrics", headers=headers, timeout=60).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (each.name.removeprefix("voxtral_serve_"), *(value for _, value in sorted(each.labels.items()))): each.value
        for each in found
        if each.name.startswith("voxtral_serve_")
    }
