"""Audio rows of running requests: each request's tokens get its own, whatever came, went and came back."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from voxtral_serve import shims
from voxtral_serve.engine import config, self_test
from voxtral_serve.engine.audio_rows import NO_AUDIO, AudioRows
from voxtral_serve.engine.live_audio import FAULTS, STEP, LivePart, LiveStep
from voxtral_serve.engine.model_runner import METHODS, AudioRowsRunner, Slots, pin, with_audio_rows
from voxtral_serve.engine.session import DELAY
from voxtral_serve.engine.worker import EncodeOnceWorker

SLOTS, LENGTH, TOKENS, DIM = 3, 10, 32, 4


def settings() -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS, max_num_batched_tokens=TOKENS),
        model_config=SimpleNamespace(max_model_len=LENGTH, get_hidden_size=lambda: DIM, hf_config=SimpleNamespace()),
    )


@pytest.fixture
def held() -> AudioRows:
    return AudioRows(settings())


def filled(value: float, length: int = LENGTH) -> torch.Tensor:
    """Rows that tell their clip and position: of clip 5 at position 3, 5.03."""
    return (value + torch.arange(length)[:, None] / 100).expand(length, DIM).contiguous()


# The tensor


def test_a_slot_holds_a_clip_and_nothing_after_it(held: AudioRows) -> None:
    held.put(1, filled(5))
    held.put(1, filled(7, 4))
    assert torch.equal(held.pool[LENGTH : LENGTH + 4], filled(7, 4))
    assert not held.pool[LENGTH + 4 : 2 * LENGTH].any()
    assert not held.pool[:LENGTH].any()
    assert not held.pool[2 * LENGTH :].any()


def test_rows_beyond_the_context_are_left_out(held: AudioRows) -> None:
    held.put(0, filled(5, LENGTH + 3))
    assert torch.equal(held.pool[:LENGTH], filled(5))
    assert not held.pool[LENGTH:].any()


def test_each_token_gets_the_row_of_its_slot_and_position(held: AudioRows) -> None:
    held.put(0, filled(5))
    held.put(2, filled(8))
    held.slot[:4] = torch.tensor([0, 2, 2, 1])
    positions = torch.tensor([3, 0, 9, 4])
    embeddings = torch.randn(4, DIM)
    got = held.added_to(embeddings, positions)
    expected = embeddings + torch.tensor([5.03, 8.0, 8.09, 0.0])[:, None]
    torch.testing.assert_close(got, expected)
    assert got.data_ptr() == held.embeddings.data_ptr()  # where a CUDA graph has it


def test_positions_beyond_a_place_wrap_modulo_its_length(held: AudioRows) -> None:
    """A warm-up counts positions beyond the context, and a live session's ring is shorter than its request."""
    held.put(2, filled(8))
    held.slot[:1] = 2
    got = held.added_to(torch.zeros(1, DIM), torch.tensor([LENGTH + 5]))
    torch.testing.assert_close(got, torch.full((1, DIM), 8.05))


def test_a_request_without_audio_has_zeros_at_every_position(live_rows: AudioRows) -> None:
    live_rows.pool.fill_(7)
    live_rows.pool[-1].zero_()
    live_rows.live().fill_(8)
    live_rows.put_nothing(1)
    live_rows.slot[:4] = torch.tensor([0, 1, 1, SLOTS])
    got = live_rows.added_to(torch.zeros(4, DIM), torch.tensor([3, 0, LENGTH + 1, 5]))
    assert got[:, 0].tolist() == [7, 0, 0, 0]
    assert live_rows.delays(4).tolist() == [6] * 4


# Delays


@pytest.fixture
def live_rows() -> AudioRows:
    return AudioRows(settings(), live_slots=2, clip_delay=6)


def delays(held: AudioRows, *slots: int) -> list[int]:
    held.slot[: len(slots)] = torch.tensor(slots)
    return held.delays(len(slots)).tolist()


def test_each_token_has_the_delay_of_its_request(live_rows: AudioRows) -> None:
    live_rows.put_live(0, 1, 30)
    live_rows.put(1, filled(5))
    live_rows.put_live(2, 0, 1)
    assert delays(live_rows, 0, 2, 2, 1, 0) == [30, 1, 1, 6, 30]
    assert live_rows.delays(3).data_ptr() == live_rows.token_delay.data_ptr()  # where a CUDA graph has it


