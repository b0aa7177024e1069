"""A request for a whole clip ends where the clip ends.

A clip has N token positions of 80 ms, its padding included, and position i of the LM's input sees the clip's row i. So
the token sampled at position N - 1 is the last one with audio behind it. Stock vLLM has no such end: where the model
says no EOS it decodes on until the context is full, with a warning in the log for each token.

The patch wraps vLLM's InputProcessor.process_inputs, which every request passes in the API server and in the offline
`LLM`, whatever its endpoint and its sampling options. `/v1/realtime`, where audio arrives in pieces, is left as it is.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

from voxtral_serve.engine import names
from voxtral_serve.engine.clip_length import OPTION, ClipLength, clip_positions
from voxtral_serve.shims import Patch


class ClipEnd(Patch):
    name = "clip_end"
    does = "a request for one whole clip generates no token beyond the clip's last position"
    target = "vllm.v1.engine.input_processor"
    breaks = "WARNING ... empty multimodal embeddings (for each token up to max_model_len, where the model says no EOS)"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "https://github.com/vllm-project/vllm/issues/52926"
    until = "vLLM ends a transcription with its clip"
    expires = "tests/patches/test_clip_end.py::test_stock_vllm_decodes_past_the_clip"
    used_by = "the models of Voxtral Realtime"

    def probe(self, module: Any) -> bool:
        from vllm import exceptions
        from vllm.multimodal import inputs
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        processor = module.InputProcessor
        stock = getattr(processor, "process_inputs", None)
        signature = inspect.signature(stock) if stock else inspect.Signature()
        expected: dict[str, tuple[set[str], set[str]]] = {  # what is used of each, and what it has
            "InputProcessor.process_inputs": ({"prompt", "params", "resumable"}, set(signature.parameters)),
            "EngineCoreRequest": ({"prompt_token_ids", "mm_features", "sampling_params"}, _fields(EngineCoreRequest)),
            "SamplingParams": ({"max_tokens", "min_tokens"}, _fields(SamplingParams)),
            "MultiModalFeatureSpec": ({"modality", "mm_position"}, _fields(inputs.MultiModalFeatureSpec)),
            "PlaceholderRange": ({"length"}, _fields(inputs.PlaceholderRange)),
            "vllm.exceptions": ({"VLLMValidationError"}, set(vars(exceptions))),
        }
        lacking = [
            f"{name} has no {', '.join(sorted(used - has))}" for name, (used, has) in expected.items() if used - has
        ]
        if lacking:
            raise LookupError("; ".join(lacking))
        return not hasattr(stock, "ends_with_clip")

    def apply(self, module: Any) -> None:
        processor = module.InputProcessor
        stock = processor.process_inputs
        signature = inspect.signature(stock)

        @wraps(stock)
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = signature.bind(self, *args, **kwargs).arguments
            if self.model_config.architecture not in names.REALTIME or call.get("resumable"):
                return stock(self, *args, **kwargs)
            # Before vLLM's own check, whose message is about its encoder cache. The length of a clip in a prompt that
            # is not rendered yet is known only afterwards.
            prompt = call["prompt"]
            if isinstance(prompt, dict):
                for clip in (prompt.get("mm_placeholders") or {}).get("audio", ()):
                    refuse_beyond_context(self, clip.length)
            request = stock(self, *args, **kwargs)
            end_with_clip(self, request)
            return request

        process_inputs.ends_with_clip = True  # type: ignore[attr-defined]
        processor.process_inputs = process_inputs


def _fields(record: Any) -> set[str]:
    """Of a msgspec.Struct or a dataclass."""
    names = getattr(record, "__struct_fields__", None) or (field.name for field in dataclasses.fields(record))
    return set(names)


def refuse_beyond_context(processor: Any, positions: int) -> None:
    """Raise vLLM's error for status 400 if a clip has more token positions than the context.

    A clip of exactly max_model_len positions is taken, as stock vLLM takes it, though it lacks one token: vLLM ends a
    request once prompt and text together are max_model_len tokens, one before the token sampled at the clip's last
    position. By then 1.3 s of padding have passed: that token is a pad or EOS, unless the text ran ten tokens late.
    """
    from vllm.exceptions import VLLMValidationError

    model = processor.model_config
    context = clip_positions(model)
    if positions <= context:
        return
    clip, name = (
        ClipLength.of_tokenizer(processor.tokenizer),
        "max_model_len" if context == model.max_model_len else OPTION,
    )
    raise VLLMValidationError(
        f"the clip lasts {clip.seconds(positions):.2f} s and this server takes at most {clip.seconds(context):.2f} s: "
        f"its {name} is {context} tokens of {clip.position_ms:.0f} ms, {clip.padding} of them padding. Send a "
        f"shorter clip, or set {name} to {positions} or more in the server's config"
    )


def end_with_clip(processor: Any, request: Any) -> None:
    """Have a request for one whole clip end with the clip; any other is left as it is.

    Raises vLLM's error for status 400 if the prompt is past the clip's end already, as in the late steps of a beam
    search: the stock model then ends the whole engine, over rows that it does not have.
    """
    from vllm.exceptions import VLLMValidationError

    features, params = request.mm_features or [], request.sampling_params
    if len(features) != 1 or features[0].modality != "audio" or params is None or request.prompt_token_ids is None:
        return
    (clip,) = features
    positions, prompt = clip.mm_position.length, len(request.prompt_token_ids)
    refuse_beyond_context(processor, positions)
    if prompt > positions:
        raise VLLMValidationError(
            f"{prompt} tokens of prompt for a clip of {positions} tokens: its text has ended before. Beam search goes "
            "there unless max_completion_tokens keeps it within the clip"
        )
    params.max_tokens = min(params.max_tokens, positions - prompt + 1)
    # vLLM 0.20.0 ends no request before min_tokens, not even at max_tokens.
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    if processor.model_config.architecture == names.ENCODE_ONCE:
        # That model holds all rows itself once the prompt is computed; vLLM's encoder cache need not.
        short = dataclasses.replace(clip.mm_position, length=prompt)
        request.mm_features = [dataclasses.replace(clip, mm_position=short)]
