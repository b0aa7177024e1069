"""What becomes of a request in vLLM's own InputProcessor, on each version; and what when that is not as expected."""

from typing import Any

import numpy as np
import pytest
import scratch
from places import PICO
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import input_processor
from vllm.v1.engine.input_processor import InputProcessor

from pico import model, others
from voxtral_serve import shims
from voxtral_serve.engine import names
from voxtral_serve.engine.session import DELAY, OPTION, SESSION, UPLOAD_DELAY
from voxtral_serve.patches.clip_end import ClipEnd
from voxtral_serve.shims import TESTED, PatchError, installed

CONTEXT = 512
NAMED = f"{0:032x}-0"  # as the API server names sessions


@pytest.fixture(scope="module")
def processor() -> Any:
    """It batches more tokens than the context has, where stock vLLM takes longer clips and cuts their text."""
    args = EngineArgs(model=str(PICO), max_model_len=CONTEXT, max_num_batched_tokens=2000, enforce_eager=True)
    return InputProcessor(args.create_engine_config())


def ask(
    processor: Any, seconds: float, resumable: bool = False, prompt: int = model.PROMPT_TOKENS, **sampling: Any
) -> Any:
    audio = model.pad_audio(np.zeros(int(seconds * model.SAMPLE_RATE), np.float32))
    return processor.process_inputs(
        "request",
        {"prompt_token_ids": [1] * prompt, "multi_modal_data": {"audio": (audio, model.SAMPLE_RATE)}},
        SamplingParams(**sampling),
        supported_tasks=("generate",),
        resumable=resumable,
    )


def positions(seconds: float) -> int:
    return model.n_tokens(int(seconds * model.SAMPLE_RATE))


@pytest.mark.parametrize("seconds", [0.05, 1, 8])
def test_a_request_ends_with_its_clip(processor: Any, seconds: float) -> None:
    limit = positions(seconds) - model.PROMPT_TOKENS + 1
    asked = {"unset": None, "more": 400, "fewer": 3}
    got = {name: ask(processor, seconds, max_tokens=tokens) for name, tokens in asked.items()}
    assert {name: request.sampling_params.max_tokens for name, request in got.items()} == {
        "unset": limit,
        "more": limit,
        "fewer": 3,
    }
    (clip,) = got["more"].mm_features
    assert clip.mm_position.length == positions(seconds)


def test_a_minimum_does_not_lead_past_it(processor: Any) -> None:
    params = ask(processor, 1, max_tokens=400, min_tokens=300).sampling_params
    assert params.min_tokens == params.max_tokens == positions(1) - model.PROMPT_TOKENS + 1
    assert ask(processor, 1, max_tokens=400, min_tokens=2).sampling_params.min_tokens == 2


def test_the_caller_s_params_stay_as_they_are(processor: Any) -> None:
    """Many prompts share one SamplingParams in the offline `LLM`."""
    audio = model.pad_audio(np.zeros(8000, np.float32))
    prompt = {"prompt_token_ids": [1] * 39, "multi_modal_data": {"audio": (audio, model.SAMPLE_RATE)}}
    params = SamplingParams(max_tokens=400)
    processor.process_inputs("request", prompt, params, ("generate",))
    assert params.max_tokens == 400


def test_audio_that_comes_in_pieces_is_left_alone(processor: Any) -> None:
    request = ask(processor, 1, resumable=True, max_tokens=400)
    assert (request.sampling_params.max_tokens, request.mm_features[0].mm_position.length) == (400, positions(1))


def test_the_final_empty_piece_is_left_alone(processor: Any) -> None:
    params = SamplingParams(max_tokens=400)
    request = processor.process_inputs("request", {"prompt_token_ids": [0]}, params, ("generate",))
    assert request.sampling_params.max_tokens == 400


def test_other_models_are_left_alone(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "REALTIME", ())
    assert ask(processor, 1, max_tokens=400).sampling_params.max_tokens == 400
    assert ask(processor, 60, max_tokens=400).sampling_params.max_tokens == 400  # as stock


