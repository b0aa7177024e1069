"""Errors that end a run or a request, and their exit status."""

import sys


class UsageError(Exception):
    """The files or settings cannot be used. The message is for the user; exit status 2."""


class RequestError(Exception):
    """A request failed. The message is for the user, with the status and the server's own message; exit status 1.

    `status` is the HTTP status of the server's last answer; None where there was none, or one that is not as expected.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class IgnoredError(RequestError):
    """The server has transcribed a file without the speaker labels, the delay or the keywords that it was asked for."""


class GoneError(RequestError):
    """The server cannot be reached, so all other requests would fail as well."""


class StoppedError(Exception):
    """The run ends before this request is answered."""


def report_end(error: UsageError | RequestError | KeyboardInterrupt) -> int:
    """Print on stderr why the command ends. Returns its exit status: 2, 1, or 130 for Ctrl-C."""
    message = "stopped" if isinstance(error, KeyboardInterrupt) else str(error)
    print(f"voxtral-serve: {message}", file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, UsageError) else 1
