"""What happens in a session: what a conversation tells of, and a codec writes as events. Also turns.TurnSign."""

from dataclasses import dataclass
from typing import Any

from voxtral_serve.guard.live.items import TurnText
from voxtral_serve.guard.live.turns import SpeechEvent, TurnSign
from voxtral_serve.transcript.turns import TimedSegment


@dataclass(frozen=True)
class TurnHeard:
    """Speech begins or ends within a turn, or silence has lasted too long."""

    turn: TurnText
    event: SpeechEvent


@dataclass(frozen=True)
class TurnCut:
    """A turn has ended at `turn.end`. Its text is not complete."""

    turn: TurnText


@dataclass(frozen=True)
class TurnDelta:
    """More text of a turn, with the logprobs of its tokens if the options ask for them."""

    turn: TurnText
    text: str
    logprobs: list[dict[str, Any]]


@dataclass(frozen=True)
class TurnSegment:
    """A segment of a turn, before the turn's text is complete. `language`, of the text so far, is as in TurnDone."""

    turn: TurnText
    segment: TimedSegment
    language: str | None = None


@dataclass(frozen=True)
class TurnDone:
    """The text of a turn is complete. `turn.end` is None for a turn without audio, or whose audio was cleared.

    segments       those that have not been said before: of all turns, for the last one where speakers are labelled
    prompt_tokens  of the turn's requests
    unlabelled     why they have no speakers, if the session has asked for them
    language       code of the text's; None if it is not clear, or if the options do not ask for it
    """

    turn: TurnText
    segments: list[TimedSegment]
    prompt_tokens: int
    unlabelled: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text, and what they add to it."""

    text: str
    count: int


@dataclass(frozen=True)
class TextDone:
    """A text is complete, with its numbers of tokens."""

    text: str
    prompt_tokens: int
    tokens: int


Output = TurnHeard | TurnSign | TurnCut | TurnDelta | TurnSegment | TurnDone | Tokens | TextDone
