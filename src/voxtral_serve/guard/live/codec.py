"""What a codec is: the translation between the events of one protocol and what every live connection does.

A codec reads the client's events into commands, and writes outputs as the protocol's events. It does no I/O, and
knows neither the socket nor the session. What it keeps between calls is the protocol's own: the settings of the
client, and the items of a conversation.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pybase64

from voxtral_serve.engine.keywords import PhraseTokens, table
from voxtral_serve.guard.live import commands
from voxtral_serve.guard.live.endings import Ending
from voxtral_serve.guard.live.events import Event, EventError
from voxtral_serve.guard.live.outputs import Output
from voxtral_serve.units import MIB

MOST_APPEND = 15 * MIB  # bytes of one append's base64, as OpenAI has it; uvicorn takes messages of 16 MiB


class CodecContext(NamedTuple):
    """What a codec knows of its connection and of the server.

    id           the connection's
    expires_at   seconds since 1970 at which the session ends; None for a session without such an end
    model        the first name of the model that is served
    serves       says whether a model of this name is served
    delay_ms     the delay of the text that the checkpoint was made for
    check_delay  raises ValueError for a delay in ms that a session cannot have
    rate_hz      of the session's audio, which positions in outputs count
    unlabelled   why speakers cannot be labelled; None if they can
    phrases      how to write custom words; None if the model cannot prefer them
    """

    id: str
    expires_at: int | None
    model: str
    serves: Callable[[object], bool]
    delay_ms: int
    check_delay: Callable[[int], None]
    rate_hz: int
    unlabelled: str | None
    phrases: PhraseTokens | None = None

    def keywords(self, phrases: Iterable[str]) -> bytes | None:
        """The engine's table of custom words; None without any, or if the model cannot prefer them. Raises
        KeywordError."""
        return None if self.phrases is None else table(self.phrases, tuple(phrases))


@dataclass(frozen=True)
class Become:
    """The event was of another protocol, whose codec takes over.

    opens  whether that codec opens the connection again, instead of reading the event
    """

    codec: "Codec"
    opens: bool


Command = (
    commands.Append
    | commands.Configure
    | commands.Cut
    | commands.Clear
    | commands.Begin
    | commands.End
    | commands.Answer
    | commands.Close
    | Become
)


class Codec:
    """One protocol on one connection.

    options  of the session's turns; None in a protocol without turns, in which one text follows the other
    """

    options: commands.Options | None = None

    def __init__(self, context: CodecContext) -> None:
        self.context = context

    def open(self) -> list[Command]:
        """What the server does when the connection is accepted."""
        raise NotImplementedError

    def decode(self, event: Event, begun: bool) -> list[Command]:
        """What an event asks for. `begun`: there is a session. Raises EventError for an event that is wrong."""
        raise NotImplementedError

    def encode(self, output: Output) -> list[str]:
        """The events of an output, as JSON."""
        raise NotImplementedError

    def refuse(self, error: EventError, event: Event | None) -> str:
        """The answer to an event that is wrong; None is an event that could not be read."""
        raise NotImplementedError

    def last_words(self, ending: Ending) -> list[str]:
        """The events before the close of an ending that is an error."""
        raise NotImplementedError


def written(kind: str, **fields: Any) -> str:
    """The JSON of an event."""
    return json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))


def retry_after(ending: Ending) -> dict[str, int]:
    """The field of an error event that says when to come back, as the header Retry-After does: in seconds."""
    return {} if ending.retry_s is None else {"retry_after": ending.retry_s}


def audio_of(event: Event) -> bytes:
    """The bytes of an append's base64; b"" if it is none, or too long. Raises EventError if there is none."""
    if event.audio is None:
        raise EventError(f"{event.type} has no `audio`: expected base64 of PCM16", "processing_error", "audio")
    try:
        content: bytes = pybase64.b64decode(event.audio) if len(event.audio) <= MOST_APPEND else b""
    except ValueError:
        content = b""
    return content


def appended(event: Event) -> commands.Append:
    """The audio of an append, which may be empty. Raises EventError for what is no base64, or too long."""
    content = audio_of(event)
    if not content and event.audio:
        raise EventError("audio is not base64 of at most 15 MiB", "invalid_audio", "audio")
    return commands.Append(content)
