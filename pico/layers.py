"""The transformer layers of pico.model: rotary positions, attention with a window and a cache, feed-forward."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 256  # number of queries per block of windowed attention
FLASH = True  # use FlashAttention in `windowed_attention` if it is available


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


def rope_table(n: int, block: Block, device: torch.device, first: int = 0) -> Tensor:
    """Cosines and sines of positions `first` to n - 1, float32 [2, n - first, head_dim / 2].

    For interleaved pairs, as in Mistral's weights.
    """
    inv_freq = block.theta ** (-torch.arange(0, block.head_dim, 2, device=device).float() / block.head_dim)
    angle = torch.arange(first, n, device=device).float()[:, None] * inv_freq
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply the rotary `table` [2, n, head_dim / 2] to x [batch, heads, n, head_dim]."""
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


class Cache:
    """Keys and values of one layer, with space for `room` positions."""

    def __init__(self, room: int):
        self.room, self.length = room, 0
        self.kept: list[Tensor] = []

    def append(self, *new: Tensor) -> list[Tensor]:
        """Append new keys and values. Returns all keys and all values, [batch, heads, length, head_dim] each."""
        if not self.kept:
            self.kept = [x.new_zeros(*x.shape[:2], self.room, x.shape[3]) for x in new]
        first, self.length = self.length, self.length + new[0].shape[2]
        for kept, x in zip(self.kept, new, strict=True):
            kept[:, :, first : self.length] = x
        return [kept[:, :, : self.length] for kept in self.kept]


class Windows(NamedTuple):
    """A mask for sequences that are much longer than the window.

    A chunk of queries attends to the keys of its own chunk and of the previous chunks within the window. The cost per
    position is therefore independent of the length of the sequence.
    """

    size: int  # a position attends to itself and to size - 1 positions before it
    mask: Tensor  # bool [chunks, CHUNK, keys]


Mask: TypeAlias = Tensor | Windows | None


@torch.compiler.disable
def windowed_attention(q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
    """Attention of q [batch, heads, n, head_dim] to k and v with as many or fewer heads. n is a multiple of CHUNK.

    Uses FlashAttention for bfloat16 on a GPU, which takes half the time; it does not support float32. Excluded from
    compilation, which takes minutes for its symbolic shapes.
    """
    heads, n = q.shape[1:3]
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    if FLASH and q.is_cuda and q.dtype == torch.bfloat16:
        from torch.nn.attention.varlen import varlen_attn  # supports windows since torch 2.11

        begins = torch.arange(0, len(q) * n + 1, n, dtype=torch.int32, device=q.device)
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        y = varlen_attn(*packed, begins, begins, n, n, window_size=(windows.size - 1, 0))
        return y.unflatten(0, (-1, n)).transpose(1, 2)
    back = windows.mask.shape[2] // CHUNK - 1

    def near(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, back * CHUNK, 0)).unflatten(2, (-1, CHUNK))
        return torch.cat([padded[:, :, i : i + n // CHUNK] for i in range(back + 1)], 3).flatten(1, 2)

    queries, mask = q.unflatten(2, (-1, CHUNK)).flatten(1, 2), windows.mask.repeat(heads, 1, 1)
    y = F.scaled_dot_product_attention(queries, near(k), near(v), attn_mask=mask)
    return y.unflatten(1, (heads, -1)).flatten(2, 3)


class Attention(nn.Module):
    def __init__(self, b: Block, biases: bool):
        super().__init__()
        self.block = b
        self.wq = nn.Linear(b.dim, b.n_heads * b.head_dim, bias=biases)
        self.wk = nn.Linear(b.dim, b.n_kv_heads * b.head_dim, bias=False)
        self.wv = nn.Linear(b.dim, b.n_kv_heads * b.head_dim, bias=biases)
        self.wo = nn.Linear(b.n_heads * b.head_dim, b.dim, bias=biases)

    def forward(self, x: Tensor, rope: Tensor, mask: Mask, cache: Cache | None) -> Tensor:
        b = self.block
        heads = lambda y: y.unflatten(-1, (-1, b.head_dim)).transpose(1, 2)  # noqa: E731
        q, k, v = rotate(heads(self.wq(x)), rope), rotate(heads(self.wk(x)), rope), heads(self.wv(x))
        if cache is not None:
            k, v = cache.append(k, v)
        if isinstance(mask, Windows):
            y = windowed_attention(q, k, v, mask)
        else:
            causal, gqa = mask is None and (cache is None or q.shape[2] > 1), b.n_heads != b.n_kv_heads
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
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
    """One transformer layer. With `t_cond_dim`, the delay scales the input of the feed-forward, as in the decoder."""

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
        mask: Mask,
        cache: Cache | None = None,
        t_cond: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask, cache)
        h = self.ffn_norm(x)
        if t_cond is not None:
            h = h * (1 + self.ada_rms_norm_t_cond(t_cond))
        return x + self.feed_forward(h)


@lru_cache(16)
def causal_mask(n_queries: int, n_keys: int, window: int, device: torch.device) -> Mask:
    """The attention mask, bool [n_queries, n_keys], True if a query attends to a key.

    None if plain causal attention is equivalent. `Windows` for a whole sequence that is much longer than the window.
    """
    if n_keys <= window and n_queries in (1, n_keys):
        return None
    reach = -(-(window - 1) // CHUNK) * CHUNK
    if n_queries == n_keys and n_keys % CHUNK == 0 and n_keys > CHUNK + reach:
        q = torch.arange(n_keys, device=device).view(-1, CHUNK, 1)
        k = q[:, :1] - reach + torch.arange(CHUNK + reach, device=device)
        return Windows(window, (k >= 0) & (k <= q) & (k > q - window))
    q = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    k = torch.arange(n_keys, device=device)[None]
    return (k <= q) & (k > q - window)
