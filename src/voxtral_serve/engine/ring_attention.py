"""Attention of live sessions: a few new frames of each against a ring of the frames before them.

Rings lie in one tensor [slots, heads, FRAMES of the ring, head_dim]; frame f of a session is at f modulo the ring's
length. `ring_attention` is a Triton kernel on GPUs, which reads each key and value once and none outside the window;
`gathered_attention` is the same in PyTorch, for CPUs and for comparison.
"""

import torch
import torch.nn.functional as F

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # vLLM for CPUs has none
    triton = None

KEYS = 64  # of one turn of the kernel's loop
LEAST_QUERIES = 16  # rows of the smallest matrix product in Triton


def gathered_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first: torch.Tensor, window: int
) -> torch.Tensor:
    """q [sessions, n, heads, head_dim] of frames first to first + n - 1 of each session, which are in the ring already
    -> [sessions, n, heads, head_dim]. `slots` and `first` are [sessions]; a frame sees itself and window - 1 before it.
    """
    n, ring = q.shape[1], keys.shape[2]
    newest = first + n - 1
    places = torch.arange(ring, device=q.device)
    held = newest[:, None] - (newest[:, None] - places) % ring  # the frame in each place
    frames = first[:, None] + torch.arange(n, device=q.device)
    seen = (held[:, None] >= 0) & (held[:, None] <= frames[..., None]) & (held[:, None] > frames[..., None] - window)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys[slots], values[slots], attn_mask=seen[:, None])
    return out.transpose(1, 2)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        q,
        keys,
        values,
        out,
        slots,
        first,
        scale,
        heads: tl.constexpr,
        head_dim: tl.constexpr,
        ring_length: tl.constexpr,
        window: tl.constexpr,
        n: tl.constexpr,
        n_rows: tl.constexpr,
        n_keys: tl.constexpr,
    ):
        session, head = tl.program_id(0), tl.program_id(1)
        slot, begin = tl.load(slots + session), tl.load(first + session)
        newest = begin + n - 1
        row, dim = tl.arange(0, n_rows), tl.arange(0, head_dim)
        at = ((session * n + row[:, None]) * heads + head) * head_dim + dim[None, :]
        query = tl.load(q + at, mask=row[:, None] < n, other=0.0)
        ring = (slot * heads + head) * ring_length
        best = tl.full([n_rows], -1e30, tl.float32)
        total = tl.zeros([n_rows], tl.float32)
        mixed = tl.zeros([n_rows, head_dim], tl.float32)
        for start in range(tl.maximum(begin - window + 1, 0), newest + 1, n_keys):
            frame = start + tl.arange(0, n_keys)
            place = (ring + frame % ring_length)[:, None] * head_dim + dim[None, :]
            there = frame[:, None] <= newest
            key = tl.load(keys + place, mask=there, other=0.0)
            value = tl.load(values + place, mask=there, other=0.0)
            score = tl.dot(query, tl.trans(key)) * scale
            query_frame = begin + row[:, None]
            seen = (frame[None, :] <= query_frame) & (frame[None, :] > query_frame - window)
            score = tl.where(seen, score, -1e30)
            higher = tl.maximum(best, tl.max(score, 1))
            weight = tl.where(seen, tl.exp(score - higher[:, None]), 0.0)
            shrink = tl.exp(best - higher)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
            best = higher
        tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=row[:, None] < n)


def ring_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, first: torch.Tensor, window: int
) -> torch.Tensor:
    """As `gathered_attention`. float32 goes there too, since the kernel's products are of 16 bits."""
    if not q.is_cuda or triton is None or q.dtype == torch.float32:
        return gathered_attention(q, keys, values, slots, first, window)
    sessions, n, heads, dim = q.shape
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    _kernel[(sessions, heads)](
        q,
        keys,
        values,
        out,
        slots,
        first,
        dim**-0.5,
        heads=heads,
        head_dim=dim,
        ring_length=keys.shape[2],
        window=window,
        n=n,
        n_rows=max(LEAST_QUERIES, triton.next_power_of_2(n)),
        n_keys=KEYS,
        num_warps=4,
    )
    return out
