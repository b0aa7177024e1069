"""The plans of the commands of `python -m bench.gpu`. bench/gpu/arguments.py makes them from the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class StartPlan:
    """How servers are started. GpuPlan describes the fields.

    steps  have each server write a timeline of its engine's steps (bench/gpu/steps.py)
    """

    together: bool
    cache: Path | None
    logs: Path | None
    command: tuple[str, ...]
    steps: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class GpuPlan(StartPlan):
    """`bench.gpu run`: serve the configurations of `rows`, measure them, and add their figures to the file `out`.

    clips       number of clips by concurrency
    together    start all servers at once
    alone       stop each server before the next one starts
    restart     start each server twice
    cache, logs directories of the servers' caches and logs; null for temporary ones
    model       directory of the checkpoint; null for one of full size with random weights
    kv_gib      KV cache in GiB by server, if it is not the default
    acceptance  acceptance rates of drafts by position; null if the weights decide
    command     the command to run as `vllm`
    arguments   the command line
    only_plan   print the plan, start nothing
    """

    out: Path
    rows: tuple[str, ...]
    clips: Mapping[int, int]
    alone: bool
    restart: bool
    model: Path | None
    kv_gib: Mapping[str, float]
    acceptance: tuple[float, ...] | None
    only_plan: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """Concurrent live sessions.

    Each sends `age_s` seconds of audio faster than speech and then `seconds` at the pace of speech. During this time,
    `uploads` clips are in flight. Without sessions, uploads are measured for `seconds`. With `find`, the largest number
    of sessions that the server holds is searched, between `sessions` and `find`. With `clips`, the sessions are so many
    clips of the benchmark, one after the other, `sessions` at a time.
    """

    sessions: int
    seconds: float = 60.0
    age_s: float = 0.0
    uploads: int = 0
    find: int | None = None
    clips: int | None = None


@dataclass(frozen=True)
class LivePlan(StartPlan):
    """`bench.gpu live`: serve `profile` with `changes` to its config, and add the row of each trial to the file `out`.

    name       name of the rows, such as stock or live
    model      as in GpuPlan
    cores      number of CPU cores for the client and the uploads; the server gets the others. 0: no division
    timeout_s  timeout of the client
    results    directory for the results of the client; null to discard them
    """

    out: Path
    name: str
    profile: Path
    changes: Mapping[str, object]
    trials: tuple[Trial, ...]
    model: Path | None
    cores: int
    timeout_s: int
    results: Path | None
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class MergePlan:
    """`bench.gpu merge`: merge `files` into `out`. If several files have a row, that of the last file is kept."""

    files: tuple[Path, ...]
    out: Path
