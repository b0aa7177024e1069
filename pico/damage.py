"""Measure the sensitivity of the benchmark: score the reference model with one error at a time, on the same clips.

    python -m pico.damage --samples 200 --out bench/results/pico-damage.json

Each row is an error that a serving stack can make. The row has the word error rate and the number of clips with a
changed text. Errors that change texts but not the error rate are found only by a comparison of texts.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch

from bench import dataset, metrics, results
from pico import evaluate, model
from pico.tokenizer import TextTokenizer


def window(net: model.Voxtral, frames: int) -> None:
    net.encoder.block = dataclasses.replace(net.config.encoder, window=frames)


def shift_rows(net: model.Voxtral, tokens: int) -> None:
    """Delay the audio by `tokens` tokens of 80 ms relative to the text."""
    embed = net.embed_audio

    def embed_audio(mel: torch.Tensor, n_rows: torch.Tensor | None = None) -> torch.Tensor:
        return torch.roll(embed(mel, n_rows), tokens, 1)

    net.embed_audio = embed_audio  # type: ignore[method-assign]


def lose_rows(net: model.Voxtral, every: int) -> None:
    embed = net.embed_audio

    def embed_audio(mel: torch.Tensor, n_rows: torch.Tensor | None = None) -> torch.Tensor:
        rows = embed(mel, n_rows)
        rows[:, ::every] = 0
        return rows

    net.embed_audio = embed_audio  # type: ignore[method-assign]


def unpair_rotation(net: model.Voxtral, layer: int) -> None:
    """Reorder the rows of queries and keys as in Hugging Face's layout (first half, second half)."""
    attention = net.encoder.layers[layer].attention
    for linear in (attention.wq, attention.wk):
        for p in linear.parameters():
            p.data = p.data.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)


def no_query_bias(net: model.Voxtral) -> None:
    for layer in net.encoder.layers:
        layer.attention.wq.bias.data.zero_()


DAMAGES: dict[str, Callable[[model.Voxtral], None]] = {
    "none": lambda net: None,
    "encoder window of 75 frames in place of 750": lambda net: window(net, 75),
    "encoder window of 32 frames": lambda net: window(net, 32),
    "encoder window of 16 frames": lambda net: window(net, 16),
    "audio one token (80 ms) late": lambda net: shift_rows(net, 1),
    "every 20th audio row lost": lambda net: lose_rows(net, 20),
    "rotary pairs of one encoder layer mixed up": lambda net: unpair_rotation(net, 0),
    "encoder's query biases not loaded": no_query_bias,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, default=Path("bench/data"))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    clips = dataset.select(dataset.load(args.dataset)[0], args.samples, seed=0)
    tokenizer = TextTokenizer.from_file(evaluate.CHECKPOINT / "tekken.json")
    undamaged: list[str | None] = []
    table = []
    for name, damage in DAMAGES.items():
        net = model.load(evaluate.CHECKPOINT)
        with torch.no_grad():
            damage(net)
        rows = evaluate.transcribe(net, tokenizer, clips)
        texts = [row.text for row in rows]
        undamaged = undamaged or texts
        wer = metrics.wer(rows)
        changed = sum(a != b for a, b in zip(undamaged, texts, strict=True))
        table.append({"damage": name, "wer": wer["value"], "ci95": wer["ci95"], "texts_changed": changed})
        print(json.dumps(table[-1]), flush=True)
    results.write_json(args.out, {"schema_version": 1, "samples": args.samples, "seed": 0, "damages": table})


if __name__ == "__main__":
    main()
