"""Recognise a checkpoint directory of VoxCPM2, and check that its files are complete. Standard library only.

vLLM-Omni reads part of the weights itself and the rest through the package voxcpm, which wants one file of weights.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import LFS, check_download, read_json, refuse_pointer
from voxtral_serve.checkpoint.headers import read_header

ARCHITECTURE = "voxcpm2"  # of config.json, which has no `model_type`
WEIGHTS, TOKENIZER = "model.safetensors", ("tokenizer.json", "tokenizer_config.json")
CODECS = ("audiovae.safetensors", "audiovae.pth")  # voxcpm takes the first that is there


@dataclass(frozen=True)
class VoxCPM2Checkpoint:
    """A directory of VoxCPM2 with all its files. `shapes` are those of the tensors of WEIGHTS, without the codec's."""

    NAME: ClassVar = "VoxCPM2"
    STAGES: ClassVar = ("0",)

    directory: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    weight_bytes: int


def read_voxcpm2(directory: Path) -> VoxCPM2Checkpoint | None:
    """Read and check a directory of VoxCPM2. None for one of another model.

    Raises CheckpointError for files that are missing or not complete.
    """
    source = directory / "config.json"
    if not source.is_file():
        return None
    check_download(directory)
    config = read_json(source)
    if config.get("architecture") != ARCHITECTURE:
        return None
    codec = next((directory / name for name in CODECS if (directory / name).is_file()), directory / CODECS[1])
    for path in (directory / WEIGHTS, codec, *(directory / name for name in TOKENIZER)):
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but {source.name} is that of VoxCPM2: download it")
    header, _ = read_header(directory / WEIGHTS)
    if codec.suffix == ".safetensors":
        read_header(codec)
    else:
        _check_saved(codec)
    size = (directory / WEIGHTS).stat().st_size + codec.stat().st_size
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return VoxCPM2Checkpoint(directory, config, shapes, size)


def _check_saved(path: Path) -> None:
    """Raises CheckpointError unless torch.save wrote all of the file."""
    with path.open("rb") as file:
        refuse_pointer(path, file.read(len(LFS)))
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a complete file of torch.save: download it again")
