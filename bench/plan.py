"""The plan of each command of `python -m bench`: immutable, made by bench/arguments.py from the command line."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.answers import Api, Mode
from bench.loads import Load

OWN_DATA = os.path.relpath(Path(__file__).parent / "data")  # the 500 clips of this repository


@dataclass(frozen=True)
class ServedConfig:
    """A server that bench starts on a free port of 127.0.0.1 for a run, and then stops.

    `config` is a vLLM config file, `directory` where its `model: .` points. `command` replaces `vllm`. `environment` is
    added to this process's environment.
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

    With `least_seconds`, the length of each is drawn between this and `seconds`, so that they end at different times.
    `delay_ms` is the model's delay. With `search`, the loads of the run are those that the search tries, from the
    plan's own on.
    """

    seconds: float
    age_s: float
    delay_ms: int
    search: SearchPlan | None
    least_seconds: float | None = None


@dataclass(frozen=True)
class RunPlan:
    """`bench run`: send clips at each load, measure and score the responses, and write the results to `out`.

    server       base URL of a running server, or the config to serve
    dataset      read by bench.dataset.load
    samples      number of clips, selected with `seed`; null for all
    warmup       requests before each load that are not measured
    prompt       instruction that --api chat sends
    language     null for the dataset's
    model        null for the first one that the server lists
    timeout_s    longest wait in seconds for the server's next byte
    api_key_env  name of the environment variable with the key; null for no key
    resume       whether to continue the run in `out`
    live         what a session is, if the loads are numbers of sessions; null if each clip is a request
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
        """The config that bench serves; null if `server` is a URL."""
        return self.server if isinstance(self.server, ServedConfig) else None


@dataclass(frozen=True)
class SpeechPlan:
    """`bench speech`: send texts to a server's /v1/audio/speech at each load, and write the results to `out`.

    url                  base URL of a running server
    dataset              its references are the texts; read by bench.dataset.load
    samples              number of texts, selected with `seed`; null for all
    characters           length of each text, which is then made of several references; null for the references
    voice, model         null for the first one that the server lists
    form                 response_format; both are 16-bit PCM
    stream               whether to ask for raw audio as it is made, as vLLM-Omni wants it asked
    transcriber          base URL of a server that transcribes the speech of the first load; null for none
    transcriber_key_env  as `api_key_env`, for the transcriber
    random_weights       whether the model's weights are random, which cannot be seen over HTTP
    note                 a line at the top of the report; null for none
    """

    url: str
    out: Path
    loads: tuple[Load, ...] = (Load("c1", concurrency=1),)
    dataset: str = OWN_DATA
    samples: int | None = None
    seed: int = 0
    characters: int | None = None
    warmup: int = 2
    voice: str | None = None
    model: str | None = None
    form: Literal["pcm", "wav"] = "pcm"
    stream: bool = True
    timeout_s: int = 600
    api_key_env: str | None = None
    transcriber: str | None = None
    transcriber_key_env: str | None = None
    random_weights: bool = False
    note: str | None = None


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
    """`bench compare`: compare each run of `others` with `baseline`; `json` is a file for the figures, or null."""

    baseline: Path
    others: tuple[Path, ...]
    json: Path | None


@dataclass(frozen=True)
class MatrixPlan:
    """`bench matrix`: measure the configurations in `file`, into `out`; with `resume`, only the runs that are left."""

    file: Path
    out: Path
    resume: bool


Plan = RunPlan | SpeechPlan | ServePlan | ReportPlan | ComparePlan | MatrixPlan
