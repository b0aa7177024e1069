"""Why the server closes a live connection, with the close codes of RFC 6455 and IANA's registry."""

from typing import NamedTuple

NORMAL, POLICY, FAILED, RESTART, LATER = 1000, 1008, 1011, 1012, 1013


class Ending(NamedTuple):
    """Why a connection is closed from this side.

    reason    a label of the metric and a word in the log
    close     the close code; its reason is `words`
    code      of the error event; None for an ending that is no error
    retry_s   seconds after which a client that was refused may be served, for the error event; None if unknown
    """

    reason: str
    close: int
    words: str
    code: str | None = None
    retry_s: int | None = None


REFUSED = "refused"  # the reason of an ending for a client that the server does not serve
IDLE = "idle"  # the reason of an ending for a client that sends nothing and awaits nothing
STOPPING = Ending("stopping", RESTART, "the server is stopping")
DEAD = Ending("engine", FAILED, "the engine has died", "engine_dead")
REVOKED = Ending("revoked", POLICY, "the key is no longer valid", "invalid_api_key")


def failed(why: str) -> Ending:
    return Ending("error", FAILED, f"the session failed: {why}", "processing_error")
