"""What the encode-once model does in vLLM's Model Runner V2, which itself needs a GPU: its rows, and drafts.

vLLM's own classes, without their set-up; the batches are made by hand.
"""

from types import SimpleNamespace
from typing import Any

import drafting
import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from voxtral_serve import shims
from voxtral_serve.engine import drafter
from voxtral_serve.engine.audio_rows import NO_AUDIO
from voxtral_serve.engine.encode_once import VoxtralRealtimeEncodeOnce
from voxtral_serve.engine.live_audio import LivePart
from voxtral_serve.engine.model_state import RowsState
from voxtral_serve.engine.session import DELAY
from voxtral_serve.engine.worker import EncodeOnceWorker

PAD = 32


@pytest.fixture
def state() -> Any:
    state: Any = RowsState.__new__(RowsState)
    put: dict[int, str] = {}
    state.put, state.observed, state.delays = put, [], {}
    state.rows = SimpleNamespace(
        slot=torch.full((32,), -1),
        put=lambda slot, rows, delay: (put.update({slot: rows}), state.delays.update({slot: delay})),
        observe=lambda clip, rows: state.observed.append((clip, rows)),
        put_nothing=lambda slot: put.update({slot: "zeros"}),
        faults={},
    )
    state.live, state.drafts, state.parts = None, None, {}
    state.vllm_config = SimpleNamespace(lora_config=None, ec_transfer_config=None)
    state.begun = []
    state.encoder_cache = SimpleNamespace(encoder_outputs={})
    state.execute_mm_encoder = state.encoder_cache.encoder_outputs.update
    return state


def request(clip: str, extra: dict[str, Any] | None = None) -> Any:
    sampling = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(req_id=clip, mm_features=[SimpleNamespace(identifier=clip)], sampling_params=sampling)


def batch(*tokens_of_slots: tuple[int, int]) -> Any:
    """Requests as (slot, tokens in this step)."""
    slots, counts = zip(*tokens_of_slots, strict=True)
    ends = torch.tensor(counts).cumsum(0)
    padded = torch.cat([torch.zeros(1, dtype=torch.int64), ends, ends[-1:]])  # as vLLM pads for its graphs
    return SimpleNamespace(
        num_tokens=sum(counts), num_reqs=len(slots), idx_mapping=torch.tensor(slots), query_start_loc=padded
    )


def slots_after(state: Any, encoded: dict[str, str], asked: Any) -> list[int]:
    assert state.prepare_inputs_embeds(encoded, asked, None) is None  # so the runner gives the model token ids
    slots: list[int] = state.rows.slot[: asked.num_tokens].tolist()
    return slots


def test_the_model_asks_for_this_state() -> None:
    assert VoxtralRealtimeEncodeOnce.get_model_state_cls() is RowsState


def test_a_clip_is_put_where_its_request_is_in_the_step_that_encodes_it(state: Any) -> None:
    state.add_request(5, request("clip"))
    slots_after(state, {"clip": "rows"}, batch((5, 3)))
    assert state.put == {5: "rows"} and state.observed == [("clip", "rows")]
    state.put.clear()
    slots_after(state, {}, batch((5, 1)))
    assert state.put == {}


def test_a_request_that_resumes_elsewhere_is_put_again(state: Any) -> None:
    state.add_request(5, request("clip"))
    slots_after(state, {"clip": "rows"}, batch((5, 3)))
    state.add_request(2, request("clip"))
    slots_after(state, {}, batch((2, 4)))
    assert state.put == {5: "rows", 2: "rows"}


def test_a_clip_has_the_delay_that_its_request_names(state: Any) -> None:
    told: list[Any] = []
    state.drafts = SimpleNamespace(begin=lambda *begun: told.append(begun))
    for slot, extra in ((5, {DELAY: 30}), (2, None), (3, {"other": "x"})):
        state.add_request(slot, request("clip", extra))
    slots_after(state, {"clip": "rows"}, batch((5, 3)))
    assert state.delays == {5: 30, 2: None, 3: None}
    assert told == [(5, 4, 30), (2, 4, None), (3, 4, None)]


