"""The self-test of the encode-once model: before the server is ready, each request must read its own audio rows.

Patches and probes see that a name in vLLM has changed, not that its meaning has. Requests would then read rows of other
requests, and get a fluent, wrong text. So the worker runs a few steps as vLLM's scheduler orders them, by its own
`execute_model`: two clips that begin together, of which one ends first; the same clips in swapped slots; a live session
beside one of them. After each step two things are compared, for every token of the step:

rows    those that AudioRows has for the token, with those of the same audio encoded alone
sums    what `forward` gave the language model, with the embedding of the token plus that row; on a GPU with
        torch.compile only, because without it the layers of the language model add to this tensor in place

Where a server runs one request at a time, or has no live sessions, the steps are fewer.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from mistral_common.tokens.tokenizers.audio import Audio
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from voxtral_serve import shims
from voxtral_serve.engine.draft_network import chirp
from voxtral_serve.engine.live_audio import FAULTS, STEP, LiveStep, SessionAudio
from voxtral_serve.engine.session import SessionShape

logger = init_logger("vllm.voxtral_serve")

# Largest relative RMS difference of rows, by their type. Rows of other audio differ by about 1. Clips that are encoded
# together are not rounded as each alone is.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# With quantized weights: a small difference of an activation may be rounded to a large one.
QUANTIZED_LIMIT = 1e-1
AUDIO_ROWS = (20, 26)  # of each clip, between its paddings
STEPS = 4  # tokens of a request after its prompt, at most; their rows are of audio, too
NAME = "voxtral-serve-self-test-"  # of a request; a number follows


class SelfTestError(RuntimeError):
    """Requests of the encode-once model would not read their own audio rows."""


@dataclass(frozen=True)
class Sound:
    """Audio of the test: int16 [n]; the same padded as an uploaded clip, float32; the prompt of such a clip; and the
    rows [positions, dim] that it has when it is encoded alone."""

    what: str
    pcm: np.ndarray
    padded: torch.Tensor
    prompt: list[int]
    rows: torch.Tensor


@dataclass
class Request:
    """A request of the test. `tokens`: its prompt, and what was sampled since. `session`: of a live session."""

    name: str
    sound: Sound
    tokens: list[int]
    blocks: tuple[list[int], ...]
    session: SessionAudio | None = None
    computed: int = 0  # tokens whose step was run
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    def __str__(self) -> str:
        return f"a live session of {self.sound.what}" if self.session else self.sound.what

    @property
    def is_new(self) -> bool:
        return self.computed == 0


def run(worker: Any) -> None:
    """Test a worker of the encode-once model that is ready for its first request, and leave it so. Raises SelfTestError
    if a request reads other rows than its own, and if vLLM does not run the steps."""
    config = worker.vllm_config
    for name in ("kv_transfer_config", "ec_transfer_config"):
        if getattr(config, name, None) is not None:  # its connector expects data of its own in each step
            logger.warning("no self-test of the audio rows, because %s is set: expected none", name)
            return
    begin, test = time.perf_counter(), SelfTest(worker)
    test.check()
    test.clean()
    logger.info(
        "self-test of the audio rows: %d steps, largest relative RMS difference %.1e (limit %.0e), %.2f s",
        test.steps,
        test.largest,
        test.limit,
        time.perf_counter() - begin,
    )


def failed() -> str:
    return f"vllm {shims.installed('vllm')}: the self-test of VoxtralRealtimeEncodeOnce failed"


ADVICE = (
    f"Transcripts would be fluent and wrong. {shims.ADVICE} If this is a tested version, report it with its start's log"
)


class SelfTest:
    """`check` runs the steps, `clean` ends the requests. `steps` and `largest`, a relative RMS, say what was seen."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.runner = worker, worker.model_runner
        self.model = self.runner.get_model()
        self.rows = self.model.audio_rows
        self.device = self.rows.pool.device
        quantized = worker.vllm_config.quant_config is not None
        self.limit = QUANTIZED_LIMIT if quantized else LIMITS[self.rows.pool.dtype]
        in_place = worker.vllm_config.compilation_config.mode == CompilationMode.NONE
        self.sees_sums = not in_place or self.device.type == "cpu"
        self.steps, self.largest = 0, 0.0
        self.requests: list[Request] = []
        self.numbers = count()

    def check(self) -> None:
        """Raises SelfTestError."""
        try:
            self._run()
        except SelfTestError:
            raise
        except Exception as error:
            name = type(error).__name__
            raise SelfTestError(f"{failed()}: vLLM did not run it ({name}: {error}). {ADVICE}") from error

    @torch.inference_mode()
    def _run(self) -> None:
        sounds = [*self._sounds()]
        together = self._fit_together(sounds)
        running: list[Request] = []
        # Freed slots are taken again from the last one on, so that two clips that end one after the other swap theirs.
        for batch in [sounds, sounds] if together else [[sound] for sound in sounds]:
            begun = [self._request(sound, place) for place, sound in enumerate(batch)]
            self.step(begun, ended=running)
            self.step(begun)
            *gone, last = begun
            if gone:
                self.step([last], ended=gone)
            running = [last]
        if self.model.live is not None:
            session = self._request(sounds[0], 0, live=True)
            beside = running if together else []
            self.step([*beside, session], ended=[] if together else running)
            self.step([*beside, session])

    def clean(self) -> None:
        """End all requests. Nothing of them is left but audio in slots that are free."""
        step = SchedulerOutput.make_empty()
        step.finished_req_ids = {request.name for request in self.requests}
        step.free_encoder_mm_hashes = [request.name for request in self.requests]
        self.worker.execute_model(step)
        if (slots := getattr(self.runner, "slots", None)) is not None:  # of Model Runner V1, which frees them late
            slots.end_all()
        if self.model.drafts is not None:
            self.model.drafts.waiting.clear()

    def _sounds(self) -> Iterator[Sound]:
        """Noise and a chirp, of different lengths, that fit the longest clip."""
        audio: Any = self.model.tokenizer.instruct.audio_encoder
        shape = SessionShape.of(audio.audio_config)
        room = self.rows.positions - shape.left - shape.right
        noise = np.random.default_rng(0).normal(0, 3000, AUDIO_ROWS[0] * shape.samples).clip(-(2**15), 2**15 - 1)
        tone = np.resize(chirp(shape.rate_hz) * 2**15, AUDIO_ROWS[1] * shape.samples)
        for what, samples in (("a clip of noise", noise), ("a clip of a chirp", tone)):
            pcm = samples[: max(room, 1) * shape.samples].astype(np.int16)
            clip = audio.encode_audio(Audio((pcm / 2**15).astype(np.float32), shape.rate_hz, format="wav"))
            padded = torch.from_numpy(clip.audio.audio_array)
            (rows,) = self.model.embed_multimodal(audio_arrays=[padded.to(self.device)])
            start = [*self.model.tokenizer.instruct.start(), *clip.tokens]
            more = shape.left + len(pcm) // shape.samples - STEPS - len(start)
            yield Sound(what, pcm, padded, start + [audio.streaming_pad] * max(more, 0), rows.clone())

    def _blocks_of(self, sound: Sound) -> list[int]:
        """Blocks of the KV cache that a request needs, of each group of layers."""
        drafts = self.worker.vllm_config.speculative_config
        tokens = len(sound.prompt) + STEPS + (drafts.num_speculative_tokens if drafts is not None else 0)
        groups = self.runner.kv_cache_config.kv_cache_groups
        return [-(-tokens // group.kv_cache_spec.block_size) for group in groups]

    def _fit_together(self, sounds: Sequence[Sound]) -> bool:
        """Whether a step may have two requests with their whole prompts."""
        prompts = sum(len(sound.prompt) for sound in sounds)
        blocks = 1 + sum(sum(self._blocks_of(sound)) for sound in sounds)  # vLLM keeps block 0 for itself
        config = self.worker.vllm_config.scheduler_config
        fits = prompts <= config.max_num_batched_tokens and blocks <= self.runner.kv_cache_config.num_blocks
        return fits and self.rows.slots >= len(sounds)

    def _request(self, sound: Sound, place: int, live: bool = False) -> Request:
        """A request with the first or second part of the KV cache's blocks that the test uses."""
        free = count(1 + place * self.runner.kv_cache_config.num_blocks // 2)
        blocks = tuple([next(free) for _ in range(number)] for number in self._blocks_of(sound))
        session = None
        if live:
            session = SessionAudio(self.model.live.shape, self.worker.vllm_config.model_config.max_model_len)
            session.add(sound.pcm.tobytes())
            session.end()
        tokens = sound.prompt[: self.worker.vllm_config.scheduler_config.max_num_batched_tokens]
        request = Request(f"{NAME}{next(self.numbers)}", sound, [*tokens], blocks, session)
        self.requests.append(request)
        return request

    def step(self, requests: Sequence[Request], ended: Sequence[Request] = ()) -> None:
        """Run a step: the prompt of each new request, the last token of each other one. Raises SelfTestError."""
        self.steps += 1
        output = self.worker.execute_model(self._scheduled(requests, ended))
        if output is None:
            output = self.worker.sample_tokens(None)
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        self._fail(*(f"its audio had a fault ({fault})" for fault in getattr(output, FAULTS, {}).values()))
        by_name = {request.name: request for request in requests}
        ordered = [by_name[name] for name in output.req_ids]
        self._compare(ordered)
        for request, sampled in zip(ordered, output.sampled_token_ids, strict=True):
            request.computed = len(request.tokens)
            request.tokens.append(int(sampled[-1]))

    def _scheduled(self, requests: Sequence[Request], ended: Sequence[Request]) -> SchedulerOutput:
        """The step as vLLM's scheduler would order it."""
        step = SchedulerOutput.make_empty()
        new = [request for request in requests if request.is_new]
        step.scheduled_new_reqs = [_described(request) for request in new]
        step.scheduled_encoder_inputs = {request.name: [0] for request in new if request.session is None}
        cached, going = CachedRequestData.make_empty(), [request for request in requests if not request.is_new]
        cached.req_ids = [request.name for request in going]
        cached.new_block_ids = [None for _ in going]
        cached.num_computed_tokens = [request.computed for request in going]
        cached.num_output_tokens = [len(request.tokens) - request.prompt for request in going]
        step.scheduled_cached_reqs = cached
        step.num_scheduled_tokens = {request.name: len(request.tokens) - request.computed for request in requests}
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.num_common_prefix_blocks = [0 for _ in self.runner.kv_cache_config.kv_cache_groups]
        step.finished_req_ids = {request.name for request in ended}
        parts = {
            request.name: part
            for request in requests
            if request.session is not None
            and (part := request.session.next_part(request.computed, step.num_scheduled_tokens[request.name], 0))
        }
        setattr(step, STEP, LiveStep(parts))
        return step

    def _compare(self, requests: Sequence[Request]) -> None:
        """Compare the rows of a step's tokens, and the sums that `forward` made of them, with those expected."""
        ranges = [range(request.computed, len(request.tokens)) for request in requests]
        tokens = [
            token for request, span in zip(requests, ranges, strict=True) for token in request.tokens[span.start :]
        ]
        positions = torch.tensor([at for span in ranges for at in span], device=self.device)
        given = self.rows.embeddings[: len(tokens)].clone()
        embedded = self.model.language_model.model.embed_input_ids(torch.tensor(tokens, device=self.device))
        rows = self.rows.added_to(torch.zeros_like(embedded), positions).clone()
        sums = self.rows.added_to(embedded, positions)
        start = 0
        for request, span in zip(requests, ranges, strict=True):
            place = slice(start, start + len(span))
            own = f"the rows of {request} at positions {span.start} to {span.stop - 1}"
            self._check(
                f"{own}, compared with the same audio alone", rows[place], request.sound.rows[span.start : span.stop]
            )
            if self.sees_sums:
                self._check(f"{own}, as the language model gets them", given[place], sums[place])
            start = place.stop

    def _check(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        difference = relative_rms(found, expected)
        if not difference <= self.limit:  # also if it is NaN
            self._fail(f"{what}: their relative RMS difference is {difference:.2g}, expected at most {self.limit:.0e}")
        self.largest = max(self.largest, difference)

    def _fail(self, *reasons: str) -> None:
        if reasons:
            raise SelfTestError(f"{failed()} in step {self.steps}: {'; '.join(reasons)}. {ADVICE}")


def _described(request: Request) -> NewRequestData:
    """A new request as vLLM's scheduler describes it to the worker. Its clip has its name."""
    clips = []
    if request.session is None:
        audio = MultiModalFieldElem(request.sound.padded, MultiModalBatchedField())
        place = PlaceholderRange(0, request.prompt)
        clips = [MultiModalFeatureSpec(MultiModalKwargsItem({"audio_arrays": audio}), "audio", request.name, place)]
    return NewRequestData(
        req_id=request.name,
        prompt_token_ids=request.tokens[:],
        mm_features=clips,
        sampling_params=SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True),
        pooling_params=None,
        block_ids=request.blocks,
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=request.tokens[:],
    )


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The RMS of the difference of two tensors of one shape over that of `expected`."""
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm())
