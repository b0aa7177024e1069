"""Real vLLM without a server: pico on an `LLM` of its own, asked and answering in tokens, beside pico's reference.

In float32, unless a test says otherwise. There the tokens must be the reference's whatever is computed together: two
candidates are never as close as two orders of summation. In bfloat16 they are, in a few clips of the 500: `differences`
has how close. On a GPU (`make test-gpu`) it is Model Runner V2 with CUDA graphs, on a CPU V1 without.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from places import DATA, PICO

from bench import dataset
from mistral_layout import audio as layout
from pico import evaluate, keywords, model
from pico.tokenizer import TextTokenizer
from voxtral_serve.engine.keywords import KEYWORDS, Strengths
from voxtral_serve.engine.session import DELAY

# What vLLM runs on. Tests that run on both are marked `gpu`.
DEVICE = os.environ.get("VOXTRAL_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE == "cuda"
ENCODE_ONCE = {"architectures": ["VoxtralRealtimeEncodeOnce"]}
# A share of RAM that vLLM's start-up wants free, whatever the KV cache takes.
CPU: dict[str, Any] = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
# The graphs and the attention of the profiles. Without torch.compile, which takes a minute of a start: servers have it.
# Several engines share the GPU, so none measures what is left of its memory.
GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "attention_backend": "CUSTOM",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
}
OPTIONS: dict[str, Any] = {
    "model": str(PICO),
    "dtype": "float32",
    "hf_overrides": ENCODE_ONCE,
    "max_model_len": 512,
    "disable_log_stats": False,
    **(GPU if ON_GPU else CPU),
}
# For a GPU: processes that CUDA can be used in; products of float32 in Triton with all of their bits.
GPU_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TRITON_F32_DEFAULT": "ieee",
    **({} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}),  # which vLLM takes to be installed
}


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Any]:
    """A `vllm.LLM`; one at a time, as all in a process count into the same metrics. Its workers run what they are
    sent: `apply_model` takes any function that they can import."""
    from vllm import LLM

    before = dict(os.environ)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if ON_GPU:
        os.environ.update(GPU_ENVIRONMENT)
    llm = None
    try:
        llm = LLM(**OPTIONS | options)
        assert not ON_GPU or llm.llm_engine.vllm_config.use_v2_model_runner, "expected Model Runner V2 on a GPU"
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        for name in os.environ.keys() - before.keys():  # vLLM sets some for its children
            del os.environ[name]
        os.environ.update(before)


BLOCK = 32


def crowded(context: int, at_once: int, held: int = 1, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """A `vllm.LLM` whose KV cache holds `held` requests of `context` tokens, at least one, as vLLM demands, and little
    beside them: several of the longer clips at once have to wait for each other, and are preempted."""
    return running(
        max_model_len=context,
        max_num_seqs=at_once,
        block_size=BLOCK,
        num_gpu_blocks_override=held * context // BLOCK + 2,
        **options,
    )


# What is asked


@cache
def clips() -> dict[str, dataset.Clip]:
    return {clip.id: clip for clip in dataset.load(DATA)[0]}


@cache
def read(clip: str) -> np.ndarray:
    return evaluate.read_audio(clips()[clip].path)


@cache
def speech(seconds: float) -> np.ndarray:
    """So much of the longest clips, one after the other."""
    parts = [read(clip.id) for clip in sorted(clips().values(), key=lambda clip: -clip.duration_s)[:3]]
    return np.concatenate(parts)[: round(seconds * model.SAMPLE_RATE)]


def varied(number: int, longest_s: float = 5.0) -> list[str]:
    """Clips from the shortest to those of about `longest_s`, not in that order."""
    names = sorted((clip.duration_s, clip.id) for clip in clips().values() if clip.duration_s <= longest_s)
    spread = [names[i * (len(names) - 1) // (number - 1)][1] for i in range(number)]
    return spread[::2] + spread[1::2][::-1]


def prompt(audio: np.ndarray, delay: int = model.DELAY_TOKENS) -> dict[str, Any]:
    return {
        "prompt_token_ids": [model.BOS] + [model.STREAMING_PAD] * (layout.prompt_tokens(delay) - 1),
        "multi_modal_data": {"audio": (model.pad_audio(audio, delay), model.SAMPLE_RATE)},
    }


def limit(audio: np.ndarray) -> int:
    """Tokens from the end of the prompt to the one that is sampled at the clip's last position."""
    return model.n_tokens(len(audio)) - model.PROMPT_TOKENS + 1


