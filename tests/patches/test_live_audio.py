"""Audio of live sessions on its way into the engine: vLLM's utility calls, the record, and vLLM's scheduler."""

import json
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scratch
from vllm.plugins import load_general_plugins
from vllm.v1.core.sched.scheduler import Scheduler

from voxtral_serve import shims
from voxtral_serve.engine import config, drafter, scheduler
from voxtral_serve.engine.draft_scheduler import DraftCounts
from voxtral_serve.engine.live_scheduler import LiveSessions
from voxtral_serve.engine.session import UTILITY
from voxtral_serve.patches.live_audio import LiveAudio

MESSAGES = [["open", "a session", False], ["audio", "a session", b"\0\0"]]
# The call to an engine that has not started, whose scheduler has a method of any name. In an interpreter that has
# nothing of ours in force.
CALL = f"""
import json, queue
from types import SimpleNamespace
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as module

class OfScheduler:
    def __getattr__(self, name):
        return lambda messages: {{"refused": name}}

engine = object.__new__(module.EngineCoreProc)
engine.scheduler = OfScheduler()
engine.output_queue = queue.Queue()
engine.shutdown_state = module.EngineShutdownState.RUNNING
engine._handle_client_request(EngineCoreRequestType.UTILITY, (0, 1, {UTILITY!r}, ([],)))
output = engine.output_queue.get_nowait()[1].utility_output
places = [name for name in dir(module.EngineCoreProc) if "utility" in name.lower()]
print(json.dumps([hasattr(module.EngineCoreProc, {UTILITY!r}), output.failure_message, output.result, places]))
"""


@pytest.mark.slow
def test_vllm_has_no_place_for_a_utility_call(stock: Path) -> None:
    """Where this fails, vLLM may take the call of a scheduler class, and the patch can go."""
    done = scratch.run(stock, "-c", CALL, VLLM_PLUGINS="")
    assert done.returncode == 0, done.stderr
    there, failure, result, places = json.loads(done.stdout.splitlines()[-1])
    assert not there
    assert f"has no attribute {UTILITY!r}" in failure and result is None
    # To answer calls, and none to add one
    assert places == ["_invoke_utility_method", "_reject_utility_in_shutdown"]


def test_a_utility_call_reaches_the_scheduler() -> None:
    """vLLM's own dispatch, which reads the arguments' types from the annotations."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine import core as module

    load_general_plugins()
    shims.require("live_audio")
    received: list[Any] = []

    def live(messages: list[Any]) -> dict[str, str]:
        received.append(messages)
        return {"a session": "no"}

    engine: Any = object.__new__(module.EngineCoreProc)
    engine.scheduler = SimpleNamespace(live=live)
    engine.output_queue = queue.Queue()
    engine.shutdown_state = module.EngineShutdownState.RUNNING
    engine._handle_client_request(EngineCoreRequestType.UTILITY, (0, 7, UTILITY, (MESSAGES,)))
    output = engine.output_queue.get_nowait()[1].utility_output
    assert (output.call_id, output.failure_message, output.result.result) == (7, None, {"a session": "no"})
    assert received == [MESSAGES]


# The record


def module_of(**methods: Any) -> Any:
    engine = type("EngineCore", (), methods)
    return SimpleNamespace(EngineCore=engine, EngineCoreProc=type("EngineCoreProc", (engine,), {}))


def test_it_applies_once() -> None:
    module = module_of(_handle_client_request=lambda *request: None)
    assert LiveAudio().settle(module)[0] == "applied"
    assert not LiveAudio().probe(module)
    process = module.EngineCoreProc()
    process.scheduler = SimpleNamespace(live=lambda messages: {"messages": messages})
    assert getattr(process, UTILITY)([1]) == {"messages": [1]}


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (SimpleNamespace(), "LookupError: no EngineCore"),
        (SimpleNamespace(EngineCore=object), "LookupError: no EngineCoreProc"),
        (module_of(), "LookupError: EngineCoreProc has no _handle_client_request"),
        (module_of(**{UTILITY: None}, _handle_client_request=None), "the probe says not needed"),
    ],
)
def test_an_engine_of_another_form_has_drifted(module: Any, found: str) -> None:
    outcome, why = LiveAudio().settle(module)
    assert outcome == "drifted" and found in why


@pytest.mark.parametrize(
    ("options", "required"), [({}, []), ({"max_live_sessions": 0}, []), ({"max_live_sessions": 2}, ["live_audio"])]
)
def test_it_is_required_where_there_are_live_sessions(
    options: dict[str, int], required: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that drifted ends no other start."""
    names: list[str] = []
    monkeypatch.setattr(shims, "require", lambda *patches: names.extend(patches))
    scheduling = SimpleNamespace(scheduler_cls=None, max_num_seqs=8, policy="priority", long_prefill_token_threshold=0)
    config._choose_scheduler(
        SimpleNamespace(
            additional_config=options,
            scheduler_config=scheduling,
            speculative_config=None,
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )  # type: ignore[arg-type]
    )
    assert names == required
    assert scheduling.scheduler_cls == "voxtral_serve.engine.scheduler.scheduler"


# The scheduler


def test_vllms_scheduler_is_as_expected() -> None:
    assert scheduler.expected(Scheduler, LiveSessions) == []
    lacking = ["self.dynamic_sd_lookup[", "num_spec_tokens_to_schedule"] if drafter.V1 else []
    assert scheduler.expected(Scheduler, DraftCounts) == lacking  # config.py does not use it there


def test_a_scheduler_that_lacks_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_preempt_request")
    monkeypatch.setattr(Scheduler, "finish_requests", lambda self, request_ids: None)
    lacking = ["finish_requests(request_ids, finished_status)", "_preempt_request(request)"]
    assert scheduler.expected(Scheduler, LiveSessions) == lacking
    options: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=True),
        additional_config={"max_live_sessions": 2},
        speculative_config=None,
    )
    with pytest.raises(shims.PatchError) as refused:
        scheduler.scheduler(vllm_config=options)
    message = str(refused.value)
    assert f"vllm {shims.installed('vllm')}: its scheduler has no {', '.join(lacking)}: live sessions" in message


@pytest.mark.parametrize("mixin", [LiveSessions, DraftCounts])
def test_a_scheduler_without_the_attributes_is_refused(mixin: Any) -> None:
    other = type("Scheduler", (), {"__module__": "json", "schedule": Scheduler.schedule})
    lacking = scheduler.expected(other, mixin)
    assert lacking[: len(mixin.ATTRIBUTES)] == [*mixin.ATTRIBUTES]
    assert "schedule()" not in lacking and "_free_request(request)" in lacking
