"""Recordings of human voices with known speakers, made from open sources into a folder that is not committed.

`make` expects these in one folder, the GitHub repositories cloned, at these commits or later:

    silero_vad-6.2.3                   MIT: aepyx, of VoxConverse; the source package on PyPI, unpacked
    joonson/voxconverse 24bf60b        CC BY 4.0: who speaks in aepyx
    pyannote/pyannote-audio b749285    MIT: a call; in its tests, AMI, CC BY 4.0
    Picovoice/falcon 3085c22           Apache-2.0
    resemble-ai/Resemblyzer 15d828e    Apache-2.0: in its demos, LibriSpeech, CC BY 4.0

It writes NAME.wav at 16 kHz, NAME.rttm (who speaks when), NAME.ctm (words with times, as PocketSphinx recognizes them)
and MANIFEST. The mixes take turns of LibriSpeech's readers.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from bench import BenchError

MANIFEST = "recordings.json"
RATE_HZ = 16_000
AMI_S = 30.0  # of each of pyannote-audio's clips has a reference
FRAME, PAUSE_FRAMES, EDGE = (
    320,
    12,
    480,
)  # samples of a level, levels of a pause between phrases, samples kept around one
UTTERANCE_S = 30  # the longest piece that PocketSphinx gets


class Turn(NamedTuple):
    """A stretch of one speaker, in seconds."""

    start: float
    end: float
    speaker: str


class Mix(NamedTuple):
    """A made conversation: its readers, about so many seconds, and the seed of its turns."""

    speakers: tuple[str, ...]
    seconds: float
    seed: int


# The settings of voxtral_serve.speakers were chosen on these, and on pieces of 30 and 60 s of them.
CHOSEN_ON = ("aepyx", "falcon", "sample", "mix2", "mix3", "mix4", "one", *(f"trn0{n}" for n in range(3, 10)))
AMI = (*(f"trn0{n}" for n in range(3, 10)), "dev00", "dev01", "tst00", "tst01")
MIXES = {
    "mix2": Mix(("1688", "1998"), 75, 1),
    "mix3": Mix(("2033", "2414", "2609"), 90, 2),
    "mix4": Mix(("1688", "2033", "2414", "2609"), 120, 3),
    "held2": Mix(("3005", "3080"), 75, 4),
    "held3": Mix(("3331", "367", "533"), 90, 5),
    "held5": Mix(("3005", "3080", "3331", "367", "533"), 180, 6),
}
READERS = {"one": "1688", "held1": "3080"}  # a minute of one reader


def make(sources: Path, out: Path) -> None:
    """Write the recordings. Raises BenchError if a source or PocketSphinx is not there."""
    out.mkdir(parents=True, exist_ok=True)
    readers = {folder.name: folder for folder in sorted((sources / LIBRI).glob("*/"))}
    if not readers:
        raise BenchError(f"{sources / LIBRI} has no readers: see bench/speakers/recordings.py for the sources")
    made = [_aepyx(sources), _sample(sources), _falcon(sources), *(_ami(sources, name) for name in AMI)]
    made += [(name, *_mixed(readers, mix), "made of LibriSpeech test-other, CC BY 4.0") for name, mix in MIXES.items()]
    made += [(name, *_read(readers[reader]), "LibriSpeech test-other, CC BY 4.0") for name, reader in READERS.items()]
    entries = []
    for name, samples, turns, source in made:
        soundfile.write(out / f"{name}.wav", samples, RATE_HZ)
        lines = (f"SPEAKER {name} 1 {t.start:.3f} {t.end - t.start:.3f} <NA> <NA> {t.speaker} <NA> <NA>" for t in turns)
        (out / f"{name}.rttm").write_text("\n".join(lines) + "\n")
        _write_words(out / f"{name}.wav", out / f"{name}.ctm")
        entries.append({"name": name, "source": source, "chosen_on": name in CHOSEN_ON})
    (out / MANIFEST).write_text(json.dumps(entries, indent=1) + "\n")


def turns(path: Path) -> list[Turn]:
    """The turns in a file of RTTM, NIST's format. Raises BenchError."""
    found = []
    try:
        for line in path.read_text().splitlines():
            parts = line.split()
            start = float(parts[3])
            found.append(Turn(start, start + float(parts[4]), parts[7]))
    except (OSError, IndexError, ValueError) as error:
        raise BenchError(f"{path} is no RTTM: {error}") from None
    return sorted(found)


