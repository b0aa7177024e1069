"""The servers that a run starts: the profile's, and those that it is compared with."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from voxtral_serve.client.errors import RequestError
from voxtral_serve.measure import engine
from voxtral_serve.measure.engine import Engine
from voxtral_serve.measure.errors import MeasureError


class StartError(RequestError):
    """vllm serve did not start. The message is one line, with the exception that ended it."""


@contextlib.contextmanager
def started(profile: Path, directory: Path, arguments: Sequence[str]) -> Iterator[Engine]:
    """A server that is up, with a key of its own, stopped at the end. Raises StartError."""
    with tempfile.TemporaryDirectory(prefix="voxtral-prove-") as folder, contextlib.ExitStack() as stack:
        key, port = secrets.token_hex(16), engine.free_port()
        log = Path(folder, "vllm.log")
        try:
            server = stack.enter_context(engine.served(profile, directory, port, log, *arguments, show=False, key=key))
        except MeasureError as error:
            raise StartError(error.one_line()) from None
        yield server
