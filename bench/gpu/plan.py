"""What each command of `python -m bench.gpu` is to do: made of its command line by bench/gpu/arguments.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StartPlan:
    """How servers are started: see GpuPlan."""

    together: bool
    cache: Path | None
    logs: Path | None
    command: tuple[str, ...]


@dataclass(frozen=True)
class GpuPlan(StartPlan):
    """`bench.gpu run`: serve the configurations of `rows`, measure them, and add their figures to the file `out`.

    `clips` gives the number of clips by concurrency. Servers start all at once with `together`, and with `alone` each
    ends before the next one starts; with `restart` each starts twice. `cache` and `logs` are the directories of the
    servers' caches and logs, null for ones that are removed at the end. `model` is the checkpoint's directory, null for
    one of full size with random weights. `kv_gib` is the KV cache in GiB by server, where it is not the usual one.
    `acceptance` gives the rates at which drafts are accepted, by position, null where the weights decide. `command`
    stands in for `vllm`; `arguments` is the command line. With `only_plan` nothing is started.
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
    """Live sessions at once, each of `seconds` at the pace of speech after `age_s` seconds sent faster than that.

    `uploads` clips are in flight meanwhile. Without sessions, uploads alone are measured for `seconds`. With `find`,
    the most sessions that the server holds are searched, from `sessions` on and up to this number.
    """

    sessions: int
    seconds: float = 60.0
    age_s: float = 0.0
    uploads: int = 0
    find: int | None = None


@dataclass(frozen=True)
class LivePlan(StartPlan):
    """`bench.gpu live`: serve `profile`, with `changes` to its config, and write a row of each trial to `out` at once.

    `name` is that of the rows, such as stock or live. `model` is as for GpuPlan. `cores` of this machine are for the
    client and the uploads, and the others for the server; 0 for no such division. `timeout_s` is the client's, and
    `results` the directory where its own results are kept, null for none.
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
    """`bench.gpu merge`: put `files` together into `out`; of a row that several have, the last one counts."""

    files: tuple[Path, ...]
    out: Path
