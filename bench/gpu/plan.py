"""What each command of `python -m bench.gpu` is to do: made of its command line by bench/gpu/arguments.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GpuPlan:
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
    together: bool
    alone: bool
    restart: bool
    cache: Path | None
    logs: Path | None
    model: Path | None
    kv_gib: Mapping[str, float]
    acceptance: tuple[float, ...] | None
    command: tuple[str, ...]
    only_plan: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class MergePlan:
    """`bench.gpu merge`: put `files` together into `out`; of a row that several have, the last one counts."""

    files: tuple[Path, ...]
    out: Path