def test_the_longest_clip(processor: Any) -> None:
    longest = (CONTEXT - model.n_tokens(0)) * model.SAMPLES_PER_TOKEN / model.SAMPLE_RATE
    assert ask(processor, longest).mm_features[0].mm_position.length == CONTEXT
    with pytest.raises(VLLMValidationError, match=r"lasts 37.12 s and this server takes at most 37.04 s.* to 513 or"):
        ask(processor, longest + 0.08)


def test_a_prompt_past_the_clip_is_refused(processor: Any) -> None:
    assert ask(processor, 1, prompt=positions(1), max_tokens=9).sampling_params.max_tokens == 1
    with pytest.raises(VLLMValidationError, match="the prompt has 63 tokens, but the clip has only 62 token positions"):
        ask(processor, 1, prompt=positions(1) + 1, max_tokens=9)


def test_the_encode_once_model_has_vllm_count_all_rows_at_the_first_position(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "ENCODE_ONCE", processor.model_config.architecture)
    request = ask(processor, 8, max_tokens=400)
    (clip,) = request.mm_features
    assert (clip.mm_position.offset, clip.mm_position.length, clip.modality) == (0, 1, "audio")
    assert clip.mm_position.get_num_embeds() == positions(8)
    assert request.sampling_params.max_tokens == positions(8) - model.PROMPT_TOKENS + 1
    assert clip.data is not None


# A request of the encode-once model has audio


