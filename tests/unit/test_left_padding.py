"""The rows of the left padding are those of any clip, so a clip must have it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from places import PICO

from voxtral_serve.engine.encode_once import PaddedClip
from voxtral_serve.engine.session import SessionShape


@pytest.fixture(scope="module")
def processor() -> Any:
    """vLLM's processor with what the check needs of it: pico's tokenizer."""
    instruct = MistralTokenizer.from_file(str(PICO / "tekken.json")).instruct_tokenizer
    made = object.__new__(PaddedClip)
    made.info = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(instruct=instruct))  # type: ignore[assignment]
    return made


def silence(processor: Any) -> int:
    return SessionShape.of(processor.info.get_tokenizer().instruct.audio_encoder.audio_config).silence


def test_the_silence_ends_a_row_before_the_audio(processor: Any) -> None:
    """31 of the 32 positions of left padding: the last one sees the first 40 samples of the audio."""
    assert silence(processor) == 31 * 1280


@pytest.mark.parametrize("beginning", [31 * 1280, 31 * 1280 + 5, 32 * 1280])
def test_a_padded_clip(processor: Any, beginning: int) -> None:
    audio = np.ones(64 * 1280, np.float32)
    audio[:beginning] = 0
    fields = processor._get_mm_fields_config({"audio_arrays": [audio]}, {})
    assert set(fields) == {"audio_arrays"}


@pytest.mark.parametrize("at", [0, 1000, 31 * 1280 - 1])
def test_a_clip_without_its_padding_is_refused(processor: Any, at: int) -> None:
    audio = np.zeros(64 * 1280, np.float32)
    audio[at] = 1e-6
    with pytest.raises(ValueError, match="sound in its first 39680 samples: expected the zeros of its left padding"):
        processor._get_mm_fields_config({"audio_arrays": [np.zeros(64 * 1280, np.float32), audio]}, {})
