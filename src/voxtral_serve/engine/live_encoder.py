"""The audio encoder for live sessions: rows as their audio arrives, several sessions at once.

Each session has a slot: the keys and values of its last frames in every layer, in rings (ring_attention). A pass takes
the samples of the same number of new rows of each of its sessions, and leaves their rows in the sessions' rings of
AudioRows. The rows before the audio are the same for every session: they are computed once, and copied to a slot when a
session begins.

On a GPU a pass is one CUDA graph for each of the numbers of sessions in `sizes`; unused places of a graph work on a
slot of their own, whose content nobody reads.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from voxtral_serve.engine.audio_rows import AudioRows
from voxtral_serve.engine.encoder import EncodeOnceEncoder, EncoderAttention
from voxtral_serve.engine.live_audio import BULK, HOP, LOOK_BACK, LivePart
from voxtral_serve.engine.ring_attention import ring_attention
from voxtral_serve.engine.session import LOOK_AHEAD, SessionShape

BULK_SESSIONS = 8  # at once
IN_FLIGHT = 4  # passes whose samples may be on their way to the GPU


class Rows(NamedTuple):
    """New rows of one session: the session's slot, the number of the first row, and the samples of all rows."""

    slot: int
    row: int
    samples: np.ndarray


class RingStep:
    """Attention of the frames of one pass to their sessions' rings. Whole clips have `Spans` instead."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, frames: torch.Tensor) -> None:
        """keys, values [layers, slots, heads, ring, head_dim]; slots [sessions]; frames [sessions, n]."""
        self.keys, self.values, self.slots, self.frames = keys, values, slots, frames
        self.places = frames % keys.shape[3]

    def attend(self, layer: EncoderAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Packed [sessions * n, heads, head_dim] each -> the same."""
        q, k, v = (x.unflatten(0, self.frames.shape) for x in (q, k, v))
        keys, values = self.keys[layer.number], self.values[layer.number]
        keys[self.slots[:, None], :, self.places] = k
        values[self.slots[:, None], :, self.places] = v
        first = self.frames[:, 0].contiguous()
        return ring_attention(q, keys, values, self.slots, first, layer.window).flatten(0, 1)


