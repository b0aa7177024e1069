"""What the events of a live session say, in the two protocols that a server may speak at `/v1/realtime`.

OpenAI's has turns: the server finds where speech ends, and sends a turn's segments with their times and then its text.
vLLM's own has one text of one token for each 80 ms, without times. There, a turn ends where a second has no text.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from voxtral_serve.client.jobs import DELAYS_MS
from voxtral_serve.measure import events
from voxtral_serve.measure.events import Event
from voxtral_serve.measure.sound import RATE_HZ, TOKEN

# OpenAI's names of delays, and what this project's server takes them for.
DELAYS = dict(zip(DELAYS_MS, ("minimal", "low", "medium", "high", "xhigh"), strict=True))
QUIET = 12  # tokens without text that end a turn in vLLM's protocol
LAST_COMMIT = "last-commit"  # the id of the commit that ends the audio
ITEM = "conversation.item.input_audio_transcription"
FAILED = f"{ITEM}.failed"


class Segment(NamedTuple):
    start_s: float  # of the recording
    end_s: float
    text: str


class Turn(NamedTuple):
    """A text that does not change any more.

    end  position in the recording, in samples, up to which the audio has been answered; None if that is not known
    """

    text: str
    segments: tuple[Segment, ...] = ()
    end: int | None = None


class Dialect(Protocol):
    """Of one connection."""

    @property
    def done(self) -> bool:
        """Whether all text has come."""

    def opening(self) -> list[Event]:
        """What to send before the audio."""

    def closing(self) -> list[Event]:
        """What to send after it."""

    def take(self, event: Event) -> Iterator[str | Turn]:
        """Text as it comes, and each turn once it is complete."""


class VllmDialect:
    """vLLM's own protocol. `first` is the position in the recording at which the connection's audio begins."""

    def __init__(self, model: str, first: int) -> None:
        self.model, self.first = model, first
        self._ended = False
        self._tokens = self._quiet = 0
        self._pieces: list[str] = []

    @property
    def done(self) -> bool:
        return self._ended

    def opening(self) -> list[Event]:
        return events.opening(self.model)

    def closing(self) -> list[Event]:
        return events.closing()

    def take(self, event: Event) -> Iterator[str | Turn]:
        if event["type"] == events.DELTA:
            text = str(event.get("delta", ""))
            self._tokens += 1
            self._quiet = 0 if text.strip() else self._quiet + 1
            if text:
                self._pieces.append(text)
                yield text
            if self._quiet == QUIET:
                self._quiet = 0
                # In the middle of the pause. A token's text is that of its own 80 ms, whatever the delay.
                yield self._turn(self.first + (self._tokens - QUIET // 2) * TOKEN)
        elif event["type"] == events.DONE:
            self._ended = True
            yield self._turn(None)

    def _turn(self, end: int | None) -> Turn:
        text, self._pieces = "".join(self._pieces).strip(), []
        return Turn(text, (), end)


class _Item:
    """A turn in the making."""

    def __init__(self) -> None:
        self.start: int | None = None  # samples of the recording
        self.end: int | None = None
        self.deltas: list[str] = []  # that are not given out
        self.segments: list[Segment] = []
        self.text: str | None = None  # once it is complete


class OpenAIDialect:
    """OpenAI's transcription sessions, with turns that the server finds. `first` is as for VllmDialect."""

    def __init__(self, model: str, first: int, delay_ms: int | None, keywords: Sequence[str] = ()) -> None:
        self.model, self.first, self.delay_ms, self.keywords = model, first, delay_ms, keywords
        self._items: dict[str, _Item] = {}  # in the order of their turns
        self._committed: set[str] = set()  # whose text has not come
        self._cleared = False

    @property
    def done(self) -> bool:
        return self._cleared and not self._committed

    def opening(self) -> list[Event]:
        transcription: Event = {"model": self.model}
        if self.keywords:
            transcription["keywords"] = [*self.keywords]
        if self.delay_ms is not None:
            transcription["delay"] = DELAYS[self.delay_ms]
        audio = {
            "format": {"type": "audio/pcm", "rate": RATE_HZ},
            "transcription": transcription,
            "turn_detection": {"type": "server_vad"},
        }
        return [{"type": events.UPDATE, "session": {"type": "transcription", "audio": {"input": audio}}}]

    def closing(self) -> list[Event]:
        """The answer to the second event comes behind that to the first, whether there was audio to commit or not."""
        return [
            {"type": events.COMMIT, "event_id": LAST_COMMIT},
            {"type": "input_audio_buffer.clear"},
        ]

    def take(self, event: Event) -> Iterator[str | Turn]:
        """Text is given out of one turn after the other, whatever the order in which it comes."""
        kind, name = event["type"], str(event.get("item_id", ""))
        if kind == "input_audio_buffer.cleared":
            self._cleared = True
        elif kind == "input_audio_buffer.speech_started":
            self._item(name).start = self._position(event.get("audio_start_ms"))
        elif kind == "input_audio_buffer.speech_stopped":
            self._item(name).end = self._position(event.get("audio_end_ms"))
        elif kind == "input_audio_buffer.committed":
            self._item(name)
            self._committed.add(name)
        elif kind == f"{ITEM}.delta":
            self._item(name).deltas.append(str(event.get("delta", "")))
        elif kind == f"{ITEM}.segment":
            begun_s = self.first / RATE_HZ
            start_s, end_s = begun_s + float(event["start"]), begun_s + float(event["end"])
            self._item(name).segments.append(Segment(start_s, end_s, str(event["text"]).strip()))
        elif kind == f"{ITEM}.completed":
            self._item(name).text = str(event.get("transcript", "")).strip()
            self._committed.discard(name)
        yield from self._given()

    def _item(self, name: str) -> _Item:
        return self._items.setdefault(name, _Item())

    def _position(self, ms: object) -> int | None:
        return self.first + round(ms * RATE_HZ / 1000) if isinstance(ms, int | float) else None

    def _given(self) -> Iterator[str | Turn]:
        """What can be given out: the text of the first turn that is not complete, and of all before it."""
        while self._items:
            name = next(iter(self._items))
            item = self._items[name]
            deltas, item.deltas = item.deltas, []
            yield from filter(None, deltas)
            if item.text is None:
                return
            del self._items[name]
            segments = item.segments
            if not segments and item.text and item.start is not None and item.end is not None:
                segments = [Segment(item.start / RATE_HZ, item.end / RATE_HZ, item.text)]
            end = item.end
            if end is None and item.segments:
                end = round(item.segments[-1].end_s * RATE_HZ)
            yield Turn(item.text, tuple(segments), end)


def is_openais(created: Event) -> bool:
    """Whether the server that sends this session.created speaks OpenAI's protocol. vLLM's has no `session`."""
    return isinstance(created.get("session"), dict)


def message(event: Event) -> str:
    """The words of an error event, or of FAILED. `error` is an object in OpenAI's protocol, a string in vLLM's."""
    problem = event.get("error")
    words = problem.get("message", problem) if isinstance(problem, dict) else problem
    return " ".join(str(words).split())


def code(event: Event) -> str:
    problem = event.get("error")
    return str(problem.get("code") if isinstance(problem, dict) else event.get("code"))


def retry_after(event: Event) -> str:
    """The seconds after which an error event has its client come back, or empty."""
    problem = event.get("error")
    return str((problem if isinstance(problem, dict) else event).get("retry_after", ""))


def harmless(event: Event) -> bool:
    """Whether this error event answers the last commit, because the server had found the last turn's end already."""
    problem = event.get("error")
    last = isinstance(problem, dict) and problem.get("event_id") == LAST_COMMIT
    return last and code(event) == "input_audio_buffer_commit_empty"
