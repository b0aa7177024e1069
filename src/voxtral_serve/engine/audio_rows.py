"""Where the encode-once model keeps the audio rows of running requests, and how vLLM's model runner fills them in.

vLLM would look the rows up for every step, request by request, and embed the tokens before the model and outside its
CUDA graph. Here each running request has a slot in one tensor, filled when its clip is encoded; a step says only which
slot each of its tokens belongs to.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig

from voxtral_serve import shims

MARK = "voxtral_serve_rows"


class AudioRows(nn.Module):
    """`slots` rows of up to `length` positions each; as many as requests may run, and as long as the context."""

    pool: torch.Tensor
    starts: torch.Tensor
    embeddings: torch.Tensor

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.slots = vllm_config.scheduler_config.max_num_seqs
        self.length = vllm_config.model_config.max_model_len
        tokens, dim = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.get_hidden_size()
        # CUDA graphs read from, and write to, addresses: all of these stay where they are.
        self.register_buffer("pool", torch.zeros(self.slots * self.length, dim), persistent=False)
        self.register_buffer("starts", torch.zeros(tokens, dtype=torch.int64), persistent=False)
        self.register_buffer("embeddings", torch.zeros(tokens, dim), persistent=False)

    @cached_property
    def slots_v1(self) -> "Slots":
        return Slots(self)

    def put(self, slot: int, rows: torch.Tensor) -> None:
        """Rows [n, dim] of positions 0 to n - 1 into a slot; positions after them have none."""
        held = self.pool[slot * self.length : (slot + 1) * self.length]
        n = min(len(rows), self.length)
        held[:n] = rows[:n]
        held[n:] = 0

    def added_to(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token embeddings [n, dim] of one step, at positions [n] of their requests, plus the audio's rows."""
        n = len(positions)
        # Warm-up runs count positions beyond the context.
        rows = F.embedding(self.starts[:n] + positions.clamp(max=self.length - 1), self.pool)
        return torch.add(embeddings, rows, out=self.embeddings[:n])


class Slots:
    """Slots of requests in Model Runner V1, whose own numbering of a batch changes from step to step."""

    def __init__(self, rows: AudioRows) -> None:
        self.rows = rows
        self.of: dict[str, int] = {}
        self.free = list(range(rows.slots))
        self.starts = np.zeros(0, np.int64)

    def begin_step(self, runner: Any, scheduled: Any) -> None:
        """Free what ended, fill what begins or begins again, and say which slot each token of the step belongs to."""
        new = [request.req_id for request in scheduled.scheduled_new_reqs]
        begun = (*new, *scheduled.scheduled_cached_reqs.resumed_req_ids)
        if begun or scheduled.preempted_req_ids:
            # Requests may also end in steps that run no model, and so are not seen here.
            for request in [name for name in self.of if name not in runner.requests]:
                self.free.append(self.of.pop(request))
            for request in (scheduled.preempted_req_ids or set()) & self.of.keys():
                self.free.append(self.of.pop(request))
        for request in begun:
            for clip in runner.requests[request].mm_features:
                if request not in self.of:
                    self.of[request] = self.free.pop()
                self.rows.put(self.of[request], runner.encoder_cache[clip.identifier])
        batch = runner.input_batch.req_ids
        starts = np.repeat(
            [self.of.get(request, 0) * self.rows.length for request in batch],
            [scheduled.num_scheduled_tokens[request] for request in batch],
        )
        if not np.array_equal(starts, self.starts):  # most steps continue the same requests
            self.starts = starts
            host = torch.from_numpy(starts)
            if self.rows.starts.is_cuda:
                host = host.pin_memory()
            self.rows.starts[: len(starts)].copy_(host, non_blocking=True)


def attach(vllm_config: VllmConfig) -> None:
    """Have this process's model runner give a model with `audio_rows` token ids, as if it took no audio.

    Model Runner V2 asks the model how (`rows_v2`); of V1 two methods are wrapped. May run twice. Raises PatchError
    where they are not those that this was written for.
    """
    if getattr(vllm_config, "use_v2_model_runner", False):
        return
    from vllm.v1.worker import gpu_model_runner

    runner_class: Any = gpu_model_runner.GPUModelRunner
    if hasattr(runner_class, MARK):
        return
    for name, first in (("_preprocess", "scheduler_output"), ("_dummy_run", "num_tokens")):
        method = getattr(runner_class, name, None)
        found = [*inspect.signature(method).parameters][1:2] if method else "nothing: it is gone"
        if method is None or found != [first] or "supports_mm_inputs" not in inspect.getsource(method):
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')}: GPUModelRunner.{name} takes {found}, expected [{first!r}] first and "
                f"a branch on supports_mm_inputs: the encode-once model cannot be served with it. {shims.ADVICE}"
            )
    stock_preprocess, stock_dummy_run = runner_class._preprocess, runner_class._dummy_run

    def preprocess(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if (rows := getattr(self.get_model(), "audio_rows", None)) is None:
            return stock_preprocess(self, scheduler_output, *args, **kwargs)
        self._execute_mm_encoder(scheduler_output)
        rows.slots_v1.begin_step(self, scheduler_output)
        with token_ids_only(self):
            return stock_preprocess(self, scheduler_output, *args, **kwargs)

    def dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.get_model(), "audio_rows", None) is None:
            return stock_dummy_run(self, *args, **kwargs)
        with token_ids_only(self):
            return stock_dummy_run(self, *args, **kwargs)

    runner_class._preprocess, runner_class._dummy_run = preprocess, dummy_run
    setattr(runner_class, MARK, True)


@contextmanager
def token_ids_only(runner: Any) -> Iterator[None]:
    before, runner.supports_mm_inputs = runner.supports_mm_inputs, False
    try:
        yield
    finally:
        runner.supports_mm_inputs = before
