"""Triton kernels that prefer the phrases of requests (keywords.py): on a GPU, without the host's knowledge of a token.

Each slot of a request has its table, whose NODE and SCANNED say how many of its tokens the automaton has read. Drafts
are no tokens of a request until they are accepted. So `_advance` reads those that were added since the last step, for
each request, and `_boost` walks on from there, for each row of logits, over the drafts before that row. Neither a
rejected draft nor a step that was scheduled ahead leaves a trace.
"""

from typing import Any

import torch

from voxtral_serve.engine import keywords
from voxtral_serve.engine.keywords import HEADER, MOST_NODES, NODE_ROWS

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # vLLM for CPUs has none
    triton = None

WIDTH = HEADER + NODE_ROWS * MOST_NODES  # numbers of a slot
BLOCK = 128  # children of a node that are read at a time

if triton is not None:
    NODES, PAD, WORD = (tl.constexpr(each) for each in (keywords.NODES, keywords.PAD, keywords.WORD))
    FIRST, LATER = tl.constexpr(keywords.FIRST), tl.constexpr(keywords.LATER)
    NODE, SCANNED = tl.constexpr(keywords.NODE), tl.constexpr(keywords.SCANNED)
    ROWS = tl.constexpr(HEADER)  # where the rows of nodes begin
    TOKEN, KIND, FAIL = (tl.constexpr(each) for each in (keywords.TOKEN, keywords.KIND, keywords.FAIL))
    CHILD, CHILDREN = tl.constexpr(keywords.CHILD), tl.constexpr(keywords.CHILDREN)
    INNER, BARE = tl.constexpr(keywords.INNER), tl.constexpr(keywords.BARE)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _step(table, nodes, pad, word, node, token, before, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """Automaton.step. `table`: of the slot."""
        rows = table + ROWS
        begins = (before == pad) | (before == word)
        at, found = node, node
        going = (token != pad) & (token != word)
        while going:
            first = tl.load(rows + CHILD * nodes + at)
            count = tl.load(rows + CHILDREN * nodes + at)
            match = -1
            for start in range(0, count, block):
                child = start + tl.arange(0, block)
                known = child < count
                tokens = tl.load(rows + TOKEN * nodes + first + child, mask=known, other=-1)
                kinds = tl.load(rows + KIND * nodes + first + child, mask=known, other=0)
                fits = known & (tokens == token) & ((kinds != BARE) | begins)
                match = tl.maximum(match, tl.max(tl.where(fits, first + child, -1), 0))
            found = match
            going = (match < 0) & (at != 0)
            at = tl.load(rows + FAIL * nodes + at)
            found = tl.maximum(found, 0)
        return found

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _advance(  # type: ignore[no-untyped-def]
        tables, slots, tokens, stride, prompts, lengths, width: tl.constexpr, block: tl.constexpr
    ):
        slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
        table = tables + slot * width
        nodes = tl.load(table + NODES)
        if nodes > 0:
            pad, word = tl.load(table + PAD), tl.load(table + WORD)
            node, length = tl.load(table + NODE), tl.load(lengths + slot)
            first = tl.maximum(tl.load(table + SCANNED), tl.load(prompts + slot))
            before = tl.load(tokens + slot * stride + first - 1)
            for place in range(first, length):
                token = tl.load(tokens + slot * stride + place)
                node = _step(table, nodes, pad, word, node, token, before, block)
                before = token
            tl.debug_barrier()
            tl.store(table + NODE, node)
            tl.store(table + SCANNED, length)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _boost(  # type: ignore[no-untyped-def]
        logits, stride, tables, slots, offsets, inputs, width: tl.constexpr, block: tl.constexpr
    ):
        row = tl.program_id(0)
        table = tables + tl.load(slots + row).to(tl.int64) * width
        nodes = tl.load(table + NODES)
        last = tl.load(inputs + row).to(tl.int32)
        pad, word = tl.load(table + PAD), tl.load(table + WORD)
        if (nodes > 0) & (last != pad):
            logits += row.to(tl.int64) * stride
            rows = table + ROWS
            offset = tl.load(offsets + row)
            node = tl.load(table + NODE)
            before = tl.load(inputs + row - offset).to(tl.int32)
            for place in range(row - offset + 1, row + 1):
                token = tl.load(inputs + place).to(tl.int32)
                node = _step(table, nodes, pad, word, node, token, before, block)
                before = token
            if last == word:
                added = tl.load(table + FIRST).to(tl.float32, bitcast=True)
                begin = tl.load(rows + CHILD * nodes)
                count = tl.load(rows + CHILDREN * nodes)
                for start in range(0, count, block):
                    child = start + tl.arange(0, block)
                    known = child < count
                    columns = tl.load(rows + TOKEN * nodes + begin + child, mask=known, other=0)
                    value = tl.load(logits + columns, mask=known, other=0.0)
                    tl.store(logits + columns, value + added, mask=known)
                tl.debug_barrier()  # the same token may also go on in a phrase
            if node > 0:
                added = tl.load(table + LATER).to(tl.float32, bitcast=True)
                first = tl.load(rows + CHILD * nodes + node)
                count = tl.load(rows + CHILDREN * nodes + node)
                for start in range(0, count, block):
                    child = start + tl.arange(0, block)
                    known = child < count
                    kind = tl.load(rows + KIND * nodes + first + child, mask=known, other=0)
                    columns = tl.load(rows + TOKEN * nodes + first + child, mask=known, other=0)
                    known = known & ((kind != INNER) == (last == word))
                    value = tl.load(logits + columns, mask=known, other=0.0)
                    tl.store(logits + columns, value + added, mask=known)


def boost(logits: torch.Tensor, tables: torch.Tensor, state: Any, batch: Any) -> None:
    """Prefer the phrases of a step's requests.

    logits  float32 [rows, vocabulary]
    tables  int32 [slots, WIDTH]: a table, and anything behind it; 0 in NODES for none
    state   vLLM's LogitsProcRequestState
    batch   vLLM's LogitsContext
    """
    tokens, requests, rows = (state.all_token_ids.gpu, len(batch.idx_mapping), len(logits))
    lengths = state.prompt_len.gpu, state.total_len.gpu
    _advance[(requests,)](tables, batch.idx_mapping, tokens, tokens.stride(0), *lengths, WIDTH, BLOCK, num_warps=1)
    _boost[(rows,)](
        *(logits, logits.stride(0), tables, batch.expanded_idx_mapping, batch.expanded_local_pos),
        *(batch.input_ids, WIDTH, BLOCK),
        num_warps=1,
    )
