"""The measurement of a run, load by load: warm up, send, write the rows, and what the load took of the machine."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import loads, results
from bench.answers import Mode
from bench.client import Client
from bench.loads import Load
from bench.measure.gpus import MemorySampler
from bench.sending import Meter

# After one of these no request can succeed: no response, wrong key, no permission, wrong address or model.
HOPELESS = (None, 401, 403, 404)


class Measurement:
    """Sends what a run consists of. Inside the `with` block, memory is sampled and a progress bar is shown.

    Subclasses say what is sent, and how.
    """

    killed: dict[str, Any]  # what run.json says of a load that was killed
    mode: Mode = "whole"

    def __init__(
        self,
        out: Path,
        client: Client,
        record: dict[str, Any],
        warm_ups: Sequence[Any],
        unit: str,
        total: int,
        done: int = 0,
    ) -> None:
        """`record` is the content of run.json, which is extended.

        `warm_ups` are sent before each load, and not measured. `unit` names what is sent, `total` times in all, of
        which `done` were by earlier parts of the run.
        """
        self._out, self._client, self._record, self._warm_ups = out, client, record, warm_ups
        self._sampler = MemorySampler(client.url)
        self._bar = tqdm(total=total, initial=done, unit=unit, file=sys.stderr)

    def __enter__(self) -> Any:
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        gpus, memory = self._sampler.gpus(), self._sampler.stop()
        if (self._out / results.ROWS).exists():
            self._record["memory"] = self.memory(gpus, memory)
            results.write_json(self._out / results.RUN, self._record)

    def memory(self, gpus: int, memory: dict[str, Any]) -> dict[str, Any]:
        """`memory` of run.json, of what was sampled while the server had so many GPUs."""
        return memory

    def warm(self, load: Load) -> Callable[[Any], Any]:
        """What sends one of the warm-ups, and returns its row or, of live audio, a coroutine of it."""
        raise NotImplementedError

    def send(self, pool: Executor, load: Load, items: Sequence[Any]) -> tuple[Iterator[Any], Meter]:
        """Begin to measure. Returns the rows as they end, and what reads at their end what they took."""
        raise NotImplementedError

    def run(self, load: Load, items: Sequence[Any]) -> list[Any]:
        """Warm up, send, write the rows, and write this load's resources to run.json. Returns the rows."""
        self._bar.set_description(load.name)
        before = self._record["loads"].get(load.name)
        pool = loads.pool(load, max(len(items), len(self._warm_ups)), self.mode)
        try:
            self._warm_up(pool, load)
            self._write(load, self.killed)  # stays there if this process is killed
            rows, took = self.send(pool, load, items)
            try:
                return self._save(rows)
            finally:
                self._write(load, _sum(before, self.killed | took()))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _warm_up(self, pool: Executor, load: Load) -> None:
        """Send what is not measured, so that compilation and cold caches do not affect the first measured request.

        They use the same threads, and therefore the same connections and the same concurrency.
        """
        for row in pool.map(self.warm(load), self._warm_ups):
            if row.error and row.status in HOPELESS:
                raise self._client.hopeless(f"warm-up with {row.id}: {row.error}")
            if row.error:
                print(f"warm-up with {row.id} failed, the measurement continues: {row.error}", file=sys.stderr)

    def _save(self, rows: Iterator[Any]) -> list[Any]:
        saved = []
        with (self._out / results.ROWS).open("a", encoding="ascii") as file:
            for row in rows:
                file.write(results.row_line(row))
                file.flush()
                self._bar.update()
                saved.append(row)
        return saved

    def _write(self, load: Load, took: dict[str, Any]) -> None:
        self._record["loads"][load.name] = took
        results.write_json(self._out / results.RUN, self._record)


def _sum(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The sum of a load's figures over the parts of a run; null for a figure that one part did not measure."""
    if before is None:
        return now
    summed = {
        name: before[name] + now[name] if before[name] is not None and now[name] is not None else None
        for name in ("joules", "queued", "harness_cpu_s")
    }
    return {
        "joules": summed["joules"],
        "joules_reason": before["joules_reason"] or now["joules_reason"],
        "queued": summed["queued"],
        "queue_threshold_s": now["queue_threshold_s"] if summed["queued"] is not None else None,
        "harness_cpu_s": summed["harness_cpu_s"],
        "late_sends_ms": now["late_sends_ms"],
    }
