"""What `voxtral-serve draft train` adds to vLLM's worker: the audio rows of clips, written to files.

vLLM's option `worker_extension_cls` names `RowsExtension`. vLLM makes it a base of the worker's class, and
`collective_rpc` calls its methods in the worker's process.
"""

import os
import select
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


class KeptRows:
    """The rows of clips until they are written, by the clip's identifier, as bfloat16 [n, dim]."""

    def __init__(self) -> None:
        self.rows: dict[str, torch.Tensor] = {}

    def add(self, clip: str, rows: torch.Tensor) -> None:
        """Keep a copy of the rows [n, dim] of a clip (AudioRows.observe)."""
        self.rows[clip] = rows.to(torch.bfloat16, copy=True)

    def write(self, path: Path, clips: Sequence[str]) -> list[int]:
        """Write the rows of these clips to a file, one clip after the other, and drop them.

        The file has `rows`, bfloat16 [rows of all clips, dim], and is written as a whole or not at all. Returns the
        number of rows of each clip. Raises KeyError for a clip whose rows are not kept.
        """
        rows = [self.rows[clip] for clip in clips]
        partial = path.with_suffix(".partial")
        save_file({"rows": torch.cat(rows).cpu()}, partial)
        partial.replace(path)
        for clip in clips:
            del self.rows[clip]
        return [len(each) for each in rows]


class RowsExtension:
    """Mixin for the worker of the encode-once model. vLLM asserts that the worker has none of its names."""

    model_runner: Any
    kept_rows: KeptRows

    def keep_rows(self, caller: int) -> None:
        """Keep the rows of all clips from now on, for the process `caller`.

        The engine ends with that process: vLLM's would outlive a SIGKILL, and with it the GPU's memory. Ctrl-C reaches
        both, and is the caller's.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.kept_rows = KeptRows()
        self.model_runner.get_model().audio_rows.observe = self.kept_rows.add
        threading.Thread(target=end_with, args=(caller, os.getppid()), daemon=True).start()

    def write_rows(self, path: str, clips: list[str]) -> list[int]:
        """Write the kept rows of these clips to a file (`KeptRows.write`). Returns the number of rows of each clip."""
        return self.kept_rows.write(Path(path), clips)


def end_with(caller: int, parent: int) -> None:
    """Wait for the end of a process, and end this one; also its parent, the engine, if a worker has its own process."""
    ended = select.poll()
    ended.register(os.pidfd_open(caller), select.POLLIN)
    ended.poll()
    if parent != caller:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
