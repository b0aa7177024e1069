"""Transcribe clips by Transformers, without vLLM: latency, energy, memory and texts, one clip at a time.

    python -m tools.transformers_runtime --model pico/checkpoint --clips 60 --out transformers.json

`--model` is a directory in Mistral's layout. A latency begins with the samples in memory and ends with the text: the
features, `generate` as the model's own defaults have it (greedy, at most a token for each 80 ms) and decoding. There is
no server in it, so no upload and no HTTP.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import dataset, environment, memory, metrics, results
from bench.answers import Row
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
    everything = dataset.load(ROOT / "bench/data").clips
    clips = random.Random(SEED).sample(everything, flags.clips + WARM_UPS)
    audio = {clip.id: evaluate.read_audio(clip.path) for clip in clips}
    for clip in clips[flags.clips :]:
        transcribe(model, processor, audio[clip.id])

    rows, tokens = [], 0
    energy = memory.joules(gpus.handles.values()) if gpus else None
    start = time.perf_counter()
    for clip in clips[: flags.clips]:
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
    audio_s = sum(row.duration_s for row in rows)
    latencies = [row.latency_ms for row in rows if row.latency_ms is not None]
    p50, p90, p95 = np.percentile(latencies, (50, 90, 95)).tolist()
    outcome = {
        "schema_version": 1,
        "environment": environment.describe(None, LIBRARIES),
        "device": flags.device,
        "dtype": str(model.dtype),
        "attention": model.config._attn_implementation,
        "weights": "random, of full size: no text is right" if flags.random else flags.model.name,
        "clips": len(rows),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "tokens": tokens,
        "ms_per_token": sum(latencies) / tokens,
        "rtfx": audio_s / wall_s,
        "joules_per_audio_second": None if energy is None or after is None else (after - energy) / audio_s,
        "peak_vram_bytes": gpus.in_use(set(gpus.handles)) - before if gpus and before is not None else None,
        "load_s": loaded_s,
        "wer": None if flags.random else metrics.wer(rows),
        "texts": None if flags.random else {row.id: row.text for row in rows},
    }
    results.write_json(flags.out, outcome)
    print({name: value for name, value in outcome.items() if name not in ("environment", "texts")})


if __name__ == "__main__":
    main()
