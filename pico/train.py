"""Train pico from scratch on one GPU: generate speech, train the vocabulary and the model, write the checkpoint.

    python -m pico.train --out pico/checkpoint

`--out` must have params.json with the shape of the model. tekken.json, training.jsonl and consolidated.safetensors are
written there. The same command continues a run that ended, by --stop-after or by a kill: `--data` keeps the speech and
the training state. pico/README.md has the cost and the loss of one run.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mistral_layout.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN, n_tokens
from mistral_layout.tekken import N_SPECIAL
from pico import layers, mel, model, recordings, text, tokenizer
from pico.pool import Loaded, Plans, Pool

PAD_WEIGHT = 0.5  # weight of [STREAMING_PAD] in the loss: pads are more than half of all targets, and easy to predict
INPUT_DROPOUT = 0.1  # share of input text tokens replaced by pads, so that the model relies on the audio
PEAK_LR, WARMUP, WEIGHT_DECAY, EMA = 2e-3, 500, 0.05, 0.999
WARPS = tuple(i / 100 for i in range(92, 109))  # factors of the frequency axis; 1 in the middle
WARPED_SHARE = 0.6
# In a share of the long batches the window of the decoder is 61 s, so that the model does not depend on the prompt: in
# a served model, the prompt leaves the window after 8,192 positions.
SHORT_WINDOW, SHORT_WINDOW_SHARE, LONG_TOKENS = 768, 0.25, 2560
SHARDS_TO_BEGIN = 8
PLANNERS = 4  # processes
SAVE_EVERY_S = 100


def inputs_of(targets: Tensor, generator: torch.Generator) -> Tensor:
    """Input tokens of the decoder: BOS, the prompt's pads, then the targets shifted by one, some replaced by pads."""
    tokens = torch.full_like(targets, model.STREAMING_PAD)
    tokens[:, 1:] = torch.where(targets[:, :-1] == recordings.UNTRAINED, model.STREAMING_PAD, targets[:, :-1])
    dropped = torch.rand(tokens.shape, device=tokens.device, generator=generator) < INPUT_DROPOUT
    tokens = tokens.masked_fill(dropped, model.STREAMING_PAD)
    tokens[:, 0] = model.BOS
    return tokens


def mask_bands(log_mel: Tensor, generator: torch.Generator) -> Tensor:
    """SpecAugment's frequency masks (Park et al. 2019): two bands of up to 16 bins, each in half of the clips."""
    first = torch.rand(2, len(log_mel), 1, 1, device=log_mel.device, generator=generator) * model.MEL_BINS
    width = torch.rand(2, len(log_mel), 1, 1, device=log_mel.device, generator=generator) * 32 - 16
    bins = torch.arange(model.MEL_BINS, device=log_mel.device)[:, None]
    masked = ((bins >= first) & (bins < first + width)).any(0)
    return log_mel.masked_fill(masked, mel.LOG_MEL_FLOOR)