def words(path: Path) -> list[tuple[float, float]]:
    """Start and end in seconds of the words in a file of CTM, NIST's format. Raises BenchError."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return sorted((float(line[2]), float(line[2]) + float(line[3])) for line in lines)
    except (OSError, IndexError, ValueError) as error:
        raise BenchError(f"{path} is no CTM: {error}") from None


# ---- Sources

LIBRI = "Resemblyzer/audio_data/librispeech_test-other"
Made = tuple[str, np.ndarray, Sequence[Turn], str]


def _samples(path: Path) -> np.ndarray:
    try:
        samples, rate = soundfile.read(path, dtype="float32")
    except (OSError, soundfile.SoundFileError) as error:
        raise BenchError(f"{path}: {error}: see bench/speakers/recordings.py for the sources") from None
    if rate != RATE_HZ or samples.ndim != 1:
        raise BenchError(f"{path} has {rate} Hz, expected one channel of {RATE_HZ} Hz")
    return np.asarray(samples)


def _aepyx(sources: Path) -> Made:
    path = sources / "silero_vad-6.2.3/examples/c++/aepyx.wav"
    return "aepyx", _samples(path), turns(sources / "voxconverse/test/aepyx.rttm"), "VoxConverse, CC BY 4.0"


def _sample(sources: Path) -> Made:
    path = sources / "pyannote-audio/src/pyannote/audio/sample/sample.wav"
    return "sample", _samples(path), turns(path.with_suffix(".rttm")), "a call, in pyannote-audio, MIT"


def _falcon(sources: Path) -> Made:
    path = sources / "falcon/resources"
    (test,) = json.loads((path / ".test/test_data.json").read_bytes())["tests"]["diarization_tests"]
    spoken = [Turn(t["start_sec"], t["end_sec"], str(t["speaker_tag"])) for t in test["segments"]]
    return "falcon", _samples(path / "audio_samples/test.wav"), spoken, "Picovoice's falcon, Apache-2.0"


def _ami(sources: Path, name: str) -> Made:
    folder = sources / "pyannote-audio/tests/data"
    part = {"trn": "train", "dev": "development", "tst": "test"}[name[:3]]
    lines = [line for line in (folder / f"debug.{part}.rttm").read_text().splitlines() if line.split()[1] == name]
    spoken = []
    for line in lines:
        start, length = (float(each) for each in line.split()[3:5])
        spoken.append(Turn(start, min(start + length, AMI_S), line.split()[7]))
    samples = _samples(folder / f"{name}.wav")[: round(AMI_S * RATE_HZ)]
    return name, samples, spoken, "AMI, CC BY 4.0, in pyannote-audio"


def _utterances(folder: Path) -> list[np.ndarray]:
    return [_samples(path) for path in sorted(folder.glob("*.flac"))]


def _read(folder: Path) -> tuple[np.ndarray, list[Turn]]:
    """A minute of one reader."""
    samples = np.concatenate(_utterances(folder))[: 60 * RATE_HZ]
    return samples, [Turn(0.0, len(samples) / RATE_HZ, folder.name)]


def _phrases(samples: np.ndarray) -> list[np.ndarray]:
    """What is between the pauses of a reading."""
    count = len(samples) // FRAME
    power = (samples[: count * FRAME].reshape(count, FRAME) ** 2).mean(axis=1)
    level = 10 * np.log10(power + 1e-10)
    low, high = np.percentile(level, (5, 95))
    loud = np.flatnonzero(level > low + 0.35 * (high - low))
    groups = np.split(loud, np.flatnonzero(np.diff(loud) > PAUSE_FRAMES) + 1)
    spans = [(group[0], group[-1] + 1) for group in groups if len(group) and group[-1] + 1 - group[0] > 15]
    return [samples[max(0, first * FRAME - EDGE) : last * FRAME + EDGE] for first, last in spans]


def _mixed(readers: dict[str, Path], mix: Mix) -> tuple[np.ndarray, list[Turn]]:
    """Turns of 0.8 to 10 s, each of whole phrases, with short pauses and a little noise."""
    rng = random.Random(mix.seed)
    pool = {name: [phrase for each in _utterances(readers[name]) for phrase in _phrases(each)] for name in mix.speakers}
    parts: list[np.ndarray] = [np.zeros(RATE_HZ // 2, np.float32)]
    spoken: list[Turn] = []
    at, last = len(parts[0]), None

    def add(samples: np.ndarray) -> None:
        nonlocal at
        parts.append(samples)
        at += len(samples)

    while at < mix.seconds * RATE_HZ and (others := [name for name in mix.speakers if name != last and pool[name]]):
        last = rng.choice(others)
        left = min(max(rng.lognormvariate(1.1, 0.6), 0.8), 10) * RATE_HZ
        while left > 0 and pool[last]:
            phrase = pool[last].pop(0)
            spoken.append(Turn(at / RATE_HZ, (at + len(phrase)) / RATE_HZ, last))
            left -= len(phrase)
            add(phrase)
            add(np.zeros(int(rng.uniform(0.08, 0.25) * RATE_HZ), np.float32))
        add(np.zeros(int(rng.uniform(0.0, 0.5) * RATE_HZ), np.float32))
    samples = np.concatenate(parts)
    noise = np.random.default_rng(mix.seed).normal(0, 0.0005, len(samples))
    return (samples + noise).astype(np.float32), spoken


# ---- Words


def _write_words(audio: Path, out: Path) -> None:
    """Recognize the words with PocketSphinx. Many are wrong, and their times are right. Raises BenchError."""
    try:
        from pocketsphinx import Decoder
    except ImportError:
        raise BenchError("PocketSphinx is not installed: pip install pocketsphinx==5.1.1") from None
    decoder: Any = Decoder(samprate=RATE_HZ, loglevel="FATAL")
    samples, _ = soundfile.read(audio, dtype="int16")
    lines, start = [], 0
    while start < len(samples):
        end = _quiet_cut(samples, start)
        decoder.start_utt()
        decoder.process_raw(samples[start:end].tobytes(), full_utt=True)
        decoder.end_utt()
        for found in decoder.seg():
            if not found.word.startswith(("<", "[")):
                at, length = start / RATE_HZ + found.start_frame / 100, (found.end_frame + 1 - found.start_frame) / 100
                lines.append(f"{audio.stem} 1 {at:.2f} {length:.2f} {found.word.partition('(')[0]}")
        start = end
    out.write_text("\n".join(lines) + "\n")


def _quiet_cut(samples: np.ndarray, start: int) -> int:
    """Where the piece from `start` ends: at the quietest 0.2 s in the last 5 of UTTERANCE_S."""
    end = start + UTTERANCE_S * RATE_HZ
    if end >= len(samples):
        return len(samples)
    last = samples[end - 5 * RATE_HZ : end].astype(np.float64)
    energy = np.convolve(last**2, np.ones(RATE_HZ // 5), "same")
    return end - 5 * RATE_HZ + int(energy.argmin())
