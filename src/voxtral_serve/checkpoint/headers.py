"""Headers of safetensors files: names, types, shapes and offsets of tensors."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.files import LFS, refuse_pointer, weight_files
from voxtral_serve.checkpoint.layouts import mistral_name

LENGTH_BYTES = 8  # size of the header's length at the start of a file


@dataclass(frozen=True)
class Tensor:
    """The entry of one tensor in a safetensors header."""

    dtype: str  # in safetensors' spelling, such as "BF16"
    shape: tuple[int, ...]
    nbytes: int
    stored_as: str  # its name in the file


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file: (entries by tensor name, offset of the data in bytes).

    Raises CheckpointError unless the file has the size that its header requires. The format:
    https://github.com/huggingface/safetensors#format
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            refuse_pointer(path, file.read(len(LFS)))
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
            header = json.loads(file.read(min(length, size)))
        header.pop("__metadata__", None)
        ends = [
            int(entry["data_offsets"][1]) for entry in header.values() if entry["dtype"] and entry["shape"] is not None
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error!r}") from error
    end = LENGTH_BYTES + length + max(ends, default=0)
    if size != end:
        raise CheckpointError(f"{path} has {size} bytes, but its header requires {end}: download it again")
    return header, LENGTH_BYTES + length


def read_tensors(directory: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of the weight files by their Mistral names. Raises CheckpointError if one is stored twice."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory, stem):
        for name, entry in read_header(path)[0].items():
            start, end = entry["data_offsets"]
            held = Tensor(entry["dtype"], tuple(entry["shape"]), end - start, name)
            before = tensors.setdefault(mistral_name(name), held)
            if before is not held:
                raise CheckpointError(
                    f"{directory} has one tensor twice: as {before.stored_as} and as {name} ({path.name})"
                )
    return tensors


def tensor_bytes(directory: Path, stem: str, tensor: Tensor) -> bytes:
    """The content of one tensor. Raises CheckpointError if no weight file has it."""
    for path in weight_files(directory, stem):
        header, data_offset = read_header(path)
        if tensor.stored_as in header:
            start, end = header[tensor.stored_as]["data_offsets"]
            with path.open("rb") as file:
                file.seek(data_offset + start)
                return file.read(end - start)
    raise CheckpointError(f"{directory} lacks tensor {tensor.stored_as}")


def stored_bytes(directory: Path, stem: str) -> int:
    """Total size of the tensors in the weight files, in bytes."""
    stored = (entry for path in weight_files(directory, stem) for entry in read_header(path)[0].values())
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in stored)
