"""The encode-once model in vLLM's Model Runner V1: on CPUs, and on GPUs with vLLM 0.20.0.

For a model with audio, this runner embeds tokens and audio before it calls the model. `AudioRowsRunner` overrides the
methods that do this: the model gets token ids, and each request gets a slot of `AudioRows`. With full CUDA graphs,
steps that only decode have graphs of their own. The worker installs it (voxtral_serve.engine.worker). Model Runner V2
has an interface for the rows (model_state.py), and a patch for the graphs (step_graphs).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.multimodal.inputs import MultiModalKwargsItem

from voxtral_serve import shims
from voxtral_serve.engine.audio_rows import AudioRows
from voxtral_serve.engine.live_encoder import LiveEncoder


class Slots:
    """Slots of requests. Model Runner V1 has no fixed numbers for requests: those in its batch change between steps."""

    def __init__(self, rows: AudioRows, live: LiveEncoder | None = None) -> None:
        self.rows, self.live = rows, live
        self.of: dict[str, int] = {}
        self.free = list(range(rows.slots))
        self.numbers = np.zeros(0, np.int64)  # slots of the tokens of a step

    def begin_step(self, runner: Any, scheduled: Any) -> None:
        """Free the slots of ended requests, fill those of new and resumed ones, and set the slot of each token."""
        new = [request.req_id for request in scheduled.scheduled_new_reqs]
        begun = (*new, *scheduled.scheduled_cached_reqs.resumed_req_ids)
        if begun or scheduled.preempted_req_ids:
            # A request may also end in a step that does not run the model and does not call this method.
            for request in [name for name in self.of if name not in runner.requests]:
                self._end(request)
            for request in (scheduled.preempted_req_ids or set()) & self.of.keys():
                self._end(request)
        parts = getattr(scheduled, "voxtral_serve_live", {})
        for request in begun:
            if request in parts:
                assert self.live is not None
                self.rows.put_live(self._begin(request), self.live.begin(request), parts[request].delay)
            for clip in runner.requests[request].mm_features:
                self.rows.put(self._begin(request), runner.encoder_cache[clip.identifier])
        if self.live is not None and parts:
            self.live.encode(parts)
        batch = runner.input_batch.req_ids
        numbers = np.repeat(
            [self.of.get(request, 0) for request in batch],
            [scheduled.num_scheduled_tokens[request] for request in batch],
        )
        if not np.array_equal(numbers, self.numbers):  # most steps have the same requests as the step before
            self.numbers = numbers
            host = torch.from_numpy(numbers)
            if self.rows.slot.is_cuda:
                host = host.pin_memory()
            self.rows.slot[: len(numbers)].copy_(host, non_blocking=True)

    def _begin(self, request: str) -> int:
        if request not in self.of:
            self.of[request] = self.free.pop()
        return self.of[request]

    def _end(self, request: str) -> None:
        self.free.append(self.of.pop(request))
        if self.live is not None:
            self.live.end(request)


class AudioRowsRunner:
    """Mixin for the classes of Model Runner V1."""

    get_model: Any
    supports_mm_inputs: bool
    requests: Any
    cudagraph_dispatcher: Any
    scheduler_config: Any
    compilation_config: Any
    uniform_decode_query_len: int
    _execute_mm_encoder: Any

    @cached_property
    def slots(self) -> Slots:
        return Slots(self.get_model().audio_rows, self.get_model().live)

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Start the encoder before vLLM prepares the inputs: the GPU encodes while the host prepares."""
        for request, clips in scheduler_output.scheduled_encoder_inputs.items():
            for clip in clips:
                pin(self.requests[request].mm_features[clip].data)
        self._execute_mm_encoder(scheduler_output)
        return super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _check_and_update_cudagraph_mode(self, *args: Any, **kwargs: Any) -> None:
        """With full graphs for all steps, add some of their own for steps that only decode, whose attention is faster.

        Without a graph of `most` tokens, decoding of nearly as many would have none: all steps share graphs then.
        """
        super()._check_and_update_cudagraph_mode(*args, **kwargs)  # type: ignore[misc]
        graphs, sizes = self.cudagraph_dispatcher, self.compilation_config.cudagraph_capture_sizes or []
        most = self.uniform_decode_query_len * self.scheduler_config.max_num_seqs
        if graphs.cudagraph_mode == CUDAGraphMode.FULL and (most in sizes or most > max(sizes, default=0)):
            # The keys of FULL stay. This mode lets `dispatch` tell both kinds of steps apart.
            graphs.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, self.uniform_decode_query_len)

    def _preprocess(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self.slots.begin_step(self, scheduler_output)
        with self._token_ids_only():
            return super()._preprocess(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        with self._token_ids_only():
            return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _token_ids_only(self) -> Iterator[None]:
        """Inside the `with` block, both methods take the branch for a model without audio."""
        before, self.supports_mm_inputs = self.supports_mm_inputs, False
        try:
            yield
        finally:
            self.supports_mm_inputs = before


def pin(item: MultiModalKwargsItem | None) -> None:
    """Put the tensors of a clip into pinned memory. A copy from other memory to the GPU waits
    until the GPU has done all work before it; vLLM 0.32.0 pins them itself. Without CUDA: nothing."""
    if item is None or not torch.cuda.is_available():
        return
    for field in item.values():
        if isinstance(field.data, torch.Tensor) and field.data.is_cpu:
            field.data = field.data.pin_memory()


# Method -> its first argument, and a word that its source must have
METHODS = {
    "_prepare_inputs": ("scheduler_output", "scheduler_output"),
    "_preprocess": ("scheduler_output", "supports_mm_inputs"),
    "_dummy_run": ("num_tokens", "supports_mm_inputs"),
    "_check_and_update_cudagraph_mode": ("attention_backends", "initialize_cudagraph_keys"),
}


def with_audio_rows(runner_class: Any) -> Any:
    """A subclass of a Model Runner V1 class. Raises PatchError if it does not have the expected methods."""
    for name, (first, word) in METHODS.items():
        method = getattr(runner_class, name, None)
        found = [*inspect.signature(method).parameters][1:2] if method else "nothing, because it does not exist"
        if method is None or found != [first] or word not in inspect.getsource(method):
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')}: {runner_class.__name__}.{name} takes {found}, expected [{first!r}] "
                f"first and {word} in its source: the encode-once model cannot be served with it. "
                f"{shims.ADVICE}"
            )
    return type(f"AudioRows{runner_class.__name__}", (AudioRowsRunner, runner_class), {})
