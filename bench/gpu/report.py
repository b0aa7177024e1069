"""Measure the rows of a plan: `bench gpu report`, every figure of the pages, and `run` and `live`, a row or a few.

Each server is up alone while it is measured. A first start compiles for minutes, so servers whose caches are empty are
started together before, as many as the GPU's memory holds, and stopped again. The file is written after every row; the
same command continues with the rows that are missing.
"""

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.gpu import live, rows, servers, tasks
from bench.gpu.clock import Clock
from bench.gpu.measure import measure
from bench.gpu.plan import GpuPlan, Item, Sessions, StartPlan, Uploads
from bench.gpu.readings import watts
from bench.gpu.record import RANDOM, Record, machine
from bench.gpu.servers import Launch, Server
from bench.measure.gpus import Gpus

START_S = {False: 240, True: 90}  # longest start on 16 cores in seconds, with empty and with filled caches
FILL_S = 330  # the same of several servers at once with empty caches
SHARE = 0.94  # of the GPU's memory that servers together may take
WARM_UP = (6, 1)  # live clips sent before the first sessions, and before each further ones


class TimeIsUpError(Exception):
    """The next row would not end in the time of this call."""


class Measurement:
    """One call of the command."""

    def __init__(self, plan: GpuPlan) -> None:
        """Raises BenchError if a configuration cannot be read."""
        self.plan, self.clock, self.gpus = plan, Clock(), Gpus()
        self.ends = time.monotonic() + 60 * plan.minutes if plan.minutes else None
        names = dict.fromkeys(item.server for item in plan.items)
        self.configs = {
            name: rows.config(name, kv_gib=plan.kv_gib.get(name), acceptance=plan.acceptance, changes=plan.changes)
            for name in names
        }

    def record(self) -> Record:
        """The file, with what it had before. Raises BenchError if it is of another machine or of other code."""
        plan = self.plan
        described = {name: rows.described(name, config) for name, config in self.configs.items()}
        weights = RANDOM if plan.model is None else f"{plan.model.resolve().name}"
        plan.out.parent.mkdir(parents=True, exist_ok=True)
        return Record(plan.out, machine(plan.commit), weights, described, [item.row for item in plan.items])

    def run(self) -> dict[str, Any]:
        """Measure what is missing. Returns the content of the file. Raises BenchError and TimeIsUpError."""
        plan, record = self.plan, self.record()
        missing = [item for item in plan.items if item.row in plan.chosen and not record.has(item.row)]
        self.clock.say(f"{len(missing)} rows to measure: {', '.join(item.row for item in missing)}")
        if not missing:
            return record.content
        for directory in (plan.work, *([plan.logs] if plan.logs else [])):
            directory.mkdir(parents=True, exist_ok=True)
        record.begin_call(
            command=plan.command_line,
            settings=servers.variables(),
            idle_watts=watts(self.gpus),
        )
        self._make_checkpoint({rows.served(item.server).checkpoint for item in missing})
        for names in self._to_fill(missing):
            self._fill(names)
        for group in groups(missing):
            self._group(group, record)
        self.clock.say("done")
        return record.content

    def _launch(self, name: str, config: dict[str, Any]) -> Launch:
        model = self.plan.work / "checkpoint" if rows.served(name).checkpoint == rows.RANDOM else rows.ROOT / rows.PICO
        return Launch(config, self.plan.model or model, rows.cache_of(name))

    def _make_checkpoint(self, needed: set[str]) -> None:
        """That of random weights, once. One that is not complete has another name."""
        place = self.plan.work / "checkpoint"
        if self.plan.model is not None or rows.RANDOM not in needed or place.exists():
            return
        from bench.gpu import head  # which needs PyTorch and this repository's package

        partial = place.with_suffix(".partial")
        head.write_checkpoint(partial)
        partial.rename(place)
        self.clock.say("checkpoint written")

    def _to_fill(self, items: Sequence[Item]) -> list[list[str]]:
        """The servers to start together so that their caches are filled; none without a GPU.

        Eager servers compile nothing, and those of small models little.
        """
        sizes = machine(None)["gpu_memory_bytes"]
        of_caches: dict[str, str] = {}
        for item in items:
            of_caches.setdefault(rows.cache_of(item.server), item.server)
        empty = {
            name: rows.filling(self.configs[name])
            for cache, name in of_caches.items()
            if not self.configs[name].get("enforce_eager")
            and rows.served(name).checkpoint == rows.RANDOM
            and not servers.filled(self.plan.work / "cache", cache)
        }
        return together(empty, sizes[0] if sizes else 0)

    def _fill(self, names: Sequence[str]) -> None:
        """Start servers at the same time and stop them, for their compiled graphs and kernels."""
        self._must_end(FILL_S, f"the first start of {', '.join(names)}")
        self.clock.say(f"filling the caches of {', '.join(names)}")
        plan = StartPlan(self.plan.work / "cache", self.plan.logs, self.plan.command)
        with contextlib.ExitStack() as up:
            places = Path(up.enter_context(tempfile.TemporaryDirectory()))
            launches = {name: self._launch(name, rows.filling(self.configs[name])) for name in names}
            servers.start(launches, plan, places, up, self.clock)

    def _must_end(self, seconds: float, what: str) -> None:
        if self.ends is not None and time.monotonic() + seconds > self.ends:
            left = self.ends - time.monotonic()
            raise TimeIsUpError(f"{what} may take {seconds:.0f} s, but --minutes leaves {left:.0f} s")

    def _group(self, group: Sequence[Item], record: Record) -> None:
        """Start one server, and measure its rows one after the other."""
        name = group[0].server
        with contextlib.ExitStack() as up:
            places = Path(up.enter_context(tempfile.TemporaryDirectory()))
            launch, cache = self._launch(name, self.configs[name]), self.plan.work / "cache"
            longest_s = START_S[servers.filled(cache, launch.cache)] + group[0].seconds
            self._must_end(longest_s, f"the start of {name} with {group[0].row}")
            start = StartPlan(cache, self.plan.logs, self.plan.command, steps=self.plan.steps)
            ready, failures = servers.start({name: launch}, start, places, up, self.clock)
            if name in failures:
                for item in group:
                    record.fail(item.row, failures[name])
                return
            server = ready[name]
            version = server.client.get("/version")["version"]
            warm_ups = itertools.chain(WARM_UP[:1], itertools.repeat(WARM_UP[1]))
            for number, item in enumerate(group):
                self._must_end(item.seconds, item.row)
                self.clock.say(f"{item.row}: measuring")
                try:
                    if isinstance(item, Uploads):
                        row = self._uploads(item, server, version, places / str(number))
                    else:
                        row = self._live(item, server, version, places / str(number), next(warm_ups))
                except BenchError as error:
                    record.fail(item.row, str(error))
                    self.clock.say(f"{item.row}: {error}")
                    continue
                record.add(item.row, {"kind": item.kind, "server": item.server, **row})
                self.clock.say(f"{item.row}: {_short(row)}")

    def _uploads(self, item: Uploads, server: Server, vllm: str, places: Path) -> dict[str, Any]:
        places.mkdir()
        (task,) = tasks.decoded([tasks.task_of(item, self.configs[item.server])], places / "clips")
        return measure(server, task, self.gpus, vllm)

    def _live(self, item: Sessions, server: Server, vllm: str, places: Path, warm_up: int) -> dict[str, Any]:
        places.mkdir()
        most = self.configs[item.server].get("max_num_seqs", item.sessions)
        if item.sessions + item.uploads > most:
            raise BenchError(f"{item.row}: {item.server} has max_num_seqs {most}: add --set max_num_seqs=NUMBER")
        out = (self.plan.results or places) / f"{item.row}-{time.time():.0f}"
        clips = live.decoded(places, item.upload_s) if item.uploads else []
        with live.cores(server.pid, self.plan.cores):
            figures = live.measure(item, server, self.gpus, clips, out, warm_up)
        return {"vllm": vllm, **figures, "start_s": server.start_s, "start_caches": server.cache}


