"""What /metrics says of the guard. vLLM serves it from prometheus_client's registry, of all API processes.

Labels have few values: paths of the API or `other`, statuses, names of keys, and codes of errors, which the source has
as constants.
`live.metrics` has what is said of live sessions.
"""

import functools
import re
from typing import Any, NamedTuple

OF_KEYS = "voxtral_serve_key_"
_OF_KEYS = re.compile(rf"^(?:# \w+ )?{OF_KEYS}.*\n".encode(), re.MULTILINE)


class Metrics(NamedTuple):
    """
    requests      answers, by path and status
    refused       requests that the guard has refused, by the error's code
    live_refused  the same of live clients
    in_flight     of this process; its limit is `most`
    bodies        bytes of requests
    audio         seconds, by kind
    """

    requests: Any
    refused: Any
    live_refused: Any
    in_flight: Any
    most: Any
    bodies: Any
    audio: Any


@functools.cache
def metrics() -> Metrics:
    """Those of this process, registered at the first call."""
    # Several API processes write to files, if this is imported after vLLM has named their directory: in each of them.
    from prometheus_client import Counter, Gauge

    prefix = "voxtral_serve_"
    return Metrics(
        Counter(
            f"{prefix}requests",
            "Requests and live connections that have ended. 499: the client left before the answer.",
            ["path", "status"],
        ),
        Counter(f"{prefix}requests_refused", "Requests that the guard refused, by the error's code.", ["code"]),
        Counter(
            f"{prefix}live_refused",
            "Live clients that were refused, at the handshake or when they began, by the error's code.",
            ["code"],
        ),
        Gauge(
            f"{prefix}requests_in_flight",
            "Requests whose bodies have arrived, and live connections.",
            multiprocess_mode="livesum",
        ),
        Gauge(
            f"{prefix}requests_in_flight_limit",
            "Requests in flight at which the guard answers 429 (VOXTRAL_SERVE_MAX_IN_FLIGHT).",
            multiprocess_mode="livesum",
        ),
        Counter(f"{prefix}received_bytes", "Bytes of the bodies of requests that the guard has read."),
        Counter(
            f"{prefix}audio_seconds",
            "Seconds of audio that were accepted: of uploads and chats once they are decoded, of live sessions as they "
            "come.",
            ["kind"],
        ),
    )


class KeyMetrics(NamedTuple):
    """
    requests   answers, by key and status
    refused    requests and live clients, by key and limit
    in_flight  uploads and chats of a key in this process
    live       live connections of a key in this process
    audio      seconds, by key and kind
    """

    requests: Any
    refused: Any
    in_flight: Any
    live: Any
    audio: Any


@functools.cache
def key_metrics() -> KeyMetrics:
    """Those of a server with VOXTRAL_SERVE_KEYS, registered at the first call. `key` is the key's name."""
    from prometheus_client import Counter, Gauge

    prefix = OF_KEYS
    return KeyMetrics(
        Counter(f"{prefix}requests", "Requests and live connections of a key that have ended.", ["key", "status"]),
        Counter(f"{prefix}refused", "Requests and live clients that a limit of their key refused.", ["key", "limit"]),
        Gauge(
            f"{prefix}requests_in_flight",
            "Uploads and chats of a key whose bodies have arrived.",
            ["key"],
            multiprocess_mode="livesum",
        ),
        Gauge(f"{prefix}live_connections", "Live connections of a key.", ["key"], multiprocess_mode="livesum"),
        Counter(f"{prefix}audio_seconds", "Seconds of audio of a key that were accepted.", ["key", "kind"]),
    )


def without_keys(text: bytes) -> bytes:
    """The text of /metrics without the lines of KeyMetrics."""
    return _OF_KEYS.sub(b"", text)


def code_counted(live: bool, code: str) -> None:
    """A request was refused with this error code; `live` for one of a live client."""
    found = metrics()
    (found.live_refused if live else found.refused).labels(code).inc()
