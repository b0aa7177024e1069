"""Voxtral Realtime in plain PyTorch: the model for the training of pico, and the reference for served models.

Implements the published architecture (params.json of Voxtral-Mini-4B-Realtime-2602 and its technical report). It shares
no code with vLLM, so an error in either one causes a difference.

    waveform --log-mel--> [128, 8 n] --conv stem, stride 2--> [4 n, dim] --causal encoder--> [4 n, dim]
             --4 frames concatenated, adapter--> [n, lm dim], one row per 80 ms and per text token

At position p, the input of the decoder is the sum of row p and the embedding of token p; it predicts token p + 1. A
clip is padded with 32 tokens of silence on the left and, for a delay of d tokens, with at least d + 11 on the right.
The prompt is BOS and 32 + d pads.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mistral_layout.audio import (
    DELAY_TOKENS,
    PROMPT_TOKENS,
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    n_tokens,
    prompt_tokens,
)
from mistral_layout.tekken import BOS, EOS, STREAMING_PAD, STREAMING_WORD
from mistral_layout.tensors import EMBEDDINGS, ENCODER
from pico.layers import CHUNK, Block, Cache, Layer, RMSNorm, causal_mask, rope_table, rotate
from pico.mel import MEL_BINS, log_mel, mel_filters, pad_audio

__all__ = [  # includes names that callers import from here
    "BOS",
    "DELAY_TOKENS",
    "EOS",
    "MEL_BINS",
    "PROMPT_TOKENS",
    "SAMPLES_PER_TOKEN",
    "SAMPLE_RATE",
    "STREAMING_PAD",
    "STREAMING_WORD",
    "Block",
    "Cache",
    "causal_mask",
    "log_mel",
    "mel_filters",
    "n_tokens",
    "pad_audio",
    "rope_table",
    "rotate",
]

FRAMES_PER_TOKEN = 4  # encoder frames of 20 ms; the adapter concatenates them
ENCODER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Config:
    encoder: Block
    lm: Block
    vocab_size: int
    t_cond_dim: int

    @classmethod
    def from_params(cls, params: dict) -> "Config":
        """From the content of a Mistral `params.json`."""
        e = params["multimodal"]["whisper_model_args"]["encoder_args"]
        encoder = Block(
            e["dim"],
            e["n_layers"],
            e["n_heads"],
            e["n_kv_heads"],
            e["head_dim"],
            e["hidden_dim"],
            e["sliding_window"],
            e["rope_theta"],
            e["norm_eps"],
        )
        lm = Block(
            params["dim"],
            params["n_layers"],
            params["n_heads"],
            params["n_kv_heads"],
            params["head_dim"],
            params["hidden_dim"],
            params["sliding_window"],
            params["rope_theta"],
            params["norm_eps"],
        )
        return cls(encoder, lm, params["vocab_size"], params["ada_rms_norm_t_cond_dim"])


class Encoder(nn.Module):
    def __init__(self, b: Block):
        super().__init__()
        self.block = b
        self.conv_layers = nn.ModuleList([nn.Conv1d(MEL_BINS, b.dim, 3), nn.Conv1d(b.dim, b.dim, 3, stride=2)])
        self.layers = nn.ModuleList([Layer(b, biases=True) for _ in range(b.n_layers)])
        self.norm = RMSNorm(b.dim, b.norm_eps)

    def forward(self, mel: Tensor, n_frames: Tensor | None = None) -> Tensor:
        """[batch, 128, 2 n] -> [batch, n, dim]. The convolutions are causal, with padding on the left only.

        From frame `n_frames` [batch] on, the layers get zeros, as in vLLM.
        """
        x = F.gelu(self.conv_layers[0](F.pad(mel, (2, 0))))
        x = F.gelu(self.conv_layers[1](F.pad(x, (1, 0)))).transpose(1, 2)
        length = x.shape[1]
        if n_frames is not None:
            x = x * (torch.arange(length, device=x.device) < n_frames[:, None])[..., None]
        if length > self.block.window:
            x = F.pad(x, (0, 0, 0, -length % CHUNK))
        n = x.shape[1]
        rope, mask = rope_table(n, self.block, x.device), causal_mask(n, n, self.block.window, x.device)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return self.norm(x[:, :length])


class Voxtral(nn.Module):
    """The whole model. `_checkpoint_name` converts the names of its parameters to those of the checkpoint."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        lm, enc = config.lm, config.encoder
        self.encoder = Encoder(enc)
        self.audio_language_projection = nn.Sequential(
            nn.Linear(FRAMES_PER_TOKEN * enc.dim, lm.dim, bias=False),
            nn.GELU(),
            nn.Linear(lm.dim, lm.dim, bias=False),
        )
        self.tok_embeddings = nn.Embedding(config.vocab_size, lm.dim)
        self.layers = nn.ModuleList([Layer(lm, t_cond_dim=config.t_cond_dim) for _ in range(lm.n_layers)])
        self.norm = RMSNorm(lm.dim, lm.norm_eps)

    def embed_audio(self, mel: Tensor, n_rows: Tensor | None = None) -> Tensor:
        """[batch, 128, 8 n] -> [batch, n, lm dim], one row per 80 ms. The first `n_rows` rows have audio."""
        frames = self.encoder(mel, None if n_rows is None else n_rows * FRAMES_PER_TOKEN)
        return self.audio_language_projection(frames.unflatten(1, (-1, FRAMES_PER_TOKEN)).flatten(2))

    def t_cond(self, delay: Tensor) -> Tensor:
        """Delay in tokens [batch] -> its embedding [batch, 1, lm dim], cosines and then sines."""
        half = self.config.lm.dim // 2
        angle = torch.exp(-math.log(10000.0) * torch.arange(half, device=delay.device).float() / half)
        angle = delay.float()[:, None, None] * angle
        return torch.cat((angle.cos(), angle.sin()), -1)

    def decode(
        self,
        audio_rows: Tensor,
        tokens: Tensor,
        caches: list[Cache] | None = None,
        delay: Tensor | int = DELAY_TOKENS,
        window: int | None = None,
    ) -> Tensor:
        """Logits [batch, n, vocab] for rows [batch, n, dim] and tokens [batch, n]. `caches` have earlier positions.

        `delay` in tokens, for all clips or for each. `window` in tokens overrides the configured one.
        """
        x = audio_rows + self.tok_embeddings(tokens)
        past = caches[0].length if caches else 0
        n = past + x.shape[1]
        rope = rope_table(n, self.config.lm, x.device, past)
        mask = causal_mask(x.shape[1], n, window or self.config.lm.window, x.device)
        t_cond = self.t_cond(torch.as_tensor(delay, device=x.device).expand(len(x))).to(x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, mask, caches[i] if caches is not None else None, t_cond)
        return F.linear(self.norm(x), self.tok_embeddings.weight)

    @torch.no_grad()
    def transcribe(
        self,
        clips: list[np.ndarray],
        delay: int = DELAY_TOKENS,
        choose: Callable[[Tensor], Tensor] = lambda logits: logits.argmax(-1),
    ) -> list[list[int]]:
        """Tokens of each 16 kHz clip without prompt and EOS, at most as many as the clip has audio rows.

        `choose` takes the logits [clips, vocab] of each position in turn and returns the tokens [clips]; it is greedy.
        """
        device = self.tok_embeddings.weight.device
        lengths = [n_tokens(len(clip), delay) for clip in clips]
        end, first = max(lengths), prompt_tokens(delay)
        padded = np.zeros((len(clips), end * SAMPLES_PER_TOKEN), np.float32)
        for row, length, clip in zip(padded, lengths, clips, strict=True):
            row[: length * SAMPLES_PER_TOKEN] = pad_audio(clip, delay)
        rows = self.embed_audio(log_mel(torch.from_numpy(padded).to(device)))
        said = torch.full((len(clips), end + 1), STREAMING_PAD, device=device)
        said[:, 0] = BOS
        caches = [Cache(end) for _ in self.layers]
        past = 0
        for position in range(first, end + 1):
            logits = self.decode(rows[:, past:position], said[:, past:position], caches, delay)
            said[:, position] = choose(logits[:, -1])
            past = position
        outputs = [row[first : length + 1] for row, length in zip(said.tolist(), lengths, strict=True)]
        return [row[: row.index(EOS)] if EOS in row else row for row in outputs]


