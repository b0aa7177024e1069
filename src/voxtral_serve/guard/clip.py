"""The clip in an audio file that a client sent."""

from voxtral_serve.audio.decode import AudioError, Bounds, Clip
from voxtral_serve.guard.budget import Reservation
from voxtral_serve.guard.decoders import Decoders
from voxtral_serve.guard.errors import RefusedError


async def decoded(
    decoders: Decoders, data: bytes | memoryview, bounds: Bounds, rate: int, param: str, held: Reservation
) -> Clip:
    """The clip in a file of any format that audio.decode reads, within `bounds`; `rate` is the model's, in Hz.

    Raises RefusedError about the request's field `param`.
    """
    try:
        return await decoders.decode(data, bounds, rate, held)
    except AudioError as error:
        raise RefusedError(400, f"{param}: {error}", error.code, param) from error
