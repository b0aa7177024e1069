"""Whether known speakers get their names: references from a recording's beginning, and from other recordings."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.speakers.recordings import Turn

LEAST_WINDOWS, MOST_WINDOWS = 2, 6  # of a reference: 2.25 to 5.25 s
Span = tuple[float, float]


class Labelled(NamedTuple):
    """A recording: the voices of its labels [n, size], who has most words of each, and vectors of its speakers."""

    chosen_on: bool
    voices: np.ndarray
    speakers: list[str | None]
    references: dict[str, np.ndarray]


def labelled(
    chosen_on: bool, found: Any, labels: Sequence[int], spans: Sequence[Span], spoken: Sequence[Turn]
) -> Labelled:
    """From the windows of a recording, and the label and the time of each of its words."""
    from voxtral_serve.speakers.known import centres, vector

    counts: list[Counter[str]] = [Counter() for _ in range(max(labels) + 1)]
    for label, span in zip(labels, spans, strict=True):
        counts[label].update(_speaking(span, spoken))
    alone = [each[0] if len(each := _speaking(span, spoken)) == 1 else None for span in found.spans]
    references = {}
    for speaker in {turn.speaker for turn in spoken}:
        own = [number for number, each in enumerate(alone) if each == speaker]
        used = own[: min(len(own) // 2, MOST_WINDOWS)]
        if len(used) >= LEAST_WINDOWS:
            references[speaker] = vector(speaker, found._replace(spans=found.spans[used], vectors=found.vectors[used]))
    speakers = [each.most_common(1)[0][0] if each else None for each in counts]
    return Labelled(chosen_on, centres(found, spans, labels), speakers, references)


def figures(recordings: Sequence[Labelled]) -> dict[str, dict[str, int]]:
    """What happens with each reference alone, for recordings that settings were chosen on, and for others.

    clips, right, wrong    of speakers of the recording: how many got their name, and how many another's
    strangers, taken       of speakers of other recordings: how many were taken for somebody
    """
    from voxtral_serve.speakers.known import matched

    sums = {
        name: dict.fromkeys(("clips", "right", "wrong", "strangers", "taken"), 0) for name in ("chosen_on", "held_out")
    }
    for recording in recordings:
        part = sums["chosen_on" if recording.chosen_on else "held_out"]
        for other in recordings:
            for speaker, reference in other.references.items():
                if other is not recording and speaker in {*recording.speakers, *recording.references}:
                    continue
                found = matched(recording.voices, reference[None])
                names = {who for who, each in zip(recording.speakers, found, strict=True) if each is not None}
                if other is recording:
                    part["clips"] += 1
                    part["right"] += names == {speaker}
                    part["wrong"] += bool(names - {speaker})
                else:
                    part["strangers"] += 1
                    part["taken"] += bool(names)
    return sums


def _speaking(span: Span, spoken: Sequence[Turn]) -> list[str]:
    """Who speaks at the middle."""
    middle = sum(span) / 2
    return sorted({turn.speaker for turn in spoken if turn.start <= middle < turn.end})
