"""Audio of live sessions in the engine: rows and samples of one session, and what the scheduler says to messages."""

import contextlib
import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from livefakes import SHAPE
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from places import PICO

from mistral_layout import audio as layout
from pico import model
from voxtral_serve.engine.live_audio import AHEAD, BYTES, LOOK_BACK, SessionAudio
from voxtral_serve.engine.live_scheduler import RUNNING_LIMITS, LiveSessions
from voxtral_serve.engine.session import DELAYS, LOOK_AHEAD, NAME, SessionShape

ROW = SHAPE.samples
SHAPES = {delay: SHAPE.with_delay(delay) for delay in DELAYS}
POSITIONS = 512
A, B, C, D = (f"{number:032x}-0" for number in range(4))  # sessions
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


def session(audio: np.ndarray, ended: bool = True, shape: SessionShape = SHAPE) -> SessionAudio:
    held = SessionAudio(shape, POSITIONS)
    held.add(audio.tobytes())
    if ended:
        held.end()
    return held


# Rows of a session


def test_the_shape_is_that_of_the_tokenizer() -> None:
    tokenizer: Any = MistralTokenizer.from_file(str(PICO / "tekken.json"))
    config = tokenizer.instruct_tokenizer.audio_encoder.audio_config
    assert SessionShape.of(config) == SHAPE
    assert SHAPE.prompt == model.PROMPT_TOKENS
    for delay, shape in SHAPES.items():
        delay_ms = delay * SHAPE.position_ms
        assert (shape.delay, shape.delay_ms) == (config.get_num_delay_tokens(delay_ms), delay_ms)
        assert shape.right == config.n_right_pad_tokens(delay_ms)
        assert shape == SessionShape.of(dataclasses.replace(config, transcription_delay_ms=delay_ms))


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


@pytest.mark.parametrize("delay", [1, 3, 12, 30])
def test_rows_of_another_delay(delay: int) -> None:
    shape = SHAPES[delay]
    assert shape.prompt == layout.prompt_tokens(delay)
    assert (shape.rows(shape.ready_samples), shape.rows(shape.ready_samples - 1)) == (shape.prompt, shape.prompt - 1)
    for n in LENGTHS:
        held = session(noise(n), shape=shape)
        assert held.rows == shape.total_rows(n) == layout.n_tokens(n, delay)
        assert session(noise(n), ended=False, shape=shape).rows == SHAPE.rows(n)
        part = held.part(held.rows - 3, 3)
        assert part.delay == delay == held.part(0, 1).delay
        np.testing.assert_array_equal(part.samples, padded(noise(n), held.rows - 3, 3))


@pytest.mark.parametrize("delay", [0, 31, -1, 6.0, "6", True])
def test_a_delay_that_no_session_has(delay: Any) -> None:
    with pytest.raises(ValueError, match=r"positions: expected 1 to 30$"):
        SHAPE.with_delay(delay)


def test_a_checkpoints_own_delay_is_always_valid() -> None:
    shape = SHAPE._replace(delay=40, right=51)
    assert shape.with_delay(40) == shape.with_delay_ms(3200) == shape.with_delay() == shape.with_delay_ms() == shape
    assert shape.with_delay_ms(480) == SHAPE


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
    whole, held = session(audio), SessionAudio(SHAPE, POSITIONS)
    sent = 0
    while sent < len(audio):
        more = chosen.randint(0, 2 * ROW)
        held.add(audio[sent : sent + more].tobytes())
        sent += more
        for first in range(held.rows):
            count = held.rows - first
            np.testing.assert_array_equal(held.part(first, count).samples, whole.part(first, count).samples)


def taken(
    held: SessionAudio, first: int, count: int, window: int = AHEAD, to_end: bool = True
) -> tuple[int, int] | None:
    """(first row, rows) that a step has encoded, whose samples are checked."""
    part = held.next_part(first, count, window, to_end)
    if part is None:
        return None
    begin = max(part.first, SHAPE.left - 1)
    np.testing.assert_array_equal(part.samples, held.part(begin, part.first + part.rows - begin).samples)
    return part.first, part.rows


def test_a_session_at_the_pace_of_speech_has_one_row_encoded_a_step() -> None:
    audio, held = noise(20 * ROW), SessionAudio(SHAPE, POSITIONS)
    held.add(audio[: SHAPE.ready_samples].tobytes())
    assert taken(held, 0, SHAPE.prompt) == (0, SHAPE.prompt)
    for row in range(SHAPE.prompt, SHAPE.prompt + 5):
        held.add(noise(ROW).tobytes())
        assert taken(held, row, 1) == (row, 1)


