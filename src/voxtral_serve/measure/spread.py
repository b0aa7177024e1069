"""Percentiles, and intervals by resampling. Without values there is None, never 0."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 90, 95, 99)
RESAMPLES = 2000
SEED = 0
# Resampled values in memory at a time: 16 MB, for any number of values
CHUNK = 2_000_000

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def percentiles(
    values: Sequence[float] | Floats, wanted: Sequence[int] = PERCENTILES, digits: int | None = None
) -> dict[str, float] | None:
    """Percentiles of the values, {"p50": ...}, rounded to `digits` if set; None without values.

    Linear interpolation at rank q/100 * (n - 1) of the sorted values (numpy's 'linear').
    """
    if not len(values):
        return None
    amounts = np.percentile(values, wanted, method="linear").tolist()
    amounts = amounts if digits is None else [round(amount, digits) for amount in amounts]
    return {f"p{q}": amount for q, amount in zip(wanted, amounts, strict=True)}


def resamples(count: int) -> Iterator[Counts]:
    """Yield the indices of RESAMPLES draws with replacement, as arrays [draws, count]. Every call yields the same."""
    random = np.random.default_rng(SEED)
    step = max(1, CHUNK // count)
    for start in range(0, RESAMPLES, step):
        yield random.integers(0, count, (min(step, RESAMPLES - start), count))


def interval(statistics: Floats) -> list[float] | None:
    """The 95 % percentile bootstrap interval [low, high] of a statistic's resampled values; None without values."""
    bounds: list[float] = np.percentile(statistics, [2.5, 97.5], method="linear").tolist() if statistics.size else []
    return bounds or None
