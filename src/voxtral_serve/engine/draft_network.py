"""The drafter that hears: a small network which guesses the token of every position from the audio rows alone.

All audio rows of an uploaded clip exist before its first token is decoded. Row i of a clip is added to the input of
position i, from which the language model makes token i + 1. The network reads the rows in both directions and guesses
token i + 1 for each row i at once; the language model verifies the guesses, so the text stays its own.

It is trained by `voxtral-serve draft train` and kept in `draft/head.safetensors` beside the checkpoint. The file has no
embeddings: the output layer multiplies with rows of the language model's own, those of `tokens`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from voxtral_serve.engine.names import DRAFT_FILE

FORMAT = "voxtral-serve draft 1"
FILE = Path(DRAFT_FILE)  # below the checkpoint's directory
CHIRP_S = 2.0
LARGEST = {"dim": 1 << 16, "width": 1 << 13, "blocks": 64, "kernel": 63}  # of a file: others are damaged


class HeadError(ValueError):
    """A file of a drafter cannot be used."""


class Block(nn.Module):
    """A depthwise convolution over time and a feed-forward layer, with a residual connection."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """hidden [clips, rows, width], inside [clips, rows, 1] -> [clips, rows, width]."""
        mixed = self.conv((self.norm(hidden) * inside).transpose(1, 2)).transpose(1, 2)
        return hidden + self.down(F.gelu(self.up(mixed)))


class HeadNetwork(nn.Module):
    """Audio rows of clips -> features that are multiplied with token embeddings."""

    def __init__(self, dim: int, width: int, blocks: int, kernel: int, tokens: int) -> None:
        """dim: of the language model. tokens: how many the output layer knows."""
        super().__init__()
        self.norm_in = nn.LayerNorm(dim)
        self.project_in = nn.Linear(dim, width)
        self.blocks = nn.ModuleList(Block(width, kernel) for _ in range(blocks))
        self.norm_out = nn.LayerNorm(width)
        self.project_out = nn.Linear(width, dim)
        self.bias = nn.Parameter(torch.zeros(tokens))
        self.gap = kernel // 2  # rows that one convolution sees on each side
        self.reach = blocks * self.gap  # rows that the guess of a row depends on, on each side

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """rows [clips, rows, dim], lengths [clips], embeddings [tokens, dim] -> logits [clips, rows, tokens].

        Rows past a clip's length have no effect on those before it.
        """
        inside = (torch.arange(rows.shape[1], device=rows.device) < lengths[:, None])[..., None].to(rows.dtype)
        return F.linear(self.features(rows, inside), embeddings, self.bias)

    def features(self, rows: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """rows [clips, rows, dim], inside [clips, rows, 1] -> [clips, rows, dim], to multiply with token embeddings.

        `inside` is 1 for rows of a clip and 0 for others. With `gap` of these between them, several clips may follow
        one another as one: none has an effect on another.
        """
        hidden = self.project_in(self.norm_in(rows))
        for block in self.blocks:
            hidden = block(hidden, inside)
        features: torch.Tensor = self.project_out(self.norm_out(hidden))
        return features


@dataclass(frozen=True)
class Head:
    """A trained drafter, as its file has it.

    tokens          int64 [n]: ids of the tokens that it can guess, ascending
    vocabulary      size of the language model's
    delay           token positions of the delay that it was trained with
    tokenizer       SHA-256 of tekken.json
    prompt          token positions of the prompt: row `prompt` - 1 guesses the first token
    survival        share of the steps of held-out clips in which drafts 1 to j were all right, for j from 1 on
    hours           of audio that it was trained on
    chirp           float32 [rows, dim]: the model's audio rows of `chirp()`, by which a checkpoint is recognised
    """

    network: HeadNetwork
    tokens: torch.Tensor
    vocabulary: int
    delay: int
    tokenizer: str
    prompt: int
    survival: Sequence[float]
    hours: float
    chirp: torch.Tensor
    shape: dict[str, int] = field(default_factory=dict)  # dim, width, blocks, kernel

    def write(self, path: Path) -> None:
        """Write the file as a whole or not at all. Weights are stored as float16."""
        tensors = {f"network.{name}": value.half() for name, value in self.network.state_dict().items()}
        tensors |= {"tokens": self.tokens.to(torch.int32), "chirp": self.chirp.bfloat16()}
        numbers = {"vocabulary": self.vocabulary, "delay": self.delay, "prompt": self.prompt, "hours": self.hours}
        facts = numbers | {"tokenizer": self.tokenizer, "survival": [*self.survival], "shape": self.shape}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        # Not by `save_file`, whose files only their owner may read: a server may have another user.
        partial.write_bytes(save(contiguous, {"format": FORMAT, "facts": json.dumps(facts)}))
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Head":
        """Raises HeadError for a file that is no drafter of this format."""
        with _opened(path) as (file, facts):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            tokens, rows = tensors["tokens"].long(), tensors["chirp"].float()
            with torch.device("meta"):  # the file's own tensors become the weights, if they have the right shapes
                network = HeadNetwork(**facts["shape"], tokens=tokens.numel())
            weights = {name.removeprefix("network."): value.float() for name, value in tensors.items() if "." in name}
            network.load_state_dict(weights, assign=True)
            ascending = tokens.ndim == 1 and len(tokens) and (tokens.diff() > 0).all()
            if not ascending or tokens[0] < 0 or tokens[-1] >= facts["vocabulary"]:
                raise ValueError(f"its tokens are not ascending ids below its vocabulary of {facts['vocabulary']}")
            if rows.ndim != 2 or rows.shape[1] != facts["shape"]["dim"]:
                raise ValueError(f"its chirp has the shape {tuple(rows.shape)}, not [rows, {facts['shape']['dim']}]")
            if not all(value.isfinite().all() for value in (rows, *weights.values())):
                raise ValueError("it has numbers that are not finite")
            return cls(network, tokens, chirp=rows, **facts)


def read_facts(path: Path) -> dict[str, Any]:
    """What the file of a drafter says of it, without its tensors: the fields of Head that are neither tensor nor
    network.

    Raises HeadError for a file that is no drafter of this format.
    """
    with _opened(path) as (_, facts):
        return facts


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(the open file, what it says of its drafter). Raises HeadError, also for errors inside the `with` block."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise HeadError(f"{path} has format {metadata.get('format')!r}: expected {FORMAT!r}")
            yield file, _checked(json.loads(metadata["facts"]))
    except HeadError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise HeadError(
            f"{path} cannot be read as a drafter ({type(error).__name__}: {' '.join(str(error).split())}): expected a "
            "file that `voxtral-serve draft train` wrote. Train it again, or remove it"
        ) from error


def _checked(facts: Any) -> dict[str, Any]:
    """The facts of a file, whose types and values are those that Head names. Raises KeyError, TypeError, ValueError."""
    shape, survival = facts["shape"], facts["survival"]
    numbers = {name: facts[name] for name in ("vocabulary", "delay", "prompt")} | {
        name: shape[name] for name in LARGEST
    }
    for name, value in numbers.items():
        if type(value) is not int or not 0 < value <= LARGEST.get(name, 2**31):
            raise ValueError(f"{name} is {value!r}")
    if not shape["kernel"] % 2:
        raise ValueError(f"kernel is {shape['kernel']}, not odd")
    if type(survival) is not list or not all(type(share) in (int, float) and 0 <= share <= 1 for share in survival):
        raise ValueError(f"survival is {survival!r}")
    if type(facts["tokenizer"]) is not str or type(facts["hours"]) not in (int, float):
        raise ValueError(f"tokenizer is {facts['tokenizer']!r} and hours {facts['hours']!r}")
    known = ("vocabulary", "delay", "prompt", "tokenizer", "survival", "hours")
    return {name: facts[name] for name in known} | {"shape": {name: shape[name] for name in LARGEST}}


def chirp(rate_hz: int) -> np.ndarray:
    """A tone that rises from 100 to 4,000 Hz in CHIRP_S seconds: float32 samples, the same on every machine."""
    seconds = np.arange(int(CHIRP_S * rate_hz)) / rate_hz
    phase = 2 * np.pi * (100 * seconds + (4000 - 100) / (2 * CHIRP_S) * seconds**2)
    return np.rint(0.5 * np.sin(phase) * 32767).astype(np.float32) / np.float32(32768)


def tokenizer_hash(tekken: Path) -> str:
    """SHA-256 of tekken.json, in hexadecimal."""
    return hashlib.sha256(tekken.read_bytes()).hexdigest()
