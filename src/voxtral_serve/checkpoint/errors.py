"""The exception of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be served. The message has the file or tensor, and what was expected."""
