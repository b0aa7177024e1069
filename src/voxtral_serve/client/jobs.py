"""The jobs of `voxtral-serve transcribe`, parsed from its command line. Standard library only."""

from dataclasses import dataclass
from pathlib import Path

# A transcript's format -> how its file's name ends
FORMATS = {
    "text": ".txt",
    "json": ".json",
    "verbose_json": ".json",
    "diarized_json": ".json",
    "srt": ".srt",
    "vtt": ".vtt",
}
LIVE_FORMATS = ("text", "srt")
DELAYS_MS = (160, 240, 480, 960, 2400)  # that OpenAI's protocol has names for


@dataclass(frozen=True)
class FilesJob:
    """Transcribe audio files, and those in folders."""

    paths: tuple[Path, ...]
    url: str
    form: str  # one of FORMATS
    out: Path | None  # the folder for transcripts; None for stdout
    again: bool  # also the files whose transcripts are in `out` already
    model: str | None  # None for the first that the server names
    language: str | None
    speakers: int | None  # their number, 0 if it is not known; None for a transcript without speakers
    delay_ms: int | None  # one of DELAYS_MS; None for the server's
    keywords: tuple[str, ...]  # phrases to prefer
    in_flight: int  # requests at a time


@dataclass(frozen=True)
class LiveJob:
    """Transcribe a microphone, or one file at the pace of speech."""

    path: Path | None  # None for the microphone
    url: str
    form: str  # one of LIVE_FORMATS
    out: Path | None  # the folder for the transcript's files; None for stdout only
    again: bool  # replace files that exist
    model: str | None  # None for the first that the server names
    delay_ms: int | None  # one of DELAYS_MS; None for the server's
    keywords: tuple[str, ...]  # phrases to prefer