def test_a_clip_that_was_not_encoded_is_an_error(state: Any) -> None:
    state.add_request(5, request("clip"))
    with pytest.raises(KeyError, match="clip"):
        slots_after(state, {}, batch((5, 3)))


def test_clips_are_encoded_before_the_step_is_prepared_and_once(state: Any) -> None:
    asked: list[list[float]] = []

    def embed(audio_arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append([float(audio[0]) for audio in audio_arrays])
        return [audio[:, None] for audio in audio_arrays]

    model: Any = SimpleNamespace(embed_multimodal=embed)
    del state.execute_mm_encoder
    state.encoder_cache = EncoderCache()
    state.encoder_runner = EncoderRunner(model, 8, 1, state.encoder_cache, torch.float32, torch.device("cpu"))

    def clip(name: str, number: float) -> Any:
        audio = MultiModalFieldElem(torch.full((4,), number), MultiModalBatchedField())
        item = MultiModalKwargsItem({"audio_arrays": audio})
        return SimpleNamespace(
            req_id=name,
            mm_features=[MultiModalFeatureSpec(item, "audio", name, PlaceholderRange(0, 4))],
            sampling_params=None,
        )

    new = [clip("a", 1.0), clip("b", 2.0)]
    step = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_encoder_inputs={"a": [0], "b": [0]},
        free_encoder_mm_hashes=["an earlier one"],
    )
    state.encoder_cache.encoder_outputs["an earlier one"] = torch.zeros(1)
    worker = OurDevice(config(None), None)
    worker.init_device()
    worker.model_runner.model_state = state
    assert worker.execute_model(step) == "executed"
    assert asked == [[1.0, 2.0]]
    assert state.encoder_cache.encoder_outputs.keys() == {"a", "b"}
    for slot, request_of in enumerate(new):
        state.add_request(slot, request_of)
    slots_after(state, step.scheduled_encoder_inputs, batch((0, 3), (1, 3)))
    assert {slot: float(rows[0]) for slot, rows in state.put.items()} == {0: 1.0, 1: 2.0}
    assert asked == [[1.0, 2.0]]
    # An output that vLLM frees between the two is computed again.
    state.encoder_cache.free_encoder_cache("b")
    state.add_request(2, new[1])
    slots_after(state, step.scheduled_encoder_inputs, batch((2, 3)))
    assert asked == [[1.0, 2.0], [2.0]]


@pytest.mark.parametrize("name", ["lora_config", "ec_transfer_config"])
def test_nothing_is_encoded_ahead_where_vllm_does_more_before(state: Any, name: str) -> None:
    setattr(state.vllm_config, name, object())
    state.encode_ahead(SimpleNamespace())  # which has nothing that it could read


def test_a_session_has_its_place_and_its_delay_in_the_step_that_begins_it(state: Any) -> None:
    placed: list[tuple[int, int, int]] = []
    state.live = SimpleNamespace(begin=len, encode=lambda parts: {})
    state.rows.put_live = lambda *place: placed.append(place)
    state.parts = {"abc": LivePart(0, 63, np.zeros(0, np.int16), 30)}
    state.add_request(5, SimpleNamespace(req_id="abc", mm_features=[], sampling_params=None))
    state.add_request(4, request("an upload"))
    assert (placed, state.rows.faults) == ([(5, 3, 30)], {})


def test_a_request_without_audio_reads_zeros_and_is_marked(state: Any) -> None:
    state.add_request(4, SimpleNamespace(req_id="text", mm_features=[], sampling_params=None))
    assert (state.put, state.rows.faults) == ({4: "zeros"}, {"text": NO_AUDIO})


