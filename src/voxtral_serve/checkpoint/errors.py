"""The error of this room."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be served as it is. The message names the file or tensor and what was expected."""
