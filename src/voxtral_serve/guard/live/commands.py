"""What events of a client ask for: a codec makes commands of them, and the socket and its conversation run these."""

from dataclasses import dataclass, field

from voxtral_serve.audio.stream import StreamFormat
from voxtral_serve.guard.live.endings import Ending
from voxtral_serve.guard.live.events import EventError
from voxtral_serve.guard.live.turns import Rule


@dataclass(frozen=True)
class Options:
    """What the settings of a client mean for its session.

    form       of the audio in appends
    delay_ms   of the text behind the audio, from the first audio on; None is the checkpoint's
    logprobs   whether deltas have the logprobs of their tokens
    rule       by which turns are found; None if none are
    speakers   whether speakers are labelled at the session's end, from the first audio on
    segment_languages  whether segments have the language of the text so far
    languages  whether the language of a turn's text is told
    keywords   the engine's table of custom words, from the next turn on; None without any
    """

    form: StreamFormat
    delay_ms: int | None = None
    logprobs: bool = False
    rule: Rule | None = None
    speakers: bool = False
    segment_languages: bool = False
    languages: bool = False
    keywords: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Append:
    """Audio, in the format of the options. It may be empty, and end within a sample."""

    audio: bytes


@dataclass(frozen=True)
class Configure:
    """The options from now on. `find`: the search for turns begins anew."""

    options: Options
    find: bool


@dataclass(frozen=True)
class Cut:
    """The turn ends with the audio so far. `empty` answers a cut of no audio; None if it has no answer."""

    empty: EventError | None = None


@dataclass(frozen=True)
class Clear:
    """The audio of the turn that goes on gets no text."""


@dataclass(frozen=True)
class Begin:
    """A text begins with the audio that waits."""


@dataclass(frozen=True)
class End:
    """No more audio follows. The connection ends with the text if there is an `ending`."""

    ending: Ending | None = None


@dataclass(frozen=True)
class Answer:
    """An event for the client, as JSON."""

    event: str


@dataclass(frozen=True)
class Close:
    """The connection ends at once."""

    ending: Ending
