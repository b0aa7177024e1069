"""The types of a text to speak and of what came of it, and the figures of one request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.measure.upload import Attempt

Piece = tuple[float, float]


class Text(NamedTuple):
    id: str
    text: str


@dataclass
class Speech(Attempt):
    """The answer to a request. `pieces` are (time of arrival, bytes of samples) of each read that had samples.

    `rate_hz` and `channels` are those of the samples, `wav` all samples as int16. `streamed` is whether the server
    began to send before it knew the length.
    """

    pieces: list[tuple[float, int]] = field(default_factory=list)
    rate_hz: int = 0
    channels: int = 1
    rate_told: bool = False
    samples: bytes = b""
    streamed: bool | None = None


@dataclass(frozen=True)
class SpeechRow:
    """The result of one request: a line of requests.jsonl (bench/schema/speech-requests.schema.json).

    `start` and `end` are unix seconds. If the request completed, `error` is null and the figures are set, else the
    reverse. `latency_ms` and `first_audio_ms` count from the first byte sent, at the first of `sends`, to the end of
    the response and to the first byte of samples; the header of a WAV has none. `pieces` are [ms after that start,
    seconds of audio] of each read from the connection. `rate_told` is whether the server said the rate of the samples;
    that of PCM is otherwise OpenAI's. `streamed` is null unless the request completed.
    """

    id: str
    load: str
    text: str
    start: float
    end: float
    latency_ms: float | None
    first_audio_ms: float | None
    audio_s: float | None
    pieces: list[Piece] | None
    rate_hz: int | None
    rate_told: bool | None
    streamed: bool | None
    status: int | None
    error: str | None
    sends: int = 1


def rtf(row: SpeechRow) -> float | None:
    """Real-time factor: latency of the whole request / seconds of its audio."""
    if row.latency_ms is None or not row.audio_s:
        return None
    return row.latency_ms / 1000 / row.audio_s


def late_ms(row: SpeechRow) -> float | None:
    """How late the latest piece was for a player that starts at the first one and never pauses.

    A piece is needed when all audio before it has been played. 0 if each piece came in time; null for a request that
    failed or was not streamed. A player that starts later by this much has no gap.
    """
    if not row.pieces or not row.streamed:
        return None
    began, before_s, latest = row.pieces[0][0], 0.0, 0.0
    for arrival_ms, seconds in row.pieces:
        latest = max(latest, arrival_ms - began - 1000 * before_s)
        before_s += seconds
    return latest


def joined(words: Sequence[str], longest: int) -> str:
    """The words with blanks between them, cut behind the last one that ends within `longest` characters."""
    text = " ".join(words)
    return text if len(text) <= longest else text[: longest + 1].rpartition(" ")[0]
