"""The process that labels speakers for an API process: started when it is first needed, and again after it has ended.

A clip's speech is computed in parts, so that short clips do not wait for long ones, and the process needs no more
memory for a long clip. Voices need no words: they are computed while the text is decoded.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np

from voxtral_serve.audio.decode import Clip
from voxtral_serve.guard.decoders import ENVIRONMENT, Places
from voxtral_serve.guard.errors import refusing
from voxtral_serve.guard.limits import LIMITS
from voxtral_serve.guard.processes import BROKEN, OrderProcess
from voxtral_serve.patches.live_server import log
from voxtral_serve.speakers import MOST
from voxtral_serve.speakers.campplus import RATE, SIZE, MissingError, check_installed
from voxtral_serve.speakers.known import KnownSpeakerError, Speaker, named, vector
from voxtral_serve.speakers.windows import HOP_S, WINDOW_S, Span, Voices
from voxtral_serve.speakers.worker import (
    START,
    LabelsAnswer,
    LabelsOrder,
    MatchAnswer,
    MatchOrder,
    VoicesAnswer,
    VoicesOrder,
)
from voxtral_serve.units import GIB

MEMORY = GIB  # of address space, beside the network's: the largest graph of clusters takes half of it
PART_S = 30.0  # of a clip in an order; it takes a second of a core
RETRY_S = 60  # after a start that failed; the next one loads PyTorch
START_S = 60  # until the process is ready; it takes 3 s on an idle core
FREE_S = 60  # the longest wait for the process
SHARE = 4  # one in so many requests in flight may ask for speakers: labels take longer than text
MOST_ASKING = 16  # requests at a time: a part of each takes 16 s of a core, and all wait for FREE_S at most
VOICES_S, LABELS_S = 60, 120  # the longest time for an order
# The error itself has paths of the machine
CANNOT_START = "the process that labels speakers cannot start: the server's log says why"
GPUS = "CUDA_VISIBLE_DEVICES"  # those of the server, which the process counts as the server does


Answer = TypeVar("Answer")
Values = ParamSpec("Values")


class LabelError(RuntimeError):
    """There are no labels. The message says why, such as that the process has ended."""


class KnownVoice(NamedTuple):
    """A known speaker: name, clip at RATE, its stretches of speech, and the request's field that has it."""

    name: str
    clip: Clip
    speech: Sequence[Span]
    where: str


class Labels:
    """What labels the words of one clip.

    voices  those of the clip, while they are computed
    find    from voices and words to speakers
    """

    def __init__(
        self, voices: asyncio.Future[Voices], find: Callable[[Voices, Sequence[Span]], Awaitable[Sequence[Speaker]]]
    ) -> None:
        self._voices, self._find = voices, find

    def check(self) -> None:
        """Raises LabelError if it is known by now that there will be no labels."""
        if self._voices.done():
            self._voices.result()

    async def __call__(self, words: Sequence[Span]) -> Sequence[Speaker]:
        """The speaker of each word. Raises LabelError."""
        return await self._find(await self._voices, words)


def no_labels(error: LabelError) -> Labels:
    """Labels that fail with this error."""
    failed: asyncio.Future[Voices] = asyncio.get_running_loop().create_future()
    failed.set_exception(error)
    failed.exception()  # which asyncio would log if nobody asked for it

    async def find(found: Voices, words: Sequence[Span]) -> list[int]:
        raise error

    return Labels(failed, find)


