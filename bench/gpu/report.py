"""Measure the rows of a plan: `bench gpu report`, every figure of the pages, and `run` and `live`, a row or a few.

The servers of uploads are resident together as far as the GPU's memory allows, because a start takes minutes, and are
measured one after the other. Live sessions have the GPU to themselves, and each start in a row `start` as well. The
file is written after every row; the same command continues with the rows that are missing.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.gpu import checkpoint, live, rows, servers, tasks
from bench.gpu.clock import Clock
from bench.gpu.measure import measure
from bench.gpu.plan import GpuPlan, Item, Sessions, Start, StartPlan, Uploads
from bench.gpu.readings import watts
from bench.gpu.record import RANDOM, Record, machine
from bench.gpu.servers import Server
from bench.measure.gpus import Gpus

# Longest start on 16 cores in seconds, of one server and of several, with empty and with filled caches
START_S = {(False, False): 240, (False, True): 90, (True, False): 320, (True, True): 150}
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
        model = self._model()
        for group in self.groups(missing):
            self._group(group, model, record)
        self.clock.say("done")
        return record.content

    def _model(self) -> Path:
        """The checkpoint, which is written once. One that is not complete has another name."""
        if self.plan.model is not None:
            return self.plan.model
        model = self.plan.work / "checkpoint"
        if not model.exists():
            partial = self.plan.work / "checkpoint.partial"
            checkpoint.write(partial)
            partial.rename(model)
            self.clock.say("checkpoint written")
        return model

    def groups(self, items: Sequence[Item]) -> list[list[Item]]:
        """The rows whose servers are up at the same time. Without a GPU, or with `alone`, one server is."""
        sizes = machine(None)["gpu_memory_bytes"]
        return groups(items, self.configs, sizes[0] if sizes and not self.plan.alone else None)

    def _must_end(self, seconds: float, what: str) -> None:
        if self.ends is not None and time.monotonic() + seconds > self.ends:
            left = self.ends - time.monotonic()
            raise TimeIsUpError(f"{what} may take {seconds:.0f} s, but --minutes leaves {left:.0f} s")

    def _group(self, group: Sequence[Item], model: Path, record: Record) -> None:
        """Start the servers of some rows together, and measure the rows one after the other."""
        names = list(dict.fromkeys(item.server for item in group))
        cold = any(isinstance(item, Start) and item.cold for item in group)
        with contextlib.ExitStack() as up:
            places = Path(up.enter_context(tempfile.TemporaryDirectory()))
            cache = places / "empty" if cold else self.plan.work / "cache"
            filled = all(servers.filled(cache, name) for name in names)
            longest_s = START_S[len(names) > 1, filled] + group[0].seconds
            self._must_end(longest_s, f"the start of {', '.join(names)} with {group[0].row}")
            cores = up.enter_context(live.cores(self.plan.cores if isinstance(group[0], Sessions) else 0))
            start = StartPlan(True, cache, self.plan.logs, self.plan.command, steps=self.plan.steps)
            configs = {name: self.configs[name] for name in names}
            ready, failures = servers.start(configs, start, model, places, up, self.clock)
            os.sched_setaffinity(0, cores)  # of this thread and of all threads and processes that it starts later
            versions = {name: server.client.get("/version")["version"] for name, server in ready.items()}
            for number, item in enumerate(group):
                if item.server in failures:
                    record.fail(item.row, failures[item.server])
                    continue
                self._must_end(item.seconds, item.row)
                self.clock.say(f"{item.row}: measuring")
                server = ready[item.server]
                try:
                    row = self._measure(item, server, versions[item.server], places / str(number), WARM_UP[number > 0])
                except BenchError as error:
                    record.fail(item.row, str(error))
                    self.clock.say(f"{item.row}: {error}")
                    continue
                record.add(item.row, {"kind": item.kind, "server": item.server, **row, "servers_up": len(ready)})
                self.clock.say(f"{item.row}: {_short(row)}")

    def _measure(self, item: Item, server: Server, vllm: str, places: Path, warm_up: int) -> dict[str, Any]:
        places.mkdir()
        if isinstance(item, Start):
            return {"vllm": vllm, "start_s": server.start_s, "start_caches": server.cache, "failed": 0}
        if isinstance(item, Uploads):
            (task,) = tasks.decoded([tasks.task_of(item, self.configs[item.server])], places / "clips")
            return measure(server, task, self.gpus, vllm)
        most = self.configs[item.server].get("max_num_seqs", item.sessions)
        if item.sessions + item.uploads > most:
            raise BenchError(f"{item.row}: {item.server} has max_num_seqs {most}: add --set max_num_seqs=NUMBER")
        out = (self.plan.results or places) / f"{item.row}-{time.time():.0f}"
        clips = live.decoded(places) if item.uploads else []
        return {"vllm": vllm, **live.measure(item, server, self.gpus, clips, out, warm_up)}


def groups(missing: Sequence[Item], configs: Mapping[str, Mapping[str, Any]], memory: int | None) -> list[list[Item]]:
    """The rows whose servers are resident at the same time. `memory`: bytes of the GPU; null for one server at a time.

    Live sessions have a group of their own, and so has each row `start`.
    """
    grouped: list[tuple[str, list[Item]]] = []
    for item in missing:
        alike = [group for kind, group in grouped if kind == item.kind and not isinstance(item, Start)]
        for group in alike:
            names = {item.server, *(other.server for other in group)}
            if len(names) == 1 or (item.kind == "uploads" and _fit([configs[name] for name in names], memory)):
                group.append(item)
                break
        else:
            grouped.append((item.kind, [item]))
    return [group for _, group in grouped]


def _fit(configs: Sequence[Mapping[str, Any]], memory: int | None) -> bool:
    needed = [rows.memory_of(config) for config in configs]
    return memory is not None and None not in needed and sum(size or 0 for size in needed) <= SHARE * memory


def _short(row: Mapping[str, Any]) -> str:
    shown = ("failed", "p50_ms", "rtfx", "lag_ms", "final_ms", "fell_behind", "joules_per_audio_second", "start_s")
    return "  ".join(f"{name} {row[name]}" for name in shown if name in row)


def run(plan: GpuPlan) -> dict[str, Any]:
    """Measure what is missing in the plan's file, and return its content. Raises BenchError and TimeIsUpError."""
    measurement = Measurement(plan)
    if not plan.only_plan:
        return measurement.run()
    chosen = [item for item in plan.items if item.row in plan.chosen]
    for group in measurement.groups(chosen):
        print("up together: " + ", ".join(f"{item.row} ({item.seconds:.0f} s)" for item in group), file=sys.stderr)
    return {}
