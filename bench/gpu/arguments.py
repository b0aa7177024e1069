"""Parse the command line of `python -m bench gpu` into a plan. An invalid one ends the program with status 2."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench.gpu import rows
from bench.gpu.plan import GpuPlan, Item, Sessions, Uploads


def parse(arguments: Sequence[str]) -> GpuPlan:
    """The plan of a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description="Measure configurations on a GPU.")
    commands = parser.add_subparsers(dest="command_name", required=True)
    _add_report(commands)
    _add_run(commands)
    _add_live(commands)
    commands.add_parser("kernels", help="times of the kernels of a step: python -m bench gpu kernels --help")
    flags = parser.parse_args(arguments)
    make = {"report": _report_items, "run": _upload_items, "live": _live_items}[flags.command_name]
    items = make(parser, flags)
    return GpuPlan(
        out=flags.out,
        items=items,
        chosen=_chosen(parser, items, flags.only),
        minutes=flags.minutes,
        work=flags.work or flags.out.with_suffix(".work"),
        logs=flags.logs,
        results=flags.results,
        model=flags.model,
        kv_gib=flags.kv,
        changes=dict(flags.changes),
        acceptance=() if flags.model and flags.acceptance is None else flags.acceptance,
        cores=flags.client_cores,
        command=tuple(shlex.split(flags.command)),
        steps=getattr(flags, "steps", False),
        commit=flags.commit,
        only_plan=flags.plan,
        command_line=_command_line(flags, arguments),
    )


def _chosen(parser: argparse.ArgumentParser, items: Sequence[Item], only: Sequence[str]) -> frozenset[str]:
    """The rows that --only names: by row, by server or by kind."""
    words = {word: {item.row for item in items if word in (item.row, item.server, item.kind)} for word in only}
    if unknown := [word for word, named in words.items() if not named]:
        known = ", ".join(item.row for item in items)
        parser.error(f"--only {unknown[0]!r}: expected a server, `uploads`, `live`, or one of {known}")
    return frozenset().union(*words.values()) if words else frozenset(item.row for item in items)


