"""What the guard reads from vLLM's live objects and changes in them."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from voxtral_serve import shims
from voxtral_serve.engine import names
from voxtral_serve.guard import server
from voxtral_serve.guard.limits import LIMITS


def test_tokens_are_recorded_for_who_asks() -> None:
    """Of one request and no other; a generator that is left is closed."""
    closed = []

    async def generate(pieces: Sequence[list[int]]) -> AsyncIterator[Any]:
        try:
            for piece in pieces:
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=piece)])
        finally:
            closed.append(True)

    recorded = server.recording(generate)

    async def consume(most: int) -> int:
        count = 0
        outputs = recorded([[1, 2], [3], [4]])
        async for _ in outputs:
            count += 1
            if count == most:
                await outputs.aclose()
                break
        return count

    async def run() -> tuple[list[int], list[int]]:
        async def request(most: int) -> list[int]:
            with server.recorded_tokens() as tokens:
                await consume(most)
            return tokens

        first, second = await asyncio.gather(request(9), request(2))
        assert await consume(9) == 3  # nobody asked
        return first, second

    assert asyncio.run(run()) == ([1, 2, 3, 4], [1, 2, 3])
    assert len(closed) == 3


class Uvicorn:
    def __init__(self) -> None:
        self.config = SimpleNamespace(timeout_graceful_shutdown=None)
        self.should_exit = self.force_exit = self.stopped = False

    async def shutdown(self, sockets: Any = None) -> None:
        self.stopped = True


def test_a_dead_engine_ends_the_server_with_an_error() -> None:
    for errored in (False, True):
        uvicorn, engine = Uvicorn(), SimpleNamespace(errored=False)
        server.end_with_engine(uvicorn, engine)
        engine.errored = errored
        if errored:
            with pytest.raises(server.EngineDeadError, match="vLLM's engine has died"):
                asyncio.run(uvicorn.shutdown(sockets=[]))
        else:
            asyncio.run(uvicorn.shutdown(sockets=[]))
        assert uvicorn.stopped


def test_a_start_that_fails_ends_with_its_reason() -> None:
    uvicorn = Uvicorn()
    server.abort_start(uvicorn, AttributeError("no attribute 'errored'"))
    assert uvicorn.should_exit
    with pytest.raises(shims.PatchError, match=r"voxtral_serve\.guard has drifted on .*: AttributeError: no attribute"):
        asyncio.run(uvicorn.shutdown())
    assert uvicorn.stopped


def test_what_cannot_be_read_changes_nothing() -> None:
    uvicorn = Uvicorn()
    stock = uvicorn.shutdown
    with pytest.raises(AttributeError, match="errored"):
        server.end_with_engine(uvicorn, SimpleNamespace())
    with pytest.raises(AttributeError, match="vllm_config"):
        server.finish_requests(uvicorn, SimpleNamespace())
    assert uvicorn.shutdown == stock and uvicorn.config.timeout_graceful_shutdown is None


def test_vllm_takes_files_as_large_as_decoded_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "25")
    handler = SimpleNamespace(max_audio_filesize_mb=25)
    server.lift_file_limit(SimpleNamespace(openai_serving_transcription=handler, openai_serving_translation=None))
    assert handler.max_audio_filesize_mb == 257
    assert os.environ["VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"] == "257"


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
    model = SimpleNamespace(architecture=architecture, max_model_len=max_model_len)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model), input_processor=SimpleNamespace(tokenizer=tokenizer)
    )
    served = SimpleNamespace(sample_rate=16000.0, allow_audio_chunking=chunking, max_audio_clip_s=30)
    return SimpleNamespace(engine_client=engine, openai_serving_transcription=SimpleNamespace(asr_config=served))


@pytest.mark.parametrize("architecture", names.REALTIME)
def test_the_longest_clip_of_voxtral_realtime_fills_the_context_with_its_padding(architecture: str) -> None:
    assert server._longest(state_of(architecture, 1024)) == (16000, LIMITS.bounds, Fraction((1024 - 49) * 1280, 16000))


def test_the_longest_clips_of_other_models() -> None:
    rate, chat_bounds, piece_s = server._longest(state_of("VoxtralForConditionalGeneration", 4096))
    assert (rate, chat_bounds.seconds, piece_s) == (16000, 300, 150)
    assert chat_bounds.because.startswith("its max_model_len is 4096 tokens, and audio takes 375 for each 30 s")
    assert server._longest(state_of("WhisperForConditionalGeneration", 448, True)) == (16000, LIMITS.bounds, 30)
