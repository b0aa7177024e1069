"""Where a speaker's turn begins and ends, from probabilities of speech."""

from collections.abc import Callable
from typing import NamedTuple

# A probability below the threshold by this is silence. Silero's own is 0.15; with it, 79 of 86 noisy pauses of the live
# benchmark set are found, and 81 with this (tests/unit/test_live_turns.py).
HYSTERESIS = 0.05
LEAST_THRESHOLD = 0.01


class TurnRule(NamedTuple):
    """When turns begin and end. Times are in samples of the session.

    threshold  probability of speech from which there is a voice
    silence    without a voice, after which the turn ends
    prefix     before the first voice that the turn's reported start lies
    idle       without a voice between turns, after which the silence is a turn of its own; None for no such limit
    sentence   without a voice, after which the turn ends if its text ends a sentence; None if the text does not count
    """

    threshold: float
    silence: int
    prefix: int
    idle: int | None = None
    sentence: int | None = None


class SpeechStart(NamedTuple):
    at: int


class SpeechEnd(NamedTuple):
    at: int


class IdleTimeout(NamedTuple):
    start: int
    end: int


TurnEvent = SpeechStart | SpeechEnd | IdleTimeout


class TurnFinder:
    """Finds the turns of one session. All positions are samples from the session's beginning."""

    def __init__(self, rule: TurnRule, at: int, sentence_over: Callable[[int], bool]) -> None:
        """`at` is where it begins; `sentence_over` says whether the text up to a position ends a sentence."""
        self.rule, self._sentence_over = rule, sentence_over
        self.reset(at)

    def reset(self, at: int) -> None:
        """A turn has ended at this position, whatever ended it."""
        self.speaking = False
        self._begin = at
        self._voice = at  # the end of the last frame with a voice

    def step(self, probability: float, start: int, end: int) -> TurnEvent | None:
        """The next frame of audio, from `start` to `end`."""
        rule = self.rule
        if not self.speaking:
            if probability >= rule.threshold:
                self.speaking, self._voice = True, end
                return SpeechStart(max(start - rule.prefix, self._begin))
            if rule.idle is not None and end - self._begin >= rule.idle:
                return IdleTimeout(self._begin, end)
            return None
        if probability >= max(rule.threshold - HYSTERESIS, LEAST_THRESHOLD):
            self._voice = end
            return None
        silent = end - self._voice
        if silent >= rule.silence:
            return SpeechEnd(end)
        if rule.sentence is not None and silent >= rule.sentence and self._sentence_over(self._voice):
            return SpeechEnd(end)
        return None
