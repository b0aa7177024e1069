"""The Triton kernels of the engine against PyTorch in float32, at odd sizes: on a GPU, or in Triton's interpreter.

Each case gives the largest absolute difference, of inputs with values of about 1. PyTorch computes on the CPU, so that
compute-sanitizer has the kernels alone to watch. Triton reads TRITON_INTERPRET when it is imported: on a CPU,
tests/pinned/test_kernels.py runs this file in a process of its own.
"""

import itertools
import os
import random as randoms
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import offline
import phrases
import pytest
import torch
import torch.nn.functional as F
from places import ROOT

from voxtral_serve.engine import draft_stream, keyword_boost, paged_attention, ring_attention
from voxtral_serve.engine.packed_attention import packed_attention

if ring_attention.triton is None:
    pytest.skip("Triton is not installed: `make test-pinned` runs this in its interpreter", allow_module_level=True)
if not offline.ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("on a CPU the kernels need TRITON_INTERPRET=1: tests/pinned/test_kernels.py", allow_module_level=True)

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if offline.ON_GPU else "cpu"
HEADS, PAGE = 2, 16
# Of products of values of about 1, rounded to 11 bits (float16) or 8 (bfloat16)
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TYPES = (torch.float16, torch.bfloat16) if offline.ON_GPU else (torch.float16,)
DIMS = (64, 128) if offline.ON_GPU else (64,)
of_each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
of_each_dim = pytest.mark.parametrize("dim", DIMS)

