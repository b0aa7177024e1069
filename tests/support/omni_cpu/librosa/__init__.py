"""An empty librosa. voxcpm imports it to trim silence, which vLLM-Omni does not ask for; it brings scipy and others."""

from omni_cpu import absent

__version__ = "0"
absent.make(__name__)
