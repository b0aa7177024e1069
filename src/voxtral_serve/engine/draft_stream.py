"""The drafts of running requests: the tokens that the drafter guesses from their audio rows, by slot and position.

The network (draft_network) runs once for each uploaded clip, in the step that begins the clip, and once for a live
session, when its audio has ended. A step then copies the guesses of its requests: those for the tokens that follow the
last one of each. The runners call `clear`, `begin` and `begin_tails` when they fill the slots of AudioRows; the
drafters call `run` and `gather` (drafter.py).

Clips that begin in one step run together: their rows follow one another, with a few rows of zeros between them, across
which no convolution of the network sees. A long clip runs in parts that overlap. On a GPU each pass is a CUDA graph.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from voxtral_serve.engine.audio_rows import AudioRows
from voxtral_serve.engine.draft_network import Head, HeadError
from voxtral_serve.engine.live_audio import LivePart

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # vLLM for CPUs has none
    triton = None

ROWS = 2048  # of one pass
SIZES = (64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, ROWS)  # rows of the CUDA graphs
PRODUCT = 512  # rows of one product with the embeddings: with 30,000 tokens, its result has 31 MB
TAIL = 128  # rows of a live session before its end for which tokens are guessed: 10 s
ALIKE = 0.99  # least cosine of the audio rows of the chirp to those in the drafter's file


class Source(NamedTuple):
    """Rows of a request that the network has to read: row r of it is row `first` + r modulo `length` of the pool."""

    first: int
    length: int
    rows: range


class Part(NamedTuple):
    """Rows that one pass reads for a slot, and those among them whose guesses it writes."""

    slot: int
    source: Source
    read: range
    write: range


class DraftTokens:
    """The guesses for the requests in all slots of AudioRows.

    tokens int32 [slots + 1, length]: the token at position p of the request in a slot is at p modulo `length`; a pad
    where nothing was guessed. The last slot, for requests without audio, has pads only. `length` is the positions of
    the longest clip, and one draft of each number beyond them, so that an uploaded clip never wraps.

    It is no nn.Module, because vLLM expects all parameters of the model in its checkpoint. It is made while the model
    is, so that vLLM counts its tensors as memory of the model.
    """

    def __init__(self, head: Head, rows: AudioRows, drafts: int, pad: int) -> None:
        """drafts: the most for one step. pad: the token of a position without a guess."""
        self.rows, self.pad, self.delay = rows, pad, head.delay
        like = rows.pool
        self.network = head.network.to(like.device, like.dtype).eval().requires_grad_(False)
        self.chirp = head.chirp.to(like.device)
        self.known = head.tokens.to(like.device, torch.int32)
        self.embeddings = torch.zeros(len(head.tokens), like.shape[1], dtype=like.dtype, device=like.device)
        self.length = rows.positions + 1 + drafts
        # One more place at the end, for guesses that are not written anywhere else
        self.unused = (rows.slots + 1) * self.length
        self.places = torch.full((self.unused + 1,), pad, dtype=torch.int32, device=like.device)
        self.tokens = self.places[: self.unused].view(-1, self.length)
        # Of a pass: the row of the pool that is read at each place, and the place in `places` of its guess
        self.plan = torch.zeros(ROWS, 2, dtype=torch.int64, device=like.device)
        self.waiting: dict[int, Source] = {}  # by slot, since the last pass
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    # What slots hold

    def clear(self, slot: int) -> None:
        """Draft pads for the request that now has a slot, until it has guesses of its own."""
        self.waiting.pop(slot, None)
        self.tokens[slot].fill_(self.pad)

    def begin(self, slot: int, rows: int, delay: int | None = None) -> None:
        """An uploaded clip begins, or begins again: its first `rows` rows are in its slot of AudioRows. One whose delay
        is not that of the drafter keeps its pads; None is the checkpoint's, which is the drafter's."""
        self.clear(slot)
        if delay not in (None, self.delay):
            return
        positions = self.rows.positions
        self.waiting[slot] = Source(slot * positions, positions, range(min(rows, positions)))

    def begin_tails(
        self, parts: Mapping[str, LivePart], live_slots: Mapping[str, int], slots: Mapping[str, int]
    ) -> None:
        """The live encoder has encoded the parts of a step, by request id. Of sessions that have ended, the last rows
        are in their rings: guess the tokens that follow these, if the session has the delay of the drafter."""
        ring = self.rows.ring
        most = min(TAIL, ring, self.rows.positions)
        for request, part in parts.items():
            if part.last and part.delay == self.delay and request in live_slots:
                rows = part.first + part.rows
                tail = range(max(rows - most, 0), rows)
                self.waiting[slots[request]] = Source(self.rows.clips + live_slots[request] * ring, ring, tail)

    # The network

    @torch.inference_mode()
    def prepare(self, embed: Callable[[torch.Tensor], torch.Tensor], chirp: torch.Tensor, use_graphs: bool) -> None:
        """Copy the embeddings and capture the CUDA graphs. Raises HeadError if the drafter is another model's.

        embed: token ids [n] -> embeddings [n, dim]. chirp: the audio rows of draft_network.chirp, which tell models
        apart.
        """
        self._check(chirp)
        for some in torch.arange(len(self.known), device=self.known.device).split(ROWS):
            self.embeddings[some] = embed(self.known[some].long())
        if use_graphs:
            self._capture()

    def _check(self, chirp: torch.Tensor) -> None:
        advice = "Train a drafter of this checkpoint with `voxtral-serve draft train`, or remove the file"
        if chirp.shape != self.chirp.shape:
            raise HeadError(f"the drafter has {[*self.chirp.shape]} audio rows of its chirp, and this checkpoint makes "
                            f"{[*chirp.shape]} of it. {advice}")  # fmt: skip
        alike = F.cosine_similarity(chirp.float(), self.chirp, dim=1)
        if not alike.min() > ALIKE:
            raise HeadError(
                f"the drafter was trained with other weights: row {int(alike.argmin())} of its chirp has a cosine of "
                f"{alike.min():.4f} to the row that this checkpoint makes of it, expected more than {ALIKE}. {advice}"
            )

    @torch.inference_mode()
    def run(self) -> None:
        """Guess the tokens of all clips that have begun since the last call, and of the live sessions that have
        ended."""
        for parts in self._passes():
            plan = self._plan(parts)
            size = next(size for size in SIZES if size >= len(plan)) if self.graphs else len(plan)
            whole = np.empty((size, 2), np.int64)
            whole[:] = (self.rows.zeros, self.unused)
            whole[: len(plan)] = plan
            host = torch.from_numpy(whole)
            # From pinned memory, because another copy would make the CPU wait for the GPU.
            self.plan[:size].copy_(host.pin_memory() if self.plan.is_cuda else host, non_blocking=True)
            if self.graphs:
                self.graphs[size].replay()
            else:
                self.guess(size)
        self.waiting.clear()

    def guess(self, size: int) -> None:
        """The network over the first `size` rows of the plan; writes the guesses."""
        source, target = self.plan[:size].unbind(1)
        inside = (source != self.rows.zeros)[None, :, None].to(self.rows.pool.dtype)
        features = self.network.features(F.embedding(source, self.rows.pool)[None], inside)[0]
        for some, places in zip(features.split(PRODUCT), target.split(PRODUCT), strict=True):
            guessed = F.linear(some, self.embeddings, self.network.bias).argmax(1)
            self.places.index_copy_(0, places, self.known[guessed])

    def _passes(self) -> Iterator[list[Part]]:
        """The parts of each pass: as many as have ROWS rows together, the gaps between them included."""
        parts, used = list[Part](), 0
        for slot, source in self.waiting.items():
            for part in _parts(slot, source, self.network.reach):
                if parts and used + len(part.read) > ROWS:
                    yield parts
                    parts, used = [], 0
                parts.append(part)
                used += len(part.read) + self.network.gap
        if parts:
            yield parts

    def _plan(self, parts: list[Part]) -> np.ndarray:
        """int64 [rows, 2]: the rows of the pool that a pass reads, and the places of their guesses."""
        used = sum(len(part.read) for part in parts) + self.network.gap * (len(parts) - 1)
        plan = np.empty((used, 2), np.int64)
        plan[:] = (self.rows.zeros, self.unused)
        at = 0
        for slot, source, read, write in parts:
            mine = plan[at : at + len(read)]
            mine[:, 0] = source.first + np.arange(read.start, read.stop) % source.length
            position = np.arange(write.start, write.stop) + 1  # row i guesses token i + 1
            mine[write.start - read.start : write.stop - read.start, 1] = slot * self.length + position % self.length
            at += len(read) + self.network.gap
        return plan

    def _capture(self) -> None:
        self.plan[:, 0], self.plan[:, 1] = self.rows.zeros, self.unused
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(SIZES):  # the largest first, so that the others fit into its memory
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.guess(size)  # what kernels set up at their first call cannot be captured
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.guess(size)
            self.graphs[size] = graph
        torch.cuda.empty_cache()  # of the runs outside the graphs


def _parts(slot: int, source: Source, reach: int) -> Iterator[Part]:
    """A request's rows in parts of at most ROWS, each with the rows beside it on which its guesses depend."""
    rows = source.rows
    if len(rows) <= ROWS:
        yield Part(slot, source, rows, rows)
        return
    for start in range(rows.start, rows.stop, ROWS - 2 * reach):
        write = range(start, min(start + ROWS - 2 * reach, rows.stop))
        yield Part(slot, source, range(max(start - reach, rows.start), min(write.stop + reach, rows.stop)), write)


