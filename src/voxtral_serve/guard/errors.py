"""Requests that the guard refuses."""

from voxtral_serve.units import MIB


class RefusedError(Exception):
    """A request is refused with HTTP `status`. The message is for the client; `code` is a short name of the problem,
    and `param` names the field that it is about."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def too_large(what: str, size: int | str, most: int) -> RefusedError:
    """The refusal of `what`, which has `size` bytes where `most` are allowed."""
    return RefusedError(
        413,
        f"{what} has {size} bytes and this server takes at most {most} ({most / MIB:.0f} MiB, its "
        "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB). Send a compressed format such as FLAC or Opus, or a shorter clip",
        "file_too_large",
        "file",
    )
