"""Attention of the language model over vLLM's paged KV cache, for GPUs: a few new tokens of each of many requests.

The kernel gives each block the new tokens of one request and one head of the KV cache, so that each key and value is
read once for all query heads that share it. It is for many requests: nothing is split over a context (vLLM's own kernel
does that, and serves batches that are too small to fill the GPU; attention_backend.py chooses).
"""

import torch

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # vLLM for CPUs has none
    triton = None

ROWS = 16  # of a block, tokens times query heads of one KV head: those of the smallest matrix product in Triton
KEYS = 64  # of a turn of the loop
WARPS, STAGES = 4, 2
LEAST_REQUESTS = 64  # that a block looks itself up among: fewer sizes are fewer compilations

if triton is not None:
    from voxtral_serve.engine.packed_attention import online_softmax, part_of_block

    @triton.jit(do_not_specialize=["requests"])  # type: ignore[untyped-decorator,unused-ignore]
    def _kernel(  # type: ignore[no-untyped-def]
        q,
        keys,
        values,
        out,
        starts,
        lengths,
        pages,
        scale,
        q_stride,
        out_stride,
        pages_stride,
        keys_page,
        keys_token,
        keys_head,
        values_page,
        values_token,
        values_head,
        requests,
        window,
        head_dim: tl.constexpr,
        group: tl.constexpr,
        page_size: tl.constexpr,
        n_rows: tl.constexpr,
        n_keys: tl.constexpr,
        n_requests: tl.constexpr,
        one_block: tl.constexpr,
    ):
        kv_head = tl.program_id(0)
        if one_block:
            request, first = tl.program_id(1), 0
        else:
            request, number = part_of_block(tl.program_id(1), starts, requests, n_requests, n_rows // group)
            first = number * (n_rows // group)
        if request >= requests:
            return
        begin, length = tl.load(starts + request), tl.load(lengths + request)
        asked = tl.load(starts + request + 1) - begin
        row, dim = tl.arange(0, n_rows)[:, None], tl.arange(0, head_dim)[None, :]
        token = first + row // group
        column = (kv_head * group + row % group) * head_dim + dim
        query = tl.load(q + (begin + token).to(tl.int64) * q_stride + column, mask=token < asked, other=0.0)
        position = length - asked + token
        end = tl.where(asked > 0, tl.minimum(length - asked + first + n_rows // group, length), 0)
        best, total = tl.full([n_rows], -1e30, tl.float32), tl.zeros([n_rows], tl.float32)
        mixed = tl.zeros([n_rows, head_dim], tl.float32)
        pages += request.to(tl.int64) * pages_stride
        keys, values = keys + kv_head * keys_head, values + kv_head * values_head
        for start in range(tl.maximum(length - asked + first - window + 1, 0), end, n_keys):
            at = start + tl.arange(0, n_keys)
            page = tl.load(pages + at // page_size, mask=at < end, other=0).to(tl.int64)
            there = (at < end)[:, None]
            key = tl.load(keys + (page * keys_page + at % page_size * keys_token)[:, None] + dim, mask=there, other=0.0)
            value_place = (page * values_page + at % page_size * values_token)[:, None] + dim
            value = tl.load(values + value_place, mask=there, other=0.0)
            seen = (at[None, :] <= position) & (at[None, :] > position - window) & (at[None, :] < end)
            best, total, mixed = online_softmax(query, key, value, seen, best, total, mixed, scale)
        done = (mixed / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (begin + token).to(tl.int64) * out_stride + column, done, mask=token < asked)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    pages: torch.Tensor,
    most: int,
    scale: float,
    window: int | None = None,
) -> None:
    """q [tokens, heads, head_dim] of 16 bits, the new tokens of all requests -> `out`, of the same shape.

    `keys` and `values` [pages, page size, KV heads, head_dim] are the cache, which the new tokens are in already.
    `starts` int32 [requests + 1] has the first new token of each request, and the end; `most` is the most new tokens of
    one request. `lengths` int32 [requests] counts a request's tokens, the new ones are the last of them. `pages` int32
    [requests, n] has the pages of each. A token sees itself and the window - 1 tokens before it; None: all.

    Heads and their elements must be contiguous in q and out, and the elements of a head in the cache. q and the cache
    have one type; head_dim and the query heads of a KV head are powers of two.
    """
    requests, kv_heads = len(lengths), keys.shape[2]
    group = q.shape[1] // kv_heads
    n_rows = max(ROWS, triton.next_power_of_2(group))
    one_block = most * group <= n_rows
    _kernel[(kv_heads, requests if one_block else len(q) * group // n_rows + requests)](
        *(q, keys, values, out, starts, lengths, pages),
        scale * 1.4426950408889634,
        q.stride(0),
        out.stride(0),
        pages.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        requests,
        2**30 if window is None else window,
        head_dim=q.shape[2],
        group=group,
        page_size=keys.shape[1],
        n_rows=n_rows,
        n_keys=KEYS,
        n_requests=1 if one_block else max(LEAST_REQUESTS, triton.next_power_of_2(requests)),
        one_block=one_block,
        num_warps=WARPS,
        num_stages=STAGES,
    )
