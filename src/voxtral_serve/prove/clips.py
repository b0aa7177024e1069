"""The clips of a run: the bundled ones, of synthetic voices, and those of the user's manifest. 16 kHz, mono."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile

from voxtral_serve.client.errors import UsageError
from voxtral_serve.measure import sound
from voxtral_serve.measure.errors import MeasureError
from voxtral_serve.measure.sound import RATE_HZ, Pcm, Samples

BUNDLED = Path(__file__).parent / "clips" / "manifest.jsonl"
PATHS = ("path", "audio_filepath")  # names of a line's audio file; the second is NeMo's
LANGUAGE = "en"


@dataclass(frozen=True)
class Clip:
    """`text` is the reference, None without one. `language` selects the rules by which texts are compared."""

    path: Path
    text: str | None
    language: str
    samples: Samples  # [n], in -1 to 1

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE_HZ

    @cached_property
    def wav(self) -> bytes:
        """A WAV file of PCM16, whose samples are those that a live session gets."""
        file = io.BytesIO()
        soundfile.write(file, self.pcm, RATE_HZ, format="WAV", subtype="PCM_16")
        return file.getvalue()

    @cached_property
    def pcm(self) -> Pcm:
        return sound.pcm16(self.samples)


def load(manifest: Path, most: int) -> tuple[list[Clip], int]:
    """The first `most` clips of a manifest, and how many it has.

    A line is a JSON object: `path` or `audio_filepath`, absolute or relative to the manifest; `text`, the reference,
    and `language`, a code such as en, are optional. Raises UsageError for a line or a file that cannot be read.
    """
    try:
        lines = [line for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--clips {manifest} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"--clips {manifest} has no lines: expected a JSON object for each clip")
    return [_clip(manifest, number, line) for number, line in enumerate(lines[:most], 1)], len(lines)


def _clip(manifest: Path, number: int, line: str) -> Clip:
    where = f"--clips {manifest} line {number}"
    try:
        entry = json.loads(line)
        name = next(entry[key] for key in PATHS if key in entry)
        text, language = entry.get("text"), entry.get("language", LANGUAGE)
    except (ValueError, AttributeError, TypeError, StopIteration):
        raise UsageError(f'{where} is not a clip: expected {{"path": FILE, "text": REFERENCE}}') from None
    for key, value, kinds in (("path", name, str), ("text", text, str | None), ("language", language, str)):
        if not isinstance(value, kinds):
            raise UsageError(f"{where}: {key} is {value!r}, expected a string")
    path = manifest.parent / name
    try:
        return Clip(path, text, language, sound.read(path, str(path)))
    except MeasureError as error:
        raise UsageError(f"{where}: {error}") from None


def joined(clips: Sequence[Clip], first: int, gap_s: float, seconds: float) -> Samples:
    """Clips one after the other, from number `first` on and over again, with pauses of `gap_s`, cut at `seconds`."""
    gap = np.zeros(round(gap_s * RATE_HZ), np.float32)
    parts: list[Samples] = []
    left, number = round(seconds * RATE_HZ), first
    while left > 0:
        parts += [clips[number % len(clips)].samples, gap]
        left -= len(parts[-2]) + len(gap)
        number += 1
    return np.concatenate(parts)[: round(seconds * RATE_HZ)]
