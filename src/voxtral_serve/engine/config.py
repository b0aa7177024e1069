"""vLLM's config for Voxtral Realtime: parsers for both checkpoint layouts, and hooks that check and complete it.

vLLM resolves a config in two steps: the parser of the file format, then the hook of the architecture. The parsers here
extend vLLM's own. They check the checkpoint first, and convert config.json to Mistral's form, so that one model class
serves both layouts.
"""

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import CUDAGraphMode, ModelConfig, ParallelConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.config import HFConfigParser, MistralConfigParser, get_hf_file_to_dict
from vllm.transformers_utils.configs.mistral import adapt_config_dict
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from voxtral_serve import checkpoint, shims
from voxtral_serve.engine import clip_length, drafter, keywords, names, session
from voxtral_serve.engine.session import PART

logger = init_logger("vllm.voxtral_serve")
GATE = "voxtral_serve"  # key of additional_config that `voxtral-serve check --gate` reads before vLLM starts


class HuggingFaceLayout(HFConfigParser):
    """`config_format: hf`. `auto` selects it if there is no consolidated.safetensors."""

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[dict, PretrainedConfig]:
        content, config = super().parse(model, trust_remote_code, revision, *args, **kwargs)
        if content.get("model_type") != "voxtral_realtime":
            return content, config
        checked = _check(model)
        params = checked.params if checked else _unchecked(model, revision, content)
        adapted = adapt_config_dict(copy.deepcopy(params), defaults={})
        adapted.architectures = [names.HUGGING_FACE]
        if dtype := content.get("dtype") or content.get("torch_dtype"):
            adapted.dtype = getattr(torch, dtype)
        return content, adapted


class MistralLayout(MistralConfigParser):
    """`config_format: mistral`. Other models are left to the parser before it: vLLM's own, or vLLM-Omni's."""

    before: type[MistralConfigParser] = MistralConfigParser

    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, *args: Any, **kwargs: Any
    ) -> tuple[dict, PretrainedConfig]:
        params = get_hf_file_to_dict("params.json", model, revision)
        if params and checkpoint.is_realtime(params):
            _check(model)
            return super().parse(model, trust_remote_code, revision, *args, **kwargs)
        return self.before().parse(model, trust_remote_code, revision, *args, **kwargs)


def _check(model: str | Path) -> checkpoint.Checkpoint | None:
    """Check the files and tensors of a local checkpoint. None for a Hub id, and for a directory without weights.

    Without weights, `load_format` may be `dummy`; otherwise vLLM raises an error itself.
    """
    if any(Path(model).glob("*.safetensors")):
        return checkpoint.read(Path(model))
    return None


def _unchecked(model: str | Path, revision: str | None, content: dict[str, Any]) -> dict[str, Any]:
    """The content of params.json from a config.json, without a check of the weights."""
    files = ("processor_config.json", "preprocessor_config.json")
    processor = next((config for file in files if (config := get_hf_file_to_dict(file, model, revision))), None)
    try:
        return checkpoint.to_params(content, processor)
    except KeyError as error:
        raise checkpoint.CheckpointError(f"config.json of {model} lacks {error.args[0]!r}") from error


class MistralTokenizerMode(VerifyAndUpdateConfig):
    """vLLM's native Voxtral model needs `tokenizer_mode: mistral`, because it reads tekken.json in both layouts."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        if model_config.tokenizer_mode not in ("auto", "mistral"):
            raise ValueError(
                f"tokenizer_mode is {model_config.tokenizer_mode!r}: expected 'auto' or 'mistral' for Voxtral Realtime"
            )
        model_config.tokenizer_mode = "mistral"


class Stock(MistralTokenizerMode):
    """Checks of the config for vLLM's own model."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        shims.require("clip_end")
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "speculative_config with vLLM's own model of Voxtral Realtime: expected none. Drafted positions "
                "after the end of a clip have no audio, which ends the engine. Use the encode-once model, as "
                "profiles/throughput.yaml does"
            )
        graphs = vllm_config.compilation_config
        if graphs.cudagraph_mode is None and _refuses_full_graphs():
            # With vLLM's default, FULL_AND_PIECEWISE, an assertion of its model ends the start.
            logger.info(
                "cudagraph_mode is PIECEWISE: the Voxtral Realtime model of this vLLM supports no full CUDA graphs"
            )
            graphs.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _refuses_full_graphs() -> bool:
    """Whether vLLM's model rejects full CUDA graphs, as up to 0.27.0. Reads the source; an import takes seconds."""
    spec = find_spec("vllm.model_executor.models.voxtral_realtime")
    return spec is not None and "Please use PIECEWISE" in Path(str(spec.origin)).read_text(encoding="utf-8")


