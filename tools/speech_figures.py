"""Serve pico on profiles/fast.yaml and measure what becomes of its 500 clips made quiet, and joined to long files.

    python -m tools.speech_figures --out bench/results/speech-cpu.json

Each clip once as it is and once with its peak at -40 dBFS; then all of them, in a fixed order, joined to files of up to
ten minutes, with half a second between two clips, and with none. Exit status 1 where a request failed, or where the
WER of the quiet clips, or of the files with pauses, is not within 0.5 points of that of the clips as they are.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests
import soundfile

from bench import dataset, environment, results, serve
from bench.measure import scoring
from pico import huggingface
from tools import inputs
from tools.compare_layouts import LIBRARIES, ROOT
from tools.soak import CONFIG

RATE = inputs.RATE
FLAGS = (
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(256 << 20),
    "--api-server-count",
    "1",
    "--max-model-len",
    "512",
    "--additional-config",
    "{}",  # without live sessions: the longest clip of the profile is longer than this context
)
PEAK_DBFS, FILE_S, TURN_S = -40, 600, 0.5
AT_ONCE = 8
WITHIN = 0.005


def samples_of(clip: dataset.Clip) -> np.ndarray:
    samples, rate = soundfile.read(clip.path, dtype="float32")
    assert rate == RATE, f"{clip.path} has {rate} Hz"
    return samples


def quiet(samples: np.ndarray) -> np.ndarray:
    return samples * np.float32(10 ** (PEAK_DBFS / 20) / np.abs(samples).max())


def files(clips: Sequence[dataset.Clip], pause_s: float) -> list[tuple[np.ndarray, str]]:
    """(samples, reference) of each."""
    made: list[tuple[list[np.ndarray], list[str]]] = [([], [])]
    seconds = 0.0
    for clip in clips:
        samples = np.concatenate([samples_of(clip), np.zeros(round(pause_s * RATE), np.float32)])
        if seconds + len(samples) / RATE > FILE_S:
            made.append(([], []))
            seconds = 0.0
        seconds += len(samples) / RATE
        made[-1][0].append(samples)
        made[-1][1].append(clip.text)
    return [(np.concatenate(parts), " ".join(texts)) for parts, texts in made]


def ask(url: str, samples: np.ndarray) -> str:
    """Raises requests.HTTPError."""
    content = inputs.encoded(samples, RATE, subtype="FLOAT" if np.abs(samples).max() < 0.1 else "PCM_16")
    answer = requests.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": ("clip.wav", content)},
        data={"model": "voxtral"},
        timeout=600,
    )
    answer.raise_for_status()
    text: str = answer.json()["text"]
    return text


def measure(url: str, each: Iterable[tuple[np.ndarray, str]], at_once: int) -> dict[str, Any]:
    pairs = list(each)
    with ThreadPoolExecutor(at_once) as pool:
        texts = list(pool.map(lambda pair: ask(url, pair[0]), pairs))
    edits = [scoring.word_errors(said, text) for (_, said), text in zip(pairs, texts, strict=True)]
    words = sum(each.words for each in edits)
    return {
        "wer": sum(each.total for each in edits) / words,
        "words": words,
        "deletions": sum(each.deletions for each in edits),
        "requests": len(pairs),
        "empty": sum(not text.strip() for text in texts),
        "audio_s": round(sum(len(samples) for samples, _ in pairs) / RATE, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    clips = list(dataset.load(ROOT / "bench/data").clips)
    mixed = random.Random(0).sample(clips, len(clips))
    with tempfile.TemporaryDirectory() as scratch:
        port = serve.free_port()
        with serve.server(CONFIG, huggingface.PICO, port, Path(scratch) / "server.log", *FLAGS):
            url = f"http://127.0.0.1:{port}"
            version = serve.get(f"{url}/version", timeout_s=10).json()["version"]
            found = {
                "as they are": measure(url, ((samples_of(clip), clip.text) for clip in clips), AT_ONCE),
                f"peak at {PEAK_DBFS} dBFS": measure(
                    url, ((quiet(samples_of(clip)), clip.text) for clip in clips), AT_ONCE
                ),
                f"files, {TURN_S} s between clips": measure(url, files(mixed, TURN_S), 1),
                "files, nothing between clips": measure(url, files(mixed, 0), 1),
            }
    outcome = {
        "command": "python -m tools.speech_figures",
        "flags": list(FLAGS),
        "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
        "results": found,
    }
    results.write_json(flags.out, outcome)
    usual, *others = found.items()
    for name, each in found.items():
        print(f"{name}: WER {each['wer']:.2%} of {each['words']} words, {each['requests']} requests")
    if any(abs(each["wer"] - usual[1]["wer"]) > WITHIN for _, each in others[:2]):
        sys.exit(1)


if __name__ == "__main__":
    main()