def gathered(tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, drafts: int) -> torch.Tensor:
    """tokens [slots + 1, length]; slots, positions int64 [n] -> int64 [n, drafts]: the tokens of each slot from its
    position on."""
    places = positions.clamp(0)[:, None] + torch.arange(drafts, device=tokens.device)
    return tokens[slots[:, None], places % tokens.shape[1]].long()


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _gather(tokens, slots, lengths, out, last, length, drafts, block: tl.constexpr):  # type: ignore[no-untyped-def]
        request, draft = tl.program_id(0), tl.arange(0, block)
        slot = tl.minimum(tl.maximum(tl.load(slots + request).to(tl.int64), 0), last)
        position = tl.maximum(tl.load(lengths + slot).to(tl.int64), 0) + draft
        token = tl.load(tokens + slot * length + position % length, mask=draft < drafts, other=0)
        tl.store(out + request * drafts + draft, token.to(tl.int64), mask=draft < drafts)


def gather(tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """Write `gathered` of requests in `slots` [n] into `out` int64 [n, drafts]. lengths [slots]: tokens that the
    request in each slot has. On a GPU it is one kernel, for which the host does not wait."""
    drafts = out.shape[1]
    if not out.is_cuda or triton is None:
        slots = slots.long().clamp(0, len(lengths) - 1)
        out.copy_(gathered(tokens, slots, lengths[slots].long(), drafts))
        return
    block = triton.next_power_of_2(drafts)
    _gather[(len(slots),)](tokens, slots, lengths, out, len(lengths) - 1, tokens.shape[1], drafts, block, num_warps=1)
