"""The encode-once model's worker on a CPU; a module of its own, since vLLM's CPU worker is imported only there."""

from vllm.v1.worker.cpu_worker import CPUWorker

from voxtral_serve.engine.worker import EncodeOnceWorker


class CpuWorker(EncodeOnceWorker, CPUWorker):
    pass