def test_a_clip_in_the_slot_of_a_session_that_has_ended_has_its_own_delay(live_rows: AudioRows) -> None:
    assert delays(live_rows, 0, 1, 2) == [6, 6, 6]
    live_rows.put_live(1, 0, 12)
    assert delays(live_rows, 0, 1, 2) == [6, 12, 6]
    live_rows.put(1, filled(5))
    assert delays(live_rows, 0, 1, 2) == [6, 6, 6]


# Slots in Model Runner V1


class Runner:
    """What Slots reads of vLLM's runner, and steps as its scheduler tells of them."""

    def __init__(self, held: AudioRows, drafts: Any = None) -> None:
        self.slots = Slots(held, drafts=drafts)
        self.requests: dict[str, Any] = {}
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.input_batch = SimpleNamespace(req_ids=[])

    def begin(self, name: str, value: float | None) -> None:
        """A request, with a clip of rows `filled(value)` if any."""
        clips = [] if value is None else [SimpleNamespace(identifier=f"clip of {name}")]
        self.requests[name] = SimpleNamespace(mm_features=clips, sampling_params=None)
        if value is not None:
            self.encoder_cache[f"clip of {name}"] = filled(value)

    def step(
        self,
        tokens: dict[str, int],
        new: tuple[str, ...] = (),
        resumed: tuple[str, ...] = (),
        preempted: tuple[str, ...] | None = None,
        untold: tuple[str, ...] = (),
    ) -> list[float]:
        """The value of the rows that each token of the step would get at position 0."""
        self.input_batch.req_ids = [*tokens]
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={*resumed}),
            preempted_req_ids=None if preempted is None else {*preempted},
            num_scheduled_tokens=tokens,
            **{STEP: LiveStep(preempted={*untold})},
        )
        self.slots.begin_step(self, scheduled)
        held, n = self.slots.rows, sum(tokens.values())
        return held.added_to(torch.zeros(n, DIM), torch.zeros(n, dtype=torch.int64))[:, 0].tolist()


@pytest.fixture
def runner(held: AudioRows) -> Runner:
    return Runner(held)


def begun(runner: Runner, *names: str) -> None:
    for value, name in enumerate(names, 1):
        runner.begin(name, value)
    runner.step(dict.fromkeys(names, 2), new=names)


def test_tokens_of_a_step_belong_to_their_requests(runner: Runner) -> None:
    runner.begin("a", 1)
    runner.begin("b", 2)
    assert runner.step({"a": 3, "b": 2}, new=("a", "b")) == [1, 1, 1, 2, 2]
    assert runner.step({"a": 1, "b": 1}) == [1, 2]
    assert runner.step({"b": 1, "a": 1}) == [2, 1]  # V1 reorders its batch
    assert runner.step({"b": 4}) == [2, 2, 2, 2]


def test_a_slot_is_free_again_once_its_request_ended(runner: Runner) -> None:
    begun(runner, "a", "b", "c")
    assert runner.slots.free == []
    for name in "abc":
        del runner.requests[name]
    for value, name in enumerate("def", 7):
        runner.begin(name, value)
    assert runner.step({"d": 1, "e": 1, "f": 1}, new=("d", "e", "f")) == [7, 8, 9]


def test_many_requests_pass_through_a_few_slots(runner: Runner) -> None:
    running: list[str] = []
    for number in range(50):
        if len(running) == SLOTS:
            del runner.requests[running.pop(number % SLOTS)]
        name = f"request {number}"
        runner.begin(name, number)
        running.append(name)
        expected = [float(each.split()[1]) for each in running]
        assert runner.step(dict.fromkeys(running, 1), new=(name,)) == expected
    assert sorted([*runner.slots.of.values(), *runner.slots.free]) == list(range(SLOTS))


def test_a_preempted_requests_slot_goes_to_another_and_it_gets_a_new_one(runner: Runner) -> None:
    begun(runner, "a", "b", "c")
    assert runner.step({"a": 1, "b": 1}, preempted=("c",)) == [1, 2]
    assert len(runner.slots.free) == 1
    runner.begin("d", 9)
    assert runner.step({"a": 1, "d": 1, "b": 1}, new=("d",)) == [1, 9, 2]
    del runner.requests["a"]
    assert runner.step({"c": 2, "b": 1, "d": 1}, resumed=("c",)) == [3, 3, 2, 9]


