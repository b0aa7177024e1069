"""What each command of `python -m bench` is to do: made of its command line by bench/arguments.py, never changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.answers import Api, Mode
from bench.loads import Load


@dataclass(frozen=True)
class ServedConfig:
    """A server that bench starts on a free port of 127.0.0.1 for the time of a run.

    `config` is a vLLM config file, `directory` where its `model: .` points. `command` stands in for `vllm`, and
    `environment` is added to this process's.
    """

    config: Path
    directory: Path
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchPlan:
    """Find the most live sessions, up to `most`, with a P99 of the lag of at most `lag_ms` and none fallen behind."""

    most: int
    lag_ms: float


@dataclass(frozen=True)
class LivePlan:
    """Live sessions of `seconds` each at the pace of speech, all at once, after `age_s` seconds sent faster than that.

    `delay_ms` is the model's delay. With `search`, the loads of the run are those that the search tries, from the
    plan's own on.
    """

    seconds: float
    age_s: float
    delay_ms: int
    search: SearchPlan | None


@dataclass(frozen=True)
class RunPlan:
    """`bench run`: send clips at each load, time and score the answers, and write them to `out`.

    `server` is the root URL of one that is up, or what to serve. `dataset` is read by bench.dataset.load; `samples` of
    its clips are picked with `seed` (null: all). `warmup` requests are sent at each load before the measured ones.
    `timeout_s` is the longest wait in seconds for the server's next byte. `language` is null for the dataset's own,
    `model` for the server's first, `api_key_env` names the environment variable with the key, null for none. `prompt`
    is what --api chat asks for. With `resume`, the run in `out` is continued. `live` says what a session is, where the
    loads are numbers of sessions; null where each clip is a request.
    """

    server: str | ServedConfig
    dataset: str
    out: Path
    samples: int | None
    seed: int
    loads: tuple[Load, ...]
    warmup: int
    mode: Mode
    api: Api
    prompt: str
    language: str | None
    model: str | None
    timeout_s: int
    api_key_env: str | None
    resume: bool
    live: LivePlan | None = None

    @property
    def served(self) -> ServedConfig | None:
        """What bench serves itself; null where a server is up already."""
        return self.server if isinstance(self.server, ServedConfig) else None


@dataclass(frozen=True)
class ServePlan:
    """`bench serve`: `vllm serve` with `config` and `flags`, in `directory`, at `port` of 127.0.0.1, until Ctrl-C."""

    config: Path
    directory: Path
    port: int
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportPlan:
    """`bench report`: score the run in `out` again."""

    out: Path


@dataclass(frozen=True)
class ComparePlan:
    """`bench compare`: set each run of `others` against `baseline`; `json` is a file for the numbers, or null."""

    baseline: Path
    others: tuple[Path, ...]
    json: Path | None


@dataclass(frozen=True)
class MatrixPlan:
    """`bench matrix`: measure the configurations that `file` names, into `out`; with `resume`, what is left there."""

    file: Path
    out: Path
    resume: bool


Plan = RunPlan | ServePlan | ReportPlan | ComparePlan | MatrixPlan
