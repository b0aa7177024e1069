"""What would change if the words of a recording were labelled again and again, while people speak."""

from collections.abc import Sequence
from typing import Any

import numpy as np

STEP_S = 5.0
Span = tuple[float, float]


def relabelled(found: Any, spans: Sequence[Span], seconds: float) -> dict[str, Any]:
    """`words`: how many get another label at a later step of STEP_S. `oldest_s`: the age of the oldest one then.

    found   windows of the recording, with their vectors
    spans   of the words, in their order
    """
    from voxtral_serve.speakers.labels import labelled

    changed: set[int] = set()
    oldest_s, before = 0.0, list[int]()
    for step in range(1, int(seconds // STEP_S) + 1):
        now_s = step * STEP_S
        heard = [span for span in spans if span[1] <= now_s]
        past = found.spans[:, 1] <= now_s
        labels = labelled(found._replace(spans=found.spans[past], vectors=found.vectors[past]), heard)
        others = different(before, labels[: len(before)])
        changed.update(others)
        if others:
            oldest_s = max(oldest_s, now_s - heard[others[0]][1])
        before = labels
    return {"words": len(changed), "oldest_s": round(oldest_s, 1)}


def different(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The words whose label is another one, where the labels of both are matched so that these are the fewest."""
    from scipy.optimize import linear_sum_assignment

    if not before:
        return []
    counts = np.zeros((max(before) + 1, max(after) + 1), int)
    np.add.at(counts, (np.array(before), np.array(after)), 1)
    same = dict(zip(*map(np.ndarray.tolist, linear_sum_assignment(-counts)), strict=True))
    return [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if same.get(old) != new]