def test_one_is_preempted_in_the_step_in_which_another_begins(runner: Runner) -> None:
    begun(runner, "a", "b", "c")
    runner.begin("d", 9)
    assert runner.step({"a": 1, "b": 1, "d": 1}, new=("d",), preempted=("c",)) == [1, 2, 9]


def test_one_that_was_aborted_while_preempted(runner: Runner) -> None:
    begun(runner, "a", "b", "c")
    runner.step({"a": 1, "b": 1}, preempted=("c",))
    del runner.requests["c"]
    runner.begin("d", 9)
    assert runner.step({"a": 1, "b": 1, "d": 1}, new=("d",)) == [1, 2, 9]
    assert runner.slots.free == []


def test_a_request_without_a_clip_takes_no_slot_and_reads_nobodys_rows(runner: Runner) -> None:
    begun(runner, "a")
    assert runner.slots.of == {"a": SLOTS - 1}
    for value, name in enumerate("bc", 2):
        runner.begin(name, value)
    runner.begin("text", None)
    for new in (("b", "c", "text"), ()):
        assert runner.step({"text": 2, "b": 1, "a": 1, "c": 1}, new=new) == [0, 0, 2, 1, 3]
        assert runner.slots.rows.faults == {"text": NO_AUDIO}
        runner.slots.rows.faults.clear()
    assert [*runner.slots.of] == ["a", "b", "c"]


def test_a_request_for_which_no_slot_is_free(runner: Runner) -> None:
    """It takes none, and no other request notices."""
    begun(runner, "a", "b", "c")
    runner.begin("d", 9)
    assert runner.step({"a": 1, "d": 2, "b": 1, "c": 1}, new=("d",)) == [1, 0, 0, 2, 3]
    assert (runner.slots.rows.faults, len(runner.slots.of)) == ({"d": NO_AUDIO}, SLOTS)


def test_the_rows_of_each_clip_can_be_observed(runner: Runner) -> None:
    begun(runner, "a")
    observed: dict[str, torch.Tensor] = {}
    runner.slots.rows.observe = observed.__setitem__
    begun(runner, "b", "c")
    assert [*observed] == ["clip of b", "clip of c"]
    assert torch.equal(observed["clip of c"], filled(2))


def test_requests_that_were_preempted_in_steps_without_tokens(runner: Runner) -> None:
    """Model Runner V1 does not call `begin_step` in them, and vLLM's own field has those of one step."""
    begun(runner, "a", "b", "c")
    runner.begin("d", 9)
    assert runner.step({"a": 1, "d": 1, "b": 1}, new=("d",), untold=("c",)) == [1, 9, 2]
    assert runner.slots.rows.faults == {}


def test_the_drafter_hears_of_each_clip_when_it_begins_and_begins_again(held: AudioRows) -> None:
    told: list[Any] = []
    drafts = SimpleNamespace(begin=lambda *begun: told.append(begun))
    runner = Runner(held, drafts)
    begun(runner, "a", "b")
    slots = dict(runner.slots.of)
    assert told == [(slots["a"], LENGTH, None), (slots["b"], LENGTH, None)]
    told.clear()
    runner.step({"b": 1}, preempted=("a",))
    assert told == []
    runner.step({"b": 1, "a": 3}, resumed=("a",))
    assert told == [(runner.slots.of["a"], LENGTH, None)]
    runner.requests["b"].sampling_params = SimpleNamespace(extra_args={DELAY: 30})
    runner.step({"a": 1}, preempted=("b",))
    runner.step({"b": 1, "a": 3}, resumed=("b",))
    assert told[1:] == [(runner.slots.of["b"], LENGTH, 30)]
    assert delays(held, runner.slots.of["a"], runner.slots.of["b"]) == [held.clip_delay, 30]
    runner.begin("text", None)
    runner.step({"text": 1, "a": 1}, new=("text",))
    assert runner.slots.batch == [SLOTS, runner.slots.of["a"]]  # the first reads the slot that has pads only


