"""vLLM's scheduler with drafts by how many were right: it asks draft_watch what to draft, and tells it what was right.

vLLM looks the number of drafts up once for each step, by the step's number of requests, in a list that it makes of
`num_speculative_tokens_per_batch_size`. `Lookup` is in the list's place. The drafts are made at the end of the step and
verified in the next one. Whether they are the head's or pads, the worker reads on the step (drafter.wants_pads).

While vLLM schedules ahead, drafts are placeholders here, and the requests' counts of tokens are as if all of them were
right, until the step's output comes.
"""

import logging
from typing import Any, ClassVar

from vllm.logger import init_logger

from voxtral_serve.engine import drafter
from voxtral_serve.engine.draft_watch import TEXT, Choice, DraftWatch

logger: logging.Logger = init_logger("vllm.voxtral_serve.drafts")
VERIFIES = "voxtral_serve_verifies"  # attribute of vLLM's SchedulerOutput: the Choice whose drafts the step verifies
SAMPLE = 64  # requests of a step whose drafts are counted; the time of counting is the host's


class Lookup:
    """Stands for vLLM's list of numbers of drafts by number of requests. `choice` is the last one."""

    def __init__(self, watch: DraftWatch) -> None:
        self.watch, self.choice = watch, Choice(False, 0)

    def __getitem__(self, running: int) -> int:
        self.choice = self.watch.choose(running)
        return self.choice.number


class DraftCounts:
    """Mixin for vLLM's scheduler classes. What it uses of them is in METHODS and ATTRIBUTES (scheduler.expected)."""

    SERVES = "drafts"
    METHODS: ClassVar[dict[str, tuple[str, ...]]] = {
        "schedule": (),
        "update_from_output": ("scheduler_output", "model_runner_output"),
        "update_draft_token_ids": ("draft_token_ids",),
        "_free_request": ("request",),
    }
    ATTRIBUTES: ClassVar[tuple[str, ...]] = (
        *("self.dynamic_sd_lookup[", "num_spec_tokens_to_schedule"),
        *("scheduled_spec_decode_tokens", "req_id_to_index", "sampled_token_ids"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        constant = [config.speculative_config.num_speculative_tokens] * (config.scheduler_config.max_num_seqs + 1)
        schedule: list[int] = self.dynamic_sd_lookup or constant  # type: ignore[has-type]
        self.watch = DraftWatch(schedule, drafter.head_file(config) is not None, drafter.streaming_pad(config))
        self.lookup = self.dynamic_sd_lookup = Lookup(self.watch)
        self.drafted = Choice(False, 0)  # after the last step that had tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if running := len(output.num_scheduled_tokens):
            setattr(output, VERIFIES, self.drafted)
            self.drafted = self.lookup.choice
            setattr(output, drafter.PADS, self.drafted.pads)
            if (line := self.watch.report(running)) is not None:
                logger.info(line)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._count(scheduler_output, model_runner_output)  # before vLLM cuts tokens past a request's end
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _count(self, scheduler_output: Any, model_runner_output: Any) -> None:
        drafted: Choice = getattr(scheduler_output, VERIFIES, self.drafted)
        verified, sampled = scheduler_output.scheduled_spec_decode_tokens, model_runner_output.sampled_token_ids
        if drafted.pads or not verified or not sampled:
            return
        every = -(-len(verified) // SAMPLE)
        place = model_runner_output.req_id_to_index
        # Near the end of the context, vLLM verifies fewer drafts than were made.
        accepted = [
            len(tokens) - 1
            for request in [*verified][self.watch.steps % every :: every]
            if len(verified[request]) == drafted.number and (tokens := sampled[place[request]])
        ]
        self.watch.heard(accepted, drafted.number)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Called after a step where vLLM does not schedule ahead, with what was drafted."""
        for tokens in draft_token_ids.draft_token_ids:
            del tokens[self.drafted.number :]
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.watch.text(request.output_token_ids[-TEXT:])
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
