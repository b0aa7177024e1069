"""Transcribe clips by Transformers, without vLLM: latency, energy, memory and texts, one clip at a time.

    python -m tools.transformers_runtime --model pico/checkpoint --clips 60 --out transformers.json

`--model` is a directory in Mistral's layout. A latency begins with the samples in memory and ends with the text: the
features, `generate` as the model's own defaults have it (greedy, at most a token for each 80 ms) and decoding. There is
no server in it, so no upload and no HTTP.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench import dataset, environment, memory, metrics, results
from bench.answers import Row
from bench.dataset import Clip
from pico import evaluate, huggingface
from tools.compare_layouts import ROOT

SEED = 0
WARM_UPS = 1
LIBRARIES = ("transformers", "torch", "mistral-common", "nvidia-ml-py", "soundfile")


def transcribe(model: Any, processor: Any, audio: Any) -> tuple[str, int]:
    """The text, and how many tokens it took."""
    inputs = processor(audio, return_tensors="pt").to(model.device, dtype=model.dtype)
    with torch.inference_mode():
        tokens = model.generate(**inputs)
    made = tokens.shape[1] - inputs["input_ids"].shape[1]
    return processor.batch_decode(tokens, skip_special_tokens=True)[0].strip(), made


class Measurement(NamedTuple):
    """What the clips took, one after the other: a row each; of all, tokens, seconds, and joules where a GPU counts."""

    rows: list[Row]
    tokens: int
    wall_s: float
    joules: float | None


def measure(model: Any, processor: Any, clips: Sequence[Clip], gpus: memory.Gpus | None) -> Measurement:
    """Transcribe WARM_UPS clips, the last ones, for nothing, and then the others. `gpus` is null on a CPU."""
    audio = {clip.id: evaluate.read_audio(clip.path) for clip in clips}
    for clip in clips[-WARM_UPS:]:
        transcribe(model, processor, audio[clip.id])
    rows, tokens = [], 0
    before = memory.joules(gpus.handles.values()) if gpus else None
    start = time.perf_counter()
    for clip in clips[:-WARM_UPS]:
        sent = time.perf_counter()
        text, made = transcribe(model, processor, audio[clip.id])
        end = time.perf_counter()
        tokens += made
        rows.append(
            Row(
                id=clip.id,
                duration_s=clip.duration_s,
                part=1,
                start=sent - start,
                end=end - start,
                latency_ms=(end - sent) * 1000,
                status=None,
                text=text,
                reference=clip.text,
                error=None,
            )
        )
    wall_s = time.perf_counter() - start
    after = memory.joules(gpus.handles.values()) if gpus else None
    return Measurement(rows, tokens, wall_s, None if before is None or after is None else after - before)


def figures(measurement: Measurement) -> dict[str, Any]:
    """Latency in ms, tokens, real-time factor and energy, as the JSON file has them."""
    audio_s = sum(row.duration_s for row in measurement.rows)
    latencies = [row.latency_ms for row in measurement.rows if row.latency_ms is not None]
    p50, p90, p95 = np.percentile(latencies, (50, 90, 95)).tolist()
    return {
        "clips": len(measurement.rows),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "tokens": measurement.tokens,
        "ms_per_token": sum(latencies) / measurement.tokens,
        "rtfx": audio_s / measurement.wall_s,
        "joules_per_audio_second": None if measurement.joules is None else measurement.joules / audio_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Mistral's layout")
    parser.add_argument("--clips", type=int, default=60, help="of the 500, the same for the same number")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--random", action="store_true", help="the weights are random: no WER is worked out")
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()

    gpus = memory.Gpus() if flags.device == "cuda" else None
    before = gpus.in_use(set(gpus.handles)) if gpus else None
    begun = time.perf_counter()
    model, processor = huggingface.load(flags.model, flags.device)
    model.eval()
    loaded_s = time.perf_counter() - begun
    clips = random.Random(SEED).sample(dataset.load(ROOT / "bench/data").clips, flags.clips + WARM_UPS)
    measurement = measure(model, processor, clips, gpus)
    outcome = {
        "schema_version": 1,
        "environment": environment.describe(None, LIBRARIES),
        "device": flags.device,
        "dtype": str(model.dtype),
        "attention": model.config._attn_implementation,
        "weights": "random, of full size: no text is right" if flags.random else flags.model.name,
        **figures(measurement),
        "peak_vram_bytes": gpus.in_use(set(gpus.handles)) - before if gpus and before is not None else None,
        "load_s": loaded_s,
        "wer": None if flags.random else metrics.wer(measurement.rows),
        "texts": None if flags.random else {row.id: row.text for row in measurement.rows},
    }
    results.write_json(flags.out, outcome)
    print({name: value for name, value in outcome.items() if name not in ("environment", "texts")})


if __name__ == "__main__":
    main()
