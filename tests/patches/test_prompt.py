"""The encode-once model's prompt for a clip is that of vLLM's own model, sample by sample."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from places import PICO
from vllm.model_executor.models import voxtral_realtime
from vllm.tokenizers import get_tokenizer

from mistral_layout import audio as layout
from pico import mel, model
from voxtral_serve.engine import encode_once


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models ask vLLM for the checkpoint's tokenizer by a config, which there is none of here."""
    tokenizer = get_tokenizer(str(PICO), tokenizer_mode="mistral")
    for module in (voxtral_realtime, encode_once):
        monkeypatch.setattr(module, "cached_tokenizer_from_config", lambda _: tokenizer)


def asking(audio: np.ndarray) -> Any:
    return SimpleNamespace(
        audio=audio.copy(),
        model_config=SimpleNamespace(model="pico"),
        stt_config=SimpleNamespace(sample_rate=16000),
        language=None,
    )


def prompt(model: Any, audio: np.ndarray) -> Any:
    return model.get_generation_prompt(asking(audio))


@pytest.mark.parametrize("samples", [1, 160, 12345, 16000, 176001])
@pytest.mark.parametrize("loudness", [1e-5, 0.1, 1.0, 3.0], ids=["silent", "speech", "full", "clipped"])
def test_the_prompt_is_vllms_own(samples: int, loudness: float) -> None:
    audio = (np.random.default_rng(samples).standard_normal(samples) * loudness).astype(np.float32)
    audio[: samples // 2 : 7] = np.sign(audio[: samples // 2 : 7])  # the very ends of the range
    ours = prompt(encode_once.VoxtralRealtimeEncodeOnce, audio)
    theirs = prompt(voxtral_realtime.VoxtralRealtimeGeneration, audio)
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    (waveform, rate), (expected, expected_rate) = (each["multi_modal_data"]["audio"] for each in (ours, theirs))
    assert rate == expected_rate
    assert waveform.dtype == expected.dtype
    np.testing.assert_array_equal(waveform, expected)


@pytest.mark.parametrize("delay", [1, 6, 30])
def test_the_prompt_of_another_delay_is_the_references(delay: int) -> None:
    audio = np.full(12345, 0.25, np.float32)
    found: Any = encode_once.VoxtralRealtimeEncodeOnce.prompt_with_delay(asking(audio), 80 * delay)
    assert found["prompt_token_ids"] == [model.BOS] + [model.STREAMING_PAD] * (layout.prompt_tokens(delay) - 1)
    np.testing.assert_array_equal(found["multi_modal_data"]["audio"][0], mel.pad_audio(audio, delay))
