"""Label the words of recordings, and compare with who spoke them.

A word is wrong if its label's speaker does not speak at the middle of the word; labels and speakers are matched so that
the fewest words are wrong, and words while nobody speaks do not count. The diarization error rate is pyannote.metrics',
with a collar of 0.25 s and with overlap: words of one label with pauses under TURN_S make a turn.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench import BenchError
from bench.speakers import known
from bench.speakers.cost import cost
from bench.speakers.live import STEP_S, relabelled
from bench.speakers.recordings import MANIFEST, RATE_HZ, Turn, turns, words

OUT = "bench/results/speakers.json"
MINUTES = (1, 60)  # of what is labelled for its cost
TURN_S = 0.5
COLLAR_S = 0.25  # around each boundary, on both sides
SUMS = {"settings chosen on these": "chosen_on", "others\\*": "held_out", "AMI meetings of both": "meetings"}
Span = tuple[float, float]


def score(folder: Path, device: str = "cpu") -> dict[str, Any]:
    """The figures of each recording in a folder that `recordings.make` wrote, and of the server's process that labels.

    Raises BenchError.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise BenchError(f"{folder / MANIFEST}: {error}") from None
    costs = asyncio.run(_costs(folder, [entry["name"] for entry in entries], device))
    recordings, references = zip(*asyncio.run(_all(folder, entries, device)), strict=True)
    return {
        "schema_version": 3,
        "device": device,
        "costs": costs,
        "recordings": recordings,
        "chosen_on": _together([each for each in recordings if each["chosen_on"]]),
        "held_out": _together([each for each in recordings if not each["chosen_on"]]),
        "meetings": _together([each for each in recordings if each["source"].startswith("AMI")]),
        "known": known.figures(references),
    }


async def _costs(folder: Path, names: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Of all recordings in a row."""
    samples, spans, at = [], list[Span](), 0.0
    for name in names:
        samples.append(soundfile.read(folder / f"{name}.wav", dtype="float32")[0])
        spans += [(start + at, end + at) for start, end in words(folder / f"{name}.ctm")]
        at += len(samples[-1]) / RATE_HZ
    return [await cost(np.concatenate(samples), spans, minutes, device) for minutes in MINUTES]


async def _all(
    folder: Path, entries: Sequence[dict[str, Any]], device: str
) -> list[tuple[dict[str, Any], known.Labelled]]:
    from voxtral_serve.guard.labeller import LabelError, Labeller
    from voxtral_serve.speakers.campplus import SIZE
    from voxtral_serve.speakers.windows import Voices

    labeller = Labeller(device=device)
    try:
        await labeller.labels(Voices(np.empty((0, 2)), np.empty((0, SIZE))), [])  # it starts
        return [await _scored(folder, entry, labeller) for entry in entries]
    except LabelError as error:
        raise BenchError(str(error)) from None
    finally:
        await labeller.aclose()


async def _scored(folder: Path, entry: dict[str, Any], labeller: Any) -> tuple[dict[str, Any], known.Labelled]:
    from voxtral_serve.audio.decode import Clip
    from voxtral_serve.audio.speech import Detector

    name = entry["name"]
    clip = Clip(soundfile.read(folder / f"{name}.wav", dtype="float32")[0], RATE_HZ)
    seconds = len(clip.samples) / RATE_HZ
    spoken = turns(folder / f"{name}.rttm")
    spans = [span for span in words(folder / f"{name}.ctm") if span[1] <= seconds]
    count = len({turn.speaker for turn in spoken})
    speech = Detector().stretches(clip)
    found = await labeller.voices(clip, speech)
    row: dict[str, Any] = {}
    for kind, number in (("unknown", None), ("given", count)):
        labels = await labeller.labels(found, spans, number)
        wrong, counted = wrong_words(labels, spans, spoken)
        row[kind] = {
            "speakers": len(set(labels)),
            "wrong_words": wrong,
            "der": error_rate(labels, spans, spoken, seconds),
        }
    row["relabelled"] = relabelled(found, spans, seconds)
    references = known.labelled(entry["chosen_on"], found, labels, spans, spoken)
    return entry | {"seconds": round(seconds, 1), "speakers": count, "words": counted, **row}, references


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
    """The figures as a table of Markdown, and sentences on known speakers and on the cost."""
    parts = [(name, content[key]) for name, key in SUMS.items()]
    lines = ["|recording|s|speakers, found|wrong words %|with their number %|DER %|", "|---|---|---|---|---|---|"]
    for row in content["recordings"]:
        name = row["name"] if row["chosen_on"] else f"{row['name']}\\*"
        found = row["unknown"]
        counts = f"{row['speakers']}, {found['speakers']}"
        lines.append(f"|{name}|{row['seconds']:.0f}|{counts}|{_wrong(row)}|{100 * found['der']:.0f}|")
    for name, part in parts:
        right = f"right in {part['right_number']} of {part['recordings']}"
        lines.append(f"|**{name}**|{part['seconds']:.0f}|{right}|{_wrong(part)}|-|")
    costs = [
        f"{each['cpu_s']:.1f} s of a core, {each['peak_bytes'] / 1e6:.0f} MB, for {each['minutes']:g} min of audio"
        for each in content["costs"]
    ]
    rows = content["recordings"]
    share = sum(row["relabelled"]["words"] for row in rows) / max(sum(row["words"] for row in rows), 1)
    oldest_s = max(row["relabelled"]["oldest_s"] for row in rows)
    live = (
        f"Labels that are found every {STEP_S:g} s while people speak change later for {100 * share:.0f} % of the "
        f"words, up to {oldest_s:.0f} s back."
    )
    sums = content["known"]["held_out"]
    known = (
        f"Known speakers\\*, with a clip from the same recording: {sums['right']} of {sums['clips']} have their name, "
        f"and {sums['taken']} of {sums['strangers']} clips of others named somebody."
    )
    cost = f"The process on {content['device']}: {'; '.join(costs)} (`python -m bench speakers score`)."
    return "\n\n".join(("\n".join(lines), known, live, cost))


def _wrong(row: dict[str, Any]) -> str:
    return "|".join(f"{100 * row[kind]['wrong_words'] / max(row['words'], 1):.1f}" for kind in ("unknown", "given"))
