"""What /metrics says of live sessions. vLLM serves it from prometheus_client's registry, of all API processes."""

import functools
from typing import Any, NamedTuple

# Seconds: fine around one token (0.08), up to what a session never catches up with.
LAGS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics(NamedTuple):
    connections: Any
    sessions: Any
    lag: Any
    backlog: Any
    ended: Any
    rollovers: Any
    catch_ups: Any
    errors: Any
    turns: Any


@functools.cache
def metrics() -> Metrics:
    """Those of this process, registered at the first call."""
    # Several API processes write to files, if this is imported after vLLM has named their directory: in each of them.
    from prometheus_client import Counter, Gauge, Histogram

    prefix = "voxtral_serve_live_"
    return Metrics(
        Gauge(f"{prefix}connections", "Open live connections, with and without audio.", multiprocess_mode="livesum"),
        Gauge(f"{prefix}sessions", "Live sessions whose text is being made.", multiprocess_mode="livesum"),
        Histogram(
            f"{prefix}lag_seconds",
            "From the arrival of the last sample that a token needs to the token.",
            buckets=LAGS,
        ),
        Gauge(
            f"{prefix}backlog_seconds",
            "Audio of live sessions that the engine has not answered by tokens yet.",
            multiprocess_mode="livesum",
        ),
        Counter(f"{prefix}sessions_ended", "Connections of live sessions that ended.", ["reason"]),
        Counter(f"{prefix}rollovers", "Times that a session went over to another request."),
        Counter(f"{prefix}catch_ups", "Times that a session was over 0.5 s behind and caught up."),
        Counter(f"{prefix}errors", "Events of live clients that were refused.", ["code"]),
        Counter(f"{prefix}turns", "Turns of live sessions that were ended.", ["by"]),
    )
