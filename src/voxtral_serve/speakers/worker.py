"""A process that labels speakers. It computes on one thread, and gives way to the server's processes.

It loads CAM++, sets limits on its memory, files and life, and reads orders from its standard input until that ends: a
line of JSON (one of the orders below), then arrays. It writes an answer to each: a line of JSON, then arrays. It
keeps nothing between orders. guard.labeller starts it, and ends it if it takes too long.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import BinaryIO, Literal, TypedDict

import numpy as np

from voxtral_serve.audio.decode_worker import READY, close_inherited, confine
from voxtral_serve.speakers.campplus import SIZE, CamPlusPlus
from voxtral_serve.speakers.known import centres, matched
from voxtral_serve.speakers.labels import labelled
from voxtral_serve.speakers.windows import Network, Voices, voices

START = "import sys; sys.path[:] = sys.argv[3:]; from voxtral_serve.speakers.worker import main; main()"
NICE = 10  # below the server's processes
GPU_FILES = 256


class VoicesOrder(TypedDict):
    """So many samples at 16 kHz follow, float32. `speech` is in seconds from their beginning, see windows.voices."""

    kind: Literal["voices"]
    samples: int
    speech: list[tuple[float, float]]


class VoicesAnswer(TypedDict):
    """So many windows follow: their spans, float64 [windows, 2], and their vectors, float32 [windows, SIZE]."""

    windows: int


class LabelsOrder(TypedDict):
    """So many windows follow, as in VoicesAnswer. `words` and `number` are those of labels.labelled."""

    kind: Literal["labels"]
    windows: int
    words: list[tuple[float, float]]
    number: int | None


class LabelsAnswer(TypedDict):
    """The speaker of each word."""

    labels: list[int]


class MatchOrder(TypedDict):
    """So many windows follow, as in VoicesAnswer, then the vectors of known speakers: float32 [known, SIZE].

    `speakers` are those of the words, as in LabelsAnswer.
    """

    kind: Literal["match"]
    windows: int
    words: list[tuple[float, float]]
    speakers: list[int]
    known: int


class MatchAnswer(TypedDict):
    """Who of the known speakers each speaker is, see known.matched."""

    known: list[int | None]


def main() -> None:
    """Answer orders until the standard input ends. Arguments: bytes of memory beside the network's, and its device."""
    memory, device = int(sys.argv[1]), sys.argv[2]
    close_inherited()
    os.nice(NICE)
    network = _loaded(device)
    if device == "cpu":
        confine(_address_space() + memory)
    else:  # a GPU's libraries map more than they use, and open further ones when they need them
        confine(resource.RLIM_INFINITY, GPU_FILES)
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    answers.write(READY)
    answers.flush()
    while line := orders.readline():
        _answer(json.loads(line), orders, answers, network)
        answers.flush()


def _loaded(device: str) -> Network:
    """The network, after a first use of all that is needed: afterwards no file can be opened."""
    import torch

    torch.set_num_threads(1)
    network = CamPlusPlus(device)
    noise = np.random.default_rng(0).normal(0, 0.1, 16000 * 12).astype(np.float32)
    found = voices(noise, [(0.0, 12.0)], network)
    for number in (None, 2):
        labelled(found, [(0.0, 12.0)], number)
    matched(found.vectors[:2], found.vectors[:1])
    return network


def _address_space() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _answer(
    order: VoicesOrder | LabelsOrder | MatchOrder, orders: BinaryIO, answers: BinaryIO, network: Network
) -> None:
    if order["kind"] == "voices":
        samples = np.frombuffer(orders.read(4 * order["samples"]), np.float32)
        found = voices(samples, order["speech"], network)
        made: VoicesAnswer = {"windows": len(found.spans)}
        _write(answers, made)
        if len(found.spans):
            answers.write(found.spans.tobytes())
            answers.write(found.vectors.tobytes())
        return
    spans = np.frombuffer(orders.read(16 * order["windows"]), np.float64).reshape(-1, 2)
    found = Voices(spans, _vectors(orders, order["windows"]))
    if order["kind"] == "labels":
        labels: LabelsAnswer = {"labels": labelled(found, order["words"], order["number"])}
        _write(answers, labels)
        return
    known = _vectors(orders, order["known"])
    matches: MatchAnswer = {"known": matched(centres(found, order["words"], order["speakers"]), known)}
    _write(answers, matches)


def _vectors(orders: BinaryIO, count: int) -> np.ndarray:
    """float32 [count, SIZE]"""
    return np.frombuffer(orders.read(4 * SIZE * count), np.float32).reshape(count, SIZE)


def _write(answers: BinaryIO, answer: VoicesAnswer | LabelsAnswer | MatchAnswer) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
