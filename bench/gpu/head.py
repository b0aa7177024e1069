"""Write a drafter with random weights, which takes as long as a trained one and guesses no token.

The engine refuses a drafter of another checkpoint: it compares its own audio rows of a chirp with those in the file.
pico.model, the independent reference of the model, computes them here from the checkpoint's weights.
"""

import json
from pathlib import Path

import torch

from bench.gpu import checkpoint, rows
from mistral_layout.audio import DELAY_TOKENS, PROMPT_TOKENS, SAMPLE_RATE
from mistral_layout.tekken import N_SPECIAL
from pico import model as reference
from voxtral_serve.engine.draft_network import FILE, Head, HeadNetwork, chirp, tokenizer_hash

TOKENS = 30_000  # that the drafter knows: as many as hours of speech have


def write_checkpoint(directory: Path, layers: int | None = None, tokens: int = TOKENS) -> None:
    """Write the checkpoint of bench.gpu.checkpoint, with a drafter of the shape of pico's at the model's width.

    It guesses text tokens only: an accepted EOS would end a request. Raises voxtral_serve's HeadError without pico's.
    """
    checkpoint.write(directory, layers)
    params = json.loads((directory / "params.json").read_text())
    own = Head.read(rows.HEAD)
    shape = own.shape | {"dim": params["dim"]}
    torch.manual_seed(0)
    head = Head(
        network=HeadNetwork(**shape, tokens=tokens),
        tokens=torch.arange(N_SPECIAL, N_SPECIAL + tokens),
        vocabulary=params["vocab_size"],
        delay=DELAY_TOKENS,
        tokenizer=tokenizer_hash(directory / "tekken.json"),
        prompt=PROMPT_TOKENS,
        survival=own.survival,
        hours=0.0,
        chirp=chirp_rows(directory),
        shape=shape,
    )
    head.write(directory / FILE)


def chirp_rows(directory: Path) -> torch.Tensor:
    """The audio rows of the chirp by the weights in `directory`: float32 [rows, dim], those of its padding included."""
    audio = torch.from_numpy(reference.pad_audio(chirp(SAMPLE_RATE), DELAY_TOKENS))[None]
    with torch.inference_mode():
        return reference.load_audio(directory).embed_audio(reference.log_mel(audio))[0].clone()
