"""Transcribe a dataset with the reference model, and score it with the metrics of the benchmark.

    python -m pico.evaluate --dataset bench/data --out results/reference

Writes wer.json and the rows in the format of `python -m bench run`, so that both can be compared. The times in the rows
are those of a batch of clips, not of requests, so they say nothing about serving.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

from bench import dataset, metrics, results
from bench.answers import Row
from mistral_layout.audio import DELAY_MS, MS_PER_TOKEN
from pico import model
from pico.tokenizer import TextTokenizer

CHECKPOINT = Path(__file__).parent / "checkpoint"
BATCH_S = {"cpu": 240, "cuda": 6000}  # seconds of padded audio per batch, which has at least one clip


def read_audio(path: Path) -> np.ndarray:
    """float32 [n] at 16 kHz, mono."""
    audio, rate = soundfile.read(path, dtype="float32")
    return soxr.resample(audio if audio.ndim == 1 else audio.mean(1), rate, model.SAMPLE_RATE).astype(np.float32)


def transcribe(
    net: model.Voxtral, tokenizer: TextTokenizer, clips: list[dataset.Clip], delay: int = model.DELAY_TOKENS
) -> list[Row]:
    """One row per clip, in the order of the clips. `delay` is in tokens."""
    rows: dict[str, Row] = {}
    batch_s = BATCH_S[net.tok_embeddings.weight.device.type]
    pending = sorted(clips, key=lambda c: c.duration_s)
    while pending:
        longest = pending[-1].duration_s + 4
        size = max(1, int(batch_s / longest))
        batch, pending = pending[-size:], pending[:-size]
        with ThreadPoolExecutor() as pool:
            audio = list(pool.map(read_audio, [c.path for c in batch]))
        start = time.time()
        outputs = net.transcribe(audio, delay)
        end = time.time()
        for clip, tokens in zip(batch, outputs, strict=True):
            text = tokenizer.decode(tokens).strip()
            rows[clip.id] = Row(clip.id, clip.duration_s, 1, start, end, None, None, text, clip.text, None)
    return [rows[c.id] for c in clips]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, default=Path("bench/data"))
    parser.add_argument("--samples", type=int)
    parser.add_argument("--delay-ms", type=int, default=DELAY_MS)
    parser.add_argument("--out", type=Path, help="directory for the files (default: only print the WER)")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    clips = dataset.select(dataset.load(args.dataset)[0], args.samples, seed=0)
    net = model.load(args.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = TextTokenizer.from_file(args.checkpoint / "tekken.json")
    rows = transcribe(net, tokenizer, clips, args.delay_ms // MS_PER_TOKEN)
    wer = metrics.wer(rows)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        results.write(args.out / results.ROWS, "".join(map(results.row_line, rows)))
        results.write_json(args.out / "wer.json", wer)
    print(wer)


if __name__ == "__main__":
    main()