def test_the_padding_after_the_end_is_encoded_ahead() -> None:
    held = session(noise(20 * ROW))
    assert taken(held, 0, SHAPE.prompt) == (0, SHAPE.prompt)
    row, steps = SHAPE.prompt, {}
    while row < held.rows:
        assert not held.is_encoded or row > SHAPE.prompt + 6
        if step := taken(held, row, 1):
            steps[row] = step
        row += 1
    assert held.rows == 69
    assert steps == {39: (39, 24), 45: (63, 6)}  # the second one as soon as its last row is within the window
    assert held.is_encoded
    assert taken(held, 69, 16) is None  # drafts after the last row


def test_the_last_part_of_a_session_is_marked() -> None:
    held = session(noise(20 * ROW), ended=False)
    assert not held.part(held.rows - 2, 2).last
    held.end()
    assert [held.part(first, 2).last for first in (0, held.rows - 3, held.rows - 2)] == [False, False, True]


def test_without_drafts_the_last_rows_wait_for_their_steps() -> None:
    """Each row that is no part of a whole pass would be a pass of its own in the step in which the session ends."""
    for to_end, rows in ((False, 40), (True, 47)):
        held = session(noise(20 * ROW))
        held.encoded = held.rows - 47
        assert taken(held, held.encoded, 1, 60, to_end) == (held.rows - 47, rows)


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
    held = SessionAudio(SHAPE, POSITIONS)
    with pytest.raises(ValueError, match="3 bytes: expected an even number"):
        held.add(b"abc")
    assert (bytes(held.pcm), held.rows) == (b"", 0)


def test_audio_after_the_end() -> None:
    held = session(noise(ROW))
    with pytest.raises(ValueError, match="audio after the end"):
        held.add(b"ab")
    assert len(held.pcm) == ROW * BYTES


# Messages to the scheduler


@pytest.fixture
def scheduler() -> LiveSessions:
    held = LiveSessions.__new__(LiveSessions)
    held.shape, held.session_limit, held.positions = SHAPE, 2, POSITIONS
    held.sessions, held.audio_of, held.requests = {}, {}, {}
    held.full, held.untold, held.faults = "max_live_sessions is 2", set(), {}
    return held


def test_as_many_sessions_as_the_option_says(scheduler: LiveSessions) -> None:
    assert scheduler.live([["open", name] for name in (A, B, C)]) == {C: "max_live_sessions is 2"}
    assert scheduler.live([["close", A], ["open", C]]) == {}
    assert [*scheduler.sessions] == [B, C]


def test_one_that_goes_on_takes_its_own_place(scheduler: LiveSessions) -> None:
    scheduler.live([["open", A], ["open", B]])
    assert scheduler.live([["close", A], ["open", C], ["open", D]]) == {D: "max_live_sessions is 2"}


def test_a_session_is_opened_once(scheduler: LiveSessions) -> None:
    scheduler.live([["open", A], ["audio", A, b"abcd"]])
    assert [*scheduler.live([["open", A]])] == [A]
    assert scheduler.sessions[A].pcm == b"abcd"


def test_a_session_has_the_delay_that_it_is_opened_with(scheduler: LiveSessions) -> None:
    assert scheduler.live([["open", A, 30], ["open", B, None]]) == {}
    assert [held.shape for held in scheduler.sessions.values()] == [SHAPES[30], SHAPE]
    assert scheduler.live([["close", A], ["open", C, 31]]) == {C: "a delay of 31 positions: expected 1 to 30"}
    assert [*scheduler.sessions] == [B]


def test_messages_that_are_refused(scheduler: LiveSessions) -> None:
    scheduler.live([["open", A], ["open", B]])
    refused = scheduler.live([["audio", C, b""], ["end", D], ["audio", A, b"abc"], ["sing", B], ["close", "e"]])
    assert refused == {
        C: "unknown session",
        D: "unknown session",
        A: "3 bytes: expected an even number",
        B: f"unknown message ['sing', '{B}']: expected open, audio, end or close of a session",
    }


ODD = [None, 7, 2.5, True, "x" * 10**6, b"open", [], [[]], {}, {"open": A}, ["x"], [A], object()]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd!r:.20}")
def test_no_message_raises(scheduler: LiveSessions, odd: Any) -> None:
    """Whatever stands in the place of a message, its kind, its session or its content. Others are taken."""
    scheduler.session_limit = 9
    messages = [odd, [odd], [odd, A], [odd, odd], *([kind, odd] for kind in ("open", "audio", "end", "close"))]
    messages += [["open", C, odd], ["audio", A, odd], ["end", A, odd], ["close", A, odd]]
    refused = scheduler.live([["open", A], *messages, ["open", B], ["audio", B, b"ab"]])
    assert all(isinstance(text, str) for pair in refused.items() for text in pair)
    assert (A in refused, B in refused, scheduler.sessions[B].pcm) == (True, False, b"ab")
    assert A in scheduler.sessions
    assert isinstance(scheduler.live(odd), dict)


