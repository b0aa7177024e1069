"""Which of one step's outputs leave the engine: vLLM's own output and sampling types, steps made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason

from voxtral_serve import final_text, shims

FINAL = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


class Engine:
    """Requests by name, and steps in which some of them make tokens."""

    def __init__(self, **params: SamplingParams) -> None:
        self.requests = {name: SimpleNamespace(sampling_params=each) for name, each in params.items()}
        self.held: dict[str, list[int]] = {}

    def step(self, *made: tuple[str, list[int]], ends: str = "", **fields: Any) -> list[tuple[str, list[int]]]:
        """What of it leaves the engine."""
        outputs = [EngineCoreOutput(name, tokens) for name, tokens in made]
        for output in outputs:
            if output.request_id == ends:
                output.finish_reason = FinishReason.LENGTH
                del self.requests[ends]  # as the scheduler does
        groups = {0: EngineCoreOutputs(outputs=outputs, **fields)}
        final_text.hold_back(self.held, self.requests, groups)
        return [(output.request_id, output.new_token_ids) for group in groups.values() for output in group.outputs]


def test_the_first_token_leaves_then_every_32_then_the_rest() -> None:
    engine = Engine(a=FINAL)
    left = [engine.step(("a", [token])) for token in range(70)] + [engine.step(("a", [70]), ends="a")]
    assert [(step, sent) for step, sent in enumerate(left) if sent] == [
        (0, [("a", [0])]),
        (32, [("a", [*range(1, 33)])]),
        (64, [("a", [*range(33, 65)])]),
        (70, [("a", [*range(65, 71)])]),
    ]
    assert engine.held == {}


def test_several_tokens_a_step_as_with_drafts() -> None:
    engine = Engine(a=FINAL)
    left = [engine.step(("a", [3 * step, 3 * step + 1, 3 * step + 2]), ends="a" * (step == 20)) for step in range(21)]
    assert [token for sent in left for _, tokens in sent for token in tokens] == [*range(63)]
    assert max(len(tokens) for sent in left for _, tokens in sent) <= final_text.TOKENS + 2


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(output_kind=RequestOutputKind.DELTA),
        SamplingParams(output_kind=RequestOutputKind.CUMULATIVE),
        SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, stop=["."]),
        SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, logprobs=0),
        SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, prompt_logprobs=0),
    ],
    ids=["delta", "cumulative", "stop", "logprobs", "prompt_logprobs"],
)
def test_each_token_leaves_where_each_is_looked_at(params: SamplingParams) -> None:
    engine = Engine(a=FINAL, b=params)
    engine.step(("a", [1]), ("b", [1]))
    assert engine.step(("a", [2]), ("b", [2])) == [("b", [2])]


def test_an_event_is_not_late() -> None:
    engine = Engine(a=FINAL)
    engine.step(("a", [1]))
    engine.step(("a", [2]))
    output = EngineCoreOutput("a", [3], events=[EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)])
    group = EngineCoreOutputs(outputs=[output])
    final_text.hold_back(engine.held, engine.requests, {0: group})
    assert group.outputs == [output]
    assert output.new_token_ids == [2, 3]
    assert engine.step(("a", [4])) == []


def test_an_aborted_request_leaves_nothing_behind() -> None:
    engine = Engine(a=FINAL, b=FINAL)
    engine.step(("a", [1]), ("b", [1]))
    engine.step(("a", [2]), ("b", [2]))
    del engine.requests["a"]
    engine.step(("b", [3]))
    assert engine.held == {"b": [2, 3]}


def test_no_message_without_content() -> None:
    engine = Engine(a=FINAL)
    engine.step(("a", [1]))
    for fields, sent in (({}, False), ({"scheduler_stats": object()}, True), ({"finished_requests": {"x"}}, True)):
        groups = {3: EngineCoreOutputs(outputs=[EngineCoreOutput("a", [2])], **fields)}
        final_text.hold_back(engine.held, engine.requests, groups)
        assert (3 in groups) == sent


def test_a_scheduler_that_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, final_text.MARK, raising=False)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, outputs: {})
    with pytest.raises(shims.PatchError, match=r"final_text .* takes \['self', 'outputs'\]"):
        final_text.install()


def test_installing_twice_wraps_once() -> None:
    final_text.install()
    wrapped = Scheduler.update_from_output
    final_text.install()
    assert Scheduler.update_from_output is wrapped