def test_a_session_that_gets_no_slot_reads_zeros_and_is_marked(state: Any) -> None:
    state.live = SimpleNamespace(begin=lambda name: None, encode=lambda parts: dict.fromkeys(parts, "no slot"))
    state.parts = {"abc": LivePart(0, 63, np.zeros(0, np.int16), 30)}
    state.add_request(5, SimpleNamespace(req_id="abc", mm_features=[], sampling_params=None))
    slots_after(state, {}, batch((5, 1)))
    assert (state.put, state.rows.faults) == ({5: "zeros"}, {"abc": "no slot"})


@pytest.mark.parametrize(
    ("requests", "slots"),
    [
        ([(4, 1), (0, 1), (2, 1)], [4, 0, 2]),
        ([(4, 1), (0, 3), (2, 1)], [4, 0, 0, 0, 2]),
        ([(1, 6), (3, 6)], [1] * 6 + [3] * 6),
    ],
    ids=["decoding", "one begins", "drafts"],
)
def test_each_token_has_the_slot_of_its_request(state: Any, requests: list[tuple[int, int]], slots: list[int]) -> None:
    assert slots_after(state, {}, batch(*requests)) == slots


def test_nothing_stands_in_for_embeddings(state: Any) -> None:
    assert state.dummy_inputs_embeds(4) is None
    assert state.prepare_dummy_inputs(2, 4) == {}


# ---- Drafts


def config(model: str | None, drafts: int = 5) -> Any:
    return SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=SimpleNamespace(model=model, num_speculative_tokens=drafts),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )


class NgramGPUSpeculator:
    """Has the name of vLLM's, which needs a GPU."""


class Device:
    """A worker class of vLLM's form, whose runner is made in init_device."""

    def __init__(self, vllm_config: Any, speculator: Any) -> None:
        self.vllm_config = vllm_config
        self.made = SimpleNamespace(
            vllm_config=vllm_config,
            device=torch.device("cpu"),
            speculator=speculator,
            req_states=SimpleNamespace(
                total_len=SimpleNamespace(gpu=torch.zeros(drafting.SLOTS, dtype=torch.int32)), req_id_to_index={}
            ),
        )

    def init_device(self) -> None:
        self.model_runner = self.made

    def load_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any) -> str:
        return "executed"


class OurDevice(EncodeOnceWorker, Device):
    pass


@pytest.fixture(autouse=True)
def known_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "streaming_pad", lambda _: PAD)


def test_pads_are_drafted_where_the_config_names_them() -> None:
    worker = OurDevice(config("voxtral_serve.drafter.PadDrafter"), NgramGPUSpeculator())
    worker.init_device()
    speculator = worker.model_runner.speculator
    assert isinstance(speculator, BaseSpeculator)
    three = SimpleNamespace(num_reqs=3)
    drafts = speculator.propose(three, "metadata", num_speculative_tokens=5)
    assert drafts.dtype == torch.int64
    assert drafts.tolist() == [[PAD] * 5] * 3
    fewer = speculator.propose(three, num_speculative_tokens=2)
    fewer[:, 2:] = -1  # as the runner does
    assert speculator.propose(three).tolist() == [[PAD] * 5] * 3


def drafting_worker(drafts: Any) -> Any:
    """A worker whose model has these drafts."""
    worker = OurDevice(config("voxtral_serve.drafter.Drafter", drafting.DRAFTS), NgramGPUSpeculator())
    worker.init_device()
    worker.made.get_model = lambda: SimpleNamespace(drafts=drafts, weights_loaded=lambda: None)
    worker.load_model()
    return worker


def test_without_a_drafter_of_the_checkpoint_they_are_pads() -> None:
    speculator = drafting_worker(None).model_runner.speculator
    assert speculator.propose(SimpleNamespace(num_reqs=2)).tolist() == [[PAD] * drafting.DRAFTS] * 2


