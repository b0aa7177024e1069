"""The clip that vLLM encodes at its start, to see how much memory that takes."""

from types import SimpleNamespace
from typing import Any

import pytest
from places import PICO
from vllm.tokenizers.mistral import MistralTokenizer

from pico import model
from voxtral_serve.engine.encode_once import OneClip


@pytest.mark.parametrize("context", [64, 512, 45088])
def test_it_fills_the_context_and_no_more(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's rotary table ends there, and vLLM's kernels read past it without a word."""
    monkeypatch.setattr(OneClip, "get_tokenizer", lambda _: MistralTokenizer.from_pretrained(str(PICO)))
    settings: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=context, hf_config=SimpleNamespace()))
    assert model.n_tokens(OneClip(settings).get_max_audio_array_len()) == context
