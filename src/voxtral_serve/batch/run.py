"""Runs a job: a Ray Data pipeline from the manifest to the rows, which goes on where the last run ended."""

import contextlib
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from voxtral_serve.batch import manifest, output, record
from voxtral_serve.batch.job import BatchJob, JobError
from voxtral_serve.batch.places import Place, place, write
from voxtral_serve.batch.worker import Tally, Worker, WorkPlan
from voxtral_serve.client.errors import RequestError, UsageError, report_end
from voxtral_serve.client.server import Server, api_key

# Read when Ray is imported and started. By default it sends statistics to its maker, writes the log of its C++ part to
# stderr, and starts a process for each logical CPU at once.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

import ray
import ray.data
from ray.data import ActorPoolStrategy
from ray.data.checkpoint import CheckpointConfig

LEAST_ROWS, MOST_ROWS, FILES = 16, 1024, 1000  # of a part, and how many parts are aimed at
SPEAKERS_IN_FLIGHT = 4  # labels take longer than text, and a server takes few requests that ask for them
IN_FLIGHT = 16  # to a server whose max_num_seqs is not known
SPARE_CPUS = 6  # logical ones for reading, filtering and writing; with fewer, a resumed job never begins
OBJECT_STORE_BYTES = 256 << 20  # rows are text
FILTERS = 2  # actors that drop the rows that are done
WRITERS = 2  # tasks that write parts; one for each engine if there are more
LONGEST_NAME = 200  # bytes of a part of an id that names a file of subtitles
STARTS = 3  # of Ray on this machine, which gives up after 30 s if the machine is busy
LINE_S = 30  # between two lines of progress where stderr is no terminal


def run(job: BatchJob) -> int:
    """Exit status: 0 if all rows have a transcript; 1 if one has an error, or the job stopped; 2 for arguments that
    cannot be used; 130 for Ctrl-C."""
    try:
        return _Run(job).all()
    except (UsageError, RequestError, KeyboardInterrupt) as error:
        return report_end(error)
    except (JobError, OSError) as error:
        print(f"voxtral-serve: the job stops: {error}", file=sys.stderr)
        print("Rows that are complete are kept. Run the same command again for the rest.", file=sys.stderr)
        return 1


def default_in_flight(options: Mapping[str, Any], speakers: int | None) -> int:
    """Requests at a time to a server with these options of vLLM's. `speakers` as BatchJob has it."""
    known = int(options.get("max_num_seqs", IN_FLIGHT))
    return known if speakers is None else min(known, SPEAKERS_IN_FLIGHT)


