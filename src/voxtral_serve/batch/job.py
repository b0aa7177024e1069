"""A job of `voxtral-serve batch`, parsed from its command line. Standard library only."""

from dataclasses import dataclass
from pathlib import Path

SUBTITLES = ("srt", "vtt")
PATIENCE_S = 600.0  # that a job waits for a server or a storage that does not answer, before it stops


@dataclass(frozen=True)
class BatchJob:
    """Transcribe the files that a manifest lists. Places are paths, or URIs such as s3://bucket/name."""

    manifest: str
    out: str
    urls: tuple[str, ...]  # servers that are up; empty to start engines
    config: Path | None  # the YAML of `vllm serve --config` for engines; None with `urls`
    directory: Path  # the checkpoint's, in which engines start
    engines: int | None  # None for one on each GPU
    arguments: tuple[str, ...]  # further ones of `vllm serve`
    model: str | None  # None for the first that a server names
    language: str | None
    speakers: int | None  # of each file, 0 if that is not known; None for rows without speakers
    delay_ms: int | None  # of the text behind the audio; None for the server's
    keywords: tuple[str, ...]  # phrases to prefer
    in_flight: int | None  # requests at a time to one server; None for the config's max_num_seqs
    rows_per_file: int | None  # None for a number that depends on the manifest's length
    subtitles: tuple[str, ...]  # of SUBTITLES
    patience_s: float
    address: str | None  # of a Ray cluster; None to run on this machine alone


class JobError(Exception):
    """The job cannot go on. The message is for the user; exit status 1. Rows that are not written are done by the next
    run."""
