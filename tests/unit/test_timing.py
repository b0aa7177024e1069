"""Where the milliseconds of an upload go, in the header of its answer and in its line of the log."""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import inputs
import numpy as np
import pytest
from guarding import RATE, SAMPLES, Lines, form, guarded, post

from voxtral_serve.audio.decode import Clip
from voxtral_serve.audio.speech import Detector
from voxtral_serve.guard.timing import STAGES, EngineTimes, UploadTiming
from voxtral_serve.patches.live_server import log

ENGINE_S, SEARCH_S = 0.2, 0.1
WHOLE = [stage for stage in STAGES if stage not in ("engine", "speakers")]
CLIP = form(file=("clip.wav", inputs.encoded(SAMPLES)))
SILENCE = form(file=("clip.wav", inputs.encoded(np.zeros(RATE, np.int16))))


class SlowDetector(Detector):
    """Silero VAD, on a slower machine."""

    def speaks(self, clip: Clip) -> bool:
        time.sleep(SEARCH_S)
        return super().speaks(clip)


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    handler, level = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.lines
    log.setLevel(level)
    log.removeHandler(handler)


def stages(form: tuple[bytes, str], stats: bool = True) -> dict[str, float]:
    """Those of an upload in its answer's header; `stats` is whether vLLM measures its own."""
    heads: list[Any] = []
    made, app = guarded(detector=SlowDetector())
    app.engine.stats, app.engine.step_s = stats, lambda samples: ENGINE_S

    async def send(message: Any) -> None:
        heads.extend(message.get("headers", ()))

    app.send = send  # type: ignore[method-assign]
    asyncio.run(post(made, app, *form))
    parts = (part.split(";dur=") for part in dict(heads)[b"server-timing"].decode().split(", "))
    return {stage: float(spent_ms) for stage, spent_ms in parts}


def test_the_stages_add_up(lines: list[dict[str, Any]]) -> None:
    begun = time.monotonic()
    spent = stages(CLIP)
    took_ms = 1000 * (time.monotonic() - begun)
    assert [*spent] == WHOLE
    assert spent["speech"] >= 1000 * SEARCH_S and spent["encoder"] >= 1000 * ENGINE_S
    assert sum(spent.values()) <= took_ms
    assert lines[-1]["timing_ms"] == spent
    assert lines[-1]["duration_ms"] == pytest.approx(sum(spent.values()), abs=20)


def test_a_streamed_answer_begins_before_its_steps_end(lines: list[dict[str, Any]]) -> None:
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)), stream=(None, "true"))
    assert [*stages((body, kind))] == WHOLE[: WHOLE.index("steps")]
    assert [*lines[-1]["timing_ms"]] == WHOLE


def test_without_vllms_times_the_engine_is_one_stage() -> None:
    spent = stages(CLIP, stats=False)
    assert [*spent] == ["receive", "decode", "speech", "engine", "text"]
    assert spent["engine"] >= 1000 * ENGINE_S


def test_silence_and_a_refused_upload_have_the_stages_that_they_came_through() -> None:
    assert [*stages(SILENCE)] == ["receive", "decode", "speech", "text"]
    assert [*stages(form(file=("clip.wav", b"nonsense")))] == ["receive"]


def test_a_stage_of_several_pieces_ends_with_the_first_and_the_steps_with_the_last() -> None:
    timing = UploadTiming(now := time.monotonic())
    timing.add(EngineTimes(now + 1, now + 3, now + 6, now + 10))
    timing.add(EngineTimes(now + 2, now + 4, now + 5, now + 12))
    streamed = {"prompt": 1000.0, "queue": 2000.0, "encoder": 2000.0}
    assert timing.milliseconds() == streamed
    timing.end("text")
    whole = timing.milliseconds()
    assert {**whole, "text": 0.0} == {**streamed, "steps": 7000.0, "text": 0.0}
