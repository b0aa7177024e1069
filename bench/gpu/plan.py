"""What `python -m bench gpu report|run|live` measures: rows, and how. bench/gpu/arguments.py makes the plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class StartPlan:
    """How servers are started.

    cache     directory of the servers' caches; null for a temporary one
    logs      directory of the servers' logs; null for a temporary one
    command   the command to run as `vllm`
    steps     have each server write a timeline of its engine's steps (bench/gpu/steps.py)
    """

    cache: Path | None
    logs: Path | None
    command: tuple[str, ...]
    steps: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Uploads:
    """A row of uploads: `clips` requests to `server`, of which `in_flight` are under way at the same time.

    `minutes` is the length of each clip; null for clips of the benchmark. `seconds` is what the row may take on a GPU.
    """

    kind: ClassVar[str] = "uploads"
    server: str
    in_flight: int
    clips: int
    seconds: float = 30.0
    minutes: int | None = None

    @property
    def row(self) -> str:
        return f"{self.server}@{self.in_flight}" if self.minutes is None else f"{self.server}@{self.minutes}min"


@dataclass(frozen=True)
class Sessions:
    """A row of live sessions at the same time.

    Each sends `age_s` seconds of audio faster than speech, and then audio at the pace of speech, whose length is drawn
    between `least_s` and `most_s`. During this time, `uploads` clips are in flight, of `upload_s` seconds each, or as
    they are if that is 0.
    """

    kind: ClassVar[str] = "live"
    server: str
    sessions: int
    least_s: float = 30.0
    most_s: float = 60.0
    age_s: float = 0.0
    uploads: int = 0
    upload_s: float = 0.0

    @property
    def row(self) -> str:
        extra = f",age={self.age_s:g}" * bool(self.age_s) + f",uploads={self.uploads}" * bool(self.uploads)
        extra += f"x{self.upload_s:g}s" * bool(self.upload_s)
        return f"{self.server}@{self.sessions}live{extra}"

    @property
    def seconds(self) -> float:
        return 45 + self.most_s + self.age_s


Item = Uploads | Sessions


@dataclass(frozen=True)
class GpuPlan:
    """One call of `python -m bench gpu report|run|live`.

    out           the JSON file to write or to continue
    items         all rows of the file, in their order
    chosen        the names of those that this call may measure
    minutes       time of this call; null for no limit
    work          directory of the checkpoint and of the servers' caches, which later calls use again
    logs          directory of the servers' logs; null to discard them
    results       directory of the live client's results; null to discard them
    model         directory of the checkpoint; null for one of full size with random weights and a random drafter
    kv_gib        KV cache in GiB by server, if it is not the default
    changes       changes of the config of every server
    acceptance    acceptance rates of drafts by position; null for those of each server, empty if the weights decide
    cores         CPU cores for the client of live sessions; the server gets the others. 0: no division
    command       the command to run as `vllm`
    steps         have the rows of uploads say what the GPU does in a step
    commit        the commit of the code where there is no git; null to ask git
    only_plan     print the plan, start nothing
    command_line  what was called
    """

    out: Path
    items: tuple[Item, ...]
    chosen: frozenset[str]
    minutes: float | None
    work: Path
    logs: Path | None
    results: Path | None
    model: Path | None
    kv_gib: Mapping[str, float]
    changes: Mapping[str, object]
    acceptance: tuple[float, ...] | None
    cores: int
    command: tuple[str, ...]
    steps: bool
    commit: str | None
    only_plan: bool
    command_line: str