class _Run:
    """One run of a job."""

    def __init__(self, job: BatchJob) -> None:
        self.job = job
        key = api_key(os.environ)
        config = record.read_config(job.config) if job.config else {}
        if job.urls:
            made = record.of_servers(job.model or Server(job.urls[0], key).model(), job)
        else:
            made = record.of_engines(job, config | record.options(job.arguments))
        self.rows = manifest.read(job.manifest)
        if job.subtitles:
            self._check_names()
        self.out: Place = place(job.out)
        self._prepare(made)
        in_flight = job.in_flight or default_in_flight(config | record.options(job.arguments), job.speakers)
        self.plan = WorkPlan(
            config=job.config.read_text(encoding="utf-8") if job.config else None,
            directory=job.directory.resolve(),
            arguments=job.arguments,
            urls=job.urls,
            key=key,
            model=job.model,
            language=job.language,
            speakers=job.speakers,
            delay_ms=job.delay_ms,
            keywords=job.keywords,
            in_flight=in_flight * max(len(job.urls), 1),
            subtitles=job.subtitles,
            patience_s=job.patience_s,
            out=job.out if "://" in job.out else self.out.path,
            config_hash=record.config_hash(made),
        )

    def _check_names(self) -> None:
        """Raises UsageError for ids that cannot name files of subtitles."""
        for key in self.rows["id"].to_pylist():
            if max(map(len, output.subtitle_name(key, "srt").split("/"))) > LONGEST_NAME:
                raise UsageError(f"--subtitles: the id {key[:80]!r}… is too long for the name of a file")

    def _prepare(self, made: Mapping[str, Any]) -> None:
        """Check and write the output's record, make its folders, delete rows of parts that are not complete."""
        known = record.check(self.out, made)
        folders = [self.out.below(name) for name in ("done", *(f"rows/{form}" for form in output.FORMS))]
        if not known and any(output.files(each, "") for each in folders):
            raise UsageError(f"{self.out.path} has rows, but no run.json that says what made them: use another --out")
        for each in folders:
            each.system.create_dir(each.path, recursive=True)
        if not known:
            write(self.out.below("run.json"), record.written(made), self.job.patience_s)
        output.sweep(self.out)

    def all(self) -> int:
        """Returns the exit status."""
        before = output.counts(self.out)
        ids = frozenset(self.rows["id"].to_pylist())
        begin = time.time()
        spent_s: float | None = None
        if left := len(ids - before.ids):
            told = f"{len(ids)} rows: {len(ids) - left} are done, {left} are left"
            print(told, file=sys.stderr)
            spent_s = self._transcribe(left)
            output.sweep(self.out)
        return self._report(ids, before, time.time() - begin, spent_s)

    def _transcribe(self, left: int) -> float | None:
        """Run the pipeline. Returns the seconds from the first request on, None if there was none."""
        rows = self.job.rows_per_file or min(max(left // FILES, LEAST_ROWS), MOST_ROWS)
        source = self.out.below("manifest.parquet")
        pq.write_table(self.rows, source.path, filesystem=source.system)
        with _cluster(self.job) as (engines, gpus):
            tally: Any = ray.remote(num_cpus=0)(Tally).remote()
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            for name in ("ray.data", "ray.util"):  # after Ray Data has set their levels
                logging.getLogger(name).setLevel(logging.CRITICAL)
            done = self.out.below("done")
            context.checkpoint_config = CheckpointConfig(
                "id", done.path, override_filesystem=done.system, delete_checkpoint_on_success=False
            )
            context.checkpoint_config.checkpoint_actor_pool_max_size = FILTERS
            calls = math.ceil(2 * self.plan.in_flight / rows) + 1
            dataset = (
                ray.data.read_parquet(source.path, filesystem=source.system)
                .repartition(target_num_rows_per_block=rows)
                .map_batches(
                    Worker,
                    batch_size=rows,
                    batch_format="pyarrow",
                    fn_constructor_args=(self.plan, tally),
                    compute=ActorPoolStrategy(
                        size=engines,
                        max_concurrent_calls_per_actor=calls,
                        max_tasks_in_flight_per_actor=calls,
                        enable_true_multi_threading=True,
                    ),
                    num_cpus=0 if gpus else 1,  # without either, Ray would put all on one machine
                    num_gpus=gpus,
                )
            )
            with _progress(tally, left):
                try:
                    sink = output.RowSink(self.out.below("rows"), self.job.speakers is not None)
                    dataset.write_datasink(sink, concurrency=max(engines, WRITERS))
                except Exception as error:
                    raise _cause(error, tally) from None
            end = time.time()
            first = ray.get(tally.read.remote())[3]
            return end - first if first else None

    def _report(self, ids: frozenset[str], before: output.Counts, wall_s: float, spent_s: float | None) -> int:
        """Print the summary, and write it to summary.json. Returns the exit status.

        wall_s   seconds of this run
        spent_s  those from its first request on, None if there was none
        """
        after = output.counts(self.out)
        if missing := len(ids - after.ids):
            raise JobError(f"{missing} rows were not written")
        if after.rows != len(after.ids):
            raise JobError(f"{self.out.path} has {after.rows - len(after.ids)} rows twice: was it written by two runs?")
        seconds = after.seconds - before.seconds
        summary = {
            "rows": after.rows,
            "failed": after.failed,
            "hours": after.seconds / 3600,
            "this_run": {
                "rows": after.rows - before.rows,
                "failed": after.failed - before.failed,
                "audio_s": seconds,
                "wall_s": wall_s,
                "wall_without_start_s": spent_s,
            },
        }
        write(self.out.below("summary.json"), json.dumps(summary, indent=2).encode() + b"\n", self.job.patience_s)
        print(f"{after.rows} rows: {after.failed} failed, {after.seconds / 3600:.2f} hours of audio", file=sys.stderr)
        if spent_s:
            print(
                f"this run: {after.rows - before.rows} rows in {wall_s:.0f} s, RTFx {seconds / wall_s:.1f}; from the "
                f"first request on {spent_s:.0f} s, RTFx {seconds / spent_s:.1f}",
                file=sys.stderr,
            )
        return 1 if after.failed else 0


@contextlib.contextmanager
def _cluster(job: BatchJob) -> Iterator[tuple[int, int]]:
    """Ray, of this machine alone or at an address: (number of workers, GPUs of each).

    Raises UsageError, and JobError if Ray does not start.
    """
    warnings.filterwarnings("ignore", module="ray")
    settings: dict[str, Any] = {"address": job.address}
    if job.address is None:
        cpus = (job.engines or 1) + SPARE_CPUS
        settings = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        settings["num_cpus"] = max(cpus, os.cpu_count() or 1)
    for left in reversed(range(1 if job.address else STARTS)):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
            break
        except Exception as error:  # Ray raises some of no class of its own
            ray.shutdown()
            if not left:
                raise JobError(f"Ray does not start (--address {job.address}): {error}") from None
    signal.signal(signal.SIGTERM, _interrupt)  # after Ray, which has a handler of its own
    try:
        yield _workers(job, int(ray.cluster_resources().get("GPU", 0)))
    finally:
        ray.shutdown()


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM ends a job as Ctrl-C does."""
    raise KeyboardInterrupt


def _workers(job: BatchJob, there: int) -> tuple[int, int]:
    """(number of workers, GPUs of each) where Ray has so many GPUs."""
    if job.urls:
        return 1, 0
    if not there:
        if not job.engines:
            raise UsageError(
                "Ray finds no GPU: --engines N starts N engines on the CPU, --url uses servers that are up"
            )
        return job.engines, 0
    if (job.engines or 0) > there:
        raise UsageError(f"--engines {job.engines}: Ray finds {there} GPUs, and each engine takes one")
    return job.engines or there, 1


def _cause(error: Exception, tally: Any) -> JobError:
    """Why the pipeline ended: what a worker said, or the innermost of Ray's errors."""
    with contextlib.suppress(Exception):  # Ray itself may be what ended
        if said := ray.get(tally.why.remote(), timeout=10):
            return JobError(said)
    inner = getattr(error, "cause", None) or error
    # Ray puts advice about its own settings behind the message of an OSError.
    return JobError(getattr(inner, "strerror", None) or f"{type(inner).__name__}: {inner}")


@contextlib.contextmanager
def _progress(tally: Any, left: int) -> Iterator[None]:
    """Print the counts on stderr, on one line of a terminal, else in a line every LINE_S."""
    stop = threading.Event()
    terminal = sys.stderr.isatty()

    def follow() -> None:
        while not stop.wait(1 if terminal else LINE_S):
            try:
                done, failed, seconds, first = ray.get(tally.read.remote())
                line = progress(done, failed, seconds, first, left, time.time())
            except Exception:  # Ray is on its way down, which the main thread tells
                return
            print(f"\r{line}\x1b[K" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)
        if terminal:
            print(file=sys.stderr)


def progress(done: int, failed: int, seconds: float, first: float | None, left: int, now: float) -> str:
    """A line of progress. `first` is when the first request was sent; rates are of the time since."""
    if first is None or not done or now <= first:
        return f"0/{left} rows, the engines start"
    spent = now - first
    to_go = max(left - done, 0) * spent / done
    return (
        f"{min(done, left)}/{left} rows, {done / spent:.2f} rows/s, RTFx {seconds / spent:.1f}, {failed} failed, "
        f"{int(to_go // 3600)}:{int(to_go // 60 % 60):02}:{int(to_go % 60):02} left"
    )
