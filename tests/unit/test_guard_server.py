"""What the guard reads from vLLM's live objects."""

import asyncio
import json
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from guarding import RULES

from voxtral_serve.engine import names
from voxtral_serve.engine.session import SessionShape
from voxtral_serve.guard import Guard, about, server
from voxtral_serve.guard.limits import LIMITS
from voxtral_serve.guard.live.cuts import ContextError


def test_a_start_that_fails_ends_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn exits, with a status that is not 0, before it listens."""

    async def never(*_: Any) -> None:
        raise AssertionError("vLLM's application is not started")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Guard(never)(scope | {"app": SimpleNamespace(state=SimpleNamespace())}, receive, send)

    with pytest.raises(SystemExit) as ended:
        asyncio.run(uvicorn.Server(uvicorn.Config(app, port=0, log_config=None)).serve())
    assert ended.value.code == 3
    assert "PatchError: voxtral_serve.guard has drifted on vllm" in caplog.text
    assert "AttributeError: 'types.SimpleNamespace' object has no attribute 'engine_client'" in caplog.text


def state_of(architecture: str, max_model_len: int, chunking: bool = False) -> Any:
    """vLLM's state, with the audio configuration of Voxtral Realtime and of Voxtral Mini 3B in one."""
    audio = SimpleNamespace(
        n_left_pad_tokens=32,
        n_right_pad_tokens=lambda: 17,
        raw_audio_length_per_tok=1280,
        sampling_rate=16000,
        chunk_length_s=30.0,
        frame_rate=12.5,
    )
    tokenizer = SimpleNamespace(instruct=SimpleNamespace(audio_encoder=SimpleNamespace(audio_config=audio)))
    model = SimpleNamespace(architecture=architecture, max_model_len=max_model_len, hf_config=SimpleNamespace())
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model), input_processor=SimpleNamespace(tokenizer=tokenizer)
    )
    served = SimpleNamespace(sample_rate=16000.0, allow_audio_chunking=chunking, max_audio_clip_s=30)
    return SimpleNamespace(engine_client=engine, openai_serving_transcription=SimpleNamespace(asr_config=served))


@pytest.mark.parametrize("architecture", names.REALTIME)
def test_the_longest_clip_of_voxtral_realtime_fills_the_context_with_its_padding(architecture: str) -> None:
    assert server._longest(state_of(architecture, 1024)) == (16000, LIMITS.bounds, Fraction((1024 - 49) * 1280, 16000))


@pytest.mark.parametrize("delay_ms", [480, 2400])
def test_a_delay_of_uploads_needs_room(delay_ms: int) -> None:
    """Of a second of audio, which is 12.5 positions."""
    shape = SessionShape(32, 6, 17, 1280, 16000)
    needed = 13 + 49 + delay_ms // 80 - 6
    for positions in (needed, needed - 1):
        piece_s = Fraction((positions - 49) * 1280, 16000)
        rules = RULES._replace(shape=shape, delay_ms=delay_ms, piece_s=piece_s)
        if positions == needed:
            server._check_delay(rules, positions)
            continue
        with pytest.raises(ContextError) as refused:
            server._check_delay(rules, positions)
        message = f"upload_delay_ms is {delay_ms}, and uploads have {positions} positions: expected at least {needed}."
        assert server.drifted(refused.value).startswith(message)


def test_the_longest_clips_of_other_models() -> None:
    rate, chat_bounds, piece_s = server._longest(state_of("VoxtralForConditionalGeneration", 4096))
    assert (rate, chat_bounds.seconds, piece_s) == (16000, 300, 150)
    assert chat_bounds.because.startswith("its max_model_len is 4096 tokens, and audio takes 375 for each 30 s")
    assert server._longest(state_of("WhisperForConditionalGeneration", 448, True)) == (16000, LIMITS.bounds, 30)


def test_what_a_server_says_of_itself() -> None:
    found = about.about(["voxtral", "whisper-1"], RULES, LIMITS, 64, 16)
    assert json.loads(json.dumps(found)) == found
    assert (found["models"], found["capabilities"]["live"]) == (["voxtral", "whisper-1"], True)
    assert found["capabilities"]["word_times"] is True
    expected = {"file_bytes": LIMITS.file_bytes, "clip_s": LIMITS.decode_s, "in_flight": 64, "live_sessions": 16}
    assert found["limits"] == {**expected, "live_idle_s": LIMITS.live_idle_s, "live_session_s": None}
    without = about.about(["voxtral"], RULES, LIMITS, 64, None)
    assert (without["capabilities"]["live"], without["limits"]["live_sessions"]) == (False, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["vllm", "serve", "--config", "/etc/voxtral/fast.yaml", "--port", "1"], "fast.yaml"),
        (["vllm", "serve", "--config=profiles/long.yaml"], "long.yaml"),
        (["vllm", "serve", "model", "--configuration", "x.yaml"], None),
        ([], None),
    ],
)
def test_the_profile_is_the_configs_name(arguments: list[str], expected: str | None) -> None:
    assert about.profile(arguments) == expected
