"""What the programs share: their arguments, a clip at the pace of speech, and its transcript as a line of JSON.

    .venv-clients/bin/python tests/clients/programs/PROGRAM.py http://127.0.0.1:8000 MODEL FILE.wav...

The server's key is in OPENAI_API_KEY. For each file there is one session and one line:

    text     the texts of its turns, joined
    turns    their number
    first_s  seconds from the first sample to the first text that is not empty
    final_s  seconds from the clip's last sample to the last turn's text
"""

import asyncio
import json
import os
import sys
import time
import wave
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, NamedTuple

import numpy as np
import soxr

KEY = os.environ.get("OPENAI_API_KEY", "none")
PIECE_S = 0.1
LONGEST_S = 60  # for one session


class Server(NamedTuple):
    url: str  # without /v1
    model: str


class Clip:
    """A WAV file of 16 bits, mono; and what came of it."""

    def __init__(self, path: str) -> None:
        with wave.open(path) as file:
            assert (file.getsampwidth(), file.getnchannels()) == (2, 1), path
            self._rate = file.getframerate()
            self._samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        self._path = path
        self.turns: list[str] = []
        self._first: float | None = None
        self._final = 0.0

    def _pieces(self, rate: int, silence_s: float) -> Iterator[tuple[float, bytes]]:
        """Each piece with the second at which its last sample has been spoken."""
        samples = self._samples if rate == self._rate else soxr.resample(self._samples, self._rate, rate)
        samples = np.concatenate([samples, np.zeros(round(silence_s * rate), np.int16)])
        size = round(PIECE_S * rate)
        for start in range(0, len(samples), size):
            piece = samples[start : start + size]
            yield (start + len(piece)) / rate, piece.astype("<i2").tobytes()

    def spoken(self, rate: int, silence_s: float = 0.0) -> Iterator[bytes]:
        """PCM16 in pieces of 100 ms at the pace of speech, and silence after it."""
        self._begun = time.monotonic()
        for end_s, piece in self._pieces(rate, silence_s):
            time.sleep(max(0.0, self._begun + end_s - time.monotonic()))
            yield piece

    async def spoken_async(self, rate: int, silence_s: float = 0.0) -> AsyncIterator[bytes]:
        self._begun = time.monotonic()
        for end_s, piece in self._pieces(rate, silence_s):
            await asyncio.sleep(max(0.0, self._begun + end_s - time.monotonic()))
            yield piece

    def file(self) -> bytes:
        """The file, which is sent at once: it has been spoken."""
        self._begun = time.monotonic() - len(self._samples) / self._rate
        with open(self._path, "rb") as file:
            return file.read()

    def delta(self, text: str) -> None:
        if text.strip() and self._first is None:
            self._first = time.monotonic() - self._begun

    def turn(self, text: str) -> None:
        self.delta(text)
        self._final = time.monotonic() - self._begun - len(self._samples) / self._rate
        self.turns.append(text.strip())

    def report(self) -> None:
        first_s = None if self._first is None else round(self._first, 3)
        line = {
            "text": " ".join(turn for turn in self.turns if turn),
            "turns": len(self.turns),
            "first_s": first_s,
            "final_s": round(self._final, 3),
        }
        print(json.dumps(line), flush=True)


def arguments() -> tuple[Server, list[Clip]]:
    url, model, *paths = sys.argv[1:]
    return Server(url, model), [Clip(path) for path in paths]


def each(session: Callable[[Server, Clip], Coroutine[Any, Any, None]]) -> None:
    """Run `session` for each clip of the command line, one after the other."""

    async def run() -> None:
        server, clips = arguments()
        for clip in clips:
            await asyncio.wait_for(session(server, clip), LONGEST_S)
            clip.report()

    asyncio.run(run())
