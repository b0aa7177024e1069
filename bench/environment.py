"""Describe the machine and the versions that the results depend on.

This is the machine that runs bench. Of a server on another machine, only the version is known.
"""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped,unused-ignore]

from bench.memory import Gpus

LIBRARIES = (
    "jiwer",
    "numpy",
    "nvidia-ml-py",
    "psutil",
    "requests",
    "soundfile",
    "soxr",
    "tqdm",
    "websockets",
    "whisper-normalizer",
)
# "-dirty" when tracked files differ from the commit
GIT = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def describe(server_version: str | None, libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    gpus = Gpus().handles.values()
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"^model name\s*: (.+)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    try:
        git = subprocess.run(GIT, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        git = ""  # no git here, or no checkout
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "server_version": server_version,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu.group(1) if cpu else platform.processor() or None,
        "cores": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "gpu": [pynvml.nvmlDeviceGetName(gpu) for gpu in gpus] or None,
        "gpu_memory_bytes": [_memory(gpu) for gpu in gpus] or None,
        "gpu_driver": pynvml.nvmlSystemGetDriverVersion() if gpus else None,
        "libraries": versions(libraries),
        "git_commit": git.strip() or None,
    }


def _memory(gpu: Any) -> int | None:
    try:
        total: int = pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    except pynvml.NVMLError:
        return None  # no memory of its own: CPU and GPU share one chip
    return total


def versions(libraries: Sequence[str]) -> dict[str, str | None]:
    """Versions of distributions, null for one that is not installed."""

    def of(library: str) -> str | None:
        try:
            return version(library)
        except PackageNotFoundError:
            return None

    return {library: of(library) for library in libraries}
