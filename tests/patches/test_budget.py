"""The token budget that the third patch answers with comes from the context, on the real processor."""

from types import SimpleNamespace

import pytest
from places import PICO
from transformers.models.voxtral_realtime.feature_extraction_voxtral_realtime import VoxtralRealtimeFeatureExtractor
from transformers.models.voxtral_realtime.processing_voxtral_realtime import VoxtralRealtimeProcessor
from transformers.tokenization_mistral_common import MistralCommonBackend

from voxtral_serve.shims import TokenBudget


@pytest.mark.parametrize(("context", "budget"), [(512, 480), (1024, 992)])
def test_the_budget_is_the_context_less_the_left_padding(
    context: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = VoxtralRealtimeProcessor(
        VoxtralRealtimeFeatureExtractor(), MistralCommonBackend(str(PICO / "tekken.json"))
    )

    class Info:
        ctx = SimpleNamespace(model_config=SimpleNamespace(max_model_len=context))

        def get_hf_processor(self, **_: object) -> VoxtralRealtimeProcessor:
            return processor

    # So that what the patch sets on the class is taken back after the test.
    monkeypatch.setattr(VoxtralRealtimeProcessor, "_get_num_multimodal_tokens", None, raising=False)
    TokenBudget().apply(SimpleNamespace(MultiModalProcessingInfo=Info))
    answer = Info().get_hf_processor()._get_num_multimodal_tokens(image_sizes=([10_000, 10_000],))
    assert answer["num_image_tokens"] == [budget]