@pytest.fixture
def live(processor: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a server with live sessions."""
    monkeypatch.setattr(names, "ENCODE_ONCE", processor.model_config.architecture)
    monkeypatch.setattr(processor.vllm_config, "additional_config", {OPTION: 2})
    return processor


def written(processor: Any, resumable: bool = False, **sampling: Any) -> Any:
    """A request without a clip."""
    prompt, params = {"prompt_token_ids": [1] * 39}, SamplingParams(**sampling)
    return processor.process_inputs("request", prompt, params, supported_tasks=("generate",), resumable=resumable)


@pytest.mark.parametrize("extra", [None, {}, {SESSION: None}, {"other": "x"}], ids=str)
@pytest.mark.parametrize("resumable", [False, True])
def test_a_request_without_audio_is_refused(live: Any, extra: Any, resumable: bool) -> None:
    with pytest.raises(VLLMValidationError, match="the request has no audio: expected one clip"):
        written(live, resumable, extra_args=extra)
    assert ask(live, 1, extra_args=extra).mm_features


WRONG = [["x"], {"x": 1}, 7, True, "", "x", "x" * 10**6, "0" * 34, f" {NAMED}", f"{NAMED}\n"]


@pytest.mark.parametrize("name", WRONG, ids=lambda name: f"{name!r:.12}")
def test_a_name_that_no_session_has_is_refused(live: Any, name: Any) -> None:
    for request in (written, lambda *arguments, **sampling: ask(live, 1, **sampling)):
        with pytest.raises(VLLMValidationError, match=f"{SESSION} is an option of the server itself"):
            request(live, extra_args={SESSION: name})


def test_a_request_has_a_clip_or_a_session(live: Any) -> None:
    assert written(live, extra_args={SESSION: NAMED}).mm_features in (None, [])
    with pytest.raises(VLLMValidationError, match=f"{SESSION} is an option of the server itself"):
        ask(live, 1, extra_args={SESSION: NAMED})


@pytest.mark.parametrize("options", [{}, {OPTION: 0}, None])
def test_a_server_without_live_sessions_has_none(live: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.vllm_config, "additional_config", options)
    with pytest.raises(VLLMValidationError, match=f"{SESSION} is an option of the server itself"):
        written(live, extra_args={SESSION: NAMED})


# A request names its delay only as the server does: one that the model has been made for, and that its prompt has

PROMPT_OF_2400 = model.PROMPT_TOKENS - model.DELAY_TOKENS + 30


@pytest.mark.parametrize("options", [{OPTION: 2}, {UPLOAD_DELAY: 480}])
def test_a_delay_that_the_prompt_has(live: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.vllm_config, "additional_config", options)
    assert ask(live, 3, prompt=PROMPT_OF_2400, extra_args={DELAY: 30}).mm_features
    for delay in (29, 31, 0, -1, 30.0, True, "30", [30], {}, 2**63):
        with pytest.raises(VLLMValidationError, match=f"{DELAY} is an option of the server itself"):
            ask(live, 3, prompt=PROMPT_OF_2400, extra_args={DELAY: delay})
    with pytest.raises(VLLMValidationError, match="is an option of the server itself"):
        written(live, extra_args={SESSION: NAMED, DELAY: model.DELAY_TOKENS})


@pytest.mark.parametrize("options", [{}, None, {OPTION: 0}])
def test_a_server_of_one_delay(live: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.vllm_config, "additional_config", options)
    with pytest.raises(VLLMValidationError, match=f"{DELAY} is an option of the server itself"):
        ask(live, 3, prompt=PROMPT_OF_2400, extra_args={DELAY: 30})


def test_installing_twice_wraps_once(processor: Any) -> None:
    wrapped = InputProcessor.process_inputs
    assert ClipEnd().settle(input_processor)[0] != "applied"
    load_general_plugins()
    assert InputProcessor.process_inputs is wrapped


def test_stock_vllm_decodes_past_the_clip(processor: Any) -> None:
    """Where this fails, vLLM ends a transcription with its clip: the patch can go."""
    audio = model.pad_audio(np.zeros(model.SAMPLE_RATE, np.float32))
    prompt = {"prompt_token_ids": [1] * 39, "multi_modal_data": {"audio": (audio, model.SAMPLE_RATE)}}
    stock = InputProcessor.process_inputs.__wrapped__  # type: ignore[attr-defined]
    request = stock(processor, "request", prompt, SamplingParams(max_tokens=400), supported_tasks=("generate",))
    assert request.sampling_params.max_tokens == 400


def test_an_input_processor_of_other_parameters_has_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputProcessor, "process_inputs", lambda self, request_id, prompt: None)
    found = "LookupError: InputProcessor.process_inputs has no params, resumable"
    assert ClipEnd().settle(input_processor) == ("drifted", found)
    finder: Any = shims.active()
    monkeypatch.setitem(finder.outcomes, "clip_end", ("drifted", found))
    with pytest.raises(PatchError) as raised:
        shims.require("clip_end")
    assert str(raised.value).startswith(
        f"patch clip_end (of vllm.v1.engine.input_processor) has drifted on vllm {installed('vllm')}: {found}. Nothing "
        "is served. "
    )
    assert all(version in str(raised.value) for version in TESTED["vllm"])


CONFIGURE = """
import sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model=sys.argv[1], max_model_len=128, enforce_eager=True).create_engine_config()
"""


@pytest.mark.slow
@pytest.mark.parametrize("realtime", [True, False], ids=["Voxtral Realtime", "Whisper"])
def test_only_a_configuration_that_uses_it_is_refused(realtime: bool, stock: Any, tmp_path: Any) -> None:
    renamed = {"vllm.v1.engine.input_processor": {"def process_inputs(": "def process("}}
    changed = scratch.sitecustomize(tmp_path / "changed", scratch.LOADED, scratch.edited(renamed))
    if not realtime:
        others.write_whisper(tmp_path / "whisper")
    directory = PICO if realtime else tmp_path / "whisper"
    path = f"{changed}:{scratch.ROOT / 'src'}"
    done = scratch.run(stock, "-c", CONFIGURE, str(directory), PYTHONPATH=path)
    if realtime:
        assert done.returncode != 0
        assert "PatchError: patch clip_end " in done.stderr, done.stderr[-3000:]
    else:
        assert done.returncode == 0, done.stderr[-3000:]
