"""The file of `bench gpu report`: the rows of one machine and of one state of the code, written after every row.

A second call continues the file. It is refused by name if the GPU, the machine's start, the commit, the versions, the
weights or a configuration is another one, because figures of two machines or of two codes are never in one table.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, environment, results
from bench.measure.gpus import Gpus

LIBRARIES = ("vllm", "torch", "transformers", "mistral-common", "triton", "nvidia-ml-py", "requests")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one after each start of the machine
RANDOM = (
    "random, of full size, but for pico's rows: texts are wrong, and drafts are accepted at the rates of `acceptance`"
)
NOTES = (
    "p50_ms, p90_ms, p95_ms: from sending a clip to its text. Clips are 16 kHz WAV, decoded from Opus before the run.",
    "rtfx: seconds of audio per second. It begins and ends with few requests in flight.",
    "joules_per_audio_second: of the whole GPU, with its idle power.",
    "acceptance: share of the steps in which the drafts up to each position are accepted; null if the weights decide.",
    "tokens_per_step, survival: of the steps of a request that have drafts. Drafts past a clip's end count, too.",
    "start_s: from the start of the process until /health answers. Random weights are read from a file just written.",
)


def machine(commit: str | None) -> dict[str, Any]:
    """The machine and the versions. `commit` is for a checkout without git."""
    described = environment.describe(None, LIBRARIES)
    del described["server_version"], described["date_utc"]
    handles = Gpus().handles.values()
    described["gpu_uuid"] = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles] or None
    described["boot_id"] = BOOT.read_text().strip() if BOOT.exists() else None
    described["git_commit"] = commit or described["git_commit"]
    return described


class Record:
    """The content of the file: what it had, and what is added."""

    def __init__(
        self,
        path: Path,
        machine: Mapping[str, Any],
        weights: str,
        configs: Mapping[str, Mapping[str, Any]],
        order: Sequence[str],
    ) -> None:
        """`configs` has {profile, changes, config} of each server, `order` the names of all rows that the file may get.

        Raises BenchError if the file is of another machine, of other code or of other configurations.
        """
        self._path, self._order = path, list(order)
        self.content: dict[str, Any] = {
            "schema_version": 1,
            "date_utc": environment.describe(None, ())["date_utc"],
            "machine": dict(machine),
            "weights": weights,
            "notes": NOTES,
            "calls": [],
            "configs": {},
            "rows": [],
            "not_measured": {},
        }
        if path.exists():
            self.content = json.loads(path.read_bytes())
            self._refuse_others(machine, weights, configs)
        self._configs = configs

    def _refuse_others(
        self, machine: Mapping[str, Any], weights: str, configs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        was = self.content["machine"]
        pairs = [(name, was[name], machine[name]) for name in ("gpu", "gpu_uuid", "boot_id", "libraries")]
        pairs += [("git_commit", _clean(was["git_commit"]), _clean(machine["git_commit"]))]
        pairs += [("weights", self.content["weights"], weights)]
        measured = {row["server"] for row in self.content["rows"]}
        for name in sorted(measured & configs.keys()):
            pairs.append((f"config of {name}", self.content["configs"][name]["config"], configs[name]["config"]))
        others = [f"{name} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]
        if others:
            lines = "\n  ".join(others)
            raise BenchError(
                f"--out {self._path} has rows of something else, expected one machine and code:\n  {lines}"
            )

    def has(self, name: str) -> bool:
        """Whether the file has this row, without a failed request."""
        return any(row["row"] == name and not row["failed"] for row in self.content["rows"])

    def begin_call(self, **call: Any) -> None:
        """Note one call of the command: its time, its command line, its settings."""
        self.content["calls"].append({"date_utc": environment.describe(None, ())["date_utc"], **call})
        self.save()

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Add the row, or replace the earlier one of its name, and write the file."""
        rows = {old["row"]: old for old in self.content["rows"]} | {name: {"row": name, **row}}
        last = len(self._order)
        place = {known: number for number, known in enumerate(self._order)}
        self.content["rows"] = sorted(rows.values(), key=lambda row: place.get(row["row"], last))
        self.content["configs"][row["server"]] = self._configs[row["server"]]
        self.content["not_measured"].pop(name, None)
        self.save()

    def fail(self, name: str, reason: str) -> None:
        """Note why a row is missing, and write the file."""
        self.content["not_measured"][name] = reason
        self.save()

    def save(self) -> None:
        results.write_json(self._path, self.content)


def _clean(commit: str | None) -> str | None:
    """The commit alone: the file itself can make the checkout differ from it."""
    return commit and commit.removesuffix("-dirty")


def table(content: Mapping[str, Any]) -> str:
    """The rows as a text table."""
    titles = ["row", "clips", "failed", "p50 ms", "p90 ms", "p95 ms", "rtfx", "lag p50", "lag p99", "final p50"]
    titles += ["final p99", "behind", "J/s", "tokens/step", "GB", "start s", "caches"]
    body = [titles]
    for row in content["rows"]:
        lags = [(row.get(name) or {}).get(quantile) for name in ("lag_ms", "final_ms") for quantile in ("p50", "p99")]
        memory = row.get("peak_vram_bytes")
        cells = [row["row"], row.get("clips") or row.get("sessions"), row["failed"]]
        cells += [row.get(name) for name in ("p50_ms", "p90_ms", "p95_ms", "rtfx")]
        cells += [*lags, row.get("fell_behind"), row.get("joules_per_audio_second")]
        cells += [row.get("tokens_per_step"), memory and memory / 1e9, row.get("start_s"), row.get("start_caches")]
        body.append([_cell(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in body]
    return "\n".join([*lines, *(f"not measured: {name}: {why}" for name, why in content["not_measured"].items())])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