def test_the_guesses_that_follow_the_tokens_of_each_request(state: Any) -> None:
    worker = drafting_worker(drafts := drafting.made())
    speculator, lengths = worker.model_runner.speculator, worker.made.req_states.total_len.gpu
    state.drafts, state.rows = drafts, drafts.rows
    rows = {"a": torch.randn(60, drafting.DIM), "b": torch.randn(90, drafting.DIM)}
    for slot, name in ((3, "a"), (1, "b")):
        state.add_request(slot, request(name))
        lengths[slot] = 39
    both = batch((1, 39), (3, 39))
    slots_after(state, rows, both)
    pending = [*drafts.waiting]
    none = speculator.propose(both, num_speculative_tokens=0)
    assert none.shape == (2, drafting.DRAFTS) and [*drafts.waiting] == pending  # the network has not run
    alone = {name: drafting.alone(drafts, of) for name, of in rows.items()}
    got = speculator.propose(both, "metadata")
    assert got.dtype == torch.int64
    assert got.tolist() == [alone["b"][38 : 38 + drafting.DRAFTS], alone["a"][38 : 38 + drafting.DRAFTS]]
    got[:, 2:] = -1  # as the runner does where fewer are used
    lengths += 2
    got = speculator.propose(batch((3, 6)), num_speculative_tokens=5)
    assert got.tolist() == [alone["a"][40 : 40 + drafting.DRAFTS]]


def test_the_scheduler_may_want_pads(state: Any) -> None:
    worker = drafting_worker(drafts := drafting.made())
    speculator = worker.model_runner.speculator
    worker.model_runner.model_state = state
    state.encode_ahead = lambda step: None
    state.drafts, state.rows = drafts, drafts.rows
    state.add_request(0, request("a"))
    one = batch((0, 39))
    worker.made.req_states.total_len.gpu[0] = 39
    slots_after(state, {"a": (rows := torch.randn(60, drafting.DIM))}, one)
    worker.execute_model(SimpleNamespace(**{drafter.PADS: True}))
    assert speculator.propose(one).tolist() == [[PAD] * drafting.DRAFTS]
    assert [*drafts.waiting] == [0]
    worker.execute_model(SimpleNamespace())
    assert speculator.propose(one).tolist() == [drafting.alone(drafts, rows)[38 : 38 + drafting.DRAFTS]]


def test_the_tail_of_a_session_is_guessed_in_the_step_of_its_last_part(state: Any) -> None:
    told: list[Any] = []
    state.drafts = SimpleNamespace(clear=told.append, begin_tails=lambda *given: told.append(given))
    state.live = SimpleNamespace(begin=len, encode=lambda parts: {}, slot_of={"abc": 3})
    state.rows.put_live = lambda *place: None
    state.parts = {"abc": LivePart(0, 63, np.zeros(0, np.int16), 30, True)}
    state.add_request(5, SimpleNamespace(req_id="abc", mm_features=[], sampling_params=None))
    state.prepare_inputs_embeds({}, batch((5, 30)), SimpleNamespace(req_id_to_index={"abc": 5}))
    assert told == [5, (state.parts, {"abc": 3}, {"abc": 5})]


@pytest.mark.parametrize("model", ["another.Drafter", None])
def test_any_other_speculation_is_vllms(model: str | None) -> None:
    stock = NgramGPUSpeculator()
    worker = OurDevice(config(model), stock)
    worker.init_device()
    assert worker.model_runner.speculator is stock


def test_a_speculator_of_another_kind_is_refused() -> None:
    worker = OurDevice(config("voxtral_serve.drafter.PadDrafter"), SimpleNamespace())
    with pytest.raises(shims.PatchError, match="Model Runner V2 is SimpleNamespace, expected NgramGPUSpeculator"):
        worker.init_device()


def test_vllms_speculator_has_the_name() -> None:
    ngram = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.ngram.speculator", reason="not in this vLLM")
    assert ngram.NgramGPUSpeculator.__name__ == NgramGPUSpeculator.__name__
