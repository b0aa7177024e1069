"""Text ends where the clip ends: no request for a whole clip decodes past the clip's last token position.

A clip has N token positions of 80 ms, its padding included, and position i of the LM's input sees the clip's row i. So
the token sampled at position N - 1 is the last that any audio speaks for. Stock vLLM knows no such end: where the model
says no EOS it decodes on, over nothing, until the context is full, with a warning in the log for each token.

`install` wraps vLLM's InputProcessor.process_inputs, which every request passes in the API server and in the offline
`LLM`, whatever its endpoint and its sampling options. `/v1/realtime`, where audio arrives in pieces, is left as it is.
"""

import dataclasses
import inspect
from functools import wraps
from typing import Any

from voxtral_serve import shims

ENCODE_ONCE = "VoxtralRealtimeEncodeOnce"
ARCHITECTURES = ("VoxtralRealtimeGeneration", "VoxtralRealtimeForConditionalGeneration", ENCODE_ONCE)
MARK = "voxtral_serve_clip_end"


def install() -> None:
    """Wrap this process' InputProcessor; twice does no harm. Raises PatchError where it is not as expected."""
    from vllm import exceptions
    from vllm.multimodal import inputs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

    processor: Any = InputProcessor
    if MARK in vars(processor):
        return
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
    lacking = [f"{name} has no {', '.join(sorted(used - has))}" for name, (used, has) in expected.items() if used - has]
    if stock is None or lacking:
        raise shims.PatchError(
            f"patch clip_end (of vllm.v1.engine.input_processor) has drifted on vllm {shims.installed('vllm')}: "
            f"{'; '.join(lacking)}. {shims.ADVICE}"
        )

    @wraps(stock)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs).arguments
        if self.model_config.architecture not in ARCHITECTURES or call.get("resumable"):
            return stock(self, *args, **kwargs)
        # Before vLLM's own check, whose message is about its encoder cache. The length of a clip in a prompt that is
        # not rendered yet is known only afterwards.
        prompt = call["prompt"]
        if isinstance(prompt, dict):
            for clip in (prompt.get("mm_placeholders") or {}).get("audio", ()):
                refuse_beyond_context(self, clip.length)
        request = stock(self, *args, **kwargs)
        end_with_clip(self, request)
        return request

    processor.process_inputs = process_inputs
    setattr(processor, MARK, True)


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

    context = processor.model_config.max_model_len
    if positions <= context:
        return
    audio = processor.tokenizer.instruct.audio_encoder.audio_config
    padding = audio.n_left_pad_tokens + audio.n_right_pad_tokens()
    lasts, longest = (max(0, count - padding) / audio.frame_rate for count in (positions, context))
    raise VLLMValidationError(
        f"the clip lasts {lasts:.2f} s and this server takes at most {longest:.2f} s: its max_model_len is {context} "
        f"tokens of {1000 / audio.frame_rate:.0f} ms, {padding} of them padding. Send a shorter clip, or set "
        f"max_model_len to {positions} or more in the server's config"
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
    if processor.model_config.architecture == ENCODE_ONCE:
        # That model holds all rows itself once the prompt is computed; vLLM's encoder cache need not.
        short = dataclasses.replace(clip.mm_position, length=prompt)
        request.mm_features = [dataclasses.replace(clip, mm_position=short)]
