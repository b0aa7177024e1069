"""Attention of whole clips packed together, for GPUs: causal, with a window, over keys that all clips may share.

Frames of clips lie one after the other in one tensor [frames, heads, head_dim], with the clips' starts in another. The
kernel computes blocks of one clip each, so that clips need no padding to one length, and reads no key outside the
window. The first keys of every clip, those of its left padding, may be in a tensor of their own: they are the same for
all clips, and are computed once (encoder.LeftPadding). encoder.windowed_attention is the same in PyTorch.
"""

import torch

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # vLLM for CPUs has none
    triton = None

QUERIES = 64  # of one block of the kernel
KEYS = 64  # of one turn of its loop

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _clip_of_block(block, query_starts, clips, n_clips: tl.constexpr, n_queries: tl.constexpr):  # type: ignore[no-untyped-def]
        """The clip that a block of queries belongs to, and the number of the block in it; a clip past the last one for
        a block that is not used."""
        each = tl.arange(0, n_clips)
        starts = tl.load(query_starts + each, mask=each < clips, other=0)
        blocks = tl.cdiv(tl.load(query_starts + each + 1, mask=each < clips, other=0) - starts, n_queries)
        clip = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        return clip, block - tl.sum(tl.where(each < clip, blocks, 0), 0)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _rows(own, shared, at, stride, ours, key_at, start, n_shared, column, width: tl.constexpr):  # type: ignore[no-untyped-def]
        """Keys or values of one head: those of the clip in rows `at` where `ours`, and the first ones of all clips."""
        found = tl.load(own + at[:, None] * stride + column[None, :], mask=ours[:, None], other=0.0)
        if start < n_shared:
            place = key_at[:, None] * width + column[None, :]
            found += tl.load(shared + place, mask=(key_at < n_shared)[:, None], other=0.0)
        return found

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        q,
        k,
        v,
        shared_k,
        shared_v,
        out,
        query_starts,
        key_starts,
        scale,
        q_stride,
        k_stride,
        v_stride,
        clips,
        shared,
        heads: tl.constexpr,
        head_dim: tl.constexpr,
        window: tl.constexpr,
        n_clips: tl.constexpr,
        n_queries: tl.constexpr,
        n_keys: tl.constexpr,
    ):
        head = tl.program_id(1)
        clip, number = _clip_of_block(tl.program_id(0), query_starts, clips, n_clips, n_queries)
        if clip >= clips:
            return
        first_query, last_query = tl.load(query_starts + clip), tl.load(query_starts + clip + 1)
        first_key, last_key = tl.load(key_starts + clip), tl.load(key_starts + clip + 1)
        held = shared + last_key - first_key  # keys of the clip; its queries are at the last of these positions
        row = number * n_queries + tl.arange(0, n_queries)
        there = row < last_query - first_query
        position = held - (last_query - first_query) + row
        dim = tl.arange(0, head_dim)
        column = head * head_dim + dim
        at = (first_query + row).to(tl.int64)
        query = tl.load(q + at[:, None] * q_stride + column[None, :], mask=there[:, None], other=0.0)
        best = tl.full([n_queries], -1e30, tl.float32)
        total = tl.zeros([n_queries], tl.float32)
        mixed = tl.zeros([n_queries, head_dim], tl.float32)
        begin = held - (last_query - first_query) + number * n_queries
        end = tl.minimum(begin + n_queries, held)
        for start in range(tl.maximum(begin - window + 1, 0), end, n_keys):
            key_at = start + tl.arange(0, n_keys)
            own = (first_key + key_at - shared).to(tl.int64)
            ours = (key_at >= shared) & (key_at < end)
            key = _rows(k, shared_k, own, k_stride, ours, key_at, start, shared, column, heads * head_dim)
            value = _rows(v, shared_v, own, v_stride, ours, key_at, start, shared, column, heads * head_dim)
            score = tl.dot(query, tl.trans(key)) * scale  # times log2(e)
            seen = (key_at[None, :] <= position[:, None]) & (key_at[None, :] > position[:, None] - window)
            score = tl.where(seen, score, -1e30)
            higher = tl.maximum(best, tl.max(score, 1))
            weight = tl.where(seen, tl.exp2(score - higher[:, None]), 0.0)
            shrink = tl.exp2(best - higher)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
            best = higher
        mixed = mixed / tl.maximum(total, 1e-30)[:, None]
        place = at[:, None] * (heads * head_dim) + column[None, :]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=there[:, None])


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    window: int,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """q [queries, heads, head_dim], k and v [keys, heads, head_dim] of all clips -> [queries, heads, head_dim].

    `query_starts` and `key_starts`, int32 [clips + 1], have the first query and key of each clip, and the end. The
    queries of a clip are at its last positions. A query sees itself and the window - 1 keys before it. `shared`: keys
    and values [n, heads, head_dim], contiguous, that come before those of every clip.
    """
    queries, heads, dim = q.shape
    out = torch.empty((queries, heads, dim), dtype=q.dtype, device=q.device)
    clips = len(query_starts) - 1
    shared_k, shared_v = shared if shared is not None else (k, v)
    _kernel[(triton.cdiv(queries, QUERIES) + clips, heads)](
        q,
        k,
        v,
        shared_k,
        shared_v,
        out,
        query_starts,
        key_starts,
        dim**-0.5 * 1.4426950408889634,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        clips,
        0 if shared is None else len(shared_k),
        heads=heads,
        head_dim=dim,
        window=window,
        n_clips=triton.next_power_of_2(clips),
        n_queries=QUERIES,
        n_keys=KEYS,
        num_warps=4,
    )
    return out
