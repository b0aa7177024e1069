"""The types of responses and rows of requests.jsonl.

The HTTP client (bench/client.py), the WebSocket client (bench/realtime.py) and the scoring use them.
"""

from dataclasses import dataclass
from typing import Literal

from bench.measure import upload
from bench.measure.lag import Lag

Api = Literal["transcriptions", "chat"]
Mode = Literal["whole", "stream", "realtime"]
LagOf = Literal["token", "word"]


@dataclass(frozen=True)
class Row:
    """The result of one request: a line of requests.jsonl.

    `start` and `end` are unix seconds; `status` is null without a response. If the request completed, `text` and
    `latency_ms` are set and `error` is null, else the reverse. `part` counts the invocations of a run: 1, and one more
    for every --resume that sent a request.

    `load` is the level of load: "c16" for 16 requests in flight, "r2.5" for Poisson arrivals of 2.5 per second.
    `due` is the intended start of such an arrival. With --stream or --realtime, `first_text_ms` and `deltas_ms` are the
    arrivals of the first and of all pieces of text. `words_ms` is the delay of each recognised word after its end in
    the audio.

    `lags` of live audio are [seconds of audio needed, ms of lag] of each token, or of each word where `lag_of` says so
    (measure/lag.py); with --age of those after it alone. Null where neither could be told, as is `fell_behind`.

    `sends` counts how often the request was sent: more than once after HTTP 429, 502, 503 or 504 or a dropped
    connection. All its times are counted from the first time that it was sent, so they include the waits between.

    `server_ms` has the milliseconds of each stage of the server, as it says in the header Server-Timing, if it does.
    """

    id: str
    duration_s: float
    part: int
    start: float
    end: float
    latency_ms: float | None
    status: int | None
    text: str | None
    reference: str
    error: str | None
    load: str = "c1"
    due: float | None = None
    first_text_ms: float | None = None
    deltas_ms: list[float] | None = None
    words_ms: list[float] | None = None
    sends: int = 1
    lags: list[Lag] | None = None
    lag_of: LagOf | None = None
    fell_behind: bool | None = None
    server_ms: dict[str, float] | None = None


@dataclass
class Answer(upload.Answer):
    """A transcript. Live audio alone has `spoken`, when its last piece was sent, and `words_ms`, `lags`, `lag_of` and
    `fell_behind` as in Row.
    """

    spoken: float | None = None
    words_ms: list[float] | None = None
    lags: list[Lag] | None = None
    lag_of: LagOf | None = None
    fell_behind: bool | None = None
