"""Speakers of a live session. They are labelled at its end: its audio is kept until then, and its segments wait."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard.labeller import FREE_S, LabelError, Labeller
from voxtral_serve.speakers.campplus import RATE
from voxtral_serve.speakers.windows import Span, Voices
from voxtral_serve.transcript.subtitles import grouped, segment
from voxtral_serve.transcript.turns import TimedSegment
from voxtral_serve.units import MIB

KEPT_BYTES = 256 * MIB  # of audio of all sessions of a process: 2.3 hours
SHARE = 2  # one session keeps one of so many bytes at most: 70 min
PART_BYTES = 2 * RATE * 300  # of a session's audio that are searched for speech at a time


class KeptAudio:
    """What the sessions of a process share. `size`: bytes of audio that they keep."""

    def __init__(self, labeller: Labeller, detector: Detector) -> None:
        self.labeller, self.detector = labeller, detector
        self.size = 0


class SessionSpeakers:
    """The audio and the segments of one session. Call `close` in any case."""

    def __init__(self, kept: KeptAudio) -> None:
        self._kept = kept
        self._parts: list[bytearray] = []
        self._size = 0  # bytes of the parts
        self._segments: list[TimedSegment] = []
        self._given_up: str | None = None

    def take(self, pcm: bytes) -> None:
        """Keep PCM16 at RATE. If that is too much, all audio of the session goes."""
        if self._given_up is not None:
            return
        if self._size + len(pcm) > KEPT_BYTES // SHARE or self._kept.size + len(pcm) > KEPT_BYTES:
            self._given_up = (
                f"this server keeps {KEPT_BYTES} bytes of audio of live sessions that ask for speakers, and "
                f"{KEPT_BYTES // SHARE} of one"
            )
            self.close()
            return
        self._count(len(pcm))
        for piece in _pieces(pcm, PART_BYTES - len(self._parts[-1]) if self._parts else 0):
            if not self._parts or len(self._parts[-1]) == PART_BYTES:
                self._parts.append(bytearray())
            self._parts[-1] += piece

    def hold(self, segments: Sequence[TimedSegment]) -> list[TimedSegment]:
        """Take segments. Returns those that do not wait any more, because they get no speakers."""
        self._segments += segments
        if self._given_up is None:
            return []
        held, self._segments = self._segments, []
        return held

    async def labelled(self) -> tuple[list[TimedSegment], str | None]:
        """All segments that wait, with speakers, split where these change; or without, and why there are none."""
        if self._given_up is None:
            try:
                async with self._kept.labeller.place(FREE_S):
                    return await self._labelled(), None
            except LabelError as error:
                self._given_up = str(error)
        return self.hold([]), self._given_up

    def close(self) -> None:
        """Forget the audio."""
        while self._parts:
            self._drop()

    async def _labelled(self) -> list[TimedSegment]:
        words = [word for each in self._segments for word in each.words]
        if not words:
            return []
        labels = await self._kept.labeller.labels(await self._voices(), [(word.start, word.end) for word in words])
        return await asyncio.to_thread(_split, self._segments, labels)

    async def _voices(self) -> Voices:
        start_s = 0.0
        found: list[Voices] = []
        for _ in range(len(self._parts)):
            clip, speech = await asyncio.to_thread(self._heard, self._parts[0])
            self._drop()
            voices = await self._kept.labeller.voices(clip, speech)
            found.append(voices._replace(spans=voices.spans + start_s))
            start_s += clip.seconds
        return Voices(*map(np.concatenate, zip(*found, strict=True)))

    def _heard(self, pcm: bytearray) -> tuple[Clip, list[Span]]:
        """(clip, its speech) of a part."""
        clip = Clip(np.frombuffer(pcm, np.int16).astype(np.float32) / 2**15, RATE)
        return clip, self._kept.detector.stretches(clip)

    def _drop(self) -> None:
        """The first part."""
        self._count(-len(self._parts.pop(0)))

    def _count(self, size: int) -> None:
        self._size += size
        self._kept.size += size


def _split(segments: Iterable[TimedSegment], labels: Iterable[int]) -> list[TimedSegment]:
    """The segments with the speakers of their words, split where these change."""
    following = iter(labels)
    found = []
    for each in segments:
        spoken = [word._replace(speaker=f"speaker_{next(following) + 1}") for word in each.words]
        found += [TimedSegment(segment(group), group) for group in grouped(spoken)]
    return found


def _pieces(pcm: bytes, first: int) -> Iterator[bytes]:
    """The first so many bytes, and the others in pieces of PART_BYTES."""
    if first:
        yield pcm[:first]
    for start in range(first, len(pcm), PART_BYTES):
        yield pcm[start : start + PART_BYTES]
