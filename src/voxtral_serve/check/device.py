"""The device that vLLM would use, its memory, and whether vLLM's model runs on it."""

import os
from argparse import Namespace
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from voxtral_serve.check.report import ConfigError
from voxtral_serve.units import GIB


@dataclass(frozen=True)
class Device:
    """The first device that vLLM would use. Memory in bytes."""

    name: str
    total: int
    free: int
    present: bool = True  # no: the check is for a GPU that another machine has


def other_gpu(gib: float) -> Device:
    """A GPU with so many GiB that nothing else uses."""
    return Device(f"a GPU with {gib:g} GiB", int(gib * GIB), int(gib * GIB), present=False)


def on_cpu() -> bool:
    """Whether vLLM is a CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def first_device(current: Any) -> Device:
    """`current` is vllm.platforms.current_platform. Raises ConfigError without a device whose memory can be read."""
    if current.is_cpu():
        from vllm.utils.cpu_resource_utils import get_memory_node_info

        node = get_memory_node_info(0)
        return Device("memory node 0 (CPU)", node.total_memory, node.available_memory)
    if not current.is_cuda():
        raise ConfigError(
            f"vLLM {version('vllm')} is not a CPU build and finds no NVIDIA GPU (its platform is "
            f"{current.device_name!r}): check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    from vllm.third_party import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        raise ConfigError("CUDA_VISIBLE_DEVICES is empty, which hides all GPUs: unset it, or set it to a GPU")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(current.device_id_to_physical_device_id(0))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
    except (pynvml.NVMLError, RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"NVML cannot read the memory of the first GPU (CUDA_VISIBLE_DEVICES is {visible!r}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return Device(name, int(memory.total), int(memory.free))


def explicit_kv_bytes(values: Namespace, cpu: bool) -> tuple[int, str] | None:
    """The size of the KV cache in bytes, and the setting that gives it. None if no setting does; raises ConfigError."""
    if cpu and (text := os.environ.get("VLLM_CPU_KVCACHE_SPACE")):
        try:
            return int(text) * GIB, f"VLLM_CPU_KVCACHE_SPACE={text}"
        except ValueError:
            raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE is {text!r}, expected a whole number of GiB") from None
    if values.kv_cache_memory_bytes:
        return values.kv_cache_memory_bytes, f"kv_cache_memory_bytes {values.kv_cache_memory_bytes}"
    return None


def runs_on_cpu() -> bool:
    """Whether vLLM's encoder attention works with its CPU backend. Calls vLLM's code instead of comparing versions."""
    from vllm.model_executor.models.whisper_causal import create_whisper_attention_backend_with_block_pooling
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    try:
        create_whisper_attention_backend_with_block_pooling(CPUAttentionBackend, 4)
    except NotImplementedError:
        return False
    return True
