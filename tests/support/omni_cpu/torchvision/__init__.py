"""An empty torchvision. vLLM-Omni imports it and Voxtral TTS does not use it; PyPI's wheel needs a PyTorch for CUDA."""

from omni_cpu import absent

__version__ = "0"
absent.make(__name__)