# What is answered


def sampling(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": 512} | options)


def without_eos(tokens: Sequence[int]) -> list[int]:
    return [*tokens[:-1]] if tokens and tokens[-1] == model.EOS else [*tokens]


def generate(llm: Any, audios: Sequence[np.ndarray], **options: Any) -> list[list[int]]:
    """Tokens of each clip, EOS left out; all clips are asked for at once."""
    answers = llm.generate([prompt(audio) for audio in audios], sampling(**options), use_tqdm=False)
    return [without_eos(answer.outputs[0].token_ids) for answer in answers]


def generate_at(llm: Any, audios: Sequence[np.ndarray], delays: Sequence[int]) -> list[list[int]]:
    """The same, with a delay of each clip in token positions."""
    prompts = [prompt(audio, delay) for audio, delay in zip(audios, delays, strict=True)]
    answers = llm.generate(prompts, [sampling(extra_args={DELAY: delay}) for delay in delays], use_tqdm=False)
    return [without_eos(answer.outputs[0].token_ids) for answer in answers]


# Strong enough to change most texts, in every part of the rule
STRONG = Strengths(16.0, 12.0)


def table(*phrases: str) -> bytes | None:
    """Custom words of a request."""
    return keywords.phrase_tokens(TextTokenizer.from_file(PICO / "tekken.json")).table(phrases, STRONG)


def generate_preferring(llm: Any, audios: Sequence[np.ndarray], tables: Sequence[bytes | None]) -> list[list[int]]:
    """`generate` with custom words of each clip, or none."""
    asked = [sampling(extra_args=None if each is None else {KEYWORDS: each}) for each in tables]
    answers = llm.generate([prompt(audio) for audio in audios], asked, use_tqdm=False)
    return [without_eos(answer.outputs[0].token_ids) for answer in answers]


def referred_preferring(audios: Sequence[np.ndarray], tables: Sequence[bytes | None]) -> list[list[int]]:
    """The reference's tokens by the same rule."""
    return reference().transcribe([*audios], choose=keywords.Choice(tables))


def first_logits(llm: Any, audio: np.ndarray) -> torch.Tensor:
    """[vocab], of the token after the prompt; the LLM has logprobs_mode raw_logits and max_logprobs -1."""
    (answer,) = llm.generate([prompt(audio)], sampling(max_tokens=1, logprobs=-1), use_tqdm=False)
    (step,) = answer.outputs[0].logprobs
    return torch.tensor([step[token].logprob for token in range(len(step))])


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters and gauges by name, as /metrics has them."""
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


def steps(llm: Any) -> list[int]:
    """How many tokens each step had since this was last asked; nothing the first time."""
    (counts,) = llm.collective_rpc(counts_of_steps)
    return counts


# The reference


@cache
def reference() -> model.Voxtral:
    return model.load(PICO)


def reference_tokens(names: Sequence[str]) -> list[list[int]]:
    return reference().transcribe([read(name) for name in names])


def referred(audios: Sequence[np.ndarray], delays: Sequence[int]) -> list[list[int]]:
    """The reference's tokens: clip i at `delays[i]`, which begin again after the last."""
    pairs = [(audio, delays[number % len(delays)]) for number, audio in enumerate(audios)]
    by_delay = {
        delay: iter(reference().transcribe([audio for audio, each in pairs if each == delay], delay))
        for delay in {delay for _, delay in pairs}
    }
    return [next(by_delay[delay]) for _, delay in pairs]


@torch.no_grad()
def reference_rows(audio: np.ndarray) -> torch.Tensor:
    padded = torch.from_numpy(model.pad_audio(audio))
    return reference().embed_audio(model.log_mel(padded[None]))[0]


@torch.no_grad()
def reference_first_logits(audio: np.ndarray) -> torch.Tensor:
    tokens = torch.tensor([prompt(audio)["prompt_token_ids"]])
    return reference().decode(reference_rows(audio)[None, : model.PROMPT_TOKENS], tokens)[0, -1]


class Difference(NamedTuple):
    """The first token of a clip that is not the reference's: the numbers of clip and token, and by how much less likely
    the reference has it, in natural logarithms."""

    clip: int
    at: int
    gap: float


@torch.no_grad()
def differences(audios: Sequence[np.ndarray], answers: Sequence[Sequence[int]]) -> list[Difference]:
    """Of each clip whose tokens are not the reference's. An end counts as EOS."""
    found = []
    for number, (audio, expected) in enumerate(zip(audios, reference().transcribe([*audios]), strict=True)):
        theirs, ours = ([*tokens, model.EOS] for tokens in (expected, answers[number]))
        if theirs != ours:
            at = next(at for at, (token, other) in enumerate(zip(theirs, ours, strict=False)) if token != other)
            tokens = torch.tensor([prompt(audio)["prompt_token_ids"] + expected[:at]])
            logits = reference().decode(reference_rows(audio)[None, : tokens.shape[1]], tokens)[0, -1]
            found.append(Difference(number, at, float(logits[theirs[at]] - logits[ours[at]])))
    return found


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference of two tensors over the greatest magnitude in the expected one."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


# What workers run


def counts_of_steps(worker: Any) -> list[int]:
    worker = getattr(worker, "worker", worker)  # without vLLM's wrapper
    if not hasattr(worker, "counted"):
        run, worker.counted = worker.execute_model, []

        def counting(scheduled: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                worker.counted.append(scheduled.total_num_scheduled_tokens)
            return run(scheduled)

        worker.execute_model = counting
    counted: list[int] = worker.counted[:]
    worker.counted.clear()
    return counted


def padded_clips(served: Any, audios: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The waveforms of these clips, as vLLM gives them to the model."""
    return [torch.from_numpy(model.pad_audio(audio)).to(served.audio_rows.pool.device) for audio in audios]


def rows_of(served: Any, audios: Sequence[np.ndarray], frames: int = 8192) -> list[torch.Tensor]:
    """`embed_multimodal` of these clips in one call, with pieces of at most `frames`."""
    from voxtral_serve.engine import encoder

    whole, encoder.FRAMES = encoder.FRAMES, frames
    try:
        with torch.inference_mode():
            return [rows.float().cpu() for rows in served.embed_multimodal(audio_arrays=padded_clips(served, audios))]
    finally:
        encoder.FRAMES = whole


def packed_rows_of(served: Any, audios: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The rows of these clips by the pass that CUDA graphs capture, in buffers that an earlier pass has used."""
    from voxtral_serve.engine.encoder import PackedClips, Spans

    encoder = served.whisper_encoder
    left = encoder.prepare(served.project, served.downsample_factor)
    padded = padded_clips(served, audios)
    most = sum(len(each) // encoder.samples - left.frames for each in padded)
    clips = PackedClips(encoder, left, served.project, most)
    with torch.inference_mode():
        clips.put([torch.rand(encoder.samples * (left.frames + most), device=padded[0].device)])
        lengths = clips.put(padded)
        rows = clips.run(sum(lengths), Spans(lengths, lengths, left=left.kv))
    parts = rows.split([length // served.downsample_factor for length in lengths])
    return [torch.cat([left.rows, part]).float().cpu() for part in parts]


def frames_encoded(served: Any, audios: Sequence[np.ndarray]) -> tuple[int, int]:
    """Frames that the encoder computes for these clips, and those of their padded waveforms."""
    encoder, computed = served.whisper_encoder, []
    rows_of(served, audios[:1])  # the first clip computes the padding, unless it has been computed
    counting = encoder.whisper_encoder.register_forward_pre_hook(lambda _, given: computed.append(len(given[0])))
    try:
        rows_of(served, audios)
    finally:
        counting.remove()
    return sum(computed), sum(len(model.pad_audio(audio)) // encoder.samples for audio in audios)
