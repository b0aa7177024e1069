"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PICO = ROOT / "pico/checkpoint"
CONFIG = ROOT / "vllm_config.yaml"
DATA = ROOT / "bench/data"
