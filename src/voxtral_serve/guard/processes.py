"""A process beside an API process that answers orders, one after the other: decoders of audio, labellers of speakers.

It runs this package's modules with a small environment, without `site`, and so without patches of vLLM. A socket is its
standard input and output: it writes READY, then an answer to each order. Its standard error is read while it starts.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from voxtral_serve.audio.decode_worker import READY
from voxtral_serve.units import MIB

PIECE_BYTES = MIB  # written or read at a time
END_S = 1.0  # the wait for a process to end that does not answer
# Errors of a process that has ended, or that answers nonsense
BROKEN = (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, msgspec.MsgspecError)
KEPT = ("LD_LIBRARY_PATH",)  # of this process's environment: where libraries are


class OrderProcess:
    """One process. `ready` is False while it has an order, and if it is not to be used again."""

    def __init__(self, process: Process, output: asyncio.StreamReader, orders: asyncio.StreamWriter) -> None:
        self.process, self._output, self._orders = process, output, orders
        self.ready = True

    @classmethod
    async def begin(
        cls, what: str, script: str, arguments: Sequence[str], environment: Mapping[str, str], start_s: float
    ) -> Self:
        """A new process that is ready.

        what       names it in an error
        script     for `python -c`; its arguments are `arguments` and this process's sys.path
        start_s    until it is ready

        Raises RuntimeError if it cannot start, and TimeoutError.
        """
        command = (sys.executable, "-I", "-S", "-c", script, *arguments, *(path for path in sys.path if path))
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failed:
            output, orders = await asyncio.open_unix_connection(sock=ours, limit=PIECE_BYTES)
            failed.callback(orders.transport.abort)
            orders.transport.set_write_buffer_limits(0)  # `drain` then waits until all is written
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=PIPE,
                env={**environment, **kept},
                start_new_session=True,  # it gets no signals of a terminal
            )
            begun = cls(process, output, orders)
            failed.callback(begun.kill)
            theirs.close()
            async with asyncio.timeout(start_s):
                if await output.readline() != READY:
                    assert process.stderr is not None
                    said = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
                    said = said or f"it ended with {await begun.ended()}"
                    raise RuntimeError(f"{what} cannot start ({' '.join(command[:3])} …): {said[:300]}")
            failed.pop_all()
        return begun

    async def write(self, data: bytes | memoryview) -> None:
        """Send a part of an order. Raises ConnectionError if the process has ended."""
        with memoryview(data) as view, view.cast("B") as octets:
            for start in range(0, len(octets), PIECE_BYTES):
                self._orders.write(octets[start : start + PIECE_BYTES])
                await self._orders.drain()

    async def line(self) -> bytes:
        """A line of an answer. Raises one of BROKEN if the process has ended."""
        return await self._output.readuntil(b"\n")

    async def read_into(self, view: memoryview) -> None:
        """Fill `view`, of bytes, with a part of an answer. Raises asyncio.IncompleteReadError if the process ended."""
        start = 0
        while start < len(view):
            piece = await self._output.read(min(PIECE_BYTES, len(view) - start))
            if not piece:
                raise asyncio.IncompleteReadError(b"", len(view) - start)
            view[start : start + len(piece)] = piece
            start += len(piece)

    async def skip(self, size: int) -> None:
        """Read `size` bytes of an answer, and keep none. Raises as `read_into`."""
        while size:
            piece = await self._output.read(min(PIECE_BYTES, size))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(piece)

    def kill(self) -> None:
        """End it at once; nothing waits for it."""
        self.ready = False
        self._orders.transport.abort()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def ended(self) -> str:
        """How the process ended. It is killed if it has not."""
        try:
            async with asyncio.timeout(END_S):
                await self.process.wait()
        except TimeoutError:
            self.kill()
        code = await self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
