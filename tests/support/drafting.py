"""The drafts of a model of a few dimensions, with random weights."""

from types import SimpleNamespace
from typing import Any

import torch

from voxtral_serve.engine.audio_rows import AudioRows
from voxtral_serve.engine.draft_network import Head, HeadNetwork
from voxtral_serve.engine.draft_stream import DraftTokens

SLOTS, POSITIONS, RING, DIM, DRAFTS, PAD, DELAY = 4, 300, 128, 8, 5, 32, 6
KNOWN = torch.arange(3, 90)
EMBEDDINGS = torch.randn(100, DIM, generator=torch.Generator().manual_seed(1))
LENGTH = POSITIONS + 1 + DRAFTS


def made(device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftTokens:
    torch.manual_seed(0)
    shape = {"dim": DIM, "width": 16, "blocks": 3, "kernel": 7}
    network = HeadNetwork(**shape, tokens=len(KNOWN))
    for name, parameter in network.named_parameters():  # convolutions that matter: a row that is not the clip's shows
        torch.nn.init.normal_(parameter, std=3 if "conv" in name else 0.5)
    network.bias.data.zero_()
    chirp = torch.randn(9, DIM)
    head = Head(network, KNOWN, 100, DELAY, "hash", 39, [0.5], 1.0, chirp, shape)
    settings: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS, max_num_batched_tokens=RING),
        model_config=SimpleNamespace(
            max_model_len=512, get_hidden_size=lambda: DIM, hf_config=SimpleNamespace(max_clip_positions=POSITIONS)
        ),
    )
    rows = AudioRows(settings, live_slots=2, clip_delay=DELAY).to(device, dtype)
    drafts = DraftTokens(head, rows, DRAFTS, PAD)
    drafts.prepare(lambda tokens: EMBEDDINGS.to(device, dtype)[tokens], chirp.to(device), device == "cuda")
    return drafts


def clip(drafts: DraftTokens, slot: int, rows: int, delay: int | None = None) -> torch.Tensor:
    """A clip of random rows begins in a slot. Returns its rows."""
    audio = torch.randn(rows, DIM).to(drafts.rows.pool)
    drafts.rows.put(slot, audio, delay)
    drafts.begin(slot, rows, delay)
    return audio


def alone(drafts: DraftTokens, rows: torch.Tensor) -> list[int]:
    """What the network guesses for these rows and nothing beside them."""
    lengths = torch.tensor([len(rows)], device=rows.device)
    return drafts.known[drafts.network(rows[None], lengths, drafts.embeddings)[0].argmax(1)].tolist()
