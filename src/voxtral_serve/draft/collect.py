"""The first stage: vLLM transcribes the recordings, and their audio rows and tokens go into shards."""

import os
import time
from collections.abc import Sequence

from voxtral_serve.audio.speech import Detector
from voxtral_serve.client.text import shown
from voxtral_serve.draft.engine import POSITIONS, Transcriber
from voxtral_serve.draft.recordings import RATE_HZ, Ending, Piece, Reader, Recording
from voxtral_serve.draft.report import Progress, say
from voxtral_serve.draft.shards import Shards
from voxtral_serve.engine.session import SessionShape

SHARD_S = 900  # seconds of audio in a shard: what a kill loses at most
FEW = 25  # recordings; of fewer, clips are held out and not recordings


def longest_s(shape: SessionShape) -> float:
    """Seconds of the longest clip that the engine takes."""
    return (POSITIONS - shape.left - shape.right) * shape.samples / shape.rate_hz


def detector() -> Detector | None:
    """The server's speech detector; None, with a line that says so, where its package is not installed."""
    try:
        return Detector()
    except ImportError as error:
        say(f"long recordings are cut by the clock and not at pauses, because {error.name} is not installed")
        return None


class Collection:
    """One run of the stage: clips in flight, and those whose shard is not written yet."""

    def __init__(self, transcriber: Transcriber, shards: Shards, held_out: frozenset[str]) -> None:
        """held_out: keys of recordings for the table; without any, one clip of ten is held out."""
        self.transcriber, self.shards, self.held_out = transcriber, shards, held_out
        self.at_once = 2 * transcriber.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        self.flying: dict[str, tuple[str, float]] = {}  # by request: key, seconds
        self.done: list[tuple[str, float, list[int]]] = []
        self.counts: dict[str, int] = {}
        self.failed: list[tuple[Recording, str]] = []
        self.seconds = 0.0

    def run(self, recordings: Sequence[Recording]) -> None:
        """Collect these recordings, without those clips that are in shards. Unreadable ones are named and left out."""
        todo = [each for each in recordings if not self.shards.complete(each.key)]
        progress = Progress("collected", sum(each.seconds for each in todo) / 3600, "h of audio")
        reader = Reader(todo, longest_s(self.transcriber.shape), detector())
        waiting = 0.0  # seconds of done clips
        while reader.left or self.flying:
            while reader.left and len(self.flying) < self.at_once:
                item = reader.take(wait=not self.flying)
                if item is None:
                    break
                self._begin(item)
            for name, tokens in (self.transcriber.step() if self.flying else {}).items():
                key, seconds = self.flying.pop(name)
                self.done.append((key, seconds, tokens))
                waiting += seconds
                self.seconds += seconds
                progress.at(self.seconds / 3600)
            if waiting >= SHARD_S:
                self._write()
                waiting = 0.0
        self._write()
        if self.failed:
            say(f"{len(self.failed)} recordings could not be read and are left out")

    def _begin(self, item: Piece | Ending) -> None:
        if isinstance(item, Ending):
            self.counts[item.recording.key] = item.clips
            if item.error is not None:
                self.failed.append((item.recording, item.error))
                say(f"left out: {shown(item.recording.path)}: {item.error}")
        elif item.key in self.shards.keys:
            self.seconds += len(item.samples) / RATE_HZ
        else:
            name = self.transcriber.add(item.key, item.samples)
            self.flying[name] = (item.key, len(item.samples) / RATE_HZ)

    def _write(self) -> None:
        """A shard of the clips that are done."""
        if not self.done:
            return
        keys = [key for key, *_ in self.done]
        written = self.transcriber.llm.collective_rpc("write_rows", args=(str(self.shards.path()), keys))
        self.shards.add(
            [
                (key, self._is_held_out(key), seconds, rows, tokens)
                for (key, seconds, tokens), rows in zip(self.done, written[0], strict=True)
            ],
            self.counts,
        )
        self.done, self.counts = [], {}

    def _is_held_out(self, key: str) -> bool:
        recording, _, number = key.partition("-")
        if not self.held_out:
            return (int(recording, 16) + int(number)) % 10 == 0
        return recording in self.held_out


def collect(
    transcriber: Transcriber, shards: Shards, recordings: Sequence[Recording], held_out: frozenset[str]
) -> None:
    """Fill the shards. The worker keeps the rows of all clips from here on."""
    transcriber.llm.collective_rpc("keep_rows", args=(os.getpid(),))
    started = time.monotonic()
    collection = Collection(transcriber, shards, held_out)
    collection.run(recordings)
    if collection.seconds:
        say(f"collected {collection.seconds / 3600:.2f} h of audio in {time.monotonic() - started:.0f} s")
