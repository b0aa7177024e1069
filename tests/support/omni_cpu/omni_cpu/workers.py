"""Workers and model runners of both kinds of stages: vLLM-Omni's over vLLM's for a CPU."""

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _OnCPU:
    """Before vLLM-Omni's runner: its own constructor makes streams and buffers too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _torch_cuda_wrapper():
            super().__init__(*args, **kwargs)
        self._postprocess_tensors()


class ARModelRunner(_OnCPU, GPUARModelRunner, CPUModelRunner):
    pass


class GenerationModelRunner(_OnCPU, GPUGenerationModelRunner, CPUModelRunner):
    pass


class _Worker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: type[CPUModelRunner]

    def init_device(self) -> None:
        super().init_device()
        self.use_v2_model_runner = False  # it has none of vLLM-Omni's hooks
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)

    def encoder_loaded(self) -> bool:
        """Called for requests with reference audio, as in vLLM-Omni's own base worker."""
        return self.model_runner.model.encoder_loaded()


class ARWorker(_Worker):
    model_runner_cls = ARModelRunner


class GenerationWorker(_Worker):
    model_runner_cls = GenerationModelRunner
