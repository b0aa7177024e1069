"""A clip sent to a server by `requests`, as any client would."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import requests
import soundfile

from tools.inputs import KEY

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
