"""`voxtral-serve transcribe`: send audio files to a server's /v1/audio/transcriptions; print or write the transcripts.

A transcript's file is written whole or not at all, and a file that exists is not requested again: the same command
continues a run that was interrupted.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from voxtral_serve.client import files
from voxtral_serve.client.errors import GoneError, RequestError, StoppedError, UsageError, report_end
from voxtral_serve.client.jobs import FORMATS, FilesJob
from voxtral_serve.client.server import Server, api_key
from voxtral_serve.client.text import shown


def run(job: FilesJob) -> int:
    """Exit status: 0 if all files are transcribed; 1 if one failed; 2 for invalid files or settings; 130 for Ctrl-C."""
    try:
        found = files.find(job.paths)
        if len(found) > 1 and not job.out and (job.form != "text" or job.speakers is not None):
            option = "--speakers" if job.form == "text" else f"--format {job.form}"
            raise UsageError(f"{len(found)} files: {option} needs --out DIR for them")
        outputs = files.targets(found, job.out, FORMATS[job.form]) if job.out else [None] * len(found)
        server = Server(job.url, api_key(os.environ))
        if job.out:
            try:
                job.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--out {shown(job.out)}: {error.strerror}") from None
        pairs = [(each.path, output) for each, output in zip(found, outputs, strict=True)]
        todo = [(path, output) for path, output in pairs if job.again or output is None or not output.exists()]
        return _FilesRun(job, server, len(found), len(found) - len(todo)).all(todo)
    except (UsageError, RequestError, KeyboardInterrupt) as error:
        return report_end(error)


class _FilesRun:
    """One run and its results: `done`, the number of files transcribed, and `failed`, each file with its error.

    `total` counts all files, `there` those whose transcripts existed before.
    """

    def __init__(self, job: FilesJob, server: Server, total: int, there: int) -> None:
        self.job, self.server, self.total, self.there = job, server, total, there
        self.done = 0
        self.failed: list[tuple[Path, str]] = []

    def all(self, todo: Sequence[tuple[Path, Path | None]]) -> int:
        """Transcribe pairs of a file and its output, None for stdout. Returns the exit status."""
        if not todo:
            return self.report(0)
        model = self.job.model or self.server.model()
        # None: on a terminal only.
        hidden = None if self.total > 1 else True
        bar = tqdm(total=self.total, initial=self.there, unit="file", file=sys.stderr, disable=hidden)
        pool = ThreadPoolExecutor(self.job.in_flight)
        futures: dict[Future[bytes], int] = {}
        ready: dict[int, bytes | None] = {}
        following = 0
        interrupted = False
        try:
            for number, each in enumerate(todo):
                futures[pool.submit(self.one, model, *each)] = number
            for future in as_completed(futures):
                number = futures.pop(future)
                ready[number] = self.take(todo[number][0], future)
                bar.update()
                while following in ready:
                    self.show(todo[following][0], ready.pop(following))
                    following += 1
        except KeyboardInterrupt:
            interrupted = True
            self.server.stop.set()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            bar.close()
        for future, number in futures.items():
            if future.done() and not future.cancelled():
                self.take(todo[number][0], future)
        return self.report(130 if interrupted else 1 if self.failed else 0)

    def one(self, model: str, path: Path, output: Path | None) -> bytes:
        """In a thread: transcribe a file, and write its output if it has one. Raises as Server does."""
        if self.server.stop.is_set():
            raise StoppedError
        try:
            job = self.job
            asked = job.language, (), job.speakers, job.delay_ms, job.keywords
            content = self.server.transcribe(path, model, job.form, *asked)
        except GoneError:
            self.server.stop.set()
            raise
        if output is not None:
            try:
                files.write(output, content)
            except OSError as error:
                raise RequestError(f"{shown(output)} cannot be written: {error.strerror}") from None
        return content

    def take(self, path: Path, future: "Future[bytes]") -> bytes | None:
        """Count a request that has ended. Returns its transcript, None if it has none."""
        try:
            content = future.result()
        except StoppedError:
            return None
        except RequestError as error:
            self.failed.append((path, str(error)))
            return None
        self.done += 1
        return content

    def show(self, path: Path, content: bytes | None) -> None:
        """Print a transcript if there is no --out, after the file's name if there are several files."""
        if content is None or self.job.out:
            return
        text = content.decode(errors="replace").removesuffix("\n")
        tqdm.write(f"{shown(path)}: {text}" if self.total > 1 else text, file=sys.stdout)
        sys.stdout.flush()

    def report(self, status: int) -> int:
        """Print failures and counts on stderr. Returns `status`."""
        for path, error in sorted(self.failed):
            print(f"failed: {shown(path)}: {error}", file=sys.stderr)
        left = self.total - self.done - self.there - len(self.failed)
        counts = {
            "transcribed": self.done,
            "already transcribed (--again repeats them)": self.there,
            "failed": len(self.failed),
            "not sent or without a response": left,
        }
        if self.job.out or (status and self.total > 1):
            told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            print(f"{self.total} file{'s' * (self.total > 1)}: {told}", file=sys.stderr)
        if self.job.out and left:
            print("Run the same command again for the rest.", file=sys.stderr)
        return status
