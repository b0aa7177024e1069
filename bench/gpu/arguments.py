"""Parse the command line of `python -m bench.gpu` into a plan. An invalid one ends the program with status 2."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench.gpu import rows
from bench.gpu.plan import GpuPlan, LivePlan, MergePlan, Trial

PROFILES = {
    "stock": "profiles/realtime-stock.yaml",
    "live": "profiles/fast.yaml",
}  # name of the rows -> default profile
TRIAL = {"sessions": int, "seconds": float, "age": float, "uploads": int, "find": int, "clips": int}


def parse(arguments: Sequence[str]) -> GpuPlan | LivePlan | MergePlan:
    """The plan of a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure configurations on a GPU.")
    commands = parser.add_subparsers(dest="command_name", required=True)
    _add_run(commands)
    _add_live(commands)
    merge = commands.add_parser("merge", help="merge several files; the last file with a row wins").add_argument
    merge("files", type=Path, nargs="+", metavar="FILE")
    merge("--out", type=Path, required=True)
    flags = parser.parse_args(arguments)
    if flags.command_name == "merge":
        return MergePlan(tuple(flags.files), flags.out)
    if flags.command_name == "live":
        return _live_plan(parser, flags, arguments)
    return _run_plan(parser, flags, arguments)


def _run_plan(parser: argparse.ArgumentParser, flags: argparse.Namespace, arguments: Sequence[str]) -> GpuPlan:
    levels, clips = flags.concurrency, flags.clips
    if len(clips) not in (1, len(levels)):
        parser.error(f"--clips has {len(clips)} numbers: expected 1, or {len(levels)} as --concurrency")
    return GpuPlan(
        out=flags.out,
        rows=tuple(flags.rows),
        clips=dict(zip(levels, clips * len(levels) if len(clips) == 1 else clips, strict=True)),
        together=flags.together,
        alone=flags.alone,
        restart=flags.restart,
        cache=flags.cache,
        logs=flags.logs,
        model=flags.model,
        kv_gib=flags.kv,
        acceptance=None if flags.acceptance is None else tuple(flags.acceptance),
        command=tuple(shlex.split(flags.command)),
        only_plan=flags.plan,
        steps=flags.steps,
        arguments=tuple(arguments),
    )


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="serve and measure", formatter_class=argparse.RawDescriptionHelpFormatter)
    run.description = "Rows:\n\n" + (rows.__doc__ or "").partition("\n\n")[2]
    add = run.add_argument
    add("--out", type=Path, required=True, help="JSON file to write; existing rows are kept")
    add("--rows", type=_words, default=["stock-eager", "stock-piecewise", "fast"], metavar="NAME,...", help="see above")
    add("--concurrency", type=_whole, default=[1, 16, 64], metavar="N,...", help="requests in flight (1,16,64)")
    add("--clips", type=_whole, default=[12, 48, 128], metavar="N,...", help="clips at each concurrency (12,48,128)")
    add("--together", action="store_true", help="start all servers at once: faster, but start_s is less accurate")
    add("--alone", action="store_true", help="stop each server before the next one starts")
    add("--restart", action="store_true", help="start each server twice, to time empty and filled caches")
    add("--cache", type=Path, metavar="DIR", help="keep the servers' caches (default: empty, removed at the end)")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs")
    add("--model", type=Path, metavar="DIR", help="checkpoint (default: of full size, with random weights)")
    add("--kv", type=_sizes, default={}, metavar="NAME=GIB,...", help="size of a server's KV cache in GiB")
    rates = "acceptance rates of drafts by position, for fast-spec (such as 0.8,0.6)"
    add("--acceptance", type=lambda text: [float(rate) for rate in _words(text)], metavar="RATE,...", help=rates)
    engine = shlex.join([sys.executable, "-m", "vllm.entrypoints.cli.main"])
    add("--command", default=engine, help="command to run as `vllm` (default: that of this Python)")
    add("--steps", action="store_true", help="record the engine's steps (not of vLLM's own models, which write none)")
    add("--plan", action="store_true", help="print the plan and exit")


