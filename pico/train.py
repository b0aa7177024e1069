"""Train pico, on one GPU, from nothing: make the speech, learn the vocabulary, train, write the checkpoint.

    python -m pico.train --out pico/checkpoint

`--out` holds params.json, which gives the model's shape; tekken.json and consolidated.safetensors are written there.
pico/README.md says what one run cost and how the loss fell.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mistral_layout.tekken import N_SPECIAL
from pico import model, text, tokenizer

PAD_WEIGHT = 0.5  # weight of [STREAMING_PAD] in the loss: half of all targets, and the easy half
INPUT_DROPOUT = 0.1  # share of text tokens in the input replaced by pads, so that the model listens and does not guess
PEAK_LR, WARMUP, WEIGHT_DECAY, EMA = 2e-3, 500, 0.05, 0.999


class Speech:
    """The generated clips, as int16 on the device, and batches of similar lengths."""

    def __init__(self, directory: Path, device: str):
        shards = sorted(directory.glob("shard-*.npz"), key=lambda p: int(p.stem.split("-")[1]))
        if not shards:
            raise FileNotFoundError(f"no shard-*.npz in {directory}: make them with `python -m pico.data {directory}`")
        audio, lengths, tokens = [], [], []
        for path in shards:
            with np.load(path) as shard:
                audio.append(torch.from_numpy(shard["audio"]).to(device))
                lengths.append(shard["n_samples"])
                tokens.append(torch.from_numpy(shard["tokens"].astype(np.int32)).to(device))
        self.audio, self.tokens = torch.cat(audio), torch.cat(tokens)
        self.lengths = np.concatenate(lengths)
        self.n_tokens = np.array([model.n_tokens(n) for n in self.lengths])
        self.audio_at = np.concatenate(([0], np.cumsum(self.lengths)))
        self.tokens_at = np.concatenate(([0], np.cumsum(self.n_tokens)))
        self.hours = self.lengths.sum() / model.SAMPLE_RATE / 3600
        self.device = device

    def batches(self, rng: np.random.Generator, seconds: float) -> list[np.ndarray]:
        """Indices of the clips of each batch: one epoch, in random order, `seconds` of padded audio a batch."""
        order = np.argsort(self.n_tokens * rng.uniform(0.9, 1.1, len(self.lengths)))
        batches, start = [], 0
        while start < len(order):
            size, longest = 0, 0
            while start + size < len(order):
                longest = max(longest, self.n_tokens[order[start + size]])
                if size and (size + 1) * longest * 0.08 > seconds:
                    break
                size += 1
            batches.append(order[start : start + size])
            start += size
        return [batches[i] for i in rng.permutation(len(batches))]

    def load(self, batch: np.ndarray) -> tuple[Tensor, Tensor]:
        """Audio float32 [batch, n * 1280], padded left and right, and targets int64 [batch, n], -1 past the end."""
        n = -(-int(self.n_tokens[batch].max()) // 8) * 8  # other lengths would each be compiled for
        audio = torch.zeros(len(batch), n * model.SAMPLES_PER_TOKEN, device=self.device)
        targets = torch.full((len(batch), n), -1, dtype=torch.int64, device=self.device)
        left = model.LEFT_PAD_TOKENS * model.SAMPLES_PER_TOKEN
        for row, i in enumerate(batch):
            a, t = self.audio_at[i], self.tokens_at[i]
            audio[row, left : left + self.lengths[i]] = self.audio[a : a + self.lengths[i]].float() / 32767
            targets[row, : self.n_tokens[i]] = self.tokens[t : t + self.n_tokens[i]]
        return audio, targets


def inputs_of(targets: Tensor, generator: torch.Generator) -> Tensor:
    """The tokens that the decoder reads: BOS, the prompt's pads, then the targets one position later, some dropped."""
    tokens = torch.full_like(targets, model.STREAMING_PAD)
    tokens[:, model.PROMPT_TOKENS :] = targets[:, model.PROMPT_TOKENS - 1 : -1].clamp_min(0)
    dropped = torch.rand(tokens.shape, device=tokens.device, generator=generator) < INPUT_DROPOUT
    tokens[dropped] = model.STREAMING_PAD
    tokens[:, 0] = model.BOS
    return tokens


def mask_bands(mel: Tensor, generator: torch.Generator) -> Tensor:
    """SpecAugment's frequency masks (Park et al. 2019): two bands of up to 16 bins, each in half of the clips."""
    first = torch.rand(2, len(mel), 1, 1, device=mel.device, generator=generator) * model.MEL_BINS
    width = torch.rand(2, len(mel), 1, 1, device=mel.device, generator=generator) * 32 - 16
    bins = torch.arange(model.MEL_BINS, device=mel.device)[:, None]
    masked = ((bins >= first) & (bins < first + width)).any(0)
    return mel.masked_fill(masked, (model.LOG_MEL_MAX - 8 + 4) / 4)


