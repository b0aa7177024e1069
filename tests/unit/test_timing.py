"""Where the milliseconds of an upload go, in the header of its answer and in its line of the log."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import inputs
import numpy as np
import pytest
from engines import EngineClient
from guarding import RATE, SAMPLES, Lines, form, guarded, post

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard import transcription
from voxtral_serve.guard.timing import EngineTimes, UploadTiming
from voxtral_serve.patches.live_server import log

ENGINE_S, SEARCH_S, HANGS_S = 0.2, 0.1, 3600.0
CLIP = form(file=("clip.wav", inputs.encoded(SAMPLES)))
SILENCE = form(file=("clip.wav", inputs.encoded(np.zeros(RATE, np.int16))))


class SlowDetector(Detector):
    """Silero VAD, on a slower machine. `ended` is when its last search did."""

    ended = 0.0

    def speaks(self, clip: Clip) -> bool:
        time.sleep(SEARCH_S)
        self.ended = time.monotonic()
        return super().speaks(clip)


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler, level = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.setLevel(level)
    log.removeHandler(handler)


class Upload(NamedTuple):
    """What became of an upload: the engine, when it was asked, when the search ended, the parts of Server-Timing."""

    engine: EngineClient
    asked: float
    searched: float
    parts: dict[str, str]

    @property
    def spent_ms(self) -> dict[str, float]:
        found = {name: re.fullmatch(r"(?:desc=beside;)?dur=([0-9.]+)", part) for name, part in self.parts.items()}
        return {name: float(match[1]) for name, match in found.items() if match}

    @property
    def is_beside(self) -> bool:
        return self.parts["speech"].startswith("desc=beside;")


def sent(form: tuple[bytes, str], others: int = 0, step_s: float = ENGINE_S, stats: bool = True) -> Upload:
    """By a guard that has so many other requests."""
    detector, asked, heads = SlowDetector(), list[float](), list[Any]()
    made, app = guarded(detector=detector)
    made.in_flight, app.engine.stats = others, stats

    def step(samples: Any) -> float:
        asked.append(time.monotonic())
        return step_s

    async def send(message: Any) -> None:
        heads.extend(message.get("headers", ()))

    app.engine.step_s, app.send = step, send  # type: ignore[method-assign]
    asyncio.run(post(made, app, *form))
    parts = dict(part.split(";", 1) for part in dict(heads)[b"server-timing"].decode().split(", "))
    return Upload(app.engine, max(asked, default=math.inf), detector.ended, parts)


@pytest.mark.parametrize("others", [0, transcription.FEW - 1, transcription.FEW])
def test_the_engine_waits_for_the_search_among_others_alone(others: int) -> None:
    upload = sent(CLIP, others)
    assert [*upload.parts] == ["receive", "decode", "speech", "prompt", "queue", "encoder", "steps", "text"]
    spent = upload.spent_ms
    assert spent["speech"] >= 1000 * SEARCH_S and spent["encoder"] >= 1000 * ENGINE_S
    assert upload.is_beside == (upload.asked < upload.searched) == (others < transcription.FEW)


def test_the_stages_add_up() -> None:
    begun = time.monotonic()
    spent = sent(CLIP, transcription.FEW).spent_ms
    took_ms = 1000 * (time.monotonic() - begun)
    assert 1000 * (SEARCH_S + ENGINE_S) <= sum(spent.values()) <= took_ms


def test_silence_takes_the_engine_no_longer_than_the_search() -> None:
    upload = sent(SILENCE, step_s=HANGS_S)
    assert [*upload.parts] == ["receive", "decode", "speech", "text"]
    assert not upload.is_beside and upload.engine.dropped == 1
    assert sent(SILENCE, transcription.FEW).engine.ids == []


def test_without_vllms_times_the_engine_is_one_stage() -> None:
    upload = sent(CLIP, stats=False)
    assert [*upload.parts] == ["receive", "decode", "speech", "engine", "text"]
    assert upload.spent_ms["engine"] >= 1000 * ENGINE_S


def test_the_log_has_the_stages_too(lines: list[dict[str, Any]]) -> None:
    upload = sent(CLIP)
    assert lines[-1]["timing_ms"] == upload.spent_ms


def test_a_refused_upload_has_the_stages_before() -> None:
    assert [*sent(form(file=("clip.wav", b"nonsense"))).parts] == ["receive"]


def test_a_stage_of_several_pieces_ends_with_the_first_and_the_steps_with_the_last() -> None:
    timing = UploadTiming(now := time.monotonic())
    timing.add(EngineTimes(now + 1, now + 3, now + 6, now + 10))
    timing.add(EngineTimes(now + 2, now + 4, now + 5, now + 12))
    streamed = {"prompt": 1000.0, "queue": 2000.0, "encoder": 2000.0}
    assert timing.milliseconds() == streamed
    timing.end("text")
    whole = timing.milliseconds()
    assert {**whole, "text": 0.0} == {**streamed, "steps": 7000.0, "text": 0.0}
