"""What a report says of the run, the server and the machine."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from voxtral_serve import checkpoint
from voxtral_serve.checkpoint.headers import tensor_bytes
from voxtral_serve.client.errors import UsageError
from voxtral_serve.measure import log as logs
from voxtral_serve.measure.gpus import Gpus
from voxtral_serve.prove import private
from voxtral_serve.prove.state import Run

LIBRARIES = (
    *("voxtral-serve", "vllm", "torch", "transformers", "mistral-common", "numpy", "requests", "websockets"),
    *("jiwer", "whisper-normalizer", "nvidia-ml-py"),
)
STEMS = {checkpoint.MISTRAL: "consolidated", checkpoint.HUGGING_FACE: "model"}
NORM = "norm.weight"  # of the language model's last layer
CENTRED = 0.25  # of its standard deviation: a mean below that is no trained norm's


def profile(path: Path) -> dict[str, Any]:
    """The content of a profile. Raises UsageError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--serve {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--serve {path} is no mapping of options: expected a YAML file for vllm serve --config")
    return content


def random_weights(directory: Path) -> str | None:
    """Why the checkpoint's weights are random; None if they are not, or its files do not tell.

    A trained RMSNorm has weights that are not all equal and whose mean is far from 0.
    """
    try:
        held = checkpoint.read(directory)
    except checkpoint.CheckpointError:
        return None  # `check` says what is wrong
    weights = _numbers(held.tensors[NORM].dtype, tensor_bytes(directory, STEMS[held.layout], held.tensors[NORM]))
    if weights is None:
        return None
    if weights.std() == 0 or abs(weights.mean()) < CENTRED * weights.std():
        return f"the checkpoint has random weights ({NORM} is not trained)"
    return None


def _numbers(dtype: str, content: bytes) -> np.ndarray | None:
    """Values of a tensor as float32; None for a type that is not looked at."""
    if dtype == "BF16":  # the upper half of float32
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    kinds = {"F32": "<f4", "F16": "<f2"}
    return np.frombuffer(content, kinds[dtype]).astype(np.float32) if dtype in kinds else None


def of_run(run: Run, gpus: Gpus | None, began: datetime) -> dict[str, Any]:
    """The report without its parts; `gpus` of the server's machine. What is not known is None."""
    job, target = run.job, run.server
    return {
        "date_utc": began.astimezone(UTC).isoformat(timespec="seconds"),
        "mode": "url" if job.url else "serve",
        "quick": job.quick,
        "random_weights": run.random,
        "versions": {name: _version(name) for name in LIBRARIES},
        "server": None
        if target is None
        else {
            "version": target.version,
            "profile": job.profile.name if job.profile else (target.about or {}).get("profile"),
            "versions": (target.about or {}).get("versions"),
            "capabilities": (target.about or {}).get("capabilities"),
            "limits": (target.about or {}).get("limits"),
            "context_s": target.context_s,
            "patches": logs.patches(logs.read(run.engine.log)) if run.engine else None,
        },
        "config": None if run.config is None else private.config(run.config),
        "options": private.options(job.arguments),
        "machine": {
            "is_the_servers": target is not None and target.is_local,
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "gpus": gpus.facts() if gpus else [],
            "driver": gpus.driver() if gpus else None,
        },
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _cpu() -> str | None:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or None
