"""The job of `voxtral-serve draft train`, parsed from its command line. Standard library only."""

from dataclasses import dataclass, field
from pathlib import Path


class DraftError(Exception):
    """The command cannot do what it was asked. The message is for the user; exit status 2."""


@dataclass(frozen=True)
class Training:
    """How the network is built and trained.

    width, blocks, kernel  of engine.draft_network.HeadNetwork
    passes                 over all rows
    batch_rows             rows of a batch with their padding, at most
    """

    width: int = 512
    blocks: int = 6
    kernel: int = 7
    passes: float = 10
    batch_rows: int = 8192
    learning_rate: float = 2e-3


@dataclass(frozen=True)
class TrainJob:
    """Train a drafter on recordings.

    clips       folders, audio files, or manifests (.jsonl)
    held_out    the same, for the table; () to hold out some of `clips`
    out         the drafter's file; None for the one that a server looks for
    work        the folder of what is kept until the file is written; None for one beside it
    arguments   options of `vllm serve` for the engine
    """

    clips: tuple[Path, ...]
    checkpoint: Path
    out: Path | None = None
    work: Path | None = None
    held_out: tuple[Path, ...] = ()
    hours: float | None = None
    replace: bool = False
    arguments: tuple[str, ...] = ()
    training: Training = field(default_factory=Training)