def _checkpoint_name(name: str) -> str:
    if name.startswith("encoder.conv_layers."):
        _, _, i, kind = name.split(".")
        return f"{ENCODER}conv_layers.{i}.conv.{kind}"
    if name.startswith("encoder."):
        return f"{ENCODER}transformer.{name.removeprefix('encoder.')}"
    if name.startswith(("tok_embeddings.", "audio_language_projection.")):
        return EMBEDDINGS + name
    return name


def save(model: Voxtral, path: Path) -> None:
    """Write `consolidated.safetensors` in bfloat16 with Mistral's names."""
    save_file(
        {_checkpoint_name(k): v.to(torch.bfloat16).contiguous().cpu() for k, v in model.state_dict().items()},
        path,
    )


def load(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Voxtral:
    """The model in `directory` (params.json, consolidated.safetensors), for inference."""
    model = Voxtral(Config.from_params(json.loads((directory / "params.json").read_text())))
    tensors = load_file(directory / "consolidated.safetensors")
    model.load_state_dict({k: tensors.pop(_checkpoint_name(k)) for k in model.state_dict()})
    if tensors:
        raise ValueError(f"{directory}/consolidated.safetensors has unknown tensors: {sorted(tensors)}")
    return model.to(device, dtype).eval()


def load_audio(directory: Path) -> Voxtral:
    """The model in `directory` with the float32 weights of its audio part alone, for `embed_audio`. The others are on
    the device "meta" and take no memory."""
    with torch.device("meta"):
        model = Voxtral(Config.from_params(json.loads((directory / "params.json").read_text())))
    with safe_open(directory / "consolidated.safetensors", "pt") as file:
        for prefix in ("encoder", "audio_language_projection"):
            part = getattr(model, prefix)
            names = {name: _checkpoint_name(f"{prefix}.{name}") for name in part.state_dict()}
            part.load_state_dict({name: file.get_tensor(held).float() for name, held in names.items()}, assign=True)
    return model.eval()