class Loss:
    """Weighted mean of the cross-entropy over the tokens after the prompt, in nats per token."""

    def __init__(self, device: str):
        self.device = device
        self.filters = torch.stack([mel.warped_filters(warp) for warp in WARPS]).to(device)

    def __call__(self, net: model.Voxtral, batch: Loaded, generator: torch.Generator, window: int | None) -> Tensor:
        draw = torch.rand(2, len(batch.targets), device=self.device, generator=generator)
        warp = torch.where(draw[0] < WARPED_SHARE, (draw[1] * len(WARPS)).long(), len(WARPS) // 2)
        log_mel = mask_bands(mel.log_mel(batch.audio, self.filters[warp]), generator)
        n_rows = -(-batch.n_samples // SAMPLES_PER_TOKEN) + n_tokens(0, 0) + batch.delays
        with torch.autocast(self.device, torch.bfloat16):
            audio_rows = net.embed_audio(log_mel, n_rows)
            logits = net.decode(audio_rows, inputs_of(batch.targets, generator), delay=batch.delays, window=window)
        flat = batch.targets.flatten()
        losses = F.cross_entropy(logits.flatten(0, 1).float(), flat.clamp_min(0), reduction="none")
        weights = torch.where(flat == model.STREAMING_PAD, PAD_WEIGHT, 1.0) * (flat != recordings.UNTRAINED)
        return (losses * weights).sum() / weights.sum()


def initialise(net: model.Voxtral) -> None:
    """Normal weights. Projections to the residual stream are scaled down with the depth (GPT-2's scheme)."""
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


class Trainer:
    """The training state: the model, its average, the optimizer and the progress."""

    def __init__(self, params: dict, seed: int, device: str):
        torch.manual_seed(seed)
        self.device, self.seed = device, seed
        self.net = model.Voxtral(model.Config.from_params(params))
        initialise(self.net)
        self.net.to(device)
        self.weights = list(self.net.parameters())
        self.average = [p.detach().clone() for p in self.weights]
        groups = [
            {"params": [p for p in self.weights if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in self.weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.loss = Loss(device)
        self.steps, self.elapsed_s, self.heard_s = 0, 0.0, 0.0

    def compile(self) -> None:
        torch._dynamo.config.recompile_limit = 32
        for layer in [*self.net.encoder.layers, *self.net.layers]:
            layer.compile(dynamic=True)

    def window(self, length: int) -> int | None:
        """The window of the decoder at this step; None for the configured one."""
        drawn = Random(f"{self.seed} {self.steps}").random()
        return SHORT_WINDOW if length >= LONG_TOKENS and drawn < SHORT_WINDOW_SHARE else None

    def step(self, batch: Loaded, lr: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(self.net, batch, self.generator, self.window(batch.targets.shape[1]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.weights, 1 - EMA)
        self.steps += 1
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.net.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "progress": (self.steps, self.elapsed_s, self.heard_s),
        }

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save(self.state(), partial)
        partial.rename(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device)
        self.net.load_state_dict(state["weights"])
        for average, saved in zip(self.average, state["average"], strict=True):
            average.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.steps, self.elapsed_s, self.heard_s = state["progress"]

    def write(self, path: Path) -> None:
        """Write the averaged weights as a checkpoint."""
        averaged = model.Voxtral(self.net.config)
        for p, average in zip(averaged.parameters(), self.average, strict=True):
            p.data.copy_(average)
        model.save(averaged, path)


class Log:
    """training.jsonl, one row per 100 steps. On resume, rows after the saved state are dropped."""

    def __init__(self, path: Path, steps: int):
        rows = path.read_text().splitlines(keepends=True) if steps and path.exists() else []
        path.write_text("".join(row for row in rows if json.loads(row)["step"] <= steps))
        self.path, self.total, self.count = path, torch.zeros(()), 0

    def add(self, trainer: Trainer, loss: Tensor, lr: float) -> None:
        self.total, self.count = self.total.to(loss.device) + loss, self.count + 1
        if trainer.steps % 100 == 0:
            row = {
                "step": trainer.steps,
                "loss": round(self.total.item() / self.count, 4),
                "lr": round(lr, 6),
                "hours_heard": round(trainer.heard_s / 3600, 1),
                "elapsed_s": round(trainer.elapsed_s, 1),
            }
            with self.path.open("a") as file:
                print(json.dumps(row), file=file)
            print(json.dumps(row), flush=True)
            self.total, self.count = torch.zeros(()), 0


def train(trainer: Trainer, pool: Pool, plans: Plans, *, minutes: float, until: float, out: Path) -> bool:
    """Train for `minutes` in total or until the time `until`, then write the checkpoint. Returns whether it is done.

    The length is a time, because machine time is limited. The log has the number of steps.
    """
    state, log = pool.directory / "state.pt", Log(out / "training.jsonl", trainer.steps)
    last = saved = time.time()
    while trainer.elapsed_s < minutes * 60 and last < until:
        plan = plans.next(trainer.steps, pool.shards)
        lr = PEAK_LR * schedule(trainer.elapsed_s / (minutes * 60), trainer.steps)
        loss = trainer.step(pool.load(plan), lr)
        now = time.time()
        trainer.elapsed_s, last = trainer.elapsed_s + now - last, now
        trainer.heard_s += float(plan.n_samples.sum()) / SAMPLE_RATE
        log.add(trainer, loss, lr)
        if now - saved > SAVE_EVERY_S:
            trainer.save(state)
            saved = now
    trainer.save(state)
    trainer.write(out / "consolidated.safetensors")
    return trainer.elapsed_s >= minutes * 60


@contextlib.contextmanager
def generation(directory: Path, hours: float, seed: int, tekken: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Generate speech during training, at lower priority. Missing shards are generated in the next run."""
    what = ["--hours", hours, "--seed", seed, "--tekken", tekken, "--workers", max(1, (os.cpu_count() or 4) - 3)]
    command = ["nice", "-n", "10", sys.executable, "-m", "pico.data", directory, *what]
    process = subprocess.Popen(list(map(str, command)), start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--data", type=Path, default=Path("pico-data"), help="directory of speech and training state")
    parser.add_argument("--hours", type=float, default=300, help="hours of speech to generate")
    parser.add_argument("--minutes", type=float, default=10, help="training time of all runs together")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds after which this run ends")
    parser.add_argument("--batch-tokens", type=int, default=recordings.BATCH_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-flash", action="store_true", help="windowed attention with PyTorch's own kernels")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the layers; slower")
    args = parser.parse_args()
    layers.FLASH = not args.no_flash
    until = time.time() + args.stop_after
    tekken, params = args.out / "tekken.json", json.loads((args.out / "params.json").read_text())
    if not tekken.exists():
        rng = Random(args.seed)
        sentences = [" " + text.sentence(rng) for _ in range(100_000)]
        tekken.write_text(json.dumps(tokenizer.train(sentences, params["vocab_size"] - N_SPECIAL), indent=0))
    args.data.mkdir(parents=True, exist_ok=True)
    plans = Plans(args.data, seed=args.seed, tokens=args.batch_tokens, workers=PLANNERS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it needs 0.3 s for each new shape
    with generation(args.data, args.hours, args.seed, tekken) as made:
        trainer = Trainer(params, args.seed, device)
        if (args.data / "state.pt").exists():
            trainer.resume(args.data / "state.pt")
        if device == "cuda" and not args.no_compile:
            trainer.compile()
        pool = Pool(args.data, args.hours, device)
        pool.start()
        pool.wait(min(SHARDS_TO_BEGIN, round(2 * args.hours)), lambda: made.poll() in (None, 0))
        done = train(trainer, pool, plans, minutes=args.minutes, until=until, out=args.out)
    pool.close()
    plans.close()
    print(json.dumps({"done": done, "steps": trainer.steps, "elapsed_s": round(trainer.elapsed_s, 1)}), flush=True)


if __name__ == "__main__":
    main()
