"""Voxtral Realtime in plain PyTorch: what pico is trained with, and the reference that a served model is compared to.

Written from the published architecture (params.json of Voxtral-Mini-4B-Realtime-2602 and its technical report); it
shares no code with vLLM, so that an error in either shows as a difference.

    waveform --log-mel--> [128, 8 n] --conv stem, stride 2--> [4 n, dim] --causal encoder--> [4 n, dim]
             --4 frames concatenated, adapter--> [n, lm dim], one row for every 80 ms: one row per text token

At position p the decoder reads the sum of row p and the embedding of token p, and predicts token p + 1. A clip is
padded with 32 tokens of silence on its left and at least 17 on its right; the prompt is BOS and 38 pads.
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mistral_layout.audio import (
    DELAY_TOKENS,
    LEFT_PAD_TOKENS,
    PROMPT_TOKENS,
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    SPECTROGRAM,
    n_tokens,
)
from mistral_layout.tensors import EMBEDDINGS, ENCODER

FRAMES_PER_TOKEN = 4  # encoder frames of 20 ms; the adapter concatenates them
MEL_BINS, HOP, N_FFT = SPECTROGRAM["num_mel_bins"], SPECTROGRAM["hop_length"], SPECTROGRAM["window_size"]
LOG_MEL_MAX = 1.5  # log10; everything 8 below it is the floor
ENCODER_NORM_EPS = 1e-5
BOS, EOS, STREAMING_PAD, STREAMING_WORD = 1, 2, 32, 33


@dataclass(frozen=True)
class Block:
    """Shape of one transformer stack."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    window: int  # a position attends to itself and to window - 1 positions before it
    theta: float
    norm_eps: float


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


def pad_audio(audio: np.ndarray) -> np.ndarray:
    """float [n] -> float32 [n_tokens(n) * 1280]: silence left and right, as mistral-common's offline streaming mode."""
    out = np.zeros(n_tokens(len(audio)) * SAMPLES_PER_TOKEN, np.float32)
    out[LEFT_PAD_TOKENS * SAMPLES_PER_TOKEN :][: len(audio)] = audio
    return out


@lru_cache
def mel_filters() -> Tensor:
    """[201, 128] triangular filters on Slaney's mel scale, area-normalised (the default of librosa.filters.mel)."""

    def to_mel(f: np.ndarray) -> np.ndarray:
        return np.where(f < 1000, f * 3 / 200, 15 + np.log(np.maximum(f, 1) / 1000) * 27 / np.log(6.4))

    def to_hz(m: np.ndarray) -> np.ndarray:
        return np.where(m < 15, m * 200 / 3, 1000 * np.exp((m - 15) * np.log(6.4) / 27))

    edges = to_hz(np.linspace(to_mel(np.array(0.0)), to_mel(np.array(8000.0)), MEL_BINS + 2))
    freqs = np.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    slopes = edges[None, :] - freqs[:, None]
    rise = -slopes[:, :-2] / np.diff(edges)[:-1]
    fall = slopes[:, 2:] / np.diff(edges)[1:]
    filters = np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))
    return torch.from_numpy(filters).float()


def log_mel(audio: Tensor) -> Tensor:
    """float32 [..., n] -> [..., 128, n / 160], about -0.6 (floor) to 1.4."""
    filters = mel_filters().to(audio.device)
    window = torch.hann_window(N_FFT, device=audio.device)
    power = torch.stft(audio, N_FFT, HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    mel = (filters.T @ power).clamp_min(1e-10).log10()
    return (mel.clamp_min(LOG_MEL_MAX - 8) + 4) / 4


def rope_table(n: int, block: Block, device: torch.device) -> Tensor:
    """float32 [2, n, head_dim / 2], cosines and sines, for neighbouring pairs (interleaved) as in Mistral's weights."""
    inv_freq = block.theta ** (-torch.arange(0, block.head_dim, 2, device=device).float() / block.head_dim)
    angle = torch.arange(n, device=device).float()[:, None] * inv_freq
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [batch, heads, n, head_dim], table [2, n, head_dim / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), self.weight.shape, eps=self.eps) * self.weight).type_as(x)


class Attention(nn.Module):
    def __init__(self, b: Block, biases: bool):
        super().__init__()
        self.block = b
        self.wq = nn.Linear(b.dim, b.n_heads * b.head_dim, bias=biases)
        self.wk = nn.Linear(b.dim, b.n_kv_heads * b.head_dim, bias=False)
        self.wv = nn.Linear(b.dim, b.n_kv_heads * b.head_dim, bias=biases)
        self.wo = nn.Linear(b.n_heads * b.head_dim, b.dim, bias=biases)

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: list[Tensor] | None) -> Tensor:
        b = self.block
        heads = lambda y: y.unflatten(-1, (-1, b.head_dim)).transpose(1, 2)  # noqa: E731
        q, k, v = rotate(heads(self.wq(x)), rope), rotate(heads(self.wk(x)), rope), heads(self.wv(x))
        if cache is not None:
            if cache:
                k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
            cache[:] = [k, v]
        gqa = b.n_heads != b.n_kv_heads
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, b: Block, bias: bool):
        super().__init__()
        self.w1 = nn.Linear(b.dim, b.hidden_dim, bias=False)
        self.w2 = nn.Linear(b.hidden_dim, b.dim, bias=bias)
        self.w3 = nn.Linear(b.dim, b.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """One transformer layer; with `t_cond_dim` the decoder's, whose feed-forward input is scaled by the delay."""

    def __init__(self, b: Block, biases: bool = False, t_cond_dim: int = 0):
        super().__init__()
        self.attention = Attention(b, biases)
        self.attention_norm = RMSNorm(b.dim, b.norm_eps)
        self.feed_forward = FeedForward(b, biases)
        self.ffn_norm = RMSNorm(b.dim, b.norm_eps)
        if t_cond_dim:
            self.ada_rms_norm_t_cond = nn.Sequential(
                nn.Linear(b.dim, t_cond_dim, bias=False), nn.GELU(), nn.Linear(t_cond_dim, b.dim, bias=False)
            )

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None,
        cache: list[Tensor] | None = None,
        t_cond: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask, cache)
        h = self.ffn_norm(x)
        if t_cond is not None:
            h = h * (1 + self.ada_rms_norm_t_cond(t_cond))
        return x + self.feed_forward(h)


