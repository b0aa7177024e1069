"""Batches of audio on the GPU: clips as int16 in GPU memory, plans of pico.recordings prepared in other processes.

Shards may still be written during training. They are loaded as they appear, in the order of their numbers.
"""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mistral_layout.audio import LEFT_PAD_TOKENS, SAMPLE_RATE, SAMPLES_PER_TOKEN
from pico import recordings

PLANS_AHEAD = 24
SCAN_S = 0.5


class Loaded(NamedTuple):
    """A batch on the device.

    audio      float32 [rows, length * 1280], padded with zeros on both sides
    targets    int64 [rows, length]
    delays     in tokens, int64 [rows]
    n_samples  lengths in samples, int64 [rows]
    """

    audio: Tensor
    targets: Tensor
    delays: Tensor
    n_samples: Tensor


class Pool:
    """The audio of all existing shards, concatenated, as int16 on the device."""

    def __init__(self, directory: Path, hours: float, device: str):
        """`hours` is an upper bound for the audio in the directory."""
        self.directory, self.device = directory, device
        self.audio = torch.zeros(int((hours + 1) * 1.05 * 3600 * SAMPLE_RATE), dtype=torch.int16, device=device)
        self.shards = self.samples = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def wait(self, shards: int, coming: Callable[[], bool]) -> None:
        """Wait until `shards` shards are in memory. Raises FileNotFoundError if no more are `coming`."""
        while self.shards < shards:
            if self._error is not None:
                raise self._error
            if not coming():
                raise FileNotFoundError(f"{self.directory} has {self.shards} shards, and pico.data failed to make more")
            time.sleep(0.1)

    def take_in(self) -> bool:
        """Copy the next shard to the device if it exists."""
        path = recordings.shard_path(self.directory, self.shards)
        if not path.exists():
            return False
        with np.load(path) as shard:
            audio = torch.from_numpy(shard["audio"])
        self.audio[self.samples : self.samples + len(audio)] = audio.to(self.device)
        self.samples += len(audio)
        self.shards += 1
        return True

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                if not self.take_in():
                    self._stop.wait(SCAN_S)
        except BaseException as error:
            self._error = error
            raise

    def load(self, plan: recordings.Batch) -> "Loaded":
        rows, width = len(plan.delays), plan.length * SAMPLES_PER_TOKEN
        left = LEFT_PAD_TOKENS * SAMPLES_PER_TOKEN
        # The padding consists of silent pieces, so that pieces cover every sample of the batch and none is empty.
        row, first, source, _ = plan.pieces.T
        row_at = np.arange(rows) * width
        start = np.concatenate((row * width + left + first, row_at, row_at + left + plan.n_samples))
        source = np.concatenate((source, np.full(2 * rows, -1)))
        gain = np.concatenate((plan.gains, np.zeros(2 * rows, np.float32)))
        order = np.argsort(start, kind="stable")
        start, source, gain = start[order], source[order], gain[order]
        begins = torch.zeros(rows * width, dtype=torch.int32, device=self.device)
        begins[self._send(start[1:])] = 1
        piece = begins.cumsum(0, dtype=torch.int32)
        offset = self._send(np.where(source < 0, -start, source - start))
        at = torch.arange(rows * width, device=self.device) + offset[piece]
        audio = self.audio[at.clamp_(max=len(self.audio) - 1)] * (self._send(gain) / 32767)[piece]
        audio = self._with_background(audio.view(rows, width), plan, left)
        return Loaded(audio, self._send(plan.targets).long(), self._send(plan.delays), self._send(plan.n_samples))

    def _send(self, array: np.ndarray) -> Tensor:
        """Copy to the device from pinned memory; another copy would wait for all work in flight."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device == "cuda" else tensor

    def _with_background(self, audio: Tensor, plan: recordings.Batch, left: int) -> Tensor:
        with_sound = np.flatnonzero(plan.background_gain)
        for i in with_sound.tolist():
            first, n = plan.background[i].tolist()
            end = left + int(plan.n_samples[i])
            sound = self.audio[first : first + n].float() * (float(plan.background_gain[i]) / 32767)
            audio[i, left:end] += sound.repeat(-(-(end - left) // n))[: end - left]
        return audio.clamp_(-1, 1)


_words: list[dict[str, np.ndarray]] = []  # in a planning process: the words of each shard that it has read
_clips: dict[int, recordings.Clips] = {}  # the same, concatenated, by number of shards


def _plan(directory: Path, seed: int, tokens: int, step: int, shards: int) -> recordings.Batch:
    if shards not in _clips:
        _words.extend(recordings.read_words(recordings.shard_path(directory, i)) for i in range(len(_words), shards))
        _clips.clear()
        _clips[shards] = recordings.Clips.of(_words[:shards])
    return recordings.batch(np.random.default_rng([seed, step]), _clips[shards], tokens)


class Plans:
    """The plan of each step, prepared in other processes. Start it before CUDA, because the processes are forked."""

    def __init__(self, directory: Path, *, seed: int, tokens: int, workers: int):
        self._what = (directory, seed, tokens)
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
        list(self._pool.map(time.sleep, [0.05] * workers))
        self._ahead: deque[Future[recordings.Batch]] = deque()

    def next(self, step: int, shards: int) -> recordings.Batch:
        """The plan of `step`. Call it with consecutive steps. `shards` is the number of shards in memory."""
        while len(self._ahead) < PLANS_AHEAD:
            ahead = step + len(self._ahead)
            self._ahead.append(self._pool.submit(_plan, *self._what, ahead, self._rounded(shards)))
        return self._ahead.popleft().result()

    def _rounded(self, shards: int) -> int:
        """The number of shards, rounded down: a process concatenates all shards again for each new number."""
        return shards if shards < 16 else shards // 16 * 16

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
