"""vLLM's own scheduler and requests, without an engine. In place of the worker, `Engine` makes the tokens of a step."""

from typing import Any

import torch
from places import PICO
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from pico import model
from voxtral_serve.engine.live_audio import FAULTS
from voxtral_serve.engine.scheduler import scheduler
from voxtral_serve.engine.session import SESSION

TOKEN = 7
PROMPT = model.PROMPT_TOKENS
SPOKEN = bytes(2 * 20 * model.SAMPLES_PER_TOKEN)  # the prompt's rows are complete, and 13 more


def engine_config(blocks: int = 64, **options: Any) -> Any:
    """vLLM's config of pico, and that of a KV cache of so many blocks."""
    load_general_plugins()
    options = {"max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True} | options
    config = EngineArgs(
        model=str(PICO), hf_overrides={"architectures": ["VoxtralRealtimeEncodeOnce"]}, **options
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=config.cache_config.block_size, num_kv_heads=1, head_size=16, dtype=torch.float32
    )
    return config, KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])


class Engine:
    """A scheduler, and what vLLM's EngineCore does with it: `step` is one pass of its loop."""

    def __init__(self, config: Any, cache: KVCacheConfig) -> None:
        self.scheduler: Any = scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=config.cache_config.block_size,
            include_finished_set=True,
            log_stats=True,
        )
        self.in_flight: list[Any] = []

    def add(self, name: str, session: Any = None, prompt: int = PROMPT, client: int = 0, **options: Any) -> None:
        extra = {} if session is None else {SESSION: session}
        params = SamplingParams(max_tokens=options.pop("tokens", 300), ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(Request(name, [1] * prompt, params, None, client_index=client, **options))

    def begin(self, session: str, name: str) -> None:
        """A session with a request."""
        assert self.scheduler.live([["open", session], ["audio", session, SPOKEN]]) == {}
        self.add(name, session)

    def schedule(self) -> list[str]:
        """Requests of the step."""
        scheduled = self.scheduler.schedule()
        self.in_flight.append(scheduled)
        requests = {name: self.scheduler.requests[name] for name in scheduled.num_scheduled_tokens}
        # As Model Runner V1 and V2, which sample no token before a request's last one.
        scheduled.partial = {
            name for name, request in requests.items() if request.num_computed_tokens < request.num_tokens
        }
        return [*requests]

    def sampled(self, scheduled: Any) -> list[list[int]]:
        """The tokens of the requests of a step."""
        return [[] if name in scheduled.partial else [TOKEN] for name in scheduled.num_scheduled_tokens]

    def update(self, faults: dict[str, str] | None = None) -> dict[str, EngineCoreOutput]:
        """The outputs of the oldest step, whose worker has marked these requests."""
        scheduled = self.in_flight.pop(0)
        names = [*scheduled.num_scheduled_tokens]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, self.sampled(scheduled))
        setattr(output, FAULTS, faults or {})
        answers = self.scheduler.update_from_output(scheduled, output)
        return {output.request_id: output for answer in answers.values() for output in answer.outputs}

    def step(self, faults: dict[str, str] | None = None) -> dict[str, EngineCoreOutput]:
        assert self.scheduler.has_requests()  # vLLM makes no step otherwise
        self.schedule()
        return self.update(faults)