def _report_items(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> tuple[Item, ...]:
    """The rows of the report, made smaller for a rehearsal."""
    items: list[Item] = []
    for item in rows.REPORT:
        if isinstance(item, Uploads) and flags.most_clips:
            item = dataclasses.replace(item, clips=min(item.clips, flags.most_clips))
        if isinstance(item, Sessions) and flags.most_sessions:
            item = dataclasses.replace(item, sessions=min(item.sessions, flags.most_sessions))
        if isinstance(item, Sessions) and flags.seconds:
            item = dataclasses.replace(item, least_s=flags.seconds[0], most_s=flags.seconds[1])
        items.append(item)
    return tuple({item.row: item for item in items}.values())


def _upload_items(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> tuple[Item, ...]:
    levels, clips = flags.in_flight, flags.clips
    if len(clips) not in (1, len(levels)):
        parser.error(f"--clips has {len(clips)} numbers: expected 1, or {len(levels)} as --in-flight")
    clips = clips * len(levels) if len(clips) == 1 else clips
    if flags.long:
        return tuple(Uploads(server, 1, 1, minutes=minutes) for server in flags.servers for minutes in flags.long)
    pairs = list(zip(levels, clips, strict=True))
    return tuple(Uploads(server, level, count) for server in flags.servers for level, count in pairs)


def _live_items(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> tuple[Item, ...]:
    least, most = flags.seconds
    return tuple(
        Sessions(server, number, least, most, flags.age, flags.uploads, flags.upload_seconds)
        for server in flags.servers
        for number in flags.sessions
    )


def _add_report(commands: Any) -> None:
    report = commands.add_parser("report", help="all figures of the pages, of one GPU in one run")
    report.description = (
        "Measures the rows of bench/gpu/rows.py and writes the file after each. The same command continues a file that "
        "lacks rows. The files in --work are used again by later calls; remove them at the end."
    )
    add = report.add_argument
    add("--most-clips", type=int, metavar="N", help="at most so many clips a row, for a rehearsal")
    add("--most-sessions", type=int, metavar="N", help="at most so many live sessions, for a rehearsal")
    seconds = "seconds of audio of a live session, in place of those of the row"
    add("--seconds", type=_between, metavar="LEAST-MOST", help=seconds)
    _add_common(add)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run", help="uploads to some configurations", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run.description = "Servers:\n\n" + (rows.__doc__ or "").partition("\n\n")[2]
    add = run.add_argument
    add("--servers", type=_words, required=True, metavar="NAME,...", help="see above")
    add("--in-flight", type=_whole, default=[1, 16, 64], metavar="N,...", help="requests in flight (1,16,64)")
    add("--clips", type=_whole, default=[20, 192, 320], metavar="N,...", help="clips at each of these (20,192,320)")
    add("--long", type=_whole, default=[], metavar="MINUTES,...", help="in place of these, one clip of each length")
    add("--steps", action="store_true", help="record the engine's steps (not of vLLM's own models, which write none)")
    _add_common(add)


def _add_live(commands: Any) -> None:
    add = commands.add_parser("live", help="live sessions, with or without uploads beside them").add_argument
    add("--servers", type=_words, default=["realtime"], metavar="NAME,...", help="as for `run` (default: realtime)")
    add("--sessions", type=_whole, required=True, metavar="N,...", help="sessions at the same time")
    text = "seconds of audio of a live session, drawn between these (30-60)"
    add("--seconds", type=_between, default=(30.0, 60.0), metavar="LEAST-MOST", help=text)
    add("--age", type=float, default=0.0, metavar="S", help="seconds of audio sent before, faster than speech (0)")
    add("--uploads", type=int, default=0, metavar="N", help="clips in flight during the sessions (0)")
    text = "length of these clips, made of several (0: clips as they are)"
    add("--upload-seconds", type=float, default=0.0, metavar="S", help=text)
    _add_common(add)


def _add_common(add: Any) -> None:
    add("--out", type=Path, required=True, help="JSON file to write, or to continue on the same machine")
    add("--only", type=_words, default=[], metavar="NAME,...", help="only rows of these names, servers or kinds")
    add(
        "--minutes",
        type=float,
        metavar="N",
        help="end after N minutes; exit status 3 if rows are missing",
    )
    add("--plan", action="store_true", help="print the plan and exit")
    add("--work", type=Path, metavar="DIR", help="checkpoint and caches of the servers (default: OUT with .work)")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs")
    add("--results", type=Path, metavar="DIR", help="keep the results of the client of live sessions")
    add("--model", type=Path, metavar="DIR", help="checkpoint of all servers (default: each its own, see `run --help`)")
    add("--kv", type=_sizes, default={}, metavar="NAME=GIB,...", help="size of a server's KV cache in GiB")
    changes = "changes of the config of every server; the values are YAML"
    add("--set", dest="changes", type=_change, nargs="+", default=[], metavar="KEY=VALUE", help=changes)
    rates = "acceptance rates of drafts by position (default: pico's; empty, or with --model: the weights decide)"
    add("--acceptance", type=_rates, metavar="RATE,...", help=rates)
    cores = "CPU cores for the client of live sessions; the server gets the others (default: 4; 0: no division)"
    add("--client-cores", type=int, default=4, metavar="N", help=cores)
    add("--commit", metavar="HASH", help="commit of this checkout, where there is no git")
    engine = shlex.join([sys.executable, "-m", "vllm.entrypoints.cli.main"])
    add("--command", default=engine, help="command to run as `vllm` (default: that of this Python)")


def _command_line(flags: argparse.Namespace, arguments: Sequence[str]) -> str:
    """The command line. Absolute paths are shortened to names, so that results contain no local directories."""
    words = list(arguments)
    for path in (flags.out, flags.work, flags.logs, flags.model, flags.results):
        if path is not None and path.is_absolute():
            words = [word.replace(str(path), path.name) for word in words]
    return shlex.join(["python", "-m", "bench", "gpu", *words])


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


def _between(text: str) -> tuple[float, float]:
    least, _, most = text.partition("-")
    pair = float(least), float(most or least)
    if not 1 <= pair[0] <= pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: expected LEAST-MOST in seconds, such as 30-60, from 1 on")
    return pair


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(rate) for rate in _words(text))


def _sizes(text: str) -> dict[str, float]:
    pairs = (word.rpartition("=") for word in _words(text))
    return {name: float(size) for name, _, size in pairs}
