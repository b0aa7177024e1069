"""What a part of the run reports, and the bounds that decide whether it has passed."""

from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

Outcome = Literal["passed", "failed", "skipped"]

# Words of a reference that are wrong, above which a model does not transcribe at all. How good a checkpoint is, is for
# the benchmark and the user's own clips to say.
BROKEN_WER = 0.5
# Words that may differ between two paths to the same model: with other requests in a batch, sums are rounded otherwise,
# and the likelier of two almost equal tokens may be the other one.
DIFFERENT = 0.03
LAG_S = 0.5  # of a live token, P99; the benchmark's bound for a session that has fallen behind
FINAL_S = 2.0  # from the end of speech to the text's end, P90
SETTLED_S = 2.0  # after the end of speech in which its last words may come
BOUNDS = {
    "broken_wer": BROKEN_WER,
    "different_words": DIFFERENT,
    "lag_p99_s": LAG_S,
    "final_p90_s": FINAL_S,
    "settled_s": SETTLED_S,
}


@dataclass(frozen=True)
class Result:
    """`reason` is one line: what was found, or why not. `figures` are JSON's types; `texts` are in reports only with
    --with-texts."""

    outcome: Outcome
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    texts: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    name: str
    title: str
    seconds: float
    result: Result


class SkippedError(Exception):
    """A part cannot be run here. The message is its reason."""


def skip(reason: str) -> NoReturn:
    raise SkippedError(reason)


def judged(
    problems: list[str], reason: str, figures: dict[str, Any], texts: list[dict[str, Any]] | None = None
) -> Result:
    """Passed for `reason` without problems, else failed for them."""
    return Result("failed" if problems else "passed", "; ".join(problems) or reason, figures, texts or [])


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
