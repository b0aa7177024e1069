"""End a request for a whole clip at the end of the clip.

A clip has N token positions of 80 ms, including its padding. Position i of the language model's input gets row i of the
clip, so the token sampled at position N - 1 is the last one that has audio. Stock vLLM does not stop there: if the
model generates no EOS, it decodes until the context is full and logs a warning for each token.

The patch wraps vLLM's InputProcessor.process_inputs. Every request passes it, in the API server and in the offline
`LLM`, for all endpoints and sampling options. `/v1/realtime` is not changed, because its audio arrives in pieces.

The encode-once model adds the rows of a request's audio, so a request has either one clip or, with live sessions, the
name of a session. All others are refused here with status 400: the API server is the place that can say so.
"""

import dataclasses
import inspect
from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

from voxtral_serve.engine import names, session
from voxtral_serve.engine.clip_length import OPTION, ClipLength, clip_positions
from voxtral_serve.engine.session import NAME, SESSION, SessionShape
from voxtral_serve.shims import Patch


class ClipEnd(Patch):
    name = "clip_end"
    does = "ends a request for one whole clip at the clip's last token position"
    target = "vllm.v1.engine.input_processor"
    breaks = (
        "WARNING ... empty multimodal embeddings (for each token up to max_model_len, if the model generates no EOS)"
    )
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "https://github.com/vllm-project/vllm/issues/52926"
    until = "vLLM ends a transcription at the end of the clip"
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
        expected: dict[str, tuple[set[str], set[str]]] = {  # attributes that are used, and attributes that exist
            "InputProcessor.process_inputs": ({"prompt", "params", "resumable"}, set(signature.parameters)),
            "EngineCoreRequest": ({"prompt_token_ids", "mm_features", "sampling_params"}, _fields(EngineCoreRequest)),
            "SamplingParams": ({"max_tokens", "min_tokens"}, _fields(SamplingParams)),
            "MultiModalFeatureSpec": ({"modality", "mm_position"}, _fields(inputs.MultiModalFeatureSpec)),
            "PlaceholderRange": ({"length", "is_embed"}, _fields(inputs.PlaceholderRange)),
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
                request = stock(self, *args, **kwargs)
                refuse_without_audio(self, request)
                return request
            # Before vLLM's own check, whose message is about its encoder cache. If the prompt is not rendered yet, the
            # clip's length is known only after the call.
            prompt = call["prompt"]
            if isinstance(prompt, dict):
                for clip in (prompt.get("mm_placeholders") or {}).get("audio", ()):
                    refuse_beyond_context(self, clip.length)
            request = stock(self, *args, **kwargs)
            refuse_without_audio(self, request)
            refuse_other_delay(self, request)
            end_with_clip(self, request)
            return request

        process_inputs.ends_with_clip = True  # type: ignore[attr-defined]
        processor.process_inputs = process_inputs


def _fields(record: Any) -> set[str]:
    """Field names of a msgspec.Struct or a dataclass."""
    names = getattr(record, "__struct_fields__", None) or (field.name for field in dataclasses.fields(record))
    return set(names)


def refuse_beyond_context(processor: Any, positions: int) -> None:
    """Raise vLLM's error for status 400 if a clip has more token positions than the context.

    A clip of exactly max_model_len positions is accepted, as in stock vLLM, although its last token is not generated:
    vLLM ends a request when prompt and text together have max_model_len tokens. By then 1.3 s of
    the padding have passed, so the missing token is a pad or EOS unless the text is ten tokens late.
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


def refuse_without_audio(processor: Any, request: Any) -> None:
    """Raise vLLM's error for status 400 if a request of the encode-once model has neither a clip nor the name of a live
    session, or both. Whether a session of this name is open, the scheduler knows."""
    from vllm.exceptions import VLLMValidationError

    if processor.model_config.architecture != names.ENCODE_ONCE:
        return
    name = (getattr(request.sampling_params, "extra_args", None) or {}).get(SESSION)
    if request.mm_features and name is None:
        return
    if name is None:
        raise VLLMValidationError(
            "the request has no audio: expected one clip, because the model transcribes and does not chat"
        )
    options = processor.vllm_config.additional_config
    live = isinstance(options, dict) and options.get(session.OPTION)
    if request.mm_features or not live or not isinstance(name, str) or not NAME.fullmatch(name):
        raise VLLMValidationError(f"{SESSION} is an option of the server itself: expected a request without it")


def refuse_other_delay(processor: Any, request: Any) -> None:
    """Raise vLLM's error for status 400 if a request names a delay (session.DELAY) that the model has not been made
    for, or that its prompt has not."""
    from vllm.exceptions import VLLMValidationError

    delay = session.upload_delay(request.sampling_params)
    if delay is None:
        return
    possible = processor.model_config.architecture == names.ENCODE_ONCE and session.has_delays(
        processor.vllm_config.additional_config
    )
    if possible and request.mm_features and type(delay) is int and delay in session.DELAYS:
        shape = SessionShape.of(processor.tokenizer.instruct.audio_encoder.audio_config)
        possible = len(request.prompt_token_ids or ()) == shape.with_delay(delay).prompt
    else:
        possible = False
    if not possible:
        raise VLLMValidationError(f"{session.DELAY} is an option of the server itself: expected a request without it")


def end_with_clip(processor: Any, request: Any) -> None:
    """End a request for one whole clip at the clip's end. Other requests are not changed.

    Raises vLLM's error for status 400 if the prompt is longer than the clip, as in the late steps of a beam search:
    the stock model would read rows that do not exist, which ends the engine.
    """
    import torch
    from vllm.exceptions import VLLMValidationError

    features, params = request.mm_features or [], request.sampling_params
    if len(features) != 1 or features[0].modality != "audio" or params is None or request.prompt_token_ids is None:
        return
    (clip,) = features
    positions, prompt = clip.mm_position.length, len(request.prompt_token_ids)
    refuse_beyond_context(processor, positions)
    if prompt > positions:
        raise VLLMValidationError(
            f"the prompt has {prompt} tokens, but the clip has only {positions} token positions. In a beam search, set "
            "max_completion_tokens so that the text ends within the clip"
        )
    params.max_tokens = min(params.max_tokens, positions - prompt + 1)
    # vLLM 0.20.0 ends no request before min_tokens, not even at max_tokens.
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    if processor.model_config.architecture == names.ENCODE_ONCE:
        # This model stores all rows itself in the step that computes the first position, so no later position needs
        # vLLM's encoder cache. vLLM counts the rows of a clip by the sum of this mask, against its bound of a step.
        first = dataclasses.replace(clip.mm_position, length=1, is_embed=torch.tensor([positions]))
        request.mm_features = [dataclasses.replace(clip, mm_position=first)]
