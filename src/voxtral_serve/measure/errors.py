"""The error of the measuring core. `bench`, `prove` and `batch` raise it, or turn it into their own."""


class MeasureError(Exception):
    """A server cannot be started or measured. The message is for the user.

    Of a server that has ended it has several lines: what happened, the end of the log, and the cause.
    """

    def one_line(self) -> str:
        """What happened, and the cause."""
        first, *rest = str(self).splitlines()
        return f"{first.rstrip('.')}: {rest[-1].removeprefix('cause: ')}" if rest else first
