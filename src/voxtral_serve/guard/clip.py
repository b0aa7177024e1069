"""The clip in an audio file that a client sent."""

from voxtral_serve.audio.decode import PYAV, SOXR, AudioError, Bounds, Clip, decode
from voxtral_serve.guard.errors import RefusedError

if not (PYAV or SOXR):
    raise ImportError(
        "neither av nor soxr is installed, so only audio at the model's own rate could be served: install av"
    )


def decoded(data: bytes, bounds: Bounds, rate: int, param: str) -> Clip:
    """The clip in a file of any format that audio.decode reads, within `bounds`; `rate` is the model's, in Hz.

    Raises RefusedError about the request's field `param`.
    """
    try:
        return decode(data, bounds, rate)
    except AudioError as error:
        raise RefusedError(400, f"{param}: {error}", error.code, param) from error
