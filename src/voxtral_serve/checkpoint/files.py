"""The files of a checkpoint directory: detect their layout, and check that they are readable and complete."""

import json
import os
import re
from pathlib import Path
from typing import Any

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.layouts import HUGGING_FACE, MISTRAL

LFS = b"version https://git-lfs"  # first bytes of a Git LFS pointer, which `git lfs pull` replaces with the file


def layout_of(directory: Path) -> str:
    """The layout, MISTRAL or HUGGING_FACE, from the file names. MISTRAL if the directory has both layouts.

    Raises CheckpointError with the file that is missing or belongs to another layout.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: expected one with a checkpoint")
    check_download(directory)
    has = {name: (directory / name).is_file() for name in ("params.json", "config.json", "tekken.json")}
    consolidated = sorted(directory.glob("consolidated*.safetensors"))
    model = sorted(directory.glob("model*.safetensors"))
    if has["params.json"] and consolidated:
        layout = MISTRAL
    elif consolidated and has["config.json"]:
        raise CheckpointError(
            f"{directory} mixes two layouts: {consolidated[0].name} belongs to Mistral's layout and needs params.json, "
            "which is missing; config.json belongs to Hugging Face's. Add params.json, or remove "
            "consolidated*.safetensors"
        )
    elif has["config.json"] and model:
        layout = HUGGING_FACE
    elif has["params.json"] and model:
        raise CheckpointError(
            f"{directory} mixes two layouts: params.json belongs to Mistral's layout and needs "
            f"consolidated.safetensors, which is missing; {model[0].name} belongs to Hugging Face's and needs "
            "config.json, which is missing, too"
        )
    else:
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:12]) or "nothing"
        raise CheckpointError(
            f"{directory} contains no checkpoint: expected params.json and consolidated.safetensors (Mistral's layout) "
            f"or config.json and model.safetensors (Hugging Face's); found {found}"
        )
    if not has["tekken.json"]:
        raise CheckpointError(f"{directory / 'tekken.json'} is missing: both layouts need this tokenizer")
    return layout


def check_download(directory: Path) -> None:
    """Raises CheckpointError for files that cannot be read or are not completely downloaded."""
    try:
        for path in sorted(directory.iterdir()):
            if path.is_file() and not os.access(path, os.R_OK, effective_ids=True):
                raise PermissionError(f"{path.name} is not readable")
    except PermissionError as error:
        raise unreadable(directory, error) from error
    # `hf download --local-dir` writes partial files to this subfolder, other tools to the directory itself.
    for folder in (directory, directory / ".cache/huggingface/download"):
        for path in sorted(folder.glob("*.incomplete")):
            raise CheckpointError(
                f"{path} is an incomplete download: download again, or remove it if no file is missing"
            )


def unreadable(directory: Path, error: PermissionError) -> CheckpointError:
    """The error for a directory that this process has no permission to read."""
    return CheckpointError(
        f"{directory} cannot be read by uid {os.geteuid()} ({error.strerror or error}): make it readable for others "
        "(chmod -R a+rX); with SELinux, the mount of a container also needs a label (`:z`)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if the file cannot be read or contains no object."""
    try:
        raw = path.read_bytes()
        refuse_pointer(path, raw)
        content = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, expected an object")
    return content


def refuse_pointer(path: Path, begins: bytes) -> None:
    """Raises CheckpointError for a Git LFS pointer. `begins` has the first bytes of the file."""
    if begins.startswith(LFS):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its directory")


def weight_files(directory: Path, stem: str) -> list[Path]:
    """The weight files of a layout. `stem` is the start of their names, "consolidated" or "model".

    The files are those in the index. Without an index, the file names have their number (-00001-of-00002). Raises
    CheckpointError for a missing file and for an invalid index.
    """
    index = directory / f"{stem}.safetensors.index.json"
    if not index.is_file():
        files = sorted(directory.glob(f"{stem}*.safetensors"))
        for file in files:
            if numbered := re.fullmatch(r"(.+-)(\d+)-of-(\d+)\.safetensors", file.name):
                start, digits, last = numbered[1], len(numbered[2]), numbered[3]
                for number in range(1, int(last) + 1):
                    shard = directory / f"{start}{number:0{digits}}-of-{last}.safetensors"
                    if not shard.is_file():
                        raise CheckpointError(f"{shard} is missing, but {file.name} requires it: download it")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no valid `weight_map` from tensor names to file names")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {index.name} lists it: download it")
    return files