class EncodeOnce(MistralTokenizerMode):
    """Checks and settings of the config for the encode-once model."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        shims.require("clip_end")
        for name in names.SPLITS:
            if (workers := getattr(vllm_config.parallel_config, name)) != 1:
                raise ValueError(f"{name} is {workers}: {names.UNSPLIT}")
        _choose_worker(vllm_config.parallel_config)
        _take_options(vllm_config)
        _choose_scheduler(vllm_config)
        drafter.check(vllm_config)
        _choose_processors(vllm_config)
        _choose_graphs(vllm_config)
        _check_attention(vllm_config)
        if vllm_config.cache_config.enable_prefix_caching:
            # A cached prefix would skip the encoding of a resumed request. Clips do not repeat, so a cache has no use.
            logger.info("enable_prefix_caching is off for VoxtralRealtimeEncodeOnce")
            vllm_config.cache_config.enable_prefix_caching = False

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        MistralTokenizerMode.verify_and_update_model_config(model_config)
        # vLLM uses this as the width of audio embeddings. Here it is the width of the LM.
        model_config.hf_text_config.projection_size = model_config.hf_text_config.hidden_size


def _take_options(vllm_config: VllmConfig) -> None:
    """Check `additional_config`. Raises ValueError for an unknown option or an invalid value."""
    options, model = vllm_config.additional_config, vllm_config.model_config
    options = options if isinstance(options, dict) else {}
    known = {
        session.OPTION: range(2**31),
        session.AGE: range(1, 2**31),
        clip_length.OPTION: range(1, model.max_model_len + 1),
        session.UPLOAD_DELAY: range(80 * session.DELAYS[0], 80 * session.DELAYS[-1] + 1, 80),
    }
    for name, value in options.items():
        if name == GATE:
            continue
        if name == names.DRAFT_HEAD and isinstance(value, str) and value:
            continue
        if name == names.DRAFT_HEAD:
            raise ValueError(f"additional_config: {name} is {value!r}: expected the path of a file")
        if name not in known:
            raise ValueError(f"additional_config has {name!r}: expected {', '.join(known)} or {names.DRAFT_HEAD}")
        # The type first: `in` compares a value that is not an int with every number of a range.
        if type(value) is not int or value not in known[name]:
            kind = "whole number" if (step := known[name].step) == 1 else f"multiple of {step}"
            raise ValueError(
                f"additional_config: {name} is {value!r}: expected a {kind} of {known[name].start} to "
                f"{known[name].stop - 1}"
            )
    if clip_length.OPTION in options:
        setattr(model.hf_config, clip_length.OPTION, options[clip_length.OPTION])


def live_sessions(vllm_config: VllmConfig) -> int:
    """`max_live_sessions` of additional_config; 0 disables live sessions."""
    options = vllm_config.additional_config
    return int(options.get(session.OPTION, 0)) if isinstance(options, dict) else 0


def _choose_scheduler(vllm_config: VllmConfig) -> None:
    """Set `scheduler_cls`. Raises ValueError for another, and for settings that do not work with live sessions."""
    sessions, scheduler = live_sessions(vllm_config), vllm_config.scheduler_config
    replicas = vllm_config.parallel_config.data_parallel_size
    watched = drafter.is_ours(vllm_config) and not drafter.V1
    if sessions:
        shims.require("live_audio")
        if vllm_config.speculative_config is not None and not watched:
            model, found = vllm_config.speculative_config.model, shims.installed("vllm")
            raise ValueError(
                f"speculative_config has model {model!r} with {session.OPTION} {sessions}, on vllm {found}: expected "
                "voxtral_serve.drafter.Drafter, or on 0.20.0 no drafts. Set it, or remove one of the two"
            )
        if replicas != 1:
            raise ValueError(f"data_parallel_size is {replicas} with {session.OPTION} {sessions}: expected 1")
        if sessions > scheduler.max_num_seqs:
            seqs = scheduler.max_num_seqs
            raise ValueError(f"max_num_seqs is {seqs} with {session.OPTION} {sessions}: expected {sessions} or more")
    ours = "voxtral_serve.engine.scheduler.scheduler"
    if scheduler.scheduler_cls not in (None, ours):
        raise ValueError(
            f"scheduler_cls is {scheduler.scheduler_cls!r}: expected None, because VoxtralRealtimeEncodeOnce needs its "
            "own scheduler"
        )
    scheduler.scheduler_cls = ours
    if sessions:
        _prefer_sessions(scheduler)


def _prefer_sessions(scheduler: Any) -> None:
    """Have vLLM preempt uploads before live sessions, and compute a long request, as one that was preempted, in parts
    that delay no session's step. Raises ValueError for longer parts."""
    if scheduler.policy != "priority":
        logger.info("scheduling_policy is priority: uploads wait where live sessions need their memory")
        scheduler.policy = "priority"
    tokens = scheduler.long_prefill_token_threshold
    if tokens > PART:
        raise ValueError(
            f"long_prefill_token_threshold is {tokens} with {session.OPTION}: expected 0, or at most {PART}"
        )
    scheduler.long_prefill_token_threshold = tokens or PART


