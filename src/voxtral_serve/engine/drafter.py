"""Speculative decoding: tokens are drafted, and verified in the step that computes the next token.

`Drafter` drafts what the drafter of the checkpoint guesses from the audio rows (draft_stream), if the checkpoint has
one, and otherwise pads. `PadDrafter` always drafts pads: Voxtral Realtime emits a token every 80 ms, and more than half
of pico's tokens are [STREAMING_PAD]. The text does not change: with temperature 0 a draft is accepted if it is the
model's own token, and above 0 with the probability that the model gives it. A wrong draft costs its share of the step.

    speculative_config: {model: voxtral_serve.drafter.Drafter, num_speculative_tokens: 15}

A patch (voxtral_serve.patches.draft_method) adds the `method` by which vLLM calls the drafter:

ngram_gpu      on GPUs with CUDA. vLLM drafts on the GPU and can therefore schedule one step ahead. In Model Runner V2
               the worker replaces the n-gram search (worker.py); in V1 of 0.20.0 a patch does, by pads (ngram_pads).
custom_class   elsewhere: an interface of vLLM 0.32.0 that gets the tokens on the CPU after each step.

The requests of a step get the same number of drafts. Only steps with the same number of tokens for each request run as
full CUDA graphs, and a rejected draft costs far less than a step without its graph.

This works only with the encode-once model. vLLM's own model ends with an error at the end of a clip, where drafted
positions have no audio rows, and its encoder has full graphs for one token per step only. While vLLM schedules ahead,
the CPU's count of computed tokens is too high after a rejection until the GPU has corrected it. A model must therefore
select its rows by the positions on the GPU.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config

from voxtral_serve import shims
from voxtral_serve.engine.audio_rows import AudioRows
from voxtral_serve.engine.draft_network import FILE, Head, HeadError, read_facts, tokenizer_hash
from voxtral_serve.engine.draft_stream import DraftTokens, gather, gathered
from voxtral_serve.engine.names import DRAFT_HEAD, DRAFTER, PAD_DRAFTER

logger = init_logger("vllm.voxtral_serve.drafts")
PADS = "voxtral_serve_pads"  # attribute of vLLM's SchedulerOutput: whether its step drafts pads despite a drafter
# 0.20.0 has an early Model Runner V2, which it does not use by default.
V1 = shims.installed("vllm") == "0.20.0"

if TYPE_CHECKING:
    import numpy as np


def streaming_pad(vllm_config: VllmConfig) -> int:
    """The id of [STREAMING_PAD] in the served checkpoint's tokenizer."""
    tokenizer: Any = cached_tokenizer_from_config(vllm_config.model_config)
    return int(tokenizer.instruct.audio_encoder.streaming_pad)


def is_ours(vllm_config: VllmConfig) -> bool:
    """Whether `speculative_config.model` names Drafter or PadDrafter."""
    config = vllm_config.speculative_config
    return config is not None and config.model in (DRAFTER, PAD_DRAFTER)


def wants_pads(scheduled: Any) -> bool:
    """Whether the scheduler has chosen pads for a step, vLLM's SchedulerOutput, although there is a drafter."""
    return bool(getattr(scheduled, PADS, False))


