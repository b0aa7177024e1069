"""Measure several configurations on one machine: `python -m bench matrix FILE.yaml --out OUT`.

The file names a dataset and configurations, each a vLLM config file with overrides:

    dataset: bench/data
    samples: 40                       # number of clips (default: all)
    loads: [c1, c16]                  # 1 and 16 requests in flight (default: c1); [r2.5]: 2.5 requests per second
    repeats: 3                        # rounds (default: 1)
    dir: pico/checkpoint              # the servers' working directory (default: the current one)
    flags: [--warmup, 4]              # other flags of `bench run`
    configurations:
      - name: eager
        config: vllm_config.yaml
      - name: long
        config: vllm_config.yaml
        overrides: {max_model_len: 1024, compilation_config: null}
        env: {VLLM_CPU_KVCACHE_SPACE: 2}
      - name: other                   # any command that takes `serve --config FILE --host HOST --port PORT`,
        config: other.yaml            # run in `dir`, and that answers GET /health, /v1/models and the requests
        command: [/opt/other/bin/other]
        dir: other/checkpoint

Paths are relative to the current directory, as in `bench run`. An override replaces the whole value of that name in the
config file, even a mapping such as compilation_config; null removes it, so that vLLM's default applies. `env` must not
contain secrets, because everything is written to the results. The server also gets the environment of this command.

Each round serves every configuration once. Every second round runs backwards: A B C, C B A. This cancels a steady drift
of the machine, for example when it heats up, which would otherwise always slow down the last configuration. Each run
is one `bench run --serve`, in OUT/NAME/ROUND.

The latency ratio in the table compares a run with the first configuration's run of the same round, the nearest in time:
the geometric mean over the clips that completed in both. If it is above 1 in one round and below 1 in another, the
difference comes from the machine, not from the configuration.
"""

import dataclasses
import difflib
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, arguments, loads, report, results
from bench.answers import Row
from bench.plan import MatrixPlan, RunPlan, ServedConfig
from bench.run import execute

MATRIX, TABLE, CONFIG = "matrix.json", "matrix.md", "config.yaml"
KINDS: dict[str, Any] = {"string": str, "whole number": int, "list": list, "mapping": dict}
KEYS = {
    **{"dataset": "string", "samples": "whole number", "loads": "list", "repeats": "whole number"},
    **{"dir": "string", "flags": "list", "configurations": "list"},
}
CONFIGURATION_KEYS = {
    **{"name": "string", "config": "string", "overrides": "mapping", "env": "mapping"},
    **{"command": "list", "dir": "string"},
}
# A configuration's name is also the name of a directory.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# Flags of `bench run` that have a key in the file, or cannot be used
OWN_FLAGS = (
    *("--url", "--serve", "--dir", "--dataset", "--samples", "--concurrency", "--rate", "--out", "--resume"),
    *("--api-key-env", "--help", "-h", "--sessions", "--find-sessions"),
)
# Key, heading, format, divisor
MEASURES = (
    ("p50_ms", "P50 ms", "{:.1f}", 1),
    ("p90_ms", "P90 ms", "{:.1f}", 1),
    ("p95_ms", "P95 ms", "{:.1f}", 1),
    ("latency_ratio", "latency ratio", "{:.3f}", 1),
    ("rtfx", "RTFx", "{:.2f}", 1),
    ("joules_per_audio_second", "J per audio s", "{:.3f}", 1),
    ("peak_bytes", "peak GiB", "{:.2f}", 2**30),
    ("startup_s", "start-up s", "{:.1f}", 1),
    ("error_rate", "error rate", "{:.2%}", 1),
)


@dataclass(frozen=True)
class Configuration:
    """One server. `settings` is the content of the config file with the overrides applied."""

    name: str
    settings: dict[str, Any]
    dir: str
    env: dict[str, str]
    command: list[str]


@dataclass(frozen=True)
class Matrix:
    """The content of the file; `samples` is null for all clips."""

    dataset: str
    samples: int | None
    loads: list[str]
    repeats: int
    flags: list[str]
    configurations: list[Configuration]

    def order(self) -> list[tuple[int, Configuration]]:
        """All runs with their round, counted from 1, in the order of execution."""
        rounds = range(1, self.repeats + 1)
        return [(number, each) for number in rounds for each in self.configurations[:: 1 if number % 2 else -1]]


