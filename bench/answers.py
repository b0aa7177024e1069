"""The types of requests, responses and rows of requests.jsonl.

The HTTP client (bench/client.py), the WebSocket client (bench/realtime.py) and the scoring use them.
"""

import time
from dataclasses import dataclass
from typing import Literal

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
    (bench/lag.py); with --age of those after it alone. Null where neither could be told, as is `fell_behind`.

    `sends` counts how often the request was sent: more than once after HTTP 429, 502, 503 or 504 or a dropped
    connection. All its times are counted from the first time that it was sent, so they include the waits between.
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
    lags: list[tuple[float, float]] | None = None
    lag_of: LagOf | None = None
    fell_behind: bool | None = None


@dataclass
class Attempt:
    """The outcome of a request. Times are in seconds on the clock of time.perf_counter.

    Unless the request completed, `error` says why. `sends` is as in Row, and `start` that of the first. `resend_s` is
    how many seconds to wait before the request is sent again, null if it is not.
    """

    start: float
    end: float
    status: int | None = None
    error: str | None = None
    sends: int = 1
    resend_s: float | None = None


@dataclass
class Answer(Attempt):
    """A transcript. `pieces` are the arrivals of non-empty text, null where the answer came whole. Live audio alone has
    `spoken`, when its last piece was sent, and `words_ms`, `lags`, `lag_of` and `fell_behind` as in Row.
    """

    text: str | None = None
    pieces: list[tuple[float, str]] | None = None
    spoken: float | None = None
    words_ms: list[float] | None = None
    lags: list[tuple[float, float]] | None = None
    lag_of: LagOf | None = None
    fell_behind: bool | None = None


def wait_until(due: float | None) -> None:
    """Sleep until this time of time.perf_counter, if it is still to come."""
    if due is not None and (left := due - time.perf_counter()) > 0:
        time.sleep(left)
