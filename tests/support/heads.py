"""Drafters for pico: of random weights, and one that is trained in seconds on the clips that it will be asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import offline
import torch
import torch.nn.functional as F
from places import PICO

from pico import model
from voxtral_serve.engine.draft_network import Head, HeadNetwork, chirp, tokenizer_hash

SHAPE = {"dim": 256, "width": 64, "blocks": 2, "kernel": 7}
STEPS = 150


def of(network: HeadNetwork, tokens: torch.Tensor, **other: Any) -> Head:
    """A head for pico with any of its fields replaced."""
    facts: dict[str, Any] = {
        "network": network,
        "tokens": tokens,
        "vocabulary": offline.reference().config.vocab_size,
        "delay": 6,
        "tokenizer": tokenizer_hash(PICO / "tekken.json"),
        "prompt": model.PROMPT_TOKENS,
        "survival": [0.9, 0.8],
        "hours": 0.0,
        "chirp": offline.reference_rows(chirp(model.SAMPLE_RATE)),
        "shape": SHAPE,
    }
    return Head(**facts | other)


def random(path: Path, **other: Any) -> Path:
    """A drafter that knows nothing."""
    torch.manual_seed(0)
    tokens = torch.arange(1000, 1200)
    of(HeadNetwork(**SHAPE, tokens=len(tokens)), tokens, **other).write(path)
    return path


def trained(path: Path, names: Sequence[str]) -> Path:
    """A drafter that guesses nearly all tokens of these clips."""
    torch.manual_seed(0)
    rows = [offline.reference_rows(offline.read(name)) for name in names]
    said = [torch.tensor(tokens) for tokens in offline.reference_tokens(names)]
    known, places = torch.cat(said).unique(return_inverse=True)
    network = HeadNetwork(**SHAPE, tokens=len(known))
    embeddings = offline.reference().tok_embeddings.weight.detach()[known]
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
    lengths = torch.tensor([len(each) for each in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    begin = model.PROMPT_TOKENS - 1
    for _ in range(STEPS):
        logits = network(padded, lengths, embeddings)
        guesses = torch.cat([each[begin : begin + len(tokens)] for each, tokens in zip(logits, said, strict=True)])
        loss = F.cross_entropy(guesses, places)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    of(network, known).write(path)
    return path