class LiveEncoder:
    """The encoder of up to `slots` live sessions. The encoder, the projection and the audio rows are the model's.

    The rings are allocated while the model is constructed, so that vLLM counts them as memory of the model.
    """

    def __init__(
        self,
        encoder: EncodeOnceEncoder,
        project: Callable[[torch.Tensor], torch.Tensor],
        rows: AudioRows,
        shape: SessionShape,
        slots: int,
    ) -> None:
        self.encoder, self.project, self.rows = encoder, project, rows
        self.shape, self.slots = shape, slots
        self.stride = shape.samples // encoder.samples  # frames of a row
        first: EncoderAttention = encoder.whisper_encoder.layers[0].self_attn
        ring = -(-(first.window - 1 + BULK * self.stride) // self.stride) * self.stride
        # One additional slot, for the unused places of graphs
        shape_ = (len(encoder.whisper_encoder.layers), slots + 1, first.heads, ring, first.head_dim)
        self.keys = torch.zeros(shape_, dtype=encoder.dtype, device=rows.pool.device)
        self.values = torch.zeros_like(self.keys)
        self.before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        # Limit of sessions in one pass, by the number of rows that the pass computes for each of them
        self.limits = {1: slots, BULK: min(slots, BULK_SESSIONS)}
        self.graphs: dict[int, PassGraphs] = {}
        self.slot_of: dict[str, int] = {}
        self.encoded: dict[str, int] = {}  # rows of each request that has a slot
        self.free = list(range(slots))

    def begin(self, request_id: str) -> int | None:
        """Return a slot for a request that begins, or begins again after preemption. None if no slot is free."""
        if request_id not in self.slot_of:
            if not self.free:
                return None
            self.slot_of[request_id] = self.free.pop()
        slot = self.slot_of[request_id]
        self.encoded[request_id] = 0
        before = self.before or self.prepare()
        n = before[0].shape[2]
        self.keys[:, slot, :, :n], self.values[:, slot, :, :n] = before[0], before[1]
        self._ring(slot)[: len(before[2])] = before[2]
        return slot

    def end(self, request_id: str) -> None:
        if (slot := self.slot_of.pop(request_id, None)) is not None:
            del self.encoded[request_id]
            self.free.append(slot)

    def _ring(self, slot: int) -> torch.Tensor:
        ring = self.rows.ring
        return self.rows.live()[slot * ring : (slot + 1) * ring]

    @torch.inference_mode()
    def prepare(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the left padding that no audio reaches, and capture the graphs on a GPU. The weights are loaded then.

        Returns keys and values [layers, heads, frames, head_dim], and the audio rows.
        """
        encoder, device = self.encoder, self.keys.device
        left = encoder.prepare(self.project, self.stride)
        layers = [left.kv[layer.self_attn] for layer in encoder.whisper_encoder.layers]
        keys, values = (torch.stack(tensors).transpose(1, 2).contiguous() for tensors in zip(*layers, strict=True))
        self.before = keys, values, left.rows
        if encoder.use_graphs and device.type == "cuda":
            self.graphs = {count: PassGraphs(self, count, limit) for count, limit in self.limits.items()}
        return self.before

    def fault(self, request_id: str, part: LivePart) -> str | None:
        """Return what is wrong with a part or its request; None if the part can be encoded."""
        if request_id not in self.slot_of:
            return "the session has no slot of the encoder"
        if part.first != (encoded := self.encoded[request_id]):
            return f"the session's next row is {encoded}, and its audio begins with row {part.first}"
        rows = part.first + part.rows - max(part.first, self.shape.left - 1)
        expected = LOOK_BACK + rows * self.shape.samples + LOOK_AHEAD if rows > 0 else 0
        if part.samples.dtype != np.int16 or part.samples.shape != (expected,):
            return f"the session's audio is {part.samples.dtype} {part.samples.shape}, expected int16 ({expected},)"
        return None

    def encode(self, parts: Mapping[str, LivePart]) -> dict[str, str]:
        """Encode the parts of one step, by request id. Returns {request id: fault} of the parts that it left out."""
        bulks: list[list[Rows]] = []  # one list for each pass, in order
        singles: list[list[Rows]] = []
        faults: dict[str, str] = {}
        for request_id, part in parts.items():
            if (fault := self.fault(request_id, part)) is not None:
                faults[request_id] = fault
                continue
            slot = self.slot_of[request_id]
            self.encoded[request_id] = part.first + part.rows
            begin, end = max(part.first, self.shape.left - 1), part.first + part.rows
            row = begin
            for passes, count in ((bulks, BULK), (singles, 1)):
                for turn in range(max(end - row, 0) // count):
                    at = (row - begin) * self.shape.samples
                    samples = part.samples[at : at + LOOK_BACK + count * self.shape.samples + LOOK_AHEAD]
                    if turn == len(passes):
                        passes.append([])
                    passes[turn].append(Rows(slot, row, samples))
                    row += count
        for passes, count in ((bulks, BULK), (singles, 1)):
            for sessions in passes:
                for start in range(0, len(sessions), self.limits[count]):
                    self._pass(sessions[start : start + self.limits[count]], count)
        return faults

    def _pass(self, sessions: list[Rows], count: int) -> None:
        if self.graphs:
            self.graphs[count].replay(sessions)
            return
        device = self.keys.device
        slots = torch.tensor([session.slot for session in sessions], device=device)
        rows = torch.tensor([session.row for session in sessions], device=device)
        samples = torch.from_numpy(np.stack([session.samples for session in sessions])).to(device)
        self.run(slots, rows, samples, count)

    def run(self, slots: torch.Tensor, rows: torch.Tensor, samples: torch.Tensor, count: int) -> None:
        """slots, rows [sessions]; samples int16 [sessions, LOOK_BACK + count rows + LOOK_AHEAD]."""
        store = self.rows
        slots, rows = slots.contiguous(), rows.contiguous()  # as the kernel reads them
        frames = self.convolved(samples).flatten(0, 1).contiguous()
        numbers = rows[:, None] * self.stride + torch.arange(count * self.stride, device=rows.device)
        step = RingStep(self.keys, self.values, slots, numbers)
        encoded = self.project(self.encoder.whisper_encoder(frames, numbers.flatten(), step))
        places = slots[:, None] * store.ring + (rows[:, None] + torch.arange(count, device=rows.device)) % store.ring
        store.live().index_copy_(0, places.flatten(), encoded.to(store.pool.dtype))

    def convolved(self, samples: torch.Tensor) -> torch.Tensor:
        """int16 [sessions, samples] -> [sessions, frames, dim], as EncodeOnceEncoder.pieces has it for later pieces."""
        size = self.encoder.config.window_size
        mel = self.encoder.log_mel((samples.float() / 2**15).unfold(1, size, HOP))
        return self.encoder.whisper_encoder.convolve(mel.to(self.encoder.dtype), first=False)


class PassGraphs:
    """The CUDA graphs of passes that compute `count` rows for each of up to `limit` sessions."""

    def __init__(self, live: LiveEncoder, count: int, limit: int) -> None:
        width = LOOK_BACK + count * live.shape.samples + LOOK_AHEAD
        record = np.dtype([("samples", "<i2", width), ("row", "<i8"), ("slot", "<i8")])
        self.sizes = sizes(limit)
        self.unused = live.slots
        # One copy to the GPU for a pass. Several passes may be on their way: each has a buffer of its own on the host.
        self.raw = torch.zeros(limit * record.itemsize, dtype=torch.uint8, device=live.keys.device)
        self.hosts = [torch.zeros_like(self.raw, device="cpu").pin_memory() for _ in range(IN_FLIGHT)]
        self.copied = [torch.cuda.Event() for _ in self.hosts]
        self.records = [host.numpy().view(record) for host in self.hosts]
        self.size_of_record = record.itemsize
        self.turn = 0
        samples = self.raw.view(torch.int16).view(limit, -1)[:, :width]
        numbers = self.raw.view(torch.int64).view(limit, -1)[:, -2:]
        numbers[:, 0], numbers[:, 1] = live.shape.left, self.unused
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in reversed(self.sizes):  # the largest first, so that the others fit into its memory

            def run(size: int = size) -> None:
                live.run(numbers[:size, 1], numbers[:size, 0], samples[:size], count)

            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # what kernels set up at their first call cannot be captured
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[size] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()
        torch.cuda.empty_cache()  # of the runs outside the graphs

    def replay(self, sessions: list[Rows]) -> None:
        size = next(size for size in self.sizes if size >= len(sessions))
        self.turn = (self.turn + 1) % IN_FLIGHT
        self.copied[self.turn].synchronize()
        records = self.records[self.turn]
        for record, session in zip(records, sessions, strict=False):
            record["samples"], record["row"], record["slot"] = session.samples, session.row, session.slot
        records["slot"][len(sessions) : size] = self.unused
        used = size * self.size_of_record
        self.raw[:used].copy_(self.hosts[self.turn][:used], non_blocking=True)
        self.copied[self.turn].record()
        self.graphs[size].replay()


def sizes(limit: int) -> list[int]:
    """Numbers of sessions of the graphs, close together because a pass computes its unused places as well."""
    return [size for size in (1, 2, 3, 4, 6, *range(8, 64, 8), *range(64, limit, 16)) if size < limit] + [limit]