def test_a_sessions_slot_has_its_ring_and_its_delay_also_after_preemption(live_rows: AudioRows) -> None:
    begun, encoded = list[str](), list[Any]()
    live: Any = SimpleNamespace(
        begin=lambda name: begun.append(name) or 1,
        encode=lambda parts: encoded.append(parts) or {},
        end=lambda name: begun.remove(name),
        slot_of={"session": 1},
    )
    tails: list[Any] = []
    drafts: Any = SimpleNamespace(clear=lambda slot: tails.append(slot), begin_tails=lambda *given: tails.append(given))
    slots = Slots(live_rows, live, drafts)
    runner = SimpleNamespace(
        requests={"session": SimpleNamespace(mm_features=[], sampling_params=None)},
        input_batch=SimpleNamespace(req_ids=["session"]),
    )

    def step(new: tuple[str, ...], resumed: set[str], preempted: set[str], tokens: int) -> list[int]:
        parts = {"session": LivePart(0, tokens, np.zeros(0, np.int16), 30)} if tokens else {}
        runner.input_batch.req_ids = [*parts]
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            preempted_req_ids=preempted,
            num_scheduled_tokens=dict.fromkeys(parts, tokens),
            **{STEP: LiveStep(parts)},
        )
        slots.begin_step(runner, scheduled)
        return live_rows.delays(tokens).tolist()

    assert step(("session",), set(), set(), 3) == [30] * 3
    (slot,) = slots.of.values()
    assert live_rows.first[slot] == live_rows.clips + live_rows.ring
    assert step((), set(), {"session"}, 0) == []
    live_rows.put(slot, filled(1))  # an upload takes the place
    assert step((), {"session"}, set(), 2) == [30] * 2
    assert (begun, len(encoded)) == (["session"], 2)
    (again,) = slots.of.values()
    assert tails[::2] == [slot, again]  # pads until the tail is guessed
    assert tails[1][1:] == (live.slot_of, slots.of) and tails[3][0] is encoded[1]


# Model Runner V1 with them


def test_the_model_gets_token_ids_and_its_rows_are_put_before() -> None:
    calls: list[Any] = []

    class Stock:
        supports_mm_inputs = True

        def get_model(self) -> Any:
            return SimpleNamespace(audio_rows="rows", live=None, drafts=None)

        def _execute_mm_encoder(self, scheduler_output: Any) -> None:
            calls.append("encoder")

        def _prepare_inputs(self, scheduler_output: Any) -> None:
            calls.append("inputs")

        def _check_and_update_cudagraph_mode(self, attention_backends: Any) -> None:
            "initialize_cudagraph_keys"

        def _preprocess(self, scheduler_output: Any, tensors: Any) -> tuple[Any, ...]:
            return scheduler_output, tensors, self.supports_mm_inputs

        def _dummy_run(self, num_tokens: int) -> tuple[int, bool]:
            return num_tokens, self.supports_mm_inputs

    runner: Any = Stock()
    runner.__class__ = with_audio_rows(Stock)
    assert isinstance(runner, Stock)
    runner.__dict__["slots"] = SimpleNamespace(begin_step=lambda *step: calls.append(step))
    runner._prepare_inputs(SimpleNamespace(scheduled_encoder_inputs={}))
    assert runner._preprocess("step", "tensors") == ("step", "tensors", False)
    assert calls == ["encoder", "inputs", (runner, "step")]
    assert runner._dummy_run(7) == (7, False)
    assert runner.supports_mm_inputs is True


def test_a_clip_is_pinned_before_it_goes_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = MultiModalFieldElem(data=torch.zeros(3), field=MultiModalSharedField(batch_size=1))
    seconds = MultiModalFieldElem(data=[2.0], field=MultiModalSharedField(batch_size=1))
    item = MultiModalKwargsItem({"audio_arrays": clip, "seconds": seconds})
    pin(item)
    assert clip.data.sum() == 0  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    pin(item)
    pin(None)  # vLLM has it in its cache
    assert (clip.data.sum(), seconds.data) == (3, [2.0])


def test_vllms_runner_is_as_expected() -> None:
    stock = {name: vars(GPUModelRunner)[name] for name in METHODS}
    assert issubclass(with_audio_rows(GPUModelRunner), GPUModelRunner)
    assert {name: vars(GPUModelRunner)[name] for name in stock} == stock  # nothing of vLLM's is replaced


def other_arguments(self: Any, tokens: int, supports_mm_inputs: bool) -> None:
    pass


def no_branch(self: Any, scheduler_output: Any, num_tokens: int) -> None:
    pass


def no_branch_either(self: Any, num_tokens: int) -> None:
    pass


