"""The files of a checkpoint directory: which layout they are, and whether they are readable and whole."""

import json
import os
import re
from pathlib import Path
from typing import Any

from voxtral_serve.checkpoint.errors import CheckpointError
from voxtral_serve.checkpoint.layouts import HUGGING_FACE, MISTRAL

LFS = b"version https://git-lfs"  # the first bytes of the pointer that stands for a file until `git lfs pull`


def layout_of(directory: Path) -> str:
    """MISTRAL or HUGGING_FACE, from the names of the files alone. A directory with both is served as Mistral's.

    Raises CheckpointError naming the file that is missing or does not belong there.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: expected one that holds a checkpoint")
    check_download(directory)
    has = {name: (directory / name).is_file() for name in ("params.json", "config.json", "tekken.json")}
    consolidated = sorted(directory.glob("consolidated*.safetensors"))
    model = sorted(directory.glob("model*.safetensors"))
    if has["params.json"] and consolidated:
        layout = MISTRAL
    elif consolidated and has["config.json"]:
        raise CheckpointError(
            f"{directory} mixes two layouts: {consolidated[0].name} is Mistral's and needs params.json, which is "
            "missing; config.json is Hugging Face's. Add params.json, or remove consolidated*.safetensors"
        )
    elif has["config.json"] and model:
        layout = HUGGING_FACE
    elif has["params.json"] and model:
        raise CheckpointError(
            f"{directory} mixes two layouts: params.json is Mistral's and needs consolidated.safetensors, which is "
            f"missing; {model[0].name} is Hugging Face's and needs config.json, which is missing as well"
        )
    else:
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:12]) or "nothing"
        raise CheckpointError(
            f"{directory} holds no checkpoint: expected params.json and consolidated.safetensors (Mistral's layout) or "
            f"config.json and model.safetensors (Hugging Face's); found {found}"
        )
    if not has["tekken.json"]:
        raise CheckpointError(f"{directory / 'tekken.json'} is missing: no layout can do without this tokenizer")
    return layout


def check_download(directory: Path) -> None:
    """Raises CheckpointError for files that cannot be read or are not completely downloaded."""
    try:
        for path in sorted(directory.iterdir()):
            if path.is_file() and not os.access(path, os.R_OK, effective_ids=True):
                raise PermissionError(f"{path.name} is not readable")
    except PermissionError as error:
        raise unreadable(directory, error) from error
    # `hf download --local-dir` keeps them in the folder below, other tools beside the file they will be.
    for folder in (directory, directory / ".cache/huggingface/download"):
        for path in sorted(folder.glob("*.incomplete")):
            raise CheckpointError(f"{path} is half a download: download again, or remove it if nothing is missing")


def unreadable(directory: Path, error: PermissionError) -> CheckpointError:
    """The error for a directory that this process may not read."""
    return CheckpointError(
        f"{directory} cannot be read by uid {os.geteuid()} ({error.strerror or error}): make it readable for others "
        "(chmod -R a+rX); a container's mount may need a label, too (`:z` with SELinux)"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it cannot be read, or holds anything else."""
    try:
        raw = path.read_bytes()
        refuse_pointer(path, raw)
        content = json.loads(raw.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


def refuse_pointer(path: Path, begins: bytes) -> None:
    """Raises CheckpointError if a file's first bytes are those of a Git LFS pointer."""
    if begins.startswith(LFS):
        raise CheckpointError(f"{path} is a pointer of Git LFS and not the file itself: run `git lfs pull` beside it")


def weight_files(directory: Path, stem: str) -> list[Path]:
    """The weight files of the layout whose file names begin with `stem`, "consolidated" or "model".

    Its index names them; without an index, the numbers in their names count them. Raises CheckpointError for a missing
    file and for an index that is not valid.
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
                        raise CheckpointError(f"{shard} is missing, and {file.name} counts it: download it")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no `weight_map` of tensor names to file names")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, and {index.name} names it")
    return files
