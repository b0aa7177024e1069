"""Train the network of a drafter on collected rows: it learns the tokens that the model itself made from them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from voxtral_serve.draft.job import Training
from voxtral_serve.draft.shards import Entry, Shards
from voxtral_serve.engine.draft_network import HeadNetwork

WARMUP = 0.05  # share of the steps
LAST_RATE = 0.01  # of the learning rate, at the end of its cosine
GROUP = 32  # batches whose clips are sorted together by length
SAVE_S, REPORT_S = 30.0, 5.0
IGNORED = -100  # target of a row that is not in the loss
GPU_SHARE = 0.4  # of the free memory that rows may take; others stay in their files


class Corpus:
    """The rows of all shards, and the target of each row: the number of its token in `tokens`."""

    def __init__(self, shards: Shards, tokens: torch.Tensor, prompt: int, device: torch.device) -> None:
        """tokens: ids, ascending. prompt: positions of the prompt, whose last row has the first token as target."""
        self.device = device
        known = {int(token): number for number, token in enumerate(tokens)}
        self.rows = [shards.rows(number) for number in range(shards.number)]
        self.targets = [torch.full((len(rows),), IGNORED) for rows in self.rows]
        for entry in shards.entries:
            numbers = [known.get(token, IGNORED) for token in entry.tokens]
            first = entry.first + prompt - 1
            self.targets[entry.shard][first : first + len(numbers)] = torch.tensor(numbers)
        size = sum(rows.nbytes for rows in self.rows)
        if device.type == "cuda" and size < GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
            self.rows = [rows.to(device) for rows in self.rows]

    def batch(self, entries: Sequence[Entry]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [clips, most rows, dim], their lengths [clips] and targets [clips, most rows], on the device."""
        rows = pad_sequence([self.rows[e.shard][e.first : e.first + e.rows] for e in entries], batch_first=True)
        targets = [self.targets[e.shard][e.first : e.first + e.rows] for e in entries]
        lengths = torch.tensor([e.rows for e in entries])
        padded = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        if rows.device.type == "cpu" and self.device.type == "cuda":
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=True)
        return rows, lengths.to(self.device), padded.to(self.device, non_blocking=True)


def seen_tokens(entries: Sequence[Entry]) -> torch.Tensor:
    """int64 [n], ascending: the ids of all tokens of these clips."""
    return torch.tensor(sorted({token for entry in entries for token in entry.tokens}))


def batches(entries: Sequence[Entry], rows: int, seed: int) -> Iterator[list[Entry]]:
    """One pass over the clips, each once: batches of clips of about one length, of at most `rows` rows with padding.

    A clip of more rows is a batch of its own.
    """
    rng = np.random.default_rng(seed)
    order = [entries[number] for number in rng.permutation(len(entries))]
    made: list[list[Entry]] = []
    total = sum(entry.rows for entry in order)
    groups = max(1, round(total / (GROUP * rows)))
    for group in np.array_split(np.arange(len(order)), groups):
        batch: list[Entry] = []
        for entry in sorted((order[number] for number in group), key=lambda entry: entry.rows):
            if batch and (len(batch) + 1) * entry.rows > rows:
                made.append(batch)
                batch = []
            batch.append(entry)
        made.append(batch)
    yield from (made[number] for number in rng.permutation(len(made)) if made[number])


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to LAST_RATE."""
    warmup = max(1, round(WARMUP * steps))
    progress = max(0.0, (step - warmup) / max(1, steps - warmup))
    return min(1.0, (step + 1) / warmup) * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """A network in training. Its state is kept in a file from time to time, from which the next run goes on."""

    def __init__(
        self, corpus: Corpus, entries: Sequence[Entry], embeddings: torch.Tensor, training: Training, state: Path
    ) -> None:
        """entries: the clips to train on. embeddings [tokens, dim], of the corpus' tokens."""
        self.corpus, self.entries, self.training, self.path = corpus, entries, training, state
        self.embeddings = embeddings.to(corpus.device)
        torch.manual_seed(0)
        self.shape = {"dim": embeddings.shape[1], "width": training.width, "blocks": training.blocks}
        self.shape["kernel"] = training.kernel
        self.network = HeadNetwork(**self.shape, tokens=len(embeddings)).to(corpus.device)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), training.learning_rate, fused=corpus.device.type == "cuda"
        )
        a_pass = sum(1 for _ in batches(entries, self._batch_rows(), 0))
        self.steps = max(training.least_steps, round(training.passes * a_pass))
        self.step = 0

    def _batch_rows(self) -> int:
        return self.training.batch_rows

    def run(self, report: Callable[[int, int, float], None]) -> HeadNetwork:
        """Train to the end. `report` gets the step, the number of steps and the loss, every REPORT_S seconds."""
        self._resume()
        done = self.step  # steps of whole passes before this one
        saved = told = time.monotonic()
        for number in range(10**9):
            numbered = list(batches(self.entries, self._batch_rows(), number))
            if done >= len(numbered):
                done -= len(numbered)
                continue
            for batch in numbered[done:]:
                loss = self._train_on(batch)
                self.step += 1
                now = time.monotonic()
                if now - told > REPORT_S or self.step == self.steps:
                    report(self.step, self.steps, float(loss))
                    told = now
                if now - saved > SAVE_S:
                    self._save()
                    saved = now
                if self.step >= self.steps:
                    return self.network.eval()
            done = 0
        raise AssertionError("a job has fewer passes")

    def _train_on(self, batch: Sequence[Entry]) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate * rate(self.step, self.steps)
        rows, lengths, targets = self.corpus.batch(batch)
        on_gpu = self.corpus.device.type == "cuda"
        with torch.autocast(self.corpus.device.type, torch.bfloat16, enabled=on_gpu):
            logits = self.network(rows if on_gpu else rows.float(), lengths, self.embeddings)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _save(self) -> None:
        partial = self.path.with_suffix(".partial")
        state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state | {"steps": self.steps, "shape": self.shape}, partial)
        partial.replace(self.path)

    def _resume(self) -> None:
        """Go on from the state's file, unless that is of another training: other clips, or another network."""
        if not self.path.exists():
            return
        state: dict[str, Any] = torch.load(self.path, map_location=self.corpus.device, weights_only=True)
        if (state["steps"], state["shape"]) == (self.steps, self.shape):
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]


@torch.inference_mode()
def right(
    network: HeadNetwork, corpus: Corpus, entries: Sequence[Entry], embeddings: torch.Tensor, prompt: int, rows: int
) -> list[np.ndarray]:
    """For each clip, bool [tokens]: whether the network guesses its tokens."""
    embeddings = embeddings.to(corpus.device)
    found: dict[str, np.ndarray] = {}
    on_gpu = corpus.device.type == "cuda"
    for batch in batches(entries, rows, 0):
        inputs, lengths, targets = corpus.batch(batch)
        with torch.autocast(corpus.device.type, torch.bfloat16, enabled=on_gpu):
            guesses = network(inputs if on_gpu else inputs.float(), lengths, embeddings).argmax(-1)
        hits = (guesses == targets).cpu().numpy()
        for entry, row in zip(batch, hits, strict=True):
            found[entry.key] = row[prompt - 1 : prompt - 1 + len(entry.tokens)]
    return [found[entry.key] for entry in entries]