class Labeller:
    """The process of one API process.

    most    requests at a time that ask for speakers
    device  a name of PyTorch's
    memory  in bytes, beside the network's
    """

    def __init__(self, most: int = 1, device: str = "cpu", memory: int = MEMORY) -> None:
        self.most, self.device, self.memory = most, device, memory
        self._asking, self._free = Places(most), Places(1)
        self._process: LabelProcess | None = None
        self._failed_s: float | None = None  # time.monotonic() of the last start that failed
        self._running: asyncio.Task[Any] | None = None  # the last order

    @classmethod
    def of_environment(cls, in_flight: int) -> "Labeller":
        """That of an API process with so many requests in flight, on the device that the environment names."""
        return cls(min(max(in_flight // SHARE, 1), MOST_ASKING), LIMITS.speakers_device)

    @asynccontextmanager
    async def place(self, wait_s: float = 0) -> AsyncIterator[None]:
        """A place among the requests that ask for speakers. Raises LabelError if there is none within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._asking.take()
        except TimeoutError:
            raise LabelError(
                f"{self.most} requests that ask for speakers are in flight, as many as this server takes: try again "
                "soon"
            ) from None
        try:
            yield
        finally:
            self._asking.give()

    async def voices(self, clip: Clip, speech: Sequence[Span]) -> Voices:
        """The voices of the stretches of speech of a clip at RATE, which are in their order. Raises LabelError."""
        if clip.rate != RATE:
            raise ValueError(f"the clip has a rate of {clip.rate} Hz: voices are computed at {RATE} Hz")
        spans, vectors = [np.empty((0, 2))], [np.empty((0, SIZE), np.float32)]
        for stretches in parts(speech):
            first, last = round(stretches[0][0] * RATE), round(stretches[-1][1] * RATE)
            inside = [(start - first / RATE, end - first / RATE) for start, end in stretches]
            samples = np.ascontiguousarray(clip.samples[first:last], np.float32)
            found = await self._order(VOICES_S, LabelProcess.voices, samples, inside)
            spans.append(found.spans + first / RATE)
            vectors.append(found.vectors)
        return Voices(np.concatenate(spans), np.concatenate(vectors))

    async def labels(self, found: Voices, words: Sequence[Span], number: int | None = None) -> list[int]:
        """The speaker of each word, as speakers.labels.labelled gives it. Raises LabelError."""
        return await self._order(LABELS_S, LabelProcess.labels, found, words, number)

    async def matches(
        self, found: Voices, words: Sequence[Span], speakers: Sequence[int], known: np.ndarray
    ) -> list[int | None]:
        """Who of `known` [n, SIZE] each speaker of the words is, see speakers.known.matched. Raises LabelError."""
        return await self._order(LABELS_S, LabelProcess.matches, found, words, speakers, known)

    @asynccontextmanager
    async def listening(
        self, clip: Clip, speech: Sequence[Span], number: int | None, known: Sequence[KnownVoice] = ()
    ) -> AsyncIterator[Labels]:
        """While this is open, the voices of a clip at RATE are computed. Gives what labels its words.

        speech  the clip's stretches of speech
        number  of the speakers; None if it is not known
        known   those that get their names. One without a voice makes the labels raise RefusedError
        """
        vectors: list[np.ndarray] = []

        async def voices() -> Voices:
            for each in known:
                found = await self.voices(each.clip, each.speech)
                with refusing(KnownSpeakerError, each.where):
                    vectors.append(vector(each.name, found))
            return await self.voices(clip, speech)

        async def find(found: Voices, words: Sequence[Span]) -> Sequence[Speaker]:
            speakers = await self.labels(found, words, number)
            if not known or not words:
                return speakers
            matches = await self.matches(found, words, speakers, np.stack(vectors))
            return named(speakers, matches, [each.name for each in known])

        task = asyncio.create_task(voices())
        try:
            yield Labels(task, find)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def aclose(self) -> None:
        """Kill the process."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._process is not None:
            self._process.kill()
            await self._process.process.wait()
            self._process = None

    async def _order(
        self,
        deadline_s: float,
        order: Callable[Concatenate["LabelProcess", Values], Awaitable[Answer]],
        *values: Values.args,
        **more: Values.kwargs,
    ) -> Answer:
        """The process's answer to an order, when those before have theirs. Raises LabelError.

        An order that has begun keeps the process until its answer is read, also when who waits for it is cancelled:
        otherwise clients that leave would have it started again and again.
        """
        try:
            async with asyncio.timeout(FREE_S):
                await self._free.take()
        except TimeoutError:
            raise LabelError(f"the process that labels speakers was busy for {FREE_S} s: try again soon") from None
        running = asyncio.create_task(self._answer(deadline_s, order, *values, **more))
        running.add_done_callback(lambda _: self._free.give())
        self._running = running
        return await asyncio.shield(running)

    async def _answer(
        self,
        deadline_s: float,
        order: Callable[Concatenate["LabelProcess", Values], Awaitable[Answer]],
        *values: Values.args,
        **more: Values.kwargs,
    ) -> Answer:
        process = await self._ready()
        process.ready = False
        try:
            async with asyncio.timeout(deadline_s):
                answer = await order(process, *values, **more)
            process.ready = True
            return answer
        except TimeoutError:
            log.warning("the process that labels speakers was ended: it took more than %d s", deadline_s)
            raise LabelError(f"the process that labels speakers ended at its deadline of {deadline_s} s") from None
        except (*BROKEN, ValueError, MemoryError) as error:
            how = await process.ended()
            log.warning("the process that labels speakers ended with %s (%s)", how, type(error).__name__)
            raise LabelError(f"the process that labels speakers ended with {how}") from None
        finally:
            if not process.ready:
                process.kill()

    async def _ready(self) -> "LabelProcess":
        if self._process is not None:
            if self._process.ready and self._process.process.returncode is None:
                return self._process
            self._process.kill()  # its connection stays open otherwise
            self._process = None
        if self._failed_s is not None and time.monotonic() - self._failed_s < RETRY_S:
            raise LabelError(CANNOT_START)
        arguments = (str(self.memory), self.device)
        environment = dict(ENVIRONMENT)
        if GPUS in os.environ:
            environment[GPUS] = os.environ[GPUS]
        try:
            self._process = await LabelProcess.begin(
                "the process that labels speakers", START, arguments, environment, START_S
            )
        except (RuntimeError, OSError, *BROKEN) as error:  # TimeoutError is an OSError
            log.warning("no speaker labels: %s", str(error) or f"the process was not ready after {START_S} s")
            self._failed_s = time.monotonic()
            raise LabelError(CANNOT_START) from error
        return self._process


def unlabelled(timed: bool) -> str | None:
    """Why speakers cannot be labelled; None if they can. `timed`: whether the model's tokens have times."""
    if not timed:
        return "this model gives no word times, which speaker labels need"
    try:
        check_installed()
    except MissingError as error:
        return str(error)
    return None


class LabelProcess(OrderProcess):
    """The process itself, with one order at a time."""

    async def voices(self, samples: np.ndarray, speech: Sequence[Span]) -> Voices:
        """As speakers.windows.voices. Raises one of BROKEN if the process has ended or answers nonsense."""
        order: VoicesOrder = {"kind": "voices", "samples": len(samples), "speech": list(speech)}
        await self.write(json.dumps(order).encode() + b"\n")
        await self.write(samples.data)
        count = msgspec.json.decode(await self.line(), type=VoicesAnswer)["windows"]
        if not 0 <= count <= len(speech) + len(samples) / RATE / HOP_S:
            raise msgspec.ValidationError(f"{count} windows for {len(samples)} samples")
        spans, vectors = np.empty((count, 2)), np.empty((count, SIZE), np.float32)
        if count:
            await self.read_into(spans.data.cast("B"))
            await self.read_into(vectors.data.cast("B"))
        return Voices(spans, vectors)

    async def labels(self, found: Voices, words: Sequence[Span], number: int | None) -> list[int]:
        """As speakers.labels.labelled. Raises one of BROKEN if the process has ended or answers nonsense."""
        order: LabelsOrder = {"kind": "labels", "windows": len(found.spans), "words": list(words), "number": number}
        await self.write(json.dumps(order).encode() + b"\n")
        await self._write_voices(found)
        labels = msgspec.json.decode(await self.line(), type=LabelsAnswer)["labels"]
        if len(labels) != len(words):
            raise msgspec.ValidationError(f"{len(labels)} labels for {len(words)} words")
        if not all(0 <= label < MOST for label in labels):
            raise msgspec.ValidationError(f"labels from {min(labels)} to {max(labels)}")
        return labels

    async def matches(
        self, found: Voices, words: Sequence[Span], speakers: Sequence[int], known: np.ndarray
    ) -> list[int | None]:
        """As Labeller.matches. Raises one of BROKEN if the process has ended or answers nonsense."""
        order: MatchOrder = {
            "kind": "match",
            "windows": len(found.spans),
            "words": list(words),
            "speakers": list(speakers),
            "known": len(known),
        }
        await self.write(json.dumps(order).encode() + b"\n")
        await self._write_voices(found)
        await self.write(np.ascontiguousarray(known, np.float32).data)
        matches = msgspec.json.decode(await self.line(), type=MatchAnswer)["known"]
        if len(matches) != max(speakers) + 1:
            raise msgspec.ValidationError(f"{len(matches)} matches for {max(speakers) + 1} speakers")
        if not all(match is None or 0 <= match < len(known) for match in matches):
            raise msgspec.ValidationError(f"the matches {matches} for {len(known)} known speakers")
        return matches

    async def _write_voices(self, found: Voices) -> None:
        if len(found.spans):
            await self.write(np.ascontiguousarray(found.spans, np.float64).data)
            await self.write(np.ascontiguousarray(found.vectors, np.float32).data)


def parts(speech: Sequence[Span]) -> Iterator[list[Span]]:
    """The stretches in their order, in parts of at most PART_S from the first start to the last end.

    A longer stretch is cut; its pieces overlap by half a window, as windows do.
    """
    part: list[Span] = []
    for stretch in speech:
        for start, end in _pieces(stretch):
            if part and end - part[0][0] > PART_S:
                yield part
                part = []
            part.append((start, end))
    if part:
        yield part


def _pieces(stretch: Span) -> Iterator[Span]:
    start, end = stretch
    while end - start > PART_S:
        yield start, start + PART_S
        start += PART_S - WINDOW_S / 2
    yield start, end
