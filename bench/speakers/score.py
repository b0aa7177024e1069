"""Label the words of recordings, and compare with who spoke them.

A word is wrong if its label's speaker does not speak at the middle of the word; labels and speakers are matched so that
the fewest words are wrong, and words while nobody speaks do not count. The diarization error rate is pyannote.metrics',
with a collar of 0.25 s and with overlap: words of one label with pauses under TURN_S make a turn.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench import BenchError
from bench.speakers.recordings import MANIFEST, RATE_HZ, Turn, turns, words

TURN_S = 0.5
COLLAR_S = 0.25  # around each boundary, on both sides
Span = tuple[float, float]


def score(folder: Path, device: str = "cpu") -> dict[str, Any]:
    """The figures of each recording in a folder that `recordings.make` wrote. Raises BenchError."""
    import torch

    from voxtral_serve.audio.speech import Detector
    from voxtral_serve.speakers.campplus import CamPlusPlus

    torch.set_num_threads(1)
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"{folder / MANIFEST}: {error}") from None
    network, detector = CamPlusPlus(device), Detector()
    recordings = [_scored(folder, entry, network, detector) for entry in entries]
    return {
        "schema_version": 1,
        "device": device,
        "recordings": recordings,
        "chosen_on": _together([each for each in recordings if each["chosen_on"]]),
        "held_out": _together([each for each in recordings if not each["chosen_on"]]),
    }


def _scored(folder: Path, entry: dict[str, Any], network: Any, detector: Any) -> dict[str, Any]:
    from voxtral_serve.audio.decode import Clip
    from voxtral_serve.speakers.labels import labelled
    from voxtral_serve.speakers.windows import voices

    name = entry["name"]
    samples = soundfile.read(folder / f"{name}.wav", dtype="float32")[0]
    spoken = turns(folder / f"{name}.rttm")
    spans = [span for span in words(folder / f"{name}.ctm") if span[1] <= len(samples) / RATE_HZ]
    count = len({turn.speaker for turn in spoken})
    minutes = len(samples) / RATE_HZ / 60
    start = time.process_time()
    found = voices(samples, detector.stretches(Clip(samples, RATE_HZ)), network)
    row: dict[str, Any] = {}
    for kind, number in (("unknown", None), ("given", count)):
        labels = labelled(found, spans, number)
        if kind == "unknown":
            cpu_s = time.process_time() - start
        wrong, counted = wrong_words(labels, spans, spoken)
        row[kind] = {
            "speakers": len(set(labels)),
            "wrong_words": wrong,
            "der": error_rate(labels, spans, spoken, 60 * minutes),
        }
    return entry | {
        "seconds": round(60 * minutes, 1),
        "speakers": count,
        "words": counted,
        "cpu_s_per_minute": round(cpu_s / minutes, 2),
        **row,
    }


def _together(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = sum(row["words"] for row in rows)
    return {
        "recordings": len(rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "words": total,
        "right_number": sum(row["unknown"]["speakers"] == row["speakers"] for row in rows),
        **{kind: {"wrong_words": sum(row[kind]["wrong_words"] for row in rows)} for kind in ("unknown", "given")},
    }


def wrong_words(labels: Sequence[int], spans: Sequence[Span], spoken: Sequence[Turn]) -> tuple[int, int]:
    """(words with the wrong speaker, words that count)"""
    from scipy.optimize import linear_sum_assignment

    names = sorted({turn.speaker for turn in spoken})
    counts = np.zeros((max(labels, default=0) + 1, len(names)), int)
    speaking: list[tuple[int, set[str]]] = []
    for label, (start, end) in zip(labels, spans, strict=True):
        middle = (start + end) / 2
        speakers = {turn.speaker for turn in spoken if turn.start <= middle < turn.end}
        if speakers:
            speaking.append((label, speakers))
            for speaker in speakers:
                counts[label, names.index(speaker)] += 1
    rows, columns = linear_sum_assignment(-counts)
    speaker_of = {int(row): names[column] for row, column in zip(rows, columns, strict=True)}
    return sum(speaker_of.get(label) not in speakers for label, speakers in speaking), len(speaking)


def error_rate(labels: Sequence[int], spans: Sequence[Span], spoken: Sequence[Turn], seconds: float) -> float:
    """The diarization error rate of labelled words in a recording of this length."""
    from pyannote.core import Annotation, Segment, Timeline
    from pyannote.metrics.diarization import DiarizationErrorRate

    joined: list[Turn] = []
    for label, (start, end) in zip(labels, spans, strict=True):
        if joined and joined[-1].speaker == str(label) and start - joined[-1].end < TURN_S:
            joined[-1] = joined[-1]._replace(end=max(end, joined[-1].end))
        else:
            joined.append(Turn(start, end, str(label)))
    annotations = []
    for several in (spoken, joined):
        annotation = Annotation()
        for number, turn in enumerate(several):
            annotation[Segment(turn.start, turn.end), number] = turn.speaker
        annotations.append(annotation)
    rate = DiarizationErrorRate(collar=2 * COLLAR_S)(*annotations, uem=Timeline([Segment(0.0, seconds)]))
    return round(float(rate), 4)


def table(content: dict[str, Any]) -> str:
    """The figures as a table of Markdown."""
    lines = ["| recording | s | speakers, found | wrong words % | DER % | with the number: wrong % | CPU s/min |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in content["recordings"]:
        wrong = [f"{100 * row[kind]['wrong_words'] / max(row['words'], 1):.1f}" for kind in ("unknown", "given")]
        mark = "" if row["chosen_on"] else " *"
        found = row["unknown"]
        cells = [f"{row['name']}{mark}", f"{row['seconds']:.0f}", f"{row['speakers']}, {found['speakers']}", wrong[0]]
        cells += [f"{100 * found['der']:.1f}", wrong[1], f"{row['cpu_s_per_minute']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    for name in ("chosen_on", "held_out"):
        part = content[name]
        shares = [100 * part[kind]["wrong_words"] / max(part["words"], 1) for kind in ("unknown", "given")]
        lines.append(
            f"{name}: {part['right_number']} of {part['recordings']} right numbers; of {part['words']} words "
            f"{shares[0]:.1f} % wrong, {shares[1]:.1f} % with the number"
        )
    return "\n".join(lines)
