"""A job of `voxtral-serve prove`, parsed from its command line, and the sizes of its parts. Standard library only."""

from dataclasses import dataclass
from pathlib import Path

OUT = Path("voxtral-prove")


@dataclass(frozen=True)
class ProveJob:
    """Prove a server that is up (`url`), or one that is started from a profile and a checkpoint's directory."""

    url: str | None
    profile: Path | None  # the YAML of `vllm serve --config`; None with `url`
    directory: Path | None  # the checkpoint's; None with `url`
    arguments: tuple[str, ...]  # further ones of `vllm serve`
    clips: Path | None  # a manifest of the user's clips
    out: Path  # the folder for report.html and report.json
    random_weights: bool  # the user says that the weights are random
    quick: bool
    with_texts: bool


@dataclass(frozen=True)
class Size:
    """How much the parts do. Seconds are of audio where not said otherwise."""

    clips: int  # of the bundled ones
    given: int  # at most, of the user's; the first ones
    at_pace: int  # clips that are also sent at the pace of speech
    requests: int  # of the batched pass
    in_flight: int
    level_s: float  # of each session at a number of live sessions
    sessions: int  # at most
    silence_s: float
    hour_s: float  # audio of the compressed hour
    hour_wall_s: float  # time in which to send as much of it as the server takes
    running: int  # requests that run when the server is told to stop
    running_s: float


FULL = Size(12, 100, 8, 128, 64, 15.0, 256, 20.0, 3600.0, 90.0, 4, 60.0)
QUICK = Size(3, 3, 1, 6, 6, 2.0, 2, 3.0, 3600.0, 3.0, 2, 20.0)