def pads(vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Drafts for all requests: pads, [max_num_seqs, num_speculative_tokens]."""
    config = vllm_config.speculative_config
    assert config is not None
    shape = (vllm_config.scheduler_config.max_num_seqs, config.num_speculative_tokens)
    return torch.full(shape, streaming_pad(vllm_config), dtype=dtype, device=device)


# ---- The drafter's file


def head_file(vllm_config: VllmConfig) -> Path | None:
    """The file of the drafter that the config uses; None if it drafts pads or nothing. Raises ValueError if
    `additional_config` names a file that does not exist, or that nothing uses."""
    options, folder = vllm_config.additional_config, Path(vllm_config.model_config.model)
    named = options.get(DRAFT_HEAD) if isinstance(options, dict) else None
    config = vllm_config.speculative_config
    if config is None or config.model != DRAFTER:
        left_out = config is None and V1  # by the patch draft_method
        if named is not None and not left_out:
            raise ValueError(
                f"additional_config: {DRAFT_HEAD} is {named!r}, and nothing would use it: expected speculative_config "
                f"with model {DRAFTER}. Set it, or remove {DRAFT_HEAD}"
            )
        return None
    path = folder / (named or FILE)
    if path.is_file():
        return path
    if named is not None:
        raise ValueError(
            f"additional_config: {DRAFT_HEAD} is {named!r}, and there is no file {path}: expected one that "
            f"`voxtral-serve draft train` wrote. Correct the path, or remove {DRAFT_HEAD}: then {FILE} of the "
            "checkpoint is used, if it exists, and otherwise pads are drafted"
        )
    return None


def draft_tokens(vllm_config: VllmConfig, rows: AudioRows) -> DraftTokens | None:
    """The drafts of the drafter that the config uses; None for pads, and without drafts. The model makes it with the
    audio rows."""
    path = head_file(vllm_config)
    if path is None:
        return None
    with torch.device("cpu"):  # vLLM constructs the model on its GPU
        head = Head.read(path)
    config = vllm_config.speculative_config
    assert config is not None
    return DraftTokens(head, rows, config.num_speculative_tokens, streaming_pad(vllm_config))


def _check_head(vllm_config: VllmConfig, path: Path) -> None:
    """Raise HeadError if a drafter does not fit the checkpoint, as far as its file says. Its weights are compared by
    the audio rows of a chirp (DraftTokens.prepare)."""
    facts, model = read_facts(path), vllm_config.model_config
    tokenizer: Any = cached_tokenizer_from_config(model)
    audio = tokenizer.instruct.audio_encoder.audio_config
    tekken = Path(model.tokenizer) / "tekken.json"
    known = tokenizer_hash(tekken) if tekken.is_file() else facts["tokenizer"]  # a Hub id has no directory
    for what, found, expected in (
        ("dimension", facts["shape"]["dim"], model.get_hidden_size()),
        ("vocabulary", facts["vocabulary"], model.get_vocab_size()),
        ("delay in positions of 80 ms", facts["delay"], audio.get_num_delay_tokens()),
        ("SHA-256 of tekken.json", facts["tokenizer"], known),
    ):
        if found != expected:
            raise HeadError(
                f"{path} does not fit this checkpoint: its {what} is {found!r}, expected {expected!r}. Train a drafter "
                f"of this checkpoint with `voxtral-serve draft train`, or set {PAD_DRAFTER} in speculative_config"
            )
    tokens = 1 + sum(facts["survival"])
    logger.info(
        "drafts: %s, trained with %.1f hours: %.2f tokens a step on held-out clips", path, facts["hours"], tokens
    )


# ---- The drafters


class Drafter:
    """`method: custom_class` of vLLM 0.32.0, which calls it on the CPU after each step."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        assert vllm_config.speculative_config is not None
        self.draft = [streaming_pad(vllm_config)] * vllm_config.speculative_config.num_speculative_tokens
        self.tokens: DraftTokens | None = None
        self.slots: Any = None  # model_runner.Slots; the worker sets it

    def load_model(self, model: Any) -> None:
        """The CPU runner calls it."""
        self.tokens = model.drafts

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: "np.ndarray[Any, Any]",
        token_ids_cpu: "np.ndarray[Any, Any]",
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """As many drafts for each request of the batch as the scheduler wants; none during its prefill. vLLM cuts
        drafts beyond the context."""
        scheduled, count = self.slots.scheduled, len(sampled_token_ids)
        number = scheduled.num_spec_tokens_to_schedule
        if self.tokens is None or not number or wants_pads(scheduled):
            drafts = [self.draft[:number]] * count
        else:
            self.tokens.run()
            tokens = self.tokens.tokens
            slots, positions = (
                torch.as_tensor(each[:count], dtype=torch.int64, device=tokens.device)
                for each in (self.slots.batch, num_tokens_no_spec)
            )
            drafts = gathered(tokens, slots, positions, number).tolist()
        return [list(draft) if sampled else [] for sampled, draft in zip(sampled_token_ids, drafts, strict=True)]


class PadDrafter(Drafter):
    """The same for pads: the model has no DraftTokens then."""


def speculator(vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Any:
    """The drafter for Model Runner V2."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class Speculator(BaseSpeculator):
        supports_mm_inputs = False  # only for draft models, which need the audio rows of their positions
        draft_logits = None  # no logits: the rejection sampler treats drafts as one-hot
        tokens: DraftTokens | None = None  # the worker sets it when the model is loaded
        only_pads = False  # in this step; the worker sets it

        def __init__(self) -> None:
            self.pads = pads(vllm_config, device, torch.int64)
            self.guesses = torch.zeros_like(self.pads)

        def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
            pass

        def capture(self) -> None:
            """Does nothing: the model captures the graphs of the network (DraftTokens.prepare)."""

        def propose(self, input_batch: Any, *_: object, num_speculative_tokens: int | None = None, **__: object) -> Any:
            """Drafts [requests, num_speculative_tokens of the config], int64. vLLM has corrected `total_len` for
            rejected drafts. It overwrites the drafts that are not used at this batch size, and copies the others before
            the next step."""
            count, most = input_batch.num_reqs, self.pads.shape[1]
            wanted = most if num_speculative_tokens is None else num_speculative_tokens
            if self.tokens is None or self.only_pads:  # a constant on the GPU: the step launches no kernel
                return self.pads[:count] if wanted == most else self.pads[:count].clone()
            guesses = self.guesses[:count]
            if wanted:
                self.tokens.run()
                gather(self.tokens.tokens, input_batch.idx_mapping[:count], req_states.total_len.gpu, guesses)
            return guesses

    return Speculator()


# ---- The config


def check(vllm_config: VllmConfig) -> None:
    """Raise ValueError if the drafter's file is not valid, or vLLM would silently draft other tokens."""
    path, config = head_file(vllm_config), vllm_config.speculative_config
    if config is None or not is_ours(vllm_config):
        return
    shims.require("draft_method", *(["cpu_sampling"] if current_platform.is_cpu() else []))
    on_gpu = current_platform.is_cuda() and (V1 or getattr(vllm_config, "use_v2_model_runner", False))
    if config.method != "custom_class" and not (config.method == "ngram_gpu" and on_gpu):
        raise ValueError(
            f"speculative_config has method {config.method!r} and model {config.model!r}: expected no method, or "
            f"'ngram_gpu' on a GPU, with vLLM 0.20.0 or with 0.32.0's Model Runner V2, or 'custom_class' with any "
            f"other runner of 0.32.0; this is vllm {shims.installed('vllm')} on {current_platform.device_name}"
        )
    if config.method == "ngram_gpu" and not getattr(vllm_config, "use_v2_model_runner", False):
        shims.require("ngram_pads")
    if path is not None:
        _check_head(vllm_config, path)
    elif config.model == DRAFTER:
        logger.info(
            "drafts: [STREAMING_PAD], because %s has no %s. `voxtral-serve draft train` makes a drafter of this "
            "checkpoint, which is faster", vllm_config.model_config.model, FILE,
        )  # fmt: skip
