"""The command line of `python -m bench.gpu`, parsed into a plan. A wrong one ends the program with status 2."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import rows
from bench.gpu.plan import GpuPlan, MergePlan


def parse(arguments: Sequence[str]) -> GpuPlan | MergePlan:
    """The plan of a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure configurations on a GPU.")
    commands = parser.add_subparsers(dest="command_name", required=True)
    _add_run(commands)
    merge = commands.add_parser("merge", help="one file of several; the last one's rows count").add_argument
    merge("files", type=Path, nargs="+", metavar="FILE")
    merge("--out", type=Path, required=True)
    flags = parser.parse_args(arguments)
    if flags.command_name == "merge":
        return MergePlan(tuple(flags.files), flags.out)
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
        arguments=tuple(arguments),
    )


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="serve and measure", formatter_class=argparse.RawDescriptionHelpFormatter)
    run.description = "Rows:\n\n" + (rows.__doc__ or "").partition("\n\n")[2]
    add = run.add_argument
    add("--out", type=Path, required=True, help="JSON file to write; rows that it has already are kept")
    add("--rows", type=_words, default=["stock-eager", "stock-piecewise", "fast"], metavar="NAME,...", help="see above")
    add("--concurrency", type=_whole, default=[1, 16, 64], metavar="N,...", help="requests in flight (1,16,64)")
    add("--clips", type=_whole, default=[12, 48, 128], metavar="N,...", help="clips at each of these (12,48,128)")
    add("--together", action="store_true", help="start all servers at once: faster, but then start_s says less")
    add("--alone", action="store_true", help="stop each server before the next one starts")
    add("--restart", action="store_true", help="start each server twice, to time empty and filled caches")
    add("--cache", type=Path, metavar="DIR", help="keep the servers' caches (default: empty ones, removed at the end)")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs")
    add("--model", type=Path, metavar="DIR", help="checkpoint (default: of full size, with random weights)")
    add("--kv", type=_sizes, default={}, metavar="NAME=GIB,...", help="KV cache of a server")
    rates = "rates at which drafts are accepted, by position, for fast-spec (0.8,0.6)"
    add("--acceptance", type=lambda text: [float(rate) for rate in _words(text)], metavar="RATE,...", help=rates)
    engine = shlex.join([sys.executable, "-m", "vllm.entrypoints.cli.main"])
    add("--command", default=engine, help="what stands for `vllm` (default: this Python's)")
    add("--plan", action="store_true", help="only say what would be sent")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _whole(text: str) -> list[int]:
    numbers = [int(word) for word in _words(text)]
    if min(numbers, default=0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from 1")
    return numbers


def _sizes(text: str) -> dict[str, float]:
    pairs = (word.rpartition("=") for word in _words(text))
    return {name: float(size) for name, _, size in pairs}
