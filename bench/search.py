"""Find the most sessions that a server holds: double until it does not, then halve what lies between."""

from collections.abc import Generator

FINEST = 16  # sessions are told apart to within a 16th of what is held


def search(first: int, most: int) -> Generator[int, bool, int]:
    """Yields each number of sessions to try and is sent whether the server held them; returns the most that it held.

    0 where it held none, and `most` where it held all that were tried.
    """
    held, trial, failed = 0, min(first, most), None
    while failed is None:
        if (yield trial):
            held = trial
            if trial == most:
                return held
            trial = min(2 * trial, most)
        else:
            failed = trial
    while failed - held > max(1, held // FINEST):
        trial = (held + failed) // 2
        if (yield trial):
            held = trial
        else:
            failed = trial
    return held
