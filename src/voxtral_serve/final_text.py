"""Fewer messages for requests that want only their final text: 32 tokens at a time leave the engine, not each one.

For every token of every request vLLM's engine sends a message that the API server unpacks, counts and detokenizes,
and then waits for the next, where the client asked for the whole text at once. With 64 requests running that work
takes longer than what it waits for. A request that streams, has stop strings or asks for log probabilities gets each
token as before, and so does the first token of any request, by which vLLM measures TTFT. What vLLM's /metrics calls
inter-token latency is then the time of up to 32 tokens; the time per output token stays right.
"""

import inspect
from functools import wraps
from typing import Any

from vllm.sampling_params import RequestOutputKind

from voxtral_serve import shims
from voxtral_serve.clip_end import ENCODE_ONCE

MARK = "voxtral_serve_held"
# Few enough that the last ones are detokenized in a millisecond, since for those the client waits.
TOKENS = 32


def install() -> None:
    """Wrap this process' Scheduler; twice does no harm. Raises PatchError where it is not as expected."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    scheduler: Any = Scheduler
    if hasattr(scheduler, MARK):
        return
    stock = getattr(scheduler, "update_from_output", None)
    found = [*inspect.signature(stock).parameters] if stock else "nothing: it is gone"
    lacking = {"request_id", "new_token_ids", "finish_reason", "events"} - {*EngineCoreOutput.__struct_fields__}
    lacking |= {"outputs", "scheduler_stats", "finished_requests"} - {*EngineCoreOutputs.__struct_fields__}
    if stock is None or found != ["self", "scheduler_output", "model_runner_output"] or lacking:
        raise shims.PatchError(
            f"patch final_text (of vllm.v1.core.sched.scheduler) has drifted on vllm {shims.installed('vllm')}: "
            f"Scheduler.update_from_output takes {found}, and its outputs lack {sorted(lacking)}. {shims.ADVICE}"
        )

    @wraps(stock)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = stock(self, scheduler_output, model_runner_output)
        if self.vllm_config.model_config.architecture == ENCODE_ONCE:
            hold_back(self.__dict__.setdefault(MARK, {}), self.requests, outputs)
        return outputs

    scheduler.update_from_output = update_from_output
    setattr(scheduler, MARK, True)


def hold_back(held: dict[str, list[int]], requests: dict[str, Any], outputs: dict[int, Any]) -> None:
    """Take out of one step's outputs (EngineCoreOutputs by client) what can wait, and put in what has waited enough.

    `held` has the tokens that wait, of every running request whose tokens may; `requests` are the scheduler's.
    """
    for client, group in [*outputs.items()]:
        kept = []
        for output in group.outputs:
            waiting = held.get(output.request_id)
            if waiting is None:
                if output.finish_reason is None and may_wait(requests.get(output.request_id)):
                    held[output.request_id] = []
                kept.append(output)
                continue
            waiting += output.new_token_ids
            # An event, such as a preemption, is not to come late.
            if output.finish_reason is None and output.events is None and len(waiting) < TOKENS:
                continue
            output.new_token_ids, held[output.request_id] = waiting, []
            if output.finish_reason is not None:
                del held[output.request_id]
            kept.append(output)
        group.outputs = kept
        if not kept and group.scheduler_stats is None and not group.finished_requests:
            del outputs[client]
    if len(held) > len(requests):  # some were aborted, which is no output
        for request in held.keys() - requests.keys():
            del held[request]


def may_wait(request: Any) -> bool:
    """Whether nothing of the request is looked at before its end."""
    params = request and request.sampling_params
    return bool(
        params
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and params.logprobs is None
        and params.prompt_logprobs is None
    )