@pytest.mark.parametrize("name", ["", "x", A[:-2], "A" * 32 + "-0", A + "0" * 9, f" {A}", A + "\n", "ä" * 34])
def test_a_name_that_a_client_could_choose(scheduler: LiveSessions, name: str) -> None:
    refused = scheduler.live([["open", name]])
    assert [*refused] == [name] and f"expected {NAME.pattern}" in refused[name]
    assert scheduler.sessions == {}


def test_a_session_has_no_more_audio_than_a_request_can_use(scheduler: LiveSessions) -> None:
    most = (POSITIONS - SHAPE.left) * ROW
    scheduler.live([["open", A], ["audio", A, bytes(2 * (most - 1))]])
    assert scheduler.live([["audio", A, bytes(4)]]) == {A: f"{most + 1} samples: a request has at most {most}"}
    assert scheduler.live([["audio", A, bytes(2)]]) == {}


def test_a_request_ends_with_the_last_row_of_its_session(scheduler: LiveSessions) -> None:
    scheduler.live([["open", A], ["audio", A, noise(20 * ROW).tobytes()]])
    request = scheduler.requests["r"] = SimpleNamespace(num_prompt_tokens=SHAPE.prompt, max_tokens=1000)
    scheduler.audio_of["r"] = scheduler.sessions[A]
    scheduler.sessions[A].request = "r"
    scheduler.live([["end", A]])
    assert request.max_tokens == model.n_tokens(20 * ROW) - SHAPE.prompt + 1
    assert scheduler.live([["audio", A, b"ab"]]) == {A: "audio after the end"}


def test_a_request_waits_for_the_row_of_its_next_token(scheduler: LiveSessions) -> None:
    scheduler.live([["open", A], ["audio", A, noise(SHAPE.ready_samples).tobytes()]])
    scheduler.audio_of["r"] = scheduler.sessions[A]
    request = SimpleNamespace(request_id="r", num_tokens=SHAPE.prompt, num_output_placeholders=0)
    assert not scheduler.waits(request)
    request.num_output_placeholders = 1
    assert scheduler.waits(request)
    scheduler.live([["audio", A, noise(ROW).tobytes()]])
    assert not scheduler.waits(request)
    assert not scheduler.waits(SimpleNamespace(request_id="an upload"))


def test_a_session_that_has_ended_waits_for_its_last_token_only(scheduler: LiveSessions) -> None:
    """Its drafts count as tokens while their step is under way."""
    scheduler.live([["open", A], ["audio", A, noise(SHAPE.ready_samples).tobytes()], ["end", A]])
    audio = scheduler.audio_of["r"] = scheduler.sessions[A]
    request = SimpleNamespace(request_id="r", num_tokens=audio.rows - 1, num_output_placeholders=16)
    assert not scheduler.waits(request)
    request.num_tokens += 1
    assert scheduler.waits(request)
    request.num_output_placeholders = 0
    assert not scheduler.waits(request)


class Stepping:
    """vLLM's scheduler, as far as it decides on a step: `seen` are its running requests and its limits of them."""

    def get_request_counts(self: Any) -> tuple[int, int]:
        return len(self.running), 0

    def schedule(self: Any, *, fails: bool) -> Any:
        self.seen = self.running, [getattr(self, name) for name in self.running_limits]
        if fails:
            raise RuntimeError("no step")
        return SimpleNamespace(num_scheduled_tokens={})


class Leaving(LiveSessions, Stepping):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("limits", [RUNNING_LIMITS, RUNNING_LIMITS[:1]])  # of vLLM 0.32.0, of 0.20.0
def test_a_step_is_decided_without_those_that_wait(scheduler: Any, limits: tuple[str, ...], fails: bool) -> None:
    scheduler.__class__ = Leaving
    scheduler.live([["open", A], ["audio", A, noise(SHAPE.ready_samples).tobytes()]])
    scheduler.audio_of["r"] = scheduler.sessions[A]
    waits = SimpleNamespace(request_id="r", num_tokens=SHAPE.prompt, num_output_placeholders=1, num_preemptions=0)
    upload = SimpleNamespace(request_id="an upload")
    scheduler.running, scheduler.preempted, scheduler.running_limits = [upload, waits], {}, limits
    vars(scheduler).update(dict.fromkeys(limits, 64), max_num_scheduled_tokens=64)
    with pytest.raises(RuntimeError, match="no step") if fails else contextlib.nullcontext():
        scheduler.schedule(fails=fails)
    assert scheduler.seen == ([upload], [63] * len(limits))
    assert scheduler.running == [waits, upload]
    assert [getattr(scheduler, name) for name in limits] == [64] * len(limits)