def causal_mask(n_queries: int, n_keys: int, window: int, device: torch.device) -> Tensor | None:
    """bool [n_queries, n_keys], true where a query may look; None where plain causal attention says the same."""
    if n_queries == n_keys and n_keys <= window:
        return None
    q = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    k = torch.arange(n_keys, device=device)[None]
    return (k <= q) & (k > q - window)


class Encoder(nn.Module):
    def __init__(self, b: Block):
        super().__init__()
        self.block = b
        self.conv_layers = nn.ModuleList([nn.Conv1d(MEL_BINS, b.dim, 3), nn.Conv1d(b.dim, b.dim, 3, stride=2)])
        self.layers = nn.ModuleList([Layer(b, biases=True) for _ in range(b.n_layers)])
        self.norm = RMSNorm(b.dim, b.norm_eps)

    def forward(self, mel: Tensor) -> Tensor:
        """[batch, 128, 2 n] -> [batch, n, dim]. The convolutions look back only: all padding is on the left."""
        x = F.gelu(self.conv_layers[0](F.pad(mel, (2, 0))))
        x = F.gelu(self.conv_layers[1](F.pad(x, (1, 0)))).transpose(1, 2)
        n = x.shape[1]
        rope, mask = rope_table(n, self.block, x.device), causal_mask(n, n, self.block.window, x.device)
        for layer in self.layers:
            x = layer(x, rope, mask)
        return self.norm(x)


class Voxtral(nn.Module):
    """The whole model; parameters named as in the Mistral checkpoint but for the prefixes of `_checkpoint_name`."""

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

    def embed_audio(self, mel: Tensor) -> Tensor:
        """[batch, 128, 8 n] -> [batch, n, lm dim]: one row for every 80 ms."""
        frames = self.encoder(mel)
        return self.audio_language_projection(frames.unflatten(1, (-1, FRAMES_PER_TOKEN)).flatten(2))

    def t_cond(self, device: torch.device) -> Tensor:
        """[lm dim]: cosines, then sines, of the delay in tokens."""
        half = self.config.lm.dim // 2
        angle = DELAY_TOKENS * torch.exp(-math.log(10000.0) * torch.arange(half, device=device).float() / half)
        return torch.cat((angle.cos(), angle.sin()))

    def decode(self, audio_rows: Tensor, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        """Logits [batch, n, vocab] for rows [batch, n, dim] and tokens [batch, n]; caches hold what came before."""
        x = audio_rows + self.tok_embeddings(tokens)
        past = caches[0][0].shape[2] if caches and caches[0] else 0
        n = past + x.shape[1]
        rope = rope_table(n, self.config.lm, x.device)[:, past:]
        mask = causal_mask(x.shape[1], n, self.config.lm.window, x.device)
        t_cond = self.t_cond(x.device).to(x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, mask, caches[i] if caches is not None else None, t_cond)
        return F.linear(self.norm(x), self.tok_embeddings.weight)

    @torch.no_grad()
    def transcribe(self, clips: list[np.ndarray]) -> list[list[int]]:
        """Greedy tokens of each 16 kHz clip, prompt and EOS left out; never more than the clip has audio rows."""
        device = self.tok_embeddings.weight.device
        lengths = [n_tokens(len(c)) for c in clips]
        padded = np.zeros((len(clips), max(lengths) * SAMPLES_PER_TOKEN), np.float32)
        for row, clip in zip(padded, clips, strict=True):
            row[: n_tokens(len(clip)) * SAMPLES_PER_TOKEN] = pad_audio(clip)
        rows = self.embed_audio(log_mel(torch.from_numpy(padded).to(device)))
        tokens = torch.full((len(clips), PROMPT_TOKENS), STREAMING_PAD, device=device)
        tokens[:, 0] = BOS
        caches: list[list[Tensor]] = [[] for _ in self.layers]
        outputs: list[list[int]] = [[] for _ in clips]
        done = [False] * len(clips)
        for position in range(PROMPT_TOKENS, max(lengths) + 1):
            past = position - tokens.shape[1]
            logits = self.decode(rows[:, past:position], tokens, caches)[:, -1]
            tokens = logits.argmax(-1, keepdim=True)
            for i, token in enumerate(tokens[:, 0].tolist()):
                done[i] |= token == EOS or position > lengths[i]
                if not done[i]:
                    outputs[i].append(token)
            if all(done):
                break
        return outputs


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
    """Write `consolidated.safetensors`: bfloat16, Mistral's names."""
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
        raise ValueError(f"{directory}/consolidated.safetensors holds tensors that the model lacks: {sorted(tensors)}")
    return model.to(device, dtype).eval()
