"""The engine of `voxtral-serve draft train`: vLLM's offline LLM with the encode-once model, as the server has it."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vllm import LLM, SamplingParams
from vllm.config.speech_to_text import SpeechToTextParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from voxtral_serve.draft.job import DraftError
from voxtral_serve.draft.scoring import DRAFTS
from voxtral_serve.draft.worker import RowsExtension
from voxtral_serve.engine import names
from voxtral_serve.engine.encode_once import VoxtralRealtimeEncodeOnce
from voxtral_serve.engine.session import SessionShape

POSITIONS = 512  # of the longest clip, 37 s; longer recordings are cut
# As profiles/fast.yaml has them, with fewer sizes, because the start waits for each.
GRAPHS = {
    "cudagraph_mode": "FULL",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 40, 64, 96, 128, 160, 192, 224, 256, 384, 512],
    "compile_sizes": [1],
}
OPTIONS = {
    "hf-overrides": {"architectures": [names.ENCODE_ONCE]},
    "max-model-len": POSITIONS,
    "max-num-batched-tokens": 2048,
    "mm-processor-cache-gb": 0,
}
ON_GPU = {"max-num-seqs": 256, "dtype": "bfloat16", "attention-backend": "CUSTOM", "compilation-config": GRAPHS}
# In float32 the tokens do not depend on what is computed together; bfloat16 is slow on most CPUs.
ON_CPU = {"max-num-seqs": 16, "dtype": "float32"}


def options(checkpoint: Path, words: Sequence[str], on_gpu: bool) -> dict[str, Any]:
    """Arguments of vllm.LLM. `words` are options of `vllm serve`, which take precedence over those that are set here.

    Raises DraftError for a worker extension, of which vLLM has one, and SystemExit(2), as vLLM's parser does, for
    options that it does not know.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="voxtral-serve draft train ... --"))
    ours = ["--model", str(checkpoint), "--no-use-tqdm-on-load", *([] if on_gpu else ["--enforce-eager"])]
    for name, value in (OPTIONS | (ON_GPU if on_gpu else ON_CPU)).items():
        ours += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    arguments = EngineArgs.from_cli_args(parser.parse_args([*ours, *words]))
    if arguments.worker_extension_cls:
        raise DraftError(
            f"--worker-extension-cls {arguments.worker_extension_cls}: the training has its own; remove it"
        )
    return vars(arguments) | {
        "disable_log_stats": False,  # it counts drafts
        "worker_extension_cls": f"{RowsExtension.__module__}.{RowsExtension.__qualname__}",
    }


@contextlib.contextmanager
def running(arguments: dict[str, Any]) -> Iterator[LLM]:
    """A vllm.LLM, which ends with the block. Raises DraftError if it does not start."""
    try:
        llm = LLM(**arguments)
    except Exception as error:
        raise DraftError(f"vLLM does not start with this checkpoint: {error}") from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class Transcriber:
    """Makes the tokens of clips with an LLM, as the server does for uploads at temperature 0."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        model = llm.llm_engine.model_config
        self._speech = VoxtralRealtimeEncodeOnce.get_speech_to_text_config(model, "transcribe")
        tokenizer: Any = llm.get_tokenizer()
        self.shape = SessionShape.of(tokenizer.instruct.audio_encoder.audio_config)
        self._model = model

    def add(self, key: str, samples: np.ndarray, most: int = POSITIONS) -> str:
        """Begin a clip, float32 [n] at 16 kHz; at most so many tokens are made. Returns the name that `step` has."""
        asked = SpeechToTextParams(audio=samples, stt_config=self._speech, model_config=self._model)
        prompt: Any = VoxtralRealtimeEncodeOnce.get_generation_prompt(asked)
        prompt["multi_modal_uuids"] = {"audio": [key]}
        # No text is made of the tokens.
        sampling = SamplingParams(temperature=0, max_tokens=most, detokenize=False)
        (name,) = self.llm.enqueue([prompt], sampling, use_tqdm=False)
        return name.rpartition("-")[0] or name  # vLLM adds random digits to the name that outputs have

    def step(self) -> dict[str, list[int]]:
        """The tokens of the clips that have ended, by name."""
        outputs: Any = self.llm.llm_engine.step()
        return {each.request_id: list(each.outputs[0].token_ids) for each in outputs if each.finished}

    def tokens(self, key: str, samples: np.ndarray, most: int = POSITIONS) -> list[int]:
        """The tokens of one clip, alone."""
        name = self.add(key, samples, most)
        while True:
            if name in (ended := self.step()):
                return ended[name]


class Alone(NamedTuple):
    """Times of clips that the engine has alone.

    clip_ms    mean of a clip
    begin_ms   mean until a clip's first token
    step_ms    mean of a step after that
    steps      of all clips after their first tokens
    clips      how many
    """

    clip_ms: float
    begin_ms: float
    step_ms: float
    steps: int
    clips: int

    def with_steps(self, steps: float) -> float:
        """Milliseconds of a clip with so many steps on average."""
        return self.begin_ms + steps * self.step_ms


def alone(transcriber: Transcriber, clips: Sequence[np.ndarray], drafts: bool) -> Alone:
    """Measure clips one after the other. `drafts`: whether the engine has some, so that steps are to be counted."""
    for number, samples in enumerate(clips[:3]):  # the first ones compile kernels
        transcriber.tokens(f"warm-{number}", samples)
    whole: list[float] = []
    begin: list[float] = []
    tokens = 0
    before = _verified(transcriber.llm)
    for number, samples in enumerate(clips):
        for most, times in ((1, begin), (POSITIONS, whole)):
            started = time.perf_counter()
            made = transcriber.tokens(f"alone-{number}-{most}", samples, most)
            times.append(1e3 * (time.perf_counter() - started))
        tokens += len(made) - 1
    steps = _verified(transcriber.llm) - before if drafts else tokens
    step_ms = (sum(whole) - sum(begin)) / max(1, steps)
    return Alone(float(np.mean(whole)), float(np.mean(begin)), step_ms, steps, len(clips))


def _verified(llm: LLM) -> int:
    """Steps of single requests with drafts so far."""
    values = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_drafts"]  # type: ignore[attr-defined]
    return int(sum(values))


def with_drafts(arguments: dict[str, Any], head: Path) -> dict[str, Any]:
    """The arguments of an engine that has a drafter and serves one clip at a time."""
    return arguments | {
        "max_num_seqs": 1,
        "speculative_config": {"model": names.DRAFTER, "num_speculative_tokens": DRAFTS[-1]},
        "additional_config": {"draft_head": str(head.absolute())},
    }
