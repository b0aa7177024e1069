"""The platform that vLLM-Omni finds through its entry point `vllm_omni.platform_plugins`."""

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def name() -> str:
    """What the entry point returns: the platform's class."""
    return "omni_cpu.platform.CpuOmniPlatform"


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform, with the workers that vLLM-Omni's stages need."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "omni_cpu.workers.ARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "omni_cpu.workers.GenerationWorker"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return cls.get_device_total_memory()

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False
