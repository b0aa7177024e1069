"""The encode-once model in vLLM's Model Runner V1: on CPUs, and on GPUs with vLLM 0.20.0.

For a model with audio, this runner embeds tokens and audio before it calls the model. `AudioRowsRunner` overrides the
methods that do this: the model gets token ids, and each request gets a slot of `AudioRows`. With full CUDA graphs,
steps that only decode have graphs of their own. The worker calls `add_audio_rows` (worker.py). Model Runner V2
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
from voxtral_serve.engine import keywords
from voxtral_serve.engine.audio_rows import NO_AUDIO, AudioRows
from voxtral_serve.engine.draft_stream import DraftTokens
from voxtral_serve.engine.live_audio import LivePart, step_of
from voxtral_serve.engine.live_encoder import LiveEncoder
from voxtral_serve.engine.session import upload_delay


class Slots:
    """The slots of requests. Model Runner V1 has no fixed numbers for requests: they change between steps."""

    def __init__(self, rows: AudioRows, live: LiveEncoder | None = None, drafts: DraftTokens | None = None) -> None:
        self.rows, self.live, self.drafts = rows, live, drafts
        self.of: dict[str, int] = {}
        self.free = list(range(rows.slots))
        self.numbers = np.zeros(0, np.int64)  # slots of the tokens of a step
        self.batch: list[int] = []  # slots of the requests of a step
        self.scheduled: Any = None  # vLLM's SchedulerOutput of a step

    def begin_step(self, runner: Any, scheduled: Any) -> None:
        """Free the slots of ended requests, fill those of new and resumed ones, and set the slot of each token."""
        step = step_of(scheduled)
        new = [request.req_id for request in scheduled.scheduled_new_reqs]
        begun = (*new, *scheduled.scheduled_cached_reqs.resumed_req_ids)
        # Requests also end, and are preempted, in steps that do not run the model and do not call this method.
        preempted = step.preempted | (scheduled.preempted_req_ids or set())
        if begun or preempted:
            for request in [name for name in self.of if name not in runner.requests or name in preempted]:
                self._end(request)
        for request in begun:
            names = [clip.identifier for clip in runner.requests[request].mm_features]
            clips = [runner.encoder_cache[name] for name in names]
            self._begin(request, clips, upload_delay(runner.requests[request].sampling_params), step.parts.get(request))
            for name, clip in zip(names, clips, strict=True):
                self.rows.observe(name, clip)
        if self.live is not None and step.parts:
            self.rows.faults |= self.live.encode(step.parts)
            if self.drafts is not None:
                self.drafts.begin_tails(step.parts, self.live.slot_of, self.of)
        batch = runner.input_batch.req_ids
        self.rows.faults |= {request: NO_AUDIO for request in batch if request not in self.of}
        self.scheduled, self.batch = scheduled, [self.of.get(request, self.rows.slots) for request in batch]
        numbers = np.repeat(self.batch, [scheduled.num_scheduled_tokens[request] for request in batch])
        if not np.array_equal(numbers, self.numbers):  # most steps have the same requests as the step before
            self.numbers = numbers
            host = torch.from_numpy(numbers)
            if self.rows.slot.is_cuda:
                host = host.pin_memory()
            self.rows.slot[: len(numbers)].copy_(host, non_blocking=True)

    def _begin(self, request: str, clips: list[torch.Tensor], delay: int | None, part: LivePart | None) -> None:
        """Give a request with audio a slot. A request that gets none reads zeros, and `begin_step` marks it."""
        if request not in self.of:
            if not self.free or (not clips and part is None):
                return
            self.of[request] = self.free.pop()
        slot = self.of[request]
        if self.drafts is not None and not clips:
            self.drafts.clear(slot)
        for clip in clips:
            self.rows.put(slot, clip, delay)
            if self.drafts is not None:
                self.drafts.begin(slot, len(clip), delay)
        if part is not None:
            assert self.live is not None
            if (live_slot := self.live.begin(request)) is not None:
                self.rows.put_live(slot, live_slot, part.delay)
            else:  # `encode` finds the fault
                self.rows.put_nothing(slot)

    def end_all(self) -> None:
        """Free all slots. No request runs."""
        for request in [*self.of]:
            self._end(request)

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
        model = self.get_model()
        return Slots(model.audio_rows, model.live, model.drafts)

    def _prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Start the encoder before vLLM prepares the inputs: the GPU encodes while the host prepares."""
        for request, clips in scheduler_output.scheduled_encoder_inputs.items():
            for clip in clips:
                pin(self.requests[request].mm_features[clip].data)
        self._execute_mm_encoder(scheduler_output)
        return super()._prepare_inputs(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _check_and_update_cudagraph_mode(self, *args: Any, **kwargs: Any) -> None:
        """If all steps have full graphs, add graphs for steps that only decode, in which attention is faster.

        Exception: if there is a graph for more tokens than the largest decode step has, but none for exactly as many,
        the largest decode steps would have no graph of their own. All steps share graphs then.
        """
        super()._check_and_update_cudagraph_mode(*args, **kwargs)  # type: ignore[misc]
        graphs, sizes = self.cudagraph_dispatcher, self.compilation_config.cudagraph_capture_sizes or []
        tokens = self.uniform_decode_query_len * self.scheduler_config.max_num_seqs  # of the largest decode step
        if graphs.cudagraph_mode == CUDAGraphMode.FULL and (tokens in sizes or tokens > max(sizes, default=0)):
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
    """Move the tensors of a clip into pinned memory, as vLLM 0.32.0 does itself. Does nothing without CUDA.

    A copy from other memory to the GPU would wait until the GPU has done all work before it.
    """
    if item is None or not torch.cuda.is_available():
        return
    for field in item.values():
        if isinstance(field.data, torch.Tensor) and field.data.is_cpu:
            field.data = field.data.pin_memory()


def add_audio_rows(runner: Any) -> None:
    """Give a runner of Model Runner V1, which has not loaded its model yet, the methods of `AudioRowsRunner`.

    It assigns `__class__`, because vLLM's workers construct the runner inside `init_device` with a class that they
    import there: 0.20.0 on GPUs and CPUs, and 0.32.0 on CPUs. `AudioRowsRunner` has no `__init__`, so the result is
    what constructing the subclass would give. A worker that makes its runner in a method of its own, as 0.32.0 does
    on GPUs (`Worker._make_model_runner`), needs an override of that method only.
    """
    runner.__class__ = with_audio_rows(type(runner))
    if keywords.usable(runner.vllm_config):
        from voxtral_serve.engine.keyword_rows import KeywordRows

        KeywordRows.attach(runner)


# Method -> its first argument, and a word that its source must have
METHODS = {
    "_prepare_inputs": ("scheduler_output", "scheduler_output"),
    "_preprocess": ("scheduler_output", "supports_mm_inputs"),
    "_dummy_run": ("num_tokens", "supports_mm_inputs"),
    "_check_and_update_cudagraph_mode": ("attention_backends", "initialize_cudagraph_keys"),
}


def with_audio_rows(runner_class: Any) -> Any:
    """Return a subclass of a Model Runner V1 class. Raises PatchError if the class lacks the expected methods."""
    for name, (first, word) in METHODS.items():
        method = getattr(runner_class, name, None)
        arguments = [*inspect.signature(method).parameters][1:2] if method else "nothing, because it does not exist"
        if method is None or arguments != [first] or word not in inspect.getsource(method):
            raise shims.PatchError(
                f"vllm {shims.installed('vllm')}: {runner_class.__name__}.{name} takes {arguments}, expected "
                f"[{first!r}] first and {word} in its source: the encode-once model cannot be served with it. "
                f"{shims.ADVICE}"
            )
    return type(f"AudioRows{runner_class.__name__}", (AudioRowsRunner, runner_class), {})