def _live_plan(parser: argparse.ArgumentParser, flags: argparse.Namespace, arguments: Sequence[str]) -> LivePlan:
    if flags.profile is None and flags.name not in PROFILES:
        parser.error(f"--name {flags.name!r} has no default profile (only {' and '.join(PROFILES)} do): add --profile")
    return LivePlan(
        out=flags.out,
        name=flags.name,
        profile=flags.profile or rows.ROOT / PROFILES[flags.name],
        changes=dict(flags.changes),
        trials=tuple(flags.trials),
        model=flags.model,
        cores=flags.client_cores,
        timeout_s=flags.timeout,
        results=flags.results,
        together=False,
        cache=flags.cache,
        logs=flags.logs,
        command=tuple(shlex.split(flags.command)),
        arguments=tuple(arguments),
    )


def _add_live(commands: Any) -> None:
    live = commands.add_parser("live", help="serve one configuration and measure live sessions")
    live.description = (
        "A trial is sessions=N with any of these: seconds=S of audio at the pace of speech (60), age=S of audio sent "
        "before, faster than speech (0), uploads=N clips in flight during the sessions (0), and find=N, which searches "
        "the most sessions that the server holds, from `sessions` up to N. sessions=0 measures uploads only. With "
        "clips=N, the sessions are N clips of the benchmark, `sessions` at a time, each to its own end. "
        "max_num_seqs is raised to the largest sum of sessions and uploads of a trial."
    )
    add = live.add_argument
    add("--out", type=Path, required=True, help="JSON file to write; existing rows are kept")
    add("--name", default="live", help="name of the rows: live, stock or another one (default: live)")
    usual = ", ".join(f"{profile} for {name}" for name, profile in PROFILES.items())
    add("--profile", type=Path, metavar="YAML", help=f"vLLM config (default: {usual})")
    add("--set", dest="changes", type=_change, nargs="+", default=[], metavar="KEY=VALUE", help="changes of the config")
    add("--trials", type=_trial, nargs="+", required=True, metavar="KEY=VALUE,...", help="see above")
    cores = "CPU cores for the client and the uploads; the server gets the others (default: 4; 0: no division)"
    add("--client-cores", type=int, default=4, metavar="N", help=cores)
    add("--timeout", type=int, default=120, metavar="S", help="longest wait of the client for data, in seconds (120)")
    add("--results", type=Path, metavar="DIR", help="keep the client's results, one directory per trial")
    add("--cache", type=Path, metavar="DIR", help="keep the server's caches (default: empty, removed at the end)")
    add("--logs", type=Path, metavar="DIR", help="keep the server's log")
    add("--model", type=Path, metavar="DIR", help="checkpoint (default: of full size, with random weights)")
    engine = shlex.join([sys.executable, "-m", "vllm.entrypoints.cli.main"])
    add("--command", default=engine, help="command to run as `vllm` (default: that of this Python)")


def _trial(text: str) -> Trial:
    names = {"age": "age_s"}
    try:
        pairs = [word.split("=") for word in _words(text)]
        found = Trial(**{names.get(key, key): TRIAL[key](value) for key, value in pairs})
    except (KeyError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected sessions=N and any of {', '.join(TRIAL)}") from None
    numbers = [value for value in dataclasses.astuple(found) if value is not None]
    if min(numbers) < 0 or not found.seconds or not (found.sessions or found.uploads):
        raise argparse.ArgumentTypeError(f"{text!r}: expected sessions or uploads, and no negative number")
    if found.clips is not None and (found.age_s or found.find is not None or found.clips < max(1, found.sessions)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least as many clips as sessions, and no age or find")
    if found.find is not None and found.find < max(1, found.sessions):
        raise argparse.ArgumentTypeError(f"{text!r}: expected find to be at least 1 and at least sessions")
    return found


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        equals = ""
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE with a value in YAML")
    return key, read


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _whole(text: str) -> list[int]:
    numbers = [int(word) for word in _words(text)]
    if min(numbers, default=0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers of at least 1")
    return numbers


def _sizes(text: str) -> dict[str, float]:
    pairs = (word.rpartition("=") for word in _words(text))
    return {name: float(size) for name, _, size in pairs}