def main(plan: MatrixPlan) -> int:
    """Make all runs and their table. Raises BenchError for an error that affects all runs.

    Returns the exit status: 1 when a configuration or a request failed, 130 when Ctrl-C stopped it, else 0.
    """
    matrix = read(plan.file)
    # All flags are parsed before the first server starts.
    order = [
        (number, each, _run_plan(matrix, each, plan.out / each.name / str(number))) for number, each in matrix.order()
    ]
    _claim(plan.out, matrix, plan.resume)
    runs: list[dict[str, Any]] = [
        {"name": each.name, "round": number, "directory": f"{each.name}/{number}", "status": "not run", "reason": None}
        for number, each, _ in order
    ]
    for state, (_, _, planned) in zip(runs, order, strict=True):
        if _finished(planned.out):
            report.score(planned.out)  # it may have been killed before it was scored
            state["status"] = "finished"
    _write(plan.out, matrix, runs)
    failed: set[str] = set()
    for state, (number, configuration, planned) in zip(runs, order, strict=True):
        if state["status"] == "finished":
            continue
        if configuration.name in failed:
            state["reason"] = "skipped: it failed in an earlier round"
            continue
        print(f"round {number} of {matrix.repeats}: {configuration.name}", file=sys.stderr)
        state["status"], state["reason"] = _run(planned)
        if state["status"] == "interrupted":
            break
        if state["status"] == "failed":
            failed.add(configuration.name)
            print(f"{configuration.name} failed: {state['reason']}", file=sys.stderr)
        _write(plan.out, matrix, runs)
    table = _write(plan.out, matrix, runs)
    print(table)
    print(f"report: {plan.out / TABLE}")
    if any(state["status"] == "interrupted" for state in runs):
        print("Interrupted. Add --resume to make the remaining runs.", file=sys.stderr)
        return 130
    return int(bool(failed) or any(row["failed"] for row in tabulate(plan.out, matrix, runs)))


# ---- The file


def read(path: Path) -> Matrix:
    """Read and check the file. Raises BenchError with all its problems."""
    content = _yaml(path)
    problems = list(_problems(content, KEYS, ("dataset", "configurations"), "the file"))
    if problems:
        raise _refusal(path, problems)
    for key in ("samples", "repeats"):
        if content.get(key, 1) < 1:
            problems.append(f"{key!r} must be at least 1, found {content[key]}")
    levels = content.get("loads", ["c1"])
    if not levels or not all(map(_is_load, levels)):
        problems.append(
            f"'loads' must be a list such as [c16] (requests in flight) or [r2.5] (requests a second), found {levels!r}"
        )
    elif len({load[0] for load in levels}) > 1 or len(set(levels)) < len(levels):
        problems.append(f"'loads' must all start with c or all with r, without repetition, found {levels!r}")
    flags = content.get("flags", [])
    for flag in flags:
        if not isinstance(flag, str | int | float) or isinstance(flag, bool):
            problems.append(f"'flags' must be a list of strings and numbers, found {flag!r}")
        elif any(own.startswith(str(flag).split("=")[0]) for own in OWN_FLAGS if str(flag).startswith("-")):
            problems.append(f"'flags' has {flag!r}: use its key of the matrix file, or remove it")
    configurations: list[Configuration] = []
    for number, entry in enumerate(content["configurations"], 1):
        where = f"configuration {number}"
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            where += f" ({entry['name']!r})"
        found = list(_problems(entry, CONFIGURATION_KEYS, ("name", "config"), where))
        found += [] if found else _configuration_problems(entry, where)
        problems += found
        if found:
            continue
        if entry["name"] in [each.name for each in configurations]:
            problems.append(f"{where}: another configuration has this name")
        directory = entry.get("dir", content.get("dir", "."))
        if not Path(directory).is_dir():
            problems.append(f"{where}: 'dir' must be a directory, found {directory!r}")
        configurations.append(
            Configuration(
                name=entry["name"],
                settings=merge(_yaml(Path(entry["config"])), entry.get("overrides", {})),
                dir=directory,
                env={key: str(value) for key, value in entry.get("env", {}).items()},
                command=entry.get("command", []),
            )
        )
    if not content["configurations"]:
        problems.append("'configurations' is empty")
    if problems:
        raise _refusal(path, problems)
    return Matrix(
        dataset=content["dataset"],
        samples=content.get("samples"),
        loads=levels,
        repeats=content.get("repeats", 1),
        flags=[str(flag) for flag in flags],
        configurations=configurations,
    )


