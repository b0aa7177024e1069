"""Where a speaker's turn begins and ends, from probabilities of speech. All positions are samples of the session."""

from collections.abc import Callable
from typing import NamedTuple

# A probability below the threshold by this is silence, as in Silero's VADIterator.
HYSTERESIS = 0.15
LEAST_THRESHOLD = 0.01
# Speech begins, and goes on after silence, with so many frames in a row of the threshold or more, 64 ms: a sound that
# is no voice often reaches the threshold for one frame. docs/pages/findings.md has what else was tried.
RUN = 2


class TurnRule(NamedTuple):
    """When turns begin and end, by OpenAI's rules. Times are in samples of the session.

    threshold  probability of speech from which a frame has a voice
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


class SignRule(NamedTuple):
    """When signs of a turn are told, by Mistral's rules, which end no text.

    start, eager_end, end  probabilities of speech
    silence                samples without a voice, after which the turn is over; it may be over after half of them
    timeout                samples after which a turn that may be over is over; None for no such limit
    """

    start: float
    eager_end: float
    end: float
    silence: int
    timeout: int | None = None


Rule = TurnRule | SignRule


class SpeechStart(NamedTuple):
    at: int


class SpeechEnd(NamedTuple):
    at: int


class IdleTimeout(NamedTuple):
    start: int
    end: int


class TurnSign(NamedTuple):
    """`kind` is Mistral's, `at` the sample that it is about, and `reason` says why a turn has ended."""

    kind: str
    at: int
    reason: str | None = None


SpeechEvent = SpeechStart | SpeechEnd | IdleTimeout


class TurnFinder:
    """Finds the turns of one session."""

    def __init__(self, rule: TurnRule, at: int, sentence_over: Callable[[int], bool]) -> None:
        """`at` is where it begins; `sentence_over` says whether the text up to a position ends a sentence."""
        self.rule, self._sentence_over = rule, sentence_over
        self.reset(at)

    def reset(self, at: int) -> None:
        """A turn has ended at this position, whatever ended it."""
        self.speaking = False
        self._begin = at
        self._run = self._first = 0  # frames of the threshold or more up to now, and where the first of them begins
        self._silence: int | None = None  # where the silence within the turn begins

    def step(self, probability: float, start: int, end: int) -> SpeechEvent | None:
        """The next frame of audio, from `start` to `end`."""
        rule = self.rule
        if probability >= rule.threshold:
            self._first = self._first if self._run else start
            self._run += 1
            if self._run >= RUN:
                self._silence = None
                if not self.speaking:
                    self.speaking = True
                    return SpeechStart(max(self._first - rule.prefix, self._begin))
            return None
        self._run = 0
        if not self.speaking:
            if rule.idle is not None and end - self._begin >= rule.idle:
                return IdleTimeout(self._begin, end)
            return None
        if probability >= max(rule.threshold - HYSTERESIS, LEAST_THRESHOLD):
            return None  # neither: no turn ends here
        if self._silence is None:
            self._silence = start
        silent = end - self._silence
        if silent >= rule.silence:
            return SpeechEnd(end)
        if rule.sentence is not None and silent >= rule.sentence and self._sentence_over(self._silence):
            return SpeechEnd(end)
        return None


class SignFinder:
    """Tells of turns by Silero VAD's probability of speech, and ends none.

    A turn starts with a frame of `start`. After half of `silence` below `eager_end` it may be over, and goes on with a
    frame of `start`. It is over after `silence` below `end`, or `timeout` after it may be over.
    """

    def __init__(self, rule: SignRule) -> None:
        self.rule = rule
        self.reset(0)

    def reset(self, at: int) -> None:
        """A flush ends a text and no turn."""
        if not at:
            self._state, self._voice, self._loud, self._eager_at = "silent", 0, 0, 0

    def step(self, probability: float, start: int, end: int) -> TurnSign | None:
        rule = self.rule
        if probability >= rule.eager_end:
            self._loud = end
        if probability >= rule.end:
            self._voice = end
        if self._state == "speaking":
            if end - self._loud >= rule.silence / 2:
                self._state, self._eager_at = "eager", end
                return TurnSign("eager_end", end)
        elif self._state == "eager":
            if probability >= rule.start:
                self._state = "speaking"
                return TurnSign("resume", start)
            if end - self._voice >= rule.silence:
                self._state = "silent"
                return TurnSign("end", end, "threshold")
            if rule.timeout is not None and end - self._eager_at >= rule.timeout:
                self._state = "silent"
                return TurnSign("end", end, "timeout")
        elif probability >= rule.start:
            self._state, self._loud, self._voice = "speaking", end, end
            return TurnSign("start", start)
        return None


Finder = TurnFinder | SignFinder


def finder(rule: Rule, at: int, sentence_over: Callable[[int], bool]) -> Finder:
    """The finder of a rule, from position `at` on; `sentence_over` as TurnFinder has it."""
    return SignFinder(rule) if isinstance(rule, SignRule) else TurnFinder(rule, at, sentence_over)
