"""Describe the machine and the versions that the results depend on.

This is the machine that runs bench. Of a server on another machine, only the version is known.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from bench.measure import engine
from bench.measure.gpus import Gpus

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
SERVER_LIBRARIES = ("vllm", "torch", "transformers", "mistral-common", "voxtral-serve")
# "-dirty" when tracked files differ from the commit
GIT = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def describe(server_version: str | None, libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    gpus = Gpus()
    facts = gpus.facts()
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
        "gpu": [gpu["name"] for gpu in facts] or None,
        "gpu_memory_bytes": [gpu["memory_bytes"] for gpu in facts] or None,
        "gpu_driver": gpus.driver(),
        "libraries": versions(libraries),
        "git_commit": git.strip() or None,
    }


def versions(libraries: Sequence[str]) -> dict[str, str | None]:
    """Versions of distributions, null for one that is not installed."""

    def of(library: str) -> str | None:
        try:
            return version(library)
        except PackageNotFoundError:
            return None

    return {library: of(library) for library in libraries}


def of_server(command: Sequence[str] = ()) -> dict[str, str] | None:
    """Versions of the server's libraries; null if `vllm`, or the command that replaces it, has another environment."""
    if Path((list(command) or [engine.vllm()])[0]).parent != Path(sys.executable).parent:
        return None
    return {name: number for name, number in versions(SERVER_LIBRARIES).items() if number}
