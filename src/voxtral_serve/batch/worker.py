"""The actor of a Ray Data pipeline: rows of a manifest in, rows with transcripts out.

Of all that can fail, only what is wrong with one file becomes a row with an error. What may pass is tried again, and
what does not pass stops the job, so that its rows are done by the next run.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import ray

from voxtral_serve.batch import output, places
from voxtral_serve.batch.job import JobError
from voxtral_serve.batch.servers import Given, OwnEngine, Servers, times
from voxtral_serve.client.errors import GoneError, IgnoredError, RequestError, UsageError
from voxtral_serve.client.server import Server
from voxtral_serve.measure.upload import RESENT
from voxtral_serve.transcript.subtitles import Segment, srt, vtt

OF_ONE_FILE = (400, 413, 415, 422)  # statuses that say that a server does not take this audio
OF_ALL_FILES = (401, 403, 404)  # a wrong key or model
TRIES = 3  # with other errors of a server that works


@dataclass(frozen=True)
class WorkPlan:
    """What a worker does. `config` is the content of a YAML for an engine of its own, None if there are `urls`."""

    config: str | None
    directory: Path
    arguments: tuple[str, ...]
    urls: tuple[str, ...]
    key: str | None  # of the servers at `urls`
    model: str | None  # None for the first that the server names
    language: str | None
    speakers: int | None  # as BatchJob has it
    delay_ms: int | None  # as BatchJob has it
    keywords: tuple[str, ...]
    in_flight: int  # requests at a time
    subtitles: tuple[str, ...]
    patience_s: float
    out: str
    config_hash: str


class RowError(Exception):
    """This file has no transcript, whoever is asked. The message goes into its row."""


class Tally:
    """Counts for the progress line, and why the job stops: an actor of its own. Rows done again count again."""

    def __init__(self) -> None:
        self.done, self.failed, self.seconds = 0, 0, 0.0
        self.reason: str | None = None  # Ray hands exceptions on as text, inside of others
        self.first: float | None = None  # time.time() at the first transcript's request

    def begin(self) -> None:
        self.first = self.first or time.time()

    def add(self, failed: bool, seconds: float) -> None:
        self.done += 1
        self.failed += failed
        self.seconds += seconds

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason

    def why(self) -> str | None:
        return self.reason

    def read(self) -> tuple[int, int, float, float | None]:
        """(rows, those with an error, seconds of audio, when the first request was sent)."""
        return self.done, self.failed, self.seconds, self.first


class Worker:
    """Called by several threads, each with a block of rows: so there are always rows for all requests in flight."""

    def __init__(self, plan: WorkPlan, tally: Any) -> None:
        self.plan, self.tally = plan, tally
        self.pool = ThreadPoolExecutor(plan.in_flight)
        self.servers: Servers
        if plan.config is None:
            self.servers = Given(plan.urls, plan.key, plan.patience_s)
        else:
            self.servers = OwnEngine(plan.config, plan.directory, plan.arguments)
        self.asking = threading.Lock()
        self.known: dict[str, tuple[str, tuple[str, ...]]] = {}  # URL -> model, times
        self.labelled: set[str] = set()  # URLs of servers that have labelled speakers

    def __call__(self, block: pa.Table) -> pa.Table:
        """`block` has manifest.SCHEMA, the result output.schema. Raises JobError."""
        futures = [self.pool.submit(self.row, row) for row in block.to_pylist()]
        try:
            return pa.Table.from_pylist(
                [each.result() for each in futures], output.schema(self.plan.speakers is not None)
            )
        except JobError as error:
            ray.get(self.tally.stop.remote(str(error)))
            raise
        finally:
            for each in futures:
                each.cancel()

    def row(self, given: dict[str, str]) -> dict[str, Any]:
        """The row of one file, with its transcript or its error; writes its subtitles."""
        answer: dict[str, Any] = {}
        model = error = None
        try:
            with places.local_copy(given["source"], self.plan.patience_s) as path:
                model, answer = self.transcript(path)
        except OSError as problem:
            error = f"cannot be read: {problem.strerror or problem}"
        except (RowError, UsageError, ValueError) as problem:  # ValueError: a path with a null character
            error = str(problem)
        if error is None:
            self.subtitles(given["id"], answer)
        self.tally.add.remote(error is not None, answer.get("duration") or 0.0)
        return output.row(
            given,
            self.plan.config_hash,
            text=answer.get("text"),
            segments=None if error else answer.get("segments"),
            words=answer.get("words"),
            seconds=answer.get("duration"),
            model=model,
            error=error,
        )

    def transcript(self, path: Path) -> tuple[str, dict[str, Any]]:
        """(model, verbose_json). Raises RowError and JobError."""
        tries, busy_since = 0, None
        while True:
            server = self.servers.take()
            worked = False
            try:
                model, known = self.ask(server)
                plan = self.plan
                content = server.transcribe(
                    path, model, "verbose_json", plan.language, known, plan.speakers, plan.delay_ms, plan.keywords
                )
                worked = True
                answer = json.loads(content)
                if self.plan.speakers is not None and answer.get("segments"):  # with speakers: the client has checked
                    self.labelled.add(server.url)
                return model, answer
            except IgnoredError as error:
                if server.url in self.labelled:
                    worked = True
                    raise RowError(str(error)) from None
                raise JobError(f"{server.url}: {error}") from None
            except RequestError as error:
                worked = error.status in OF_ONE_FILE
                if worked:
                    raise RowError(str(error)) from None
                if error.status in OF_ALL_FILES:
                    raise JobError(f"{server.url} refuses: {error}") from None
                if self.servers.lost(server) or isinstance(error, GoneError):
                    pass  # another server may have this file, or this one once it is back
                elif error.status in RESENT:
                    busy_since = busy_since or time.monotonic()
                    if time.monotonic() - busy_since > self.plan.patience_s:
                        raise JobError(f"{server.url} is busy since {self.plan.patience_s:.0f} s: {error}") from None
                else:
                    tries += 1
                    if tries == TRIES:
                        raise RowError(f"{error} ({TRIES} times)") from None
            finally:
                self.servers.give(server, worked)
            time.sleep(2.0**tries)

    def ask(self, server: Server) -> tuple[str, tuple[str, ...]]:
        """(model, times) of a server, which is asked once."""
        if server.url not in self.known:
            with self.asking:
                if server.url not in self.known:
                    model = self.plan.model or server.model()
                    plan = self.plan
                    known = times(server, model, plan.language, plan.speakers, plan.delay_ms, plan.keywords)
                    self.known[server.url] = (model, known)
                    self.tally.begin.remote()
        return self.known[server.url]

    def subtitles(self, key: str, answer: dict[str, Any]) -> None:
        """Write ID.srt and ID.vtt. Raises JobError."""
        found = [
            Segment(each["text"], each["start"], each["end"], each.get("speaker"))
            for each in answer.get("segments") or ()
        ]
        out = places.patiently(lambda: places.place(self.plan.out), self.plan.out, self.plan.patience_s)
        for form in self.plan.subtitles:
            text = (srt if form == "srt" else vtt)(found)
            name = output.subtitle_name(key, form)
            places.write(out.below(f"subtitles/{name}"), text.encode(), self.plan.patience_s)
