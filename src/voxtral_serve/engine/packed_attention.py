"""Attention of whole clips packed together, for GPUs: causal, with a window, over keys that all clips may share.

Frames of clips lie one after the other in one tensor [frames, heads, head_dim], with the clips' starts in another. The
kernel computes blocks of one clip each, so that clips need no padding to one length, and reads no key outside the
window. The first keys of every clip, those of its left padding, may be in a tensor of their own: they are the same for
all clips, and are computed once (encoder.LeftPadding). encoder.windowed_attention is the same in PyTorch.
"""

from typing import NamedTuple

import torch

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # vLLM for CPUs has none
    triton = None


class Shape(NamedTuple):
    """How the kernel runs: queries of a block, keys of a turn of its loop, warps, turns whose keys are on their way,
    and the most registers of a thread. None: the compiler's choice."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int | None = None
    registers: int | None = None


SHAPE = Shape()

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def part_of_block(block, query_starts, clips, n_clips: tl.constexpr, n_queries: tl.constexpr):  # type: ignore[no-untyped-def]
        """The clip that a block of queries belongs to, and the number of the block in it; a clip past the last one for
        a block that is not used."""
        each = tl.arange(0, n_clips)
        starts = tl.load(query_starts + each, mask=each < clips, other=0)
        blocks = tl.cdiv(tl.load(query_starts + each + 1, mask=each < clips, other=0) - starts, n_queries)
        clip = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
        return clip, block - tl.sum(tl.where(each < clip, blocks, 0), 0)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def online_softmax(query, key, value, seen, best, total, mixed, scale):  # type: ignore[no-untyped-def]
        """Add keys and values [n_keys, head_dim], where `seen` [n_queries, n_keys], to the highest scores so far, the
        sums of weights, and the weighted sums of values. `scale` includes log2(e)."""
        score = tl.where(seen, tl.dot(query, tl.trans(key)) * scale, -1e30)
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.where(seen, tl.exp2(score - higher[:, None]), 0.0)
        shrink = tl.exp2(best - higher)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        return higher, total * shrink + tl.sum(weight, 1), mixed

    # The last blocks of a clip have the most keys, so they begin first.
    # Positions are those among the clip's own keys; the queries are at the last of them, the shared keys before 0.
    # Turns over the shared keys in the window, then over the clip's own. A turn reads one of the two tensors, so
    # that its keys go straight to the memory that the matrix products read.
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
        queries,
        heads: tl.constexpr,
        head_dim: tl.constexpr,
        window: tl.constexpr,
        n_clips: tl.constexpr,
        n_queries: tl.constexpr,
        n_keys: tl.constexpr,
    ):
        block = tl.num_programs(1) - 1 - tl.program_id(1)
        clip, number = part_of_block(block, query_starts, clips, n_clips, n_queries)
        column = tl.program_id(0) * head_dim + tl.arange(0, head_dim)[None, :]
        if clip >= clips:  # the rows past the last clip: with one scale per tensor, a NaN there would reach the others
            row = tl.load(query_starts + clips) + number * n_queries + tl.arange(0, n_queries)[:, None]
            nothing = tl.zeros([n_queries, head_dim], out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * (heads * head_dim) + column, nothing, mask=row < queries)
            return
        first_query, last_query = tl.load(query_starts + clip), tl.load(query_starts + clip + 1)
        first_key, last_key = tl.load(key_starts + clip), tl.load(key_starts + clip + 1)
        held = last_key - first_key
        row = first_query + number * n_queries + tl.arange(0, n_queries)[:, None]
        asked = row < last_query
        begin = held - (last_query - first_query) + number * n_queries
        end = tl.minimum(begin + n_queries, held)
        position = begin + tl.arange(0, n_queries)[:, None]
        query = tl.load(q + row.to(tl.int64) * q_stride + column, mask=asked, other=0.0)
        k, v = k + first_key.to(tl.int64) * k_stride, v + first_key.to(tl.int64) * v_stride
        best = tl.full([n_queries], -1e30, tl.float32)
        total, mixed = tl.zeros([n_queries], tl.float32), tl.zeros([n_queries, head_dim], tl.float32)
        first_shared = tl.minimum(tl.maximum(begin + shared - window + 1, 0), shared)
        first_own = tl.maximum(begin - window + 1, 0)
        of_shared = tl.cdiv(shared - first_shared, n_keys)
        for number_of_turn in range(of_shared + tl.cdiv(end - first_own, n_keys)):
            is_own = number_of_turn >= of_shared
            start = tl.where(is_own, first_own - of_shared * n_keys, first_shared) + number_of_turn * n_keys
            key_row = start + tl.arange(0, n_keys)[:, None]
            there = key_row < tl.where(is_own, end, shared)
            key_place = key_row * tl.where(is_own, k_stride, heads * head_dim) + column
            value_place = key_row * tl.where(is_own, v_stride, heads * head_dim) + column
            key = tl.load(tl.where(is_own, k, shared_k) + key_place, mask=there, other=0.0)
            value = tl.load(tl.where(is_own, v, shared_v) + value_place, mask=there, other=0.0)
            key_at = start - tl.where(is_own, 0, shared) + tl.arange(0, n_keys)[None, :]
            seen = (key_at <= position) & (key_at > position - window) & (key_at < tl.where(is_own, end, 0))
            best, total, mixed = online_softmax(query, key, value, seen, best, total, mixed, scale)
        done = (mixed / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * (heads * head_dim) + column, done, mask=asked)


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    window: int,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    shape: Shape = SHAPE,
) -> torch.Tensor:
    """q [queries, heads, head_dim], k and v [keys, heads, head_dim] of all clips -> [queries, heads, head_dim].

    `query_starts` and `key_starts`, int32 [clips + 1], have the first query and key of each clip, and the end. The
    queries of a clip are at its last positions. A query sees itself and the window - 1 keys before it. `shared`: keys
    and values [n, heads, head_dim], contiguous, that come before those of every clip. Queries past the end get zeros.
    """
    queries, heads, dim = q.shape
    out = torch.empty((queries, heads, dim), dtype=q.dtype, device=q.device)
    clips = len(query_starts) - 1
    shared_k, shared_v = shared if shared is not None else (k, v)
    # Triton refuses an option that it does not know for a GPU, such as maxnreg for AMD's, also if it is None.
    options = {"num_warps": shape.warps, "num_stages": shape.stages, "maxnreg": shape.registers}
    _kernel[(heads, triton.cdiv(queries, shape.queries) + clips)](
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
        queries,
        heads=heads,
        head_dim=dim,
        window=window,
        n_clips=triton.next_power_of_2(clips),
        n_queries=shape.queries,
        n_keys=shape.keys,
        **{name: value for name, value in options.items() if value is not None},
    )
    return out