def _is_load(name: Any) -> bool:
    try:
        loads.parse(str(name))
    except BenchError:
        return False
    return isinstance(name, str)


def merge(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The settings with each override replacing the value of the same name; null removes it.

    For vLLM, max-model-len and max_model_len are the same name.
    """
    named = {key.replace("-", "_") for key in overrides}
    kept = {key: value for key, value in settings.items() if key.replace("-", "_") not in named}
    return kept | {key: value for key, value in overrides.items() if value is not None}


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path} ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise BenchError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BenchError(f"{path} must contain a mapping of names to values, found {str(content)[:100]!r}")
    return content


def _problems(entry: Any, known: dict[str, str], needed: Sequence[str], where: str) -> list[str]:
    """Problems of an entry's keys: missing, unknown, or of the wrong type."""
    if not isinstance(entry, dict):
        return [f"{where}: expected a mapping with {', '.join(known)}, found {entry!r}"]
    problems = [f"{where}: the key {key!r} is missing" for key in needed if key not in entry]
    for key, value in entry.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0)[0]
            problems.append(f"{where}: unknown key {key!r}; did you mean {nearest!r}?")
        elif not isinstance(value, KINDS[known[key]]) or isinstance(value, bool):
            problems.append(f"{where}: {key!r} must be a {known[key]}, found {value!r}")
    return problems


def _configuration_problems(entry: dict[str, Any], where: str) -> list[str]:
    problems = []
    if not NAME.fullmatch(entry["name"]):
        problems.append(f"{where}: 'name' may contain only letters, digits and . _ + -, because it is a directory name")
    for name, value in entry.get("env", {}).items():
        if not isinstance(name, str) or not isinstance(value, str | int | float) or isinstance(value, bool):
            problems.append(
                f"{where}: 'env' must contain strings or numbers, found {name!r}: {value!r} (put it in quotes)"
            )
    if not all(isinstance(key, str) for key in entry.get("overrides", {})):
        problems.append(f"{where}: the keys of 'overrides' must be strings, found {[*entry['overrides']]!r}")
    if "command" in entry and not (entry["command"] and all(isinstance(part, str) for part in entry["command"])):
        problems.append(f"{where}: 'command' must be a list of strings, found {entry['command']!r}")
    return problems


def _refusal(path: Path, problems: list[str]) -> BenchError:
    return BenchError(f"{len(problems)} problem(s) in {path}:\n  " + "\n  ".join(problems))


# ---- Runs


def _run(plan: RunPlan) -> tuple[str, str | None]:
    """Make or continue one run, and score it. Returns its status, and the reason of a failure."""
    plan = dataclasses.replace(plan, resume=(plan.out / results.ROWS).exists())
    log = plan.out / results.LOG
    log.unlink(missing_ok=True)
    try:
        if execute(plan):
            return "interrupted", None
    except KeyboardInterrupt:
        return "interrupted", None
    except (BenchError, OSError) as error:
        if not log.exists():
            raise  # no server was started: an error in the usage or the data, which affects all runs
        return "failed", str(error)
    report.score(plan.out)
    return "finished", None


def _run_plan(matrix: Matrix, configuration: Configuration, directory: Path) -> RunPlan:
    """The plan of one run of a configuration, into `directory`. Raises SystemExit for an invalid flag in the file."""
    served = ServedConfig(
        config=directory.parent / CONFIG,
        directory=Path(configuration.dir),
        command=tuple(configuration.command),
        environment=configuration.env,
    )
    return dataclasses.replace(arguments.parse_run(_arguments(matrix, configuration, directory)), server=served)


def _arguments(matrix: Matrix, configuration: Configuration, directory: Path) -> list[str]:
    """The arguments of `bench run`."""
    found = [*matrix.flags, "--serve", str(directory.parent / CONFIG), "--dir", configuration.dir]
    found += ["--dataset", matrix.dataset, "--out", str(directory)]
    if matrix.samples is not None:
        found += ["--samples", str(matrix.samples)]
    for flag, kind in (("--concurrency", "c"), ("--rate", "r")):
        if levels := [load[1:] for load in matrix.loads if load[0] == kind]:
            found += [flag, ",".join(levels)]
    return found