def loss_of(net: model.Voxtral, audio: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Mean cross-entropy, nats per (weighted) token after the prompt."""
    mel = mask_bands(model.log_mel(audio), generator)
    with torch.autocast("cuda", torch.bfloat16):
        logits = net.decode(net.embed_audio(mel), inputs_of(targets, generator))
    first = model.PROMPT_TOKENS - 1
    flat = targets[:, first:].flatten()
    losses = F.cross_entropy(logits[:, first:].flatten(0, 1).float(), flat.clamp_min(0), reduction="none")
    weights = torch.where(flat == model.STREAMING_PAD, PAD_WEIGHT, 1.0) * (flat >= 0)
    return (losses * weights).sum() / weights.sum()


def initialise(net: model.Voxtral) -> None:
    """Normal weights; what writes to the residual stream smaller, the deeper the stack (GPT-2's scheme)."""
    for name, p in net.named_parameters():
        if p.ndim > 1:
            depth = net.config.lm.n_layers if name.startswith("layers") else net.config.encoder.n_layers
            scale = (2 * depth) ** -0.5 if name.endswith(("wo.weight", "w2.weight")) else 1.0
            fan_in = p[0].numel()
            torch.nn.init.normal_(p, std=0.02 if name.startswith("tok_embeddings") else scale * fan_in**-0.5)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(p)


def schedule(progress: float, step: int) -> float:
    """Factor of the peak learning rate: linear warm-up, then a cosine to 1 %."""
    return min(1.0, (step + 1) / WARMUP) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(out: Path, speech: Speech, *, minutes: float, batch_s: float, seed: int, log: Path) -> None:
    """Train for `minutes` of wall-clock time and write the averaged weights.

    The length is given as time because the machine is what is scarce; the log has the number of steps that it made.
    """
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans 0.3 s for every new shape, and every batch is one
    rng, generator = np.random.default_rng(seed), torch.Generator("cuda").manual_seed(seed)
    net = model.Voxtral(model.Config.from_params(json.loads((out / "params.json").read_text())))
    initialise(net)
    net.to("cuda")
    decayed = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}],
        lr=PEAK_LR,
        betas=(0.9, 0.98),
        fused=True,
    )
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(EMA))
    for layer in [*net.encoder.layers, *net.layers]:
        layer.compile(dynamic=True)

    start, step, seconds, running = time.time(), 0, 0.0, torch.zeros((), device="cuda")
    rows = log.open("w")
    print(
        f"{speech.hours:.1f} hours in {len(speech.lengths)} clips; "
        f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters",
        flush=True,
    )
    epoch: list[np.ndarray] = []
    while (elapsed := time.time() - start) < minutes * 60:
        epoch = epoch or speech.batches(rng, batch_s)
        batch = epoch.pop()
        lr = PEAK_LR * schedule(elapsed / (minutes * 60), step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(net, *speech.load(batch), generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(net)
        running += loss.detach()
        step += 1
        seconds += speech.lengths[batch].sum() / model.SAMPLE_RATE
        if step % 100 == 0:
            row = {
                "step": step,
                "loss": round(running.item() / 100, 4),
                "lr": round(lr, 6),
                "hours_heard": round(seconds / 3600, 1),
                "elapsed_s": round(time.time() - start, 1),
            }
            print(json.dumps(row), file=rows, flush=True)
            print(json.dumps(row), flush=True)
            running.zero_()
    model.save(average.module, out / "consolidated.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--data", type=Path, default=Path("pico-data"), help="where the generated speech goes, or is")
    parser.add_argument("--hours", type=float, default=240, help="speech to generate; 0 takes what --data holds")
    parser.add_argument("--minutes", type=float, default=8.2, help="time to train, generation not counted")
    parser.add_argument("--batch-s", type=float, default=1200, help="seconds of padded audio a step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tekken = args.out / "tekken.json"
    vocab_size = json.loads((args.out / "params.json").read_text())["vocab_size"]
    if not tekken.exists():
        rng = Random(args.seed)
        sentences = [" " + text.sentence(rng) for _ in range(100_000)]
        tekken.write_text(json.dumps(tokenizer.train(sentences, vocab_size - N_SPECIAL), indent=0))
    if args.hours and any(args.data.glob("shard-*")):
        parser.error(f"{args.data} holds shards already: train on them with --hours 0, or name another --data")
    if args.hours:
        command = [
            "-m",
            "pico.data",
            args.data,
            "--hours",
            args.hours,
            "--seed",
            args.seed,
            "--tekken",
            tekken,
        ]
        subprocess.run([sys.executable, *map(str, command)], check=True)
    train(
        args.out,
        Speech(args.data, "cuda"),
        minutes=args.minutes,
        batch_s=args.batch_s,
        seed=args.seed,
        log=args.out / "training.jsonl",
    )


if __name__ == "__main__":
    main()