def no_backends(self: Any, initialize_cudagraph_keys: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "method", "found"),
    [
        ("_preprocess", None, r"takes nothing, because it does not exist"),
        ("_preprocess", other_arguments, r"takes \['tokens'\], expected \['scheduler_output'\] first"),
        ("_preprocess", no_branch, "first and supports_mm_inputs in its source"),
        ("_dummy_run", no_branch_either, "first and supports_mm_inputs in its source"),
        ("_check_and_update_cudagraph_mode", no_backends, r"expected \['attention_backends'\] first"),
    ],
)
def test_a_runner_that_drifted_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, method: Any, found: str) -> None:
    if method is None:
        monkeypatch.delattr(GPUModelRunner, name)
    else:
        monkeypatch.setattr(GPUModelRunner, name, method)
    with pytest.raises(shims.PatchError, match=rf"GPUModelRunner\.{name} .*{found}"):
        with_audio_rows(GPUModelRunner)


# The worker


@pytest.mark.parametrize("given", ["auto", "voxtral_serve.engine.cpu_worker.CpuWorker"])
def test_the_model_has_a_worker_of_its_own(given: str) -> None:
    parallel: Any = SimpleNamespace(worker_cls=given)
    config._choose_worker(parallel)
    worker = resolve_obj_by_qualname(parallel.worker_cls)
    assert issubclass(worker, CPUWorker) and issubclass(worker, EncodeOnceWorker)


def test_another_worker_is_refused() -> None:
    parallel: Any = SimpleNamespace(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    with pytest.raises(ValueError, match=r"worker_cls is 'vllm\.v1.*expected 'auto'"):
        config._choose_worker(parallel)


class Device:
    """A worker class of vLLM's form, whose runner is made in init_device."""

    def __init__(self, vllm_config: Any, runner: Any) -> None:
        self.vllm_config, self.made = vllm_config, runner

    def init_device(self) -> None:
        self.model_runner = self.made

    def sample_tokens(self, grammar: Any) -> Any:
        raise NotImplementedError

    def compile_or_warm_up_model(self) -> int:
        return torch.get_num_threads()  # loading the weights and compiling use all


class OurDevice(EncodeOnceWorker, Device):
    pass


class LaterOutput(AsyncModelRunnerOutput):
    def get_output(self) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT


@pytest.mark.parametrize("later", [False, True])
def test_faults_go_with_the_output_of_their_step(later: bool, monkeypatch: pytest.MonkeyPatch, held: AudioRows) -> None:
    """And survive the way to the scheduler's process."""
    made = LaterOutput() if later else EMPTY_MODEL_RUNNER_OUTPUT
    worker = OurDevice(SimpleNamespace(use_v2_model_runner=True), None)
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(audio_rows=held))
    monkeypatch.setattr(Device, "sample_tokens", lambda self, grammar: made)
    assert worker.sample_tokens(None) is made
    held.faults["request"] = "why"
    output = worker.sample_tokens(None)
    output = pickle.loads(pickle.dumps(output.get_output() if later else output))
    assert isinstance(output, ModelRunnerOutput) and getattr(output, FAULTS) == {"request": "why"}
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, FAULTS)
    assert (held.faults, worker.sample_tokens(None)) == ({}, made)


def test_its_runner_has_the_audio_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voxtral_serve.engine.keywords.usable", lambda config: False)  # that needs a whole runner
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    runner.vllm_config = SimpleNamespace(use_v2_model_runner=False)
    worker = OurDevice(runner.vllm_config, runner)
    worker.init_device()
    assert worker.model_runner is runner
    assert isinstance(runner, AudioRowsRunner) and isinstance(runner, GPUModelRunner)


def test_a_second_runner_stays_as_it_is() -> None:
    """Model Runner V2 asks the model for its state."""
    runner: Any = SimpleNamespace()
    OurDevice(SimpleNamespace(use_v2_model_runner=True, speculative_config=None), runner).init_device()
    assert vars(runner) == {}


@pytest.mark.parametrize(
    ("device", "variable", "after"), [("cuda", None, 1), ("cuda", "3", 3), ("cpu", None, 3)], ids=lambda each: str(each)
)
def test_an_engine_on_a_gpu_computes_with_one_thread(
    device: str, variable: str | None, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    prepared: list[int] = []
    monkeypatch.setattr(self_test, "run", lambda worker: None)
    model = SimpleNamespace(prepare=lambda: prepared.append(1))
    runner = SimpleNamespace(get_model=lambda: model)
    worker = OurDevice(SimpleNamespace(use_v2_model_runner=True, speculative_config=None), runner)
    worker.device_config = SimpleNamespace(device_type=device)
    worker.init_device()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert worker.compile_or_warm_up_model() == 3
        assert prepared == [1]  # a model that does not fit its drafter ends the start
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(before)
