"""VoxCPM2, which vLLM-Omni serves with the package voxcpm: the package, and the tensors that it expects."""

import contextlib
import io
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from voxtral_serve.check.report import Report, size
from voxtral_serve.checkpoint import VoxCPM2Checkpoint

LIBRARY, TESTED = "voxcpm", "2.0.3"


def report_voxcpm2(report: Report, held: VoxCPM2Checkpoint) -> None:
    """The rows of a checkpoint. A missing tensor is a problem: voxcpm would leave random numbers in its place."""
    report.row("model", held.NAME)
    report.row("tensors", f"{len(held.shapes):,}, {size(held.weight_bytes)} with the codec")
    try:
        installed = version(LIBRARY)
    except PackageNotFoundError:
        report.problem(
            f"{LIBRARY} is not installed, and vLLM-Omni needs it for VoxCPM2: docs/pages/speech-synthesis.md has the "
            f"commands for {LIBRARY}=={TESTED}"
        )
        return
    report.row(LIBRARY, installed + ("" if installed == TESTED else f"  not tested; tested: {TESTED}"))
    try:
        expected = model_shapes(held.config)
    except (ImportError, ValueError, KeyError, TypeError) as error:  # pydantic's errors are ValueErrors
        report.problem(f"{LIBRARY} {installed} cannot make the model of {held.directory / 'config.json'}: {error}")
        return
    name = next((name for name, shape in expected.items() if held.shapes.get(name) != shape), None)
    if name is None:
        return
    if name not in held.shapes:
        report.problem(f"{held.directory} lacks tensor {name}: expected {expected[name]}")
    else:
        report.problem(
            f"{held.directory} has tensor {name} with the shape {held.shapes[name]}: expected {expected[name]}"
        )


def model_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the model but its codec, by its name. `config`: the content of config.json.

    Raises ImportError, or ValueError and others for a wrong `config`.
    """
    import torch
    from voxcpm.model.voxcpm2 import VoxCPM2Model, VoxCPMConfig
    from voxcpm.modules.audiovae import AudioVAEV2

    read = VoxCPMConfig.model_validate(config)
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, about voxcpm's codec
        codec = AudioVAEV2(read.audio_vae_config)
        model = VoxCPM2Model(read, SimpleNamespace(vocab={}), codec, device="cpu")
    state = model.state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith("audio_vae.")}
