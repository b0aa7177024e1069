"""The worker of the encode-once model: vLLM's own worker with the model runner that this model needs.

vLLM's option `worker_cls` names it. The config hook of the model sets the option (config.py).
"""

import copy
import os
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from voxtral_serve import shims
from voxtral_serve.engine import drafter, self_test, steps
from voxtral_serve.engine.live_audio import FAULTS, step_of


class EncodeOnceWorker:
    """Mixin for vLLM's worker classes."""

    device_config: Any
    model_runner: Any
    vllm_config: Any

    def init_device(self) -> None:
        self.step_probe = steps.probe_of(self)
        super().init_device()  # type: ignore[misc]
        if getattr(self.vllm_config, "use_v2_model_runner", False):
            if drafter.is_ours(self.vllm_config):
                replace_speculator(self.model_runner)
            return
        from voxtral_serve.engine import model_runner

        model_runner.add_audio_rows(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self.model_runner.get_model().weights_loaded()
        connect_drafter(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.get_model().prepare()  # where vLLM has run nothing, as on a CPU
        if self.device_config.device_type == "cuda" and "OMP_NUM_THREADS" not in os.environ:
            # As vLLM 0.32.0 does. With 0.20.0, PyTorch shared the copy of a clip into pinned memory between several
            # threads, and it took 5 ms on a busy server.
            torch.set_num_threads(1)
        self_test.run(self)
        if self.step_probe is not None:
            self.step_probe.attach(self)
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        state = getattr(self.model_runner, "model_state", None)
        if state is not None:
            state.parts = step_of(scheduler_output).parts
            if drafter.is_ours(self.vllm_config):
                self.model_runner.speculator.only_pads = drafter.wants_pads(scheduler_output)
            state.encode_ahead(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM calls it once for each step with tokens. Its output carries the faults of the step's audio."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        rows = self.model_runner.get_model().audio_rows
        if output is None or not rows.faults:  # None: `execute_model` has raised
            return output
        faults, rows.faults = rows.faults, {}
        return with_faults(output, faults)


def with_faults(output: Any, faults: dict[str, str]) -> Any:
    """Returns vLLM's output of a step with the attribute FAULTS. The result of an asynchronous output gets it later."""
    if isinstance(output, AsyncModelRunnerOutput):
        get_output = output.get_output
        output.get_output = lambda: with_faults(get_output(), faults)  # type: ignore[method-assign]
        return output
    output = copy.copy(output)  # vLLM shares its empty output
    setattr(output, FAULTS, faults)
    return output


class GpuWorker(EncodeOnceWorker, Worker):
    pass


def replace_speculator(runner: Any) -> None:
    """Replace the n-gram search, which Model Runner V2 makes for `method: ngram_gpu`, by the drafter of the config.

    Raises PatchError if the runner has another speculator.
    """
    speculator = type(getattr(runner, "speculator", None)).__name__
    if speculator != "NgramGPUSpeculator":
        raise shims.PatchError(
            f"vllm {shims.installed('vllm')}: the speculator of Model Runner V2 is {speculator}, expected "
            f"NgramGPUSpeculator (voxtral-serve drafts in its place). {shims.ADVICE}"
        )
    runner.speculator = drafter.speculator(runner.vllm_config, runner.device, runner.req_states)


def connect_drafter(runner: Any) -> None:
    """Let the drafter of the config, if there is one, reach the guesses of the model that was loaded, and in Model
    Runner V1 the slots of the requests."""
    if not drafter.is_ours(runner.vllm_config):
        return
    if getattr(runner.vllm_config, "use_v2_model_runner", False):
        runner.speculator.tokens = runner.get_model().drafts
    elif isinstance(runner.drafter, drafter.Drafter):  # in 0.20.0 it is the class of ngram_pads
        runner.drafter.slots = runner.slots