def groups(missing: Sequence[Item]) -> list[list[Item]]:
    """The rows by the server that they share, which is started once."""
    grouped: dict[str, list[Item]] = {}
    for item in missing:
        grouped.setdefault(item.server, []).append(item)
    return list(grouped.values())


def together(configs: Mapping[str, Mapping[str, Any]], memory: int) -> list[list[str]]:
    """The servers that fit into the GPU's memory of so many bytes at the same time. One that is left over alone, or
    whose memory is not known, is in none: its own start fills its caches."""
    groups: list[list[str]] = []
    free: list[int] = []  # bytes that each group leaves
    for name, config in configs.items():
        needed = rows.memory_of(name, config)
        if needed is None:
            continue
        place = next((number for number, left in enumerate(free) if needed <= left), len(groups))
        if place == len(groups):
            groups.append([])
            free.append(int(SHARE * memory))
        groups[place].append(name)
        free[place] -= needed
    return [group for group in groups if len(group) > 1]


def _short(row: Mapping[str, Any]) -> str:
    shown = ["failed", "p50_ms", "rtfx", "lag_ms", "final_ms", "fell_behind", "joules_per_audio_second"]
    shown += ["tokens_per_step", "start_s"]
    return "  ".join(f"{name} {row[name]}" for name in shown if name in row)


def run(plan: GpuPlan) -> dict[str, Any]:
    """Measure what is missing in the plan's file, and return its content. Raises BenchError and TimeIsUpError."""
    measurement = Measurement(plan)
    if not plan.only_plan:
        return measurement.run()
    chosen = [item for item in plan.items if item.row in plan.chosen]
    for group in groups(chosen):
        print("one start: " + ", ".join(f"{item.row} ({item.seconds:.0f} s)" for item in group), file=sys.stderr)
    return {}
