"""A process that decodes one file after another. Files are untrusted, and decoders are C code that may have faults.

It runs with an empty environment, and sets limits on its own memory, files and life before it reads a file. It reads
orders from its standard input until that ends: a line of JSON (`Order`), then the bytes of the file. It writes an
answer for each to its standard output: a line of JSON (`Samples` or `Failure`), then the samples in float32.
guard.decoders starts it, and ends it if it takes too long.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from fractions import Fraction
from typing import BinaryIO, TypedDict

from voxtral_serve.audio.decode import CODES, PYAV, SOXR, AudioError, Bounds, blocks

START = "import sys; sys.path[:] = sys.argv[2:]; from voxtral_serve.audio.decode_worker import main; main()"
READY = b"ready\n"
FILES = 3  # open ones: standard input, output and error. A decoder can open none
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38  # <linux/prctl.h>


class Order(TypedDict):
    """What to decode: a file of `size` bytes, to `rate` Hz; the mean of its channels, or one of them. The other fields
    are those of Bounds."""

    size: int
    rate: int
    channel: int | None
    seconds: tuple[int, int]
    because: str
    most_bytes: int


class Samples(TypedDict):
    """The answer to an order: so many samples follow."""

    samples: int


class Failure(TypedDict):
    """The answer to an order that gave no samples: an AudioError, and whether the process ends after it."""

    error: str
    code: str
    ends: bool


def main() -> None:
    """Answer orders until the standard input ends. The first argument is the limit of its memory in bytes."""
    memory = int(sys.argv[1])
    close_inherited()
    _load()
    confine(memory)
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(READY)
    answers.flush()
    while line := orders.readline():
        if not _answered(json.loads(line), orders, answers, memory):
            return


def close_inherited() -> None:
    """Close inherited files: uvloop leaves those open that the server's libraries have left inheritable."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= FILES:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(name))


def _load() -> None:
    """Import what decoding needs, while files can be opened."""
    if PYAV:
        import av  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    elif SOXR:
        import soxr  # type: ignore[import-untyped,unused-ignore]  # noqa: F401


def confine(memory: int, files: int = FILES) -> None:
    """Set the limits of this process: `memory` bytes, and `files` open ones. It ends when the thread that started it
    ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_PDEATHSIG, signal.SIGKILL), (PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3):
            raise OSError(ctypes.get_errno(), f"prctl({option})")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())  # what a C library writes is of no use, and may be a client's text
    os.close(null)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _answered(order: Order, orders: BinaryIO, answers: BinaryIO, memory: int) -> bool:
    """Decode a file and write the answer. Returns whether the process can take another one."""
    samples: list[memoryview] = []  # not joined: pages that a process touches first are the dearest part of short clips
    answer: Samples | Failure
    try:
        data = orders.read(order["size"])
        bounds = Bounds(Fraction(*order["seconds"]), order["because"], order["most_bytes"])
        samples = [block.data.cast("B") for block in blocks(data, bounds, order["rate"], order["channel"])]
        answer = {"samples": sum(map(len, samples)) // 4}
    except (AudioError, MemoryError) as error:
        answer = _failure(error, memory)
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.writelines(samples)
    answers.flush()
    return not answer.get("ends", False)


def _failure(error: AudioError | MemoryError, memory: int) -> Failure:
    if isinstance(error, AudioError):
        return {"error": str(error), "code": error.code, "ends": False}
    why = f"the decoder ended at its memory limit of {memory} bytes: the file is damaged, or takes too much to decode"
    return {"error": why, "code": CODES[0], "ends": True}
