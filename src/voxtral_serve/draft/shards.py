"""The work folder: audio rows and tokens of clips, in files that are each whole or absent, so that a job resumes.

    job.json                 what the rows are of: a checkpoint and its delay
    0000.safetensors         `rows`, bfloat16 [rows of all its clips, dim]; the engine's worker writes it
    0000.json                its clips, with their tokens; written last, so a shard without it does not count

The tokens are the clips' text. The folder is removed once the drafter is written.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from voxtral_serve.draft.job import DraftError

JOB = "job.json"
BYTES = 2  # of a number in bfloat16


class Entry(NamedTuple):
    """A clip of a shard: its rows are the `rows` ones of the shard's from row `first` on.

    key       of its recording, and its number in that
    held_out  whether it is for the table, not for training
    seconds   of audio, without padding
    tokens    that the model made after the prompt, EOS included
    """

    key: str
    held_out: bool
    seconds: float
    tokens: list[int]
    shard: int
    first: int
    rows: int


class Shards:
    """Clips of complete shards. One process at a time uses a work folder."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """`identity`: what rows depend on. Raises DraftError for a folder of another identity, or one in use."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("w")
        except OSError as error:
            raise DraftError(f"--work {folder} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DraftError(f"--work {folder} is in use by another `voxtral-serve draft train`") from None
        self._check(dict(identity))
        for partial in folder.glob("*.partial"):
            partial.unlink()
        self.entries: list[Entry] = []
        self.keys: set[str] = set()  # of all entries
        self.counts: dict[str, int] = {}  # clips of each recording that was read to its end
        self.number = 0  # of the next shard
        while (folder / f"{self.number:04d}.json").exists():
            self._read(self.number)
            self.number += 1

    def _check(self, identity: dict[str, Any]) -> None:
        path = self.folder / JOB
        if not path.exists():
            write_json(path, identity)
            return
        found = read_json(path)
        for name, value in identity.items():
            if found.get(name) != value:
                raise DraftError(
                    f"--work {self.folder} has rows of another {name} ({found.get(name)!r}, not {value!r}): remove "
                    "the folder, or name another one"
                )

    def _read(self, number: int) -> None:
        content, first = read_json(self.folder / f"{number:04d}.json"), 0
        try:
            for key, held_out, seconds, rows, tokens in content["clips"]:
                self.entries.append(Entry(key, held_out, seconds, tokens, number, first, rows))
                self.keys.add(key)
                first += rows
            self.counts |= content["counts"]
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(self.folder / f"{number:04d}.json", error) from None

    def path(self) -> Path:
        """The file of rows of the next shard."""
        return self.folder / f"{self.number:04d}.safetensors"

    def add(self, clips: Sequence[tuple[str, bool, float, int, list[int]]], counts: Mapping[str, int]) -> None:
        """A shard whose rows are written. clips: key, held_out, seconds, number of rows, tokens."""
        write_json(self.folder / f"{self.number:04d}.json", {"clips": clips, "counts": counts})
        self._read(self.number)
        self.number += 1

    def rows(self, number: int) -> torch.Tensor:
        """bfloat16 [rows, dim] of a shard; its memory is the file's. Raises DraftError for a damaged file."""
        path = self.folder / f"{number:04d}.safetensors"
        expected = sum(entry.rows for entry in self.entries if entry.shard == number)
        try:
            with safe_open(path, "pt") as file:
                rows: torch.Tensor = file.get_tensor("rows")
        except (OSError, SafetensorError) as error:
            raise damaged(path, error) from None
        if len(rows) != expected or rows.dtype != torch.bfloat16:
            raise damaged(path, f"{rows.dtype} {tuple(rows.shape)}, expected bfloat16 and {expected} rows")
        return rows

    def complete(self, recording: str) -> bool:
        """Whether all clips of a recording are in shards."""
        count = self.counts.get(recording)
        return count is not None and all(f"{recording}-{number}" in self.keys for number in range(count))

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def damaged(path: Path, why: object) -> DraftError:
    return DraftError(f"{path} is damaged ({why}): remove the folder {path.parent}, and run the command again")


def write_json(path: Path, content: object) -> None:
    """Write the file as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
        raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None


def check_space(folder: Path, needed: int) -> None:
    """Raises DraftError if the file system of a folder, which may not exist yet, has fewer bytes free."""
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DraftError(
            f"{os.fspath(folder)} has {free / 1e9:.1f} GB free and the audio rows need {needed / 1e9:.1f} GB: free "
            "some, take fewer --hours, or name a folder on another disk by --work"
        )