# window, lengths of the clips, keys that all clips share, keys of each clip before its queries
PACKED = (
    (750, (300, 64, 1, 0, 0), 0, 0),
    (50, (130, 200, 65), 0, 0),
    (50, (130, 200, 65), 40, 0),
    (750, (130, 20), 124, 0),
    (300, (500, 3, 90), 124, 0),
    (30, (70, 5), 124, 0),
    (100, (150,), 0, 99),
    (750, (0,), 124, 0),  # nothing but the shared keys
    (1, (1, 63, 129), 7, 0),
)
# window, ring, new frames, first new frame of each session; the slots are in no order, and some are another's
RINGS = (
    (750, 756, 4, (0, 5, 900)),
    (40, 72, 32, (0, 100)),
    (750, 784, 4, (0,)),  # an empty ring
    (750, 784, 4, (749, 784, 780, 1567, 3, 10_000, 0)),  # full ones, and at their ends
    (5, 9, 3, (0, 1, 7, 8, 9)),
)
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
    (None, ((16, 17), (8, 65), (1, 1), (0, 0)), True, 16, 4),  # drafts
    (8192, ((1, 16), (1, 17), (1, 15)) * 25, True, 0, 4),  # more requests than a block looks itself up among
    (None, ((39, 39), (1, 17)) * 40, True, 0, 4),
)
# drafts, tokens that the request in each slot has, slots of a step's requests
DRAFTS = ((15, (0, 39, 700, 5), (3, 1, 0)), (1, (7, 3), (1,)), (4, (600, 601), (0, 1)), (7, (39,) * 9, (8, 0, 4)))
# window, requests as above
BACKEND = (
    (None, ((1, 1), (1, 64), (1, 200))),
    (8192, ((39, 39), (1, 90), (2, 70))),
    (50, ((1, 40), (1, 130), (20, 139))),
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def numbers(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinite where a number is missing."""
    difference = (got.float().cpu() - expected.float()).abs().nan_to_num(torch.inf)
    return difference.max().item() if difference.numel() else 0.0


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """q [n, heads, dim] at the last n of the positions of k and v, in float32 on the CPU."""
    position, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    seen = (key <= position) & (key > position - window)
    q, k, v = (x.float().cpu().transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


@of_each_type
@of_each_dim
@pytest.mark.parametrize(("window", "lengths", "shared", "before"), PACKED)
def test_packed_clips(
    window: int, lengths: tuple[int, ...], shared: int, before: int, dim: int, dtype: torch.dtype
) -> None:
    query_starts = [0, *itertools.accumulate(lengths)]
    key_starts = [0, *itertools.accumulate(length + before for length in lengths)]
    # Slices of wider tensors, as the encoder's are
    q = random(dtype, query_starts[-1] + 7, 3 * HEADS * dim)[:, : HEADS * dim].unflatten(-1, (HEADS, dim))
    k, v = random(dtype, key_starts[-1] + 3, 2 * HEADS * dim).unflatten(-1, (2, HEADS, dim)).unbind(1)
    left = (random(dtype, shared, HEADS, dim), random(dtype, shared, HEADS, dim)) if shared else None
    got = packed_attention(q, k, v, numbers(query_starts), numbers(key_starts), window, left)
    for queries, keys in zip(itertools.pairwise(query_starts), itertools.pairwise(key_starts), strict=True):
        own_q, own_k, own_v = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        if left is not None:
            own_k, own_v = torch.cat([left[0], own_k]), torch.cat([left[1], own_v])
        if len(own_q):
            assert apart(got[slice(*queries)], windowed(own_q, own_k, own_v, window)) < BOUND[dtype]


@of_each_type
@of_each_dim
@pytest.mark.parametrize(("window", "length", "new", "first"), RINGS)
def test_rings(window: int, length: int, new: int, first: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    sessions = len(first)
    keys, values = (random(dtype, 2 * sessions + 1, HEADS, length, dim) for _ in "kv")
    slots, begin = torch.randperm(2 * sessions + 1)[:sessions], torch.tensor(first)
    q = random(dtype, sessions, new, HEADS, dim)
    out = torch.full_like(q, torch.nan)
    ring_attention._kernel[(sessions, HEADS)](
        *(q, keys, values, out, slots.to(DEVICE), begin.to(DEVICE), dim**-0.5),
        **{"heads": HEADS, "head_dim": dim, "ring_length": length, "window": window, "n": new},
        **{"n_rows": 16 if new <= 16 else 32, "n_keys": 64},
    )
    expected = ring_attention.gathered_attention(*(x.float().cpu() for x in (q, keys, values)), slots, begin, window)
    assert apart(out, expected) < BOUND[dtype]


def pages_of(counts: list[int]) -> torch.Tensor:
    """Pages in a random order for requests with so many: [requests, most pages]."""
    order, table = torch.randperm(sum(counts)), torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    return table


@of_each_type
@of_each_dim
@pytest.mark.parametrize(("window", "requests", "together", "most_of_graph", "group"), PAGED)
def test_pages(
    window: int | None,
    requests: tuple[tuple[int, int], ...],
    together: bool,
    most_of_graph: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    kv_heads = HEADS
    counts = [-(-length // PAGE) for _, length in requests]
    table = pages_of(counts)
    if together:
        cache = random(dtype, sum(counts), kv_heads, PAGE, 2 * dim)
        keys, values = cache.transpose(1, 2).split(dim, dim=-1)
    else:
        keys, values = random(dtype, sum(counts), 2, PAGE, kv_heads, dim).unbind(1)
    starts = [0, *itertools.accumulate(new for new, _ in requests)]
    q = random(dtype, starts[-1], (group + 2) * kv_heads * dim)[:, : group * kv_heads * dim].unflatten(-1, (-1, dim))
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    most = most_of_graph or max(new for new, _ in requests)
    lengths = numbers([length for _, length in requests])
    paged_attention.paged_attention(
        q, keys, values, out, numbers(starts), lengths, table.to(DEVICE), most, dim**-0.5, window
    )
    keys, values = keys.cpu(), values.cpu()
    for (new, length), begin, pages in zip(requests, starts, table, strict=False):
        if new:
            k, v = (x[pages.long()].flatten(0, 1)[:length].repeat_interleave(group, 1) for x in (keys, values))
            assert (
                apart(out[begin : begin + new], windowed(q[begin : begin + new], k, v, window or length)) < BOUND[dtype]
            )


@pytest.mark.parametrize(("count", "lengths", "slots"), DRAFTS)
def test_drafts(count: int, lengths: tuple[int, ...], slots: tuple[int, ...]) -> None:
    tokens = torch.randint(131072, (len(lengths) + 1, 600), dtype=torch.int32)
    out, last = torch.full((len(slots), count), -1, device=DEVICE), len(lengths) - 1
    given = (tokens.to(DEVICE), numbers(slots), numbers(lengths), out)
    draft_stream._gather[(len(slots),)](*given, last, tokens.shape[1], count, block=16)
    chosen = torch.tensor(slots)
    assert torch.equal(out.cpu(), draft_stream.gathered(tokens, chosen, torch.tensor(lengths)[chosen], count))


@pytest.mark.skipif(offline.ON_GPU, reason="vLLM 0.20.0's metadata; on a GPU the engine runs in the backend")
@pytest.mark.parametrize(("window", "requests"), BACKEND)
def test_the_backend_is_vllms(window: int | None, requests: tuple[tuple[int, int], ...]) -> None:
    """vLLM's own kernel runs in the interpreter, too."""
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.is_active = staticmethod(lambda: True)  # vLLM loads no Triton without a GPU's driver
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata

    from voxtral_serve.engine.attention_backend import PagedAttentionImpl

    heads, kv_heads, dim, filling = 8, HEADS, 64, 3  # `filling`: tokens that fill a CUDA graph
    counts = [-(-length // PAGE) for _, length in requests]
    cache = random(torch.float16, sum(counts), 2, PAGE, kv_heads, dim)  # as vLLM 0.20.0 has it
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
    q = random(torch.float16, int(starts[-1]) + filling, heads, dim)
    layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    outs = []
    for implementation in (TritonAttentionImpl, PagedAttentionImpl):
        attention = implementation(heads, dim, dim**-0.5, kv_heads, None, window, "auto")
        outs.append(attention.forward(layer, q, None, None, cache, metadata, torch.zeros_like(q)).float())
    assert apart(*outs) < BOUND[torch.float16]


@pytest.mark.parametrize("seed", range(4 if offline.ON_GPU else 2))
def test_phrases_with_drafts(seed: int) -> None:
    """What requests with and without phrases say in one batch, with drafts that are rejected, is what the rule says.

    Between steps, a request may be preempted: its table is written anew, and its tokens are in another slot.
    """
    choose, count, slots = randoms.Random(seed), 40, 7
    tables = [phrases.table(choose) if number % 3 else None for number in range(5)]
    expected = [phrases.said(seed, table, count) for table in tables]
    slot_of = dict(enumerate(choose.sample(range(slots), len(tables))))
    written = torch.full((slots, keyword_boost.WIDTH), 3, dtype=torch.int32, device=DEVICE)  # of requests before

    def write(number: int) -> None:
        content = np.frombuffer(tables[number] or bytes(4), np.int32).copy()
        written[slot_of[number], : len(content)] = torch.from_numpy(content).to(DEVICE)

    for number in slot_of:
        write(number)

    def boosted(requests: list[list[int]], drafts: list[list[int]], rows: list[phrases.Row]) -> np.ndarray:
        if choose.random() < 0.2:
            number = choose.randrange(len(tables))
            slot_of[number] = choose.choice([slot for slot in range(slots) if slot not in slot_of.values()])
            write(number)
        tokens = torch.full((slots, 90), 8, dtype=torch.int32)
        lengths = torch.zeros(slots, dtype=torch.int32)
        for number, slot in slot_of.items():
            lengths[slot] = len(requests[number])
            tokens[slot, : lengths[slot]] = torch.tensor(requests[number])
        prompts = torch.full((slots,), len(phrases.PROMPT), dtype=torch.int32)
        state = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=tokens.to(DEVICE)),
            prompt_len=SimpleNamespace(gpu=prompts.to(DEVICE)),
            total_len=SimpleNamespace(gpu=lengths.to(DEVICE)),
        )
        values = torch.from_numpy(np.stack([row.logits for row in rows])).to(DEVICE)
        batch = SimpleNamespace(
            idx_mapping=numbers(list(slot_of.values())),
            expanded_idx_mapping=numbers([slot_of[row.request] for row in rows]),
            expanded_local_pos=numbers([len(row.drafts) for row in rows]),
            input_ids=numbers([[*row.tokens, *row.drafts][-1] for row in rows], torch.int64),
        )
        for _ in range(2):  # the second time, all tokens are read
            result = values.clone()
            keyword_boost.boost(result, written, state, batch)
        return result.cpu().numpy()

    random_drafts = randoms.Random(seed + 1)
    found = phrases.said_with_drafts([seed] * 5, count, random_drafts, lambda number: expected[number], boosted)
    assert found == expected


def test_phrases_with_many_beginnings() -> None:
    """More than are read at a time."""
    size, count = 1000, 2 * 100
    choose = np.random.default_rng(0)
    ids = choose.permutation(np.arange(2, size))[:count].tolist()
    tokens = phrases.TOKENS._replace(encode=lambda text: [ids[int(text) * 2 + (text[0] == " ")]])
    table = tokens.table(map(str, range(100)), phrases.STRENGTHS)
    assert table is not None and count > keyword_boost.BLOCK
    written = torch.from_numpy(np.frombuffer(table, np.int32).copy())[None].to(DEVICE)
    written = F.pad(written, (0, keyword_boost.WIDTH - written.shape[1]))
    values = choose.normal(size=(1, size)).astype(np.float32)
    zero, length = numbers([0]), SimpleNamespace(gpu=numbers([5]))
    last = SimpleNamespace(gpu=numbers([[0] * 4 + [phrases.WORD]]))
    state = SimpleNamespace(prompt_len=length, total_len=length, all_token_ids=last)
    names = ("idx_mapping", "expanded_idx_mapping", "expanded_local_pos")
    batch = SimpleNamespace(**dict.fromkeys(names, zero), input_ids=numbers([phrases.WORD]))
    got = torch.from_numpy(values.copy()).to(DEVICE)
    keyword_boost.boost(got, written, state, batch)
    expected = values[0].copy()
    phrases.Automaton(table).boost(expected, 0, phrases.WORD)
    assert (expected != values[0]).sum() == count
    assert np.array_equal(got.cpu().numpy()[0], expected)


SANITIZER_S = 300
REFUSED = ("Device not supported", "not supported on this", "Unable to find injection library")


@pytest.mark.skipif(not offline.ON_GPU, reason="compute-sanitizer watches kernels on a GPU")
def test_compute_sanitizer() -> None:
    """No kernel reads or writes outside of its tensors, each of which has an allocation of its own."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on PATH")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [
            *(program, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m", "pytest", "-q", __file__),
            *("-p", "no:cacheprovider", "-k", "(bfloat16 and 64) or drafts or phrases"),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SANITIZER_S,
    )
    said = done.stdout + done.stderr
    if refusal := next((words for words in REFUSED if words in said), None):
        pytest.skip(f"compute-sanitizer does not run here: {refusal}")
    assert done.returncode == 0, said[-4000:]
    assert " passed" in said and "ERROR SUMMARY: 0 errors" in said, said[-4000:]
