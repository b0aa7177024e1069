"""Errors for requests that the guard refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from voxtral_serve.units import MIB


class RefusedError(Exception):
    """A request is refused with HTTP `status`. The message is for the client.

    `code` is a short name of the problem. `param` is the name of the field that has it. `retry_s` is the value of
    Retry-After, of 429 and 503.
    """

    def __init__(self, status: int, message: str, code: str, param: str | None = None, *, retry_s: int = 1) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_s = status, code, param, retry_s

    @property
    def content(self) -> dict[str, Any]:
        """The error as OpenAI's API has it, without the object around it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"message": str(self), "type": kind, "param": self.param, "code": self.code}


@contextmanager
def refusing(kind: type[ValueError], where: str) -> Iterator[None]:
    """Raises RefusedError for an error of this kind, which is about the request's field `where`."""
    try:
        yield
    except kind as error:
        raise RefusedError(400, f"{where}: {error}", "invalid_value", where) from error


def too_large(what: str, size: int | str, most: int) -> RefusedError:
    """The error for `what`, which has `size` bytes and may have at most `most`."""
    return RefusedError(
        413,
        f"{what} has {size} bytes, but this server accepts at most {most} ({most / MIB:.0f} MiB, set by "
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB). Send a compressed format such as FLAC or Opus, or a shorter clip",
        "file_too_large",
        "file",
    )
