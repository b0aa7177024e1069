"""Audio of live sessions in the engine: rows and samples of one session, and what the scheduler says to messages."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PICO
from livefakes import SHAPE
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from pico import model
from voxtral_serve.engine.live_audio import AHEAD, BYTES, LOOK_BACK, SessionAudio
from voxtral_serve.engine.live_scheduler import LiveSessions
from voxtral_serve.engine.session import LOOK_AHEAD, SessionShape

ROW = SHAPE.samples
LENGTHS = [1, 39, 40, 41, ROW - 1, ROW, ROW + 1, ROW + 40, 7 * ROW, 7 * ROW + 39, 12345]


def noise(n: int, seed: int = 0) -> np.ndarray:
    """int16 without a zero, which padding has."""
    return np.random.default_rng(seed).integers(1, 2**15, n).astype(np.int16)


def padded(audio: np.ndarray, first: int, count: int) -> np.ndarray:
    """What rows first to first + count - 1 see of audio with silence before and after it."""
    silence = np.zeros(100 * ROW, np.int16)
    whole = np.concatenate([silence, audio, silence])
    start = len(silence) + (first - SHAPE.left) * ROW
    return whole[start - LOOK_BACK : start + count * ROW + LOOK_AHEAD]


def session(audio: np.ndarray, ended: bool = True) -> SessionAudio:
    held = SessionAudio(SHAPE)
    held.add(audio.tobytes())
    if ended:
        held.end()
    return held


# Rows of a session


def test_the_shape_is_that_of_the_tokenizer() -> None:
    tokenizer: Any = MistralTokenizer.from_file(str(PICO / "tekken.json"))
    assert SessionShape.of(tokenizer.instruct_tokenizer.audio_encoder.audio_config) == SHAPE
    assert SHAPE.prompt == model.PROMPT_TOKENS


@pytest.mark.parametrize("n", LENGTHS)
def test_a_session_that_has_ended_has_the_rows_of_an_upload(n: int) -> None:
    assert SHAPE.total_rows(n) == model.n_tokens(n) == session(noise(n)).rows


@pytest.mark.parametrize("n", LENGTHS)
def test_a_row_is_complete_with_the_last_sample_that_it_sees(n: int) -> None:
    rows = SHAPE.rows(n)

    def last_sample(row: int) -> int:
        return (row + 1 - SHAPE.left) * ROW + LOOK_AHEAD

    assert last_sample(rows - 1) <= n < last_sample(rows)
    assert rows == session(noise(n), ended=False).rows < SHAPE.total_rows(n)


def test_the_prompt_is_ready_with_its_last_sample() -> None:
    assert (SHAPE.rows(SHAPE.ready_samples), SHAPE.rows(SHAPE.ready_samples - 1)) == (SHAPE.prompt, SHAPE.prompt - 1)


# Its samples


@pytest.mark.parametrize("n", LENGTHS)
def test_parts_are_those_of_padded_audio(n: int) -> None:
    audio, chosen = noise(n), random.Random(n)
    held = session(audio)
    for _ in range(200):
        first = chosen.randrange(held.rows)
        count = chosen.randint(1, min(held.rows - first, 45))
        part = held.part(first, count)
        assert (part.first, part.rows, part.samples.dtype) == (first, count, np.int16)
        begin = max(first, SHAPE.left - 1)
        if (left := first + count - begin) > 0:
            np.testing.assert_array_equal(part.samples, padded(audio, begin, left))
        else:
            assert len(part.samples) == 0


def test_a_part_is_the_same_whatever_comes_after_it() -> None:
    audio, chosen = noise(20 * ROW), random.Random(0)
    whole, held = session(audio), SessionAudio(SHAPE)
    sent = 0
    while sent < len(audio):
        more = chosen.randint(0, 2 * ROW)
        held.add(audio[sent : sent + more].tobytes())
        sent += more
        for first in range(held.rows):
            count = held.rows - first
            np.testing.assert_array_equal(held.part(first, count).samples, whole.part(first, count).samples)


def taken(held: SessionAudio, first: int, count: int, window: int = AHEAD) -> tuple[int, int] | None:
    """(first row, rows) that a step has encoded, whose samples are checked."""
    part = held.next_part(first, count, window)
    if part is None:
        return None
    begin = max(part.first, SHAPE.left - 1)
    np.testing.assert_array_equal(part.samples, held.part(begin, part.first + part.rows - begin).samples)
    return part.first, part.rows


def test_a_session_at_the_pace_of_speech_has_one_row_encoded_a_step() -> None:
    audio, held = noise(20 * ROW), SessionAudio(SHAPE)
    held.add(audio[: SHAPE.ready_samples].tobytes())
    assert taken(held, 0, SHAPE.prompt) == (0, SHAPE.prompt)
    for row in range(SHAPE.prompt, SHAPE.prompt + 5):
        held.add(noise(ROW).tobytes())
        assert taken(held, row, 1) == (row, 1)


def test_the_padding_after_the_end_is_encoded_ahead() -> None:
    held = session(noise(20 * ROW))
    assert taken(held, 0, SHAPE.prompt) == (0, SHAPE.prompt)
    row, steps = SHAPE.prompt, []
    while row < held.rows:
        steps.append(taken(held, row, 1))
        row += 1
    assert held.rows == 69
    alone = [step for step in steps if step and step[1] == 1]
    assert steps[:1] + alone == [(39, 24), *((row, 1) for row in range(63, 69))]
    assert sum(step[1] for step in steps if step) == held.rows - SHAPE.prompt


def test_rows_are_encoded_again_for_a_request_that_was_preempted() -> None:
    held = session(noise(20 * ROW))
    assert taken(held, 0, 45) == (0, 45)
    held.encoded = 0
    assert taken(held, 0, 20) == (0, 24)
    assert taken(held, 20, 20) == (24, 16)


def test_no_row_beyond_the_window_is_encoded_ahead() -> None:
    held = session(noise(40 * ROW))
    for window, expected in ((0, (40, 1)), (7, (40, 1)), (8, (40, 8)), (17, (40, 16))):
        held.encoded = 40
        assert taken(held, 40, 1, window) == expected


def test_rows_that_are_not_complete() -> None:
    held = session(noise(10 * ROW), ended=False)
    with pytest.raises(ValueError, match=rf"rows 38 to 41 of a session with {held.rows}$"):
        held.part(38, 4)


def test_half_a_sample() -> None:
    held = SessionAudio(SHAPE)
    with pytest.raises(ValueError, match="3 bytes: expected an even number"):
        held.add(b"abc")
    assert (bytes(held.held), held.rows) == (b"", 0)


def test_audio_after_the_end() -> None:
    held = session(noise(ROW))
    with pytest.raises(ValueError, match="audio after the end"):
        held.add(b"ab")
    assert len(held.held) == ROW * BYTES


# Messages to the scheduler


@pytest.fixture
def scheduler() -> LiveSessions:
    held = LiveSessions.__new__(LiveSessions)
    held.shape, held.most_sessions = SHAPE, 2
    held.sessions, held.audio_of, held.requests = {}, {}, {}
    return held


def test_as_many_sessions_as_the_option_says(scheduler: LiveSessions) -> None:
    assert scheduler.live([["open", name] for name in "abc"]) == {"c": "max_live_sessions is 2"}
    assert scheduler.live([["close", "a"], ["open", "c"]]) == {}
    assert [*scheduler.sessions] == ["b", "c"]


def test_one_that_goes_on_takes_its_own_place(scheduler: LiveSessions) -> None:
    scheduler.live([["open", "a"], ["open", "b"]])
    assert scheduler.live([["close", "a"], ["open", "a again"], ["open", "d"]]) == {"d": "max_live_sessions is 2"}


def test_a_session_is_opened_once(scheduler: LiveSessions) -> None:
    scheduler.live([["open", "a"], ["audio", "a", b"abcd"]])
    assert [*scheduler.live([["open", "a"]])] == ["a"]
    assert scheduler.sessions["a"].held == b"abcd"


def test_messages_that_are_refused(scheduler: LiveSessions) -> None:
    scheduler.live([["open", "a"], ["open", "b"]])
    refused = scheduler.live([["audio", "c", b""], ["end", "d"], ["audio", "a", b"abc"], ["sing", "b"], ["close", "e"]])
    assert refused == {
        "c": "unknown session",
        "d": "unknown session",
        "a": "3 bytes: expected an even number",
        "b": "unknown message 'sing'",
    }


def test_a_request_ends_with_the_last_row_of_its_session(scheduler: LiveSessions) -> None:
    scheduler.live([["open", "a"], ["audio", "a", noise(20 * ROW).tobytes()]])
    request = scheduler.requests["r"] = SimpleNamespace(num_prompt_tokens=SHAPE.prompt, max_tokens=1000)
    scheduler.audio_of["r"] = scheduler.sessions["a"]
    scheduler.live([["end", "a"]])
    assert request.max_tokens == model.n_tokens(20 * ROW) - SHAPE.prompt + 1
    assert scheduler.live([["audio", "a", b"ab"]]) == {"a": "audio after the end"}


def test_a_request_waits_for_the_row_of_its_next_token(scheduler: LiveSessions) -> None:
    scheduler.live([["open", "a"], ["audio", "a", noise(SHAPE.ready_samples).tobytes()]])
    scheduler.audio_of["r"] = scheduler.sessions["a"]
    request = SimpleNamespace(request_id="r", num_tokens=SHAPE.prompt, num_output_placeholders=0)
    assert not scheduler.waits(request)
    request.num_output_placeholders = 1
    assert scheduler.waits(request)
    scheduler.live([["audio", "a", noise(ROW).tobytes()]])
    assert not scheduler.waits(request)
    assert not scheduler.waits(SimpleNamespace(request_id="an upload"))