def _claim(out: Path, matrix: Matrix, resume: bool) -> None:
    """Create the directory with the configurations to serve. Raises BenchError if it has another matrix."""
    path = out / MATRIX
    if any(out.glob(f"*/*/{results.ROWS}")):
        if not resume:
            raise BenchError(f"{out} already has runs: continue that matrix with --resume, or choose another --out")
        try:
            written = path.read_bytes()
        except OSError as error:
            raise BenchError(f"cannot read {path}, which has the plan of the matrix ({error.strerror})") from None
        before, now = (json.loads(each)["plan"] for each in (written, json.dumps({"plan": _plan_json(matrix)})))
        # Rounds and configurations may be added. All other settings must be the same.
        then, new = ({each.pop("name"): each for each in side.pop("configurations")} for side in (before, now))
        both = [(f"{name}: ", then[name], new[name]) for name in then if name in new]
        same = ("dataset", "samples", "loads", "flags")
        both.append(("", {key: before[key] for key in same}, {key: now[key] for key in same}))
        differences = [
            f"{where}{key} was {old[key]!r}, is {fresh[key]!r}"
            for where, old, fresh in both
            for key in old
            if old[key] != fresh[key]
        ]
        if differences:
            raise BenchError("\n  ".join([f"--resume: the matrix in {out} has other settings:", *differences]))
    try:
        for each in matrix.configurations:
            (out / each.name).mkdir(parents=True, exist_ok=True)
            results.write(out / each.name / CONFIG, yaml.safe_dump(each.settings, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise BenchError(f"cannot write to --out {out} ({error.strerror})") from None


def _finished(directory: Path) -> bool:
    """Whether every clip has a row, completed or failed, at every load."""
    if not (directory / results.ROWS).exists():
        return False
    record = results.read_run(directory)["run"]
    answered = {(row.id, row.load) for row in _rows(directory)}
    return answered >= {(clip, load) for clip in record["ids"] for load in record["loads"]}


# ---- The table


def _plan_json(matrix: Matrix) -> dict[str, Any]:
    return dataclasses.asdict(matrix)


def _write(out: Path, matrix: Matrix, runs: list[dict[str, Any]]) -> str:
    """Write both files, and return the table."""
    rows = tabulate(out, matrix, runs)
    described = [{**run, "environment": _environment(out, run)} for run in runs]
    results.write_json(
        out / MATRIX, {"schema_version": 1, "plan": _plan_json(matrix), "runs": described, "table": rows}
    )
    table = _markdown(rows)
    text = [f"# Matrix {out.resolve().name}", table]
    for line in dict.fromkeys(_machine(run["environment"]) for run in described if run["environment"]):
        text.append(f"Measured on {line}")
    text += [
        f"## {run['name']} failed in round {run['round']}\n\n```\n{run['reason']}\n```"
        for run in runs
        if run["status"] == "failed"
    ]
    text += [f"## {each.name}\n\n```\n{_described(each)}\n```" for each in matrix.configurations]
    results.write(out / TABLE, "\n\n".join(text) + "\n")
    return table


def _environment(out: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """The environment in run.json, without the config, which is in the plan. Null for a run that is not finished."""
    if run["status"] != "finished":
        return None
    environment: dict[str, Any] = results.read_run(out / run["directory"])["environment"]
    server = environment.get("server") or {}
    return {**environment, "server": {key: value for key, value in server.items() if key != "config"}}


def _machine(environment: dict[str, Any]) -> str:
    gpu = f"{', '.join(environment['gpu'])} (driver {environment['gpu_driver']}), " if environment["gpu"] else ""
    ram = f"{environment['ram_bytes'] / 2**30:.0f} GiB of memory"
    server = f"server {environment['server_version'] or 'of unknown version'}; commit {environment['git_commit']}"
    return f"{gpu}{environment['cores']} cores of {environment['cpu']}, {ram}; {server}"


def _described(configuration: Configuration) -> str:
    described = dataclasses.asdict(configuration)
    return str(yaml.safe_dump({key: value for key, value in described.items() if value}, sort_keys=False)).strip()


def tabulate(out: Path, matrix: Matrix, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per configuration and load: median, extremes and values of each measure over the finished runs."""
    table = []
    first = matrix.configurations[0].name
    baseline = {run["round"]: run["directory"] for run in runs if run["name"] == first}
    for configuration in matrix.configurations:
        own = [run for run in runs if run["name"] == configuration.name]
        finished = [run for run in own if run["status"] == "finished"]
        summaries = [_summary(out / run["directory"]) for run in finished]
        for load in matrix.loads:
            found = [_numbers(summary, load) for summary in summaries]
            for numbers, run in zip(found, finished, strict=True):
                numbers["latency_ratio"] = _ratio(out / baseline[run["round"]], out / run["directory"], load)
            row: dict[str, Any] = {"name": configuration.name, "load": load, "runs": len(found)}
            row["planned"] = matrix.repeats
            row["headline"] = summaries[0]["quality"]["headline"] if summaries else None
            for key, *_ in MEASURES:
                values = [numbers[key] for numbers in found]
                known = [value for value in values if value is not None]
                middle = {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None
                row[key] = middle and {**middle, "values": values}
            row["failed"] = sum(numbers["failed"] for numbers in found) if found else None
            row["reason"] = next((run["reason"] for run in own if run["status"] == "failed"), None)
            table.append(row)
    return table


def _ratio(baseline: Path, directory: Path, load: str) -> float | None:
    """Geometric mean of the latency ratios to the baseline, over the clips that completed in both; null without any."""
    old, new = (
        {row.id: row.latency_ms for row in _rows(each) if row.load == load and row.latency_ms is not None}
        for each in (baseline, directory)
    )
    ratios = [new[clip] / old[clip] for clip in old if clip in new]
    return statistics.geometric_mean(ratios) if ratios else None


def _rows(directory: Path) -> list[Row]:
    return results.read_rows(directory / results.ROWS) if (directory / results.ROWS).exists() else []


def _summary(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / results.SUMMARY).read_bytes())
    return summary


def _numbers(summary: dict[str, Any], load: str) -> dict[str, Any]:
    at = next(each for each in summary["loads"] if each["load"] == load)
    quality = summary["quality"]
    # Measured once per run, or on the texts of the first load: only in that load's row.
    whole = {
        "peak_bytes": summary["memory"]["peak_bytes"],
        "startup_s": (summary["server"] or {}).get("startup_s"),
        "error_rate": quality[quality["headline"]]["value"],
    }
    return {
        **{f"p{q}_ms": at["latency_ms"][f"p{q}"] for q in (50, 90, 95)},
        **{key: at[key] for key in ("rtfx", "joules_per_audio_second")},
        **(whole if at is summary["loads"][0] else dict.fromkeys(whole)),
        "failed": at["samples"] - at["completed"],
    }


def _markdown(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown, padded for a terminal."""
    cells = [["configuration", "load", "runs", *(heading for _, heading, _, _ in MEASURES), "failed"]]
    for row in rows:
        runs = f"{row['runs']} of {row['planned']}" + (" (failed)" if row["reason"] else "")
        shown = [_cell(row[key], pattern, unit) for key, _, pattern, unit in MEASURES]
        if row["headline"] and row["error_rate"]:
            shown[-1] += f" {row['headline'].upper()}"
        failed = "-" if row["failed"] is None else str(row["failed"])
        cells.append([row["name"], row["load"], runs, *shown, failed])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    lines = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    note = (
        "Medians over the runs (minimum to maximum); -: not measured. Latency ratio: to the first configuration's\n"
        "run of the same round, clip by clip. Failed: requests without a transcript, over all runs. Peak memory,\n"
        "start-up and error rate are measured once per run and shown only in the row of the first load."
    )
    failures = [f"{row['name']} failed: {_cause(row['reason'])}" for row in rows if row["reason"]]
    return "\n".join([*lines, "", note, *dict.fromkeys(failures)])


def _cell(measure: dict[str, Any] | None, pattern: str, unit: float) -> str:
    if measure is None:
        return "-"
    middle, low, high = (pattern.format(measure[key] / unit) for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _cause(reason: str) -> str:
    """The line with the cause, which is the last line of the message of a server that ended; else the first line."""
    first, *rest = reason.splitlines()
    return rest[-1] if rest and rest[-1].startswith("cause:") else first
