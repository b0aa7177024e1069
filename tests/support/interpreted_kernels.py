"""Run the Triton kernels of the engine in Triton's interpreter, on a CPU, and print their errors as lines of JSON.

A program of its own: Triton reads TRITON_INTERPRET when it is imported. Each line has the case, and the largest
absolute difference from attention in float32 over whole sequences, of float16 inputs with values of about 1; for the
attention backend, from vLLM's own, whose kernel runs in the interpreter too.
"""

import itertools
import json
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from triton.backends.nvidia.driver import CudaDriver

from voxtral_serve.engine.draft_stream import _gather, gathered
from voxtral_serve.engine.packed_attention import packed_attention
from voxtral_serve.engine.paged_attention import paged_attention
from voxtral_serve.engine.ring_attention import _kernel, gathered_attention

HEADS, DIM = 2, 64
# window, lengths of the clips, keys that all clips share, keys of each clip before its queries
PACKED = (
    (750, (300, 64, 1, 0, 0), 0, 0),
    (50, (130, 200, 65), 0, 0),
    (50, (130, 200, 65), 40, 0),
    (750, (130, 20), 124, 0),
    (300, (500, 3, 90), 124, 0),
    (30, (70, 5), 124, 0),
    (100, (150,), 0, 99),
)
# window, ring, new frames, first new frame of each session
RINGS = ((750, 756, 4, (0, 5, 900)), (40, 72, 32, (0, 100)))
# window, (new tokens, tokens in all) of each request, whether keys and values of a head lie together as in vLLM 0.32.0,
# the most new tokens that the CUDA graph is for (0: of these requests), query heads of a KV head; a request of (0, 0)
# fills the graph
PAGED = (
    (None, ((1, 1), (1, 64), (1, 200), (0, 0)), True, 0, 4),
    (None, ((1, 1), (1, 64), (1, 200), (0, 0)), True, 3, 4),
    (None, ((1, 1), (1, 64), (1, 200), (0, 0)), True, 64, 4),
    (None, ((3, 3), (3, 130), (0, 0)), False, 0, 4),
    (None, ((39, 39), (1, 90), (2, 70), (70, 131), (0, 0), (0, 0)), True, 0, 4),
    (None, ((39, 39), (1, 90), (2, 70)), False, 0, 1),
    (None, ((39, 39), (1, 90), (2, 70)), False, 0, 32),
    (50, ((1, 40), (1, 130), (20, 139)), False, 0, 4),
)
PAGE = 16
# drafts, tokens that the request in each slot has, slots of a step's requests
DRAFTS = ((15, (0, 39, 700, 5), (3, 1, 0)), (1, (7, 3), (1,)), (4, (600, 601), (0, 1)))
# window, requests as above
BACKEND = (
    (None, ((1, 1), (1, 64), (1, 200))),
    (8192, ((39, 39), (1, 90), (2, 70))),
    (50, ((1, 40), (1, 130), (20, 139))),
)


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """q [n, heads, dim] at the last n of the positions of k and v, in float32."""
    position, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    seen = (key <= position) & (key > position - window)
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def packed(window: int, lengths: tuple[int, ...], shared: int, before: int) -> float:
    query_starts = [0, *itertools.accumulate(lengths)]
    key_starts = [0, *itertools.accumulate(length + before for length in lengths)]
    # Slices of wider tensors, as the encoder's are
    q = random(query_starts[-1] + 7, 3 * HEADS * DIM)[:, : HEADS * DIM].unflatten(-1, (HEADS, DIM))
    k, v = random(key_starts[-1] + 3, 2 * HEADS * DIM).unflatten(-1, (2, HEADS, DIM)).unbind(1)
    left = (random(shared, HEADS, DIM), random(shared, HEADS, DIM)) if shared else None
    starts = (torch.tensor(each, dtype=torch.int32) for each in (query_starts, key_starts))
    got = packed_attention(q, k, v, *starts, window, left)
    worst = 0.0
    for queries, keys in zip(itertools.pairwise(query_starts), itertools.pairwise(key_starts), strict=True):
        own_q, own_k, own_v = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        if left is not None:
            own_k, own_v = torch.cat([left[0], own_k]), torch.cat([left[1], own_v])
        if len(own_q):
            difference = got[slice(*queries)].float() - windowed(own_q, own_k, own_v, window)
            worst = max(worst, difference.abs().max().item())
    return worst