def _choose_processors(vllm_config: VllmConfig) -> None:
    """Let Model Runner V2 prefer the phrases of requests (keywords.py). In V1, model_runner.py does."""
    model = vllm_config.model_config
    others = [each for each in model.logits_processors or () if each != keywords.PROCESSOR]
    if getattr(vllm_config, "use_v2_model_runner", False) and keywords.usable(vllm_config):
        model.logits_processors = [*others, keywords.PROCESSOR]


def _choose_graphs(vllm_config: VllmConfig) -> None:
    """With `cudagraph_mode: FULL`, steps that only decode need graphs beside those for any step, or they are slower
    than with FULL_AND_PIECEWISE: a patch adds them to Model Runner V2, model_runner.py to V1.

    With drafts, Model Runner V1 has graphs of several tokens for each request only, and refuses to start with a compile
    size that its graphs do not have. In V2, a step of a live session, or one without drafts, may have one token.
    """
    sizes, v2 = vllm_config.compilation_config.compile_sizes, getattr(vllm_config, "use_v2_model_runner", False)
    if vllm_config.speculative_config is not None and not v2 and sizes and 1 in sizes:
        logger.info("compile_sizes without 1: with speculative_config, Model Runner V1 has no graph of one token")
        vllm_config.compilation_config.compile_sizes = [size for size in sizes if size != 1]
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL or not current_platform.is_cuda_alike():
        return
    if v2:
        shims.require("step_graphs")


def _check_attention(vllm_config: VllmConfig) -> None:
    """Raises ValueError if `attention_backend: CUSTOM` is the backend of another plugin."""
    custom = AttentionBackendEnum.CUSTOM
    if vllm_config.attention_config.backend == custom and custom.get_path() != names.ATTENTION:
        raise ValueError(
            f"attention_backend is CUSTOM, which is {custom.get_path()} of another plugin: expected {names.ATTENTION}. "
            "Set TRITON_ATTN, or remove that plugin"
        )


def _choose_worker(parallel: ParallelConfig) -> None:
    """Set `worker_cls` for the platform. Raises ValueError if another is set, or for an unsupported platform."""
    if current_platform.is_cuda_alike():
        ours = "voxtral_serve.engine.worker.GpuWorker"
    elif current_platform.is_cpu():
        ours = "voxtral_serve.engine.cpu_worker.CpuWorker"
    else:
        raise ValueError(
            f"VoxtralRealtimeEncodeOnce on {current_platform.device_name}: expected an NVIDIA or AMD GPU, or a CPU"
        )
    if parallel.worker_cls not in ("auto", ours):
        raise ValueError(
            f"worker_cls is {parallel.worker_cls!r}: expected 'auto': VoxtralRealtimeEncodeOnce needs its own worker"
        )
    parallel.worker_cls = ours


PARSERS = {"hf": HuggingFaceLayout, "mistral": MistralLayout}
HOOKS: dict[str, type[VerifyAndUpdateConfig]] = {
    names.STOCK: Stock,
    names.HUGGING_FACE: Stock,
    names.ENCODE_ONCE: EncodeOnce,
}