def ring(window: int, length: int, new: int, first: tuple[int, ...]) -> float:
    sessions = len(first)
    keys, values = (random(sessions + 1, HEADS, length, DIM) for _ in "kv")
    slots, begin = torch.arange(sessions, 0, -1), torch.tensor(first)
    q, out = random(sessions, new, HEADS, DIM), torch.zeros(sessions, new, HEADS, DIM).half()
    _kernel[(sessions, HEADS)](
        *(q, keys, values, out, slots, begin, DIM**-0.5),
        **{"heads": HEADS, "head_dim": DIM, "ring_length": length, "window": window, "n": new},
        **{"n_rows": 16 if new <= 16 else 32, "n_keys": 64},
    )
    expected = gathered_attention(q.float(), keys.float(), values.float(), slots, begin, window)
    return (out.float() - expected).abs().max().item()


def pages_of(counts: list[int]) -> torch.Tensor:
    """Pages in a random order for requests with so many: [requests, most pages]."""
    order, table = torch.randperm(sum(counts)), torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return table


def paged(
    window: int | None, requests: tuple[tuple[int, int], ...], together: bool, most_of_graph: int, group: int
) -> float:
    kv_heads = HEADS
    counts = [-(-length // PAGE) for _, length in requests]
    table = pages_of(counts)
    if together:
        cache = random(sum(counts), kv_heads, PAGE, 2 * DIM)
        keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
    else:
        keys, values = random(sum(counts), 2, PAGE, kv_heads, DIM).unbind(1)
    starts = [0, *itertools.accumulate(new for new, _ in requests)]
    q = random(starts[-1], (group + 2) * kv_heads * DIM)[:, : group * kv_heads * DIM].unflatten(-1, (-1, DIM))
    out = torch.full(q.shape, torch.nan).half()
    most = most_of_graph or max(new for new, _ in requests)
    lengths = torch.tensor([length for _, length in requests]).int()
    paged_attention(q, keys, values, out, torch.tensor(starts).int(), lengths, table, most, DIM**-0.5, window)
    worst = 0.0
    for (new, length), begin, pages in zip(requests, starts, table, strict=False):
        if new:
            k, v = (x[pages.long()].flatten(0, 1)[:length].repeat_interleave(group, 1) for x in (keys, values))
            difference = out[begin : begin + new].float() - windowed(q[begin : begin + new], k, v, window or length)
            worst = max(worst, difference.abs().nan_to_num(torch.inf).max().item())
    return worst


def backend(window: int | None, requests: tuple[tuple[int, int], ...]) -> float:
    CudaDriver.is_active = staticmethod(lambda: True)  # vLLM loads no Triton without a GPU's driver
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

    from voxtral_serve.engine.attention_backend import PagedAttentionImpl

    heads, kv_heads, filling = 8, HEADS, 3  # `filling`: tokens that fill a CUDA graph
    counts = [-(-length // PAGE) for _, length in requests]
    cache = random(sum(counts), 2, PAGE, kv_heads, DIM)  # as vLLM 0.20.0 has it
    starts = torch.tensor([0, *itertools.accumulate(new for new, _ in requests)]).int()
    given = dict.fromkeys(TritonAttentionMetadata.__dataclass_fields__)
    metadata = TritonAttentionMetadata(
        **given
        | {
            "num_actual_tokens": int(starts[-1]),
            "max_query_len": max(new for new, _ in requests),
            "query_start_loc": starts,
            "max_seq_len": max(length for _, length in requests),
            "seq_lens": torch.tensor([length for _, length in requests]).int(),
            "block_table": pages_of(counts),
            "seq_threshold_3D": 0,
            "use_cascade": False,
        }
    )
    q = random(int(starts[-1]) + filling, heads, DIM)
    layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    outs = []
    for implementation in (TritonAttentionImpl, PagedAttentionImpl):
        attention = implementation(heads, DIM, DIM**-0.5, kv_heads, None, window, "auto")
        outs.append(attention.forward(layer, q, None, None, cache, metadata, torch.zeros_like(q)).float())
    return (outs[0] - outs[1]).abs().max().item()


def drafts(count: int, lengths: tuple[int, ...], slots: tuple[int, ...]) -> float:
    tokens = torch.randint(131072, (len(lengths) + 1, 600), dtype=torch.int32)
    out, last = torch.full((len(slots), count), -1), len(lengths) - 1
    given = (tokens, torch.tensor(slots, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), out)
    _gather[(len(slots),)](*given, last, tokens.shape[1], count, block=16)
    expected = gathered(tokens, given[1].long(), given[2][given[1].long()].long(), count)
    return (out - expected).abs().max().item()


def main() -> None:
    torch.manual_seed(0)
    for run, cases in ((packed, PACKED), (ring, RINGS), (paged, PAGED), (backend, BACKEND), (drafts, DRAFTS)):
        for case in cases:
            print(json.dumps({"case": f"{run.__name__} {case}", "error": run(*case)}), flush=True)


if __name__ == "__main__":
    main()
