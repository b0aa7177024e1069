"""The engine as profiles/fast.yaml has it, on pico, without a server: slots, graphs, chunks, preemption, aborts, live
sessions and drafts together. On a GPU in bfloat16: the encoder's graphs, those of live sessions, and the kernels.

Tokens are the reference's or near-ties: the reference's logits of the two first tokens that differ are at most NEAR
apart. One step of bfloat16 is 0.125 where pico's logits are, 16 and more. In float32 the same runs exactly in
tests/server (test_encode_once_exact.py, test_encode_once_scheduled.py, test_live_engine.py, test_drafter.py).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import offline
import pytest
import sessions
import yaml
from offline import ON_GPU
from places import ROOT

from mistral_layout import audio as layout
from pico import model
from voxtral_serve.engine.session import RING

pytestmark = pytest.mark.gpu

NEAR = 0.3 if ON_GPU else 1e-4
SHARE = 0.1  # of the clips of a test, and one more: that may differ in near-ties
# Greatest difference of rows over their greatest magnitude: 0.006 in bfloat16 on a CPU; between two clips at least 0.07
ROWS = 0.015 if ON_GPU else 1e-5
UPLOADS, LIVE = (16, 8) if ON_GPU else (6, 3)
CHUNK = 48

FAST: dict[str, Any] = yaml.safe_load((ROOT / "profiles/fast.yaml").read_text(encoding="utf-8"))
PROFILE = {name: FAST[name] for name in ("max_num_seqs", "max_num_batched_tokens", "scheduling_policy")}
DRAFTS = {"speculative_config": FAST["speculative_config"]}
if ON_GPU:
    PROFILE["compilation_config"] = FAST["compilation_config"] | {"mode": 0, "compile_sizes": []}
    PROFILE["dtype"] = DRAFTS["dtype"] = FAST["dtype"]


@pytest.fixture(scope="module")
def audios() -> list[np.ndarray]:
    return [sessions.rounded(offline.read(name)) for name in offline.varied(UPLOADS, longest_s=8.0)]


def check(
    record: Callable[[str, object], None], name: str, audios: Sequence[np.ndarray], answers: Sequence[list[int]]
) -> None:
    """Few clips differ from the reference, and each in a near-tie."""
    found = offline.differences(audios, answers)
    record(name, f"{len(audios) - len(found)} of {len(audios)}, near-ties {[round(each.gap, 3) for each in found]}")
    assert all(abs(each.gap) <= NEAR for each in found), found
    assert len(found) <= (1 + SHARE * len(audios) if ON_GPU else 0), found


class TestAsServed:
    """The profile's options."""

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls) -> Iterator[Any]:
        with offline.running(**PROFILE | DRAFTS | sessions.live(LIVE)) as running:
            yield running

    @pytest.fixture
    def engine(self, llm: Any) -> sessions.Sessions:
        return sessions.Sessions(llm)

    @pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
    def test_every_kind_of_graph_is_captured(self, llm: Any) -> None:
        """Steps that only decode, by tokens of a request; any step; the encoder, live sessions, and the drafter."""
        (graphs,) = llm.collective_rpc(graphs_of)
        assert {1, 8, 16} <= {*graphs.pop("decode")}
        assert all(graphs.values()), graphs

    def test_each_request_reads_the_rows_of_its_own_clip(
        self,
        llm: Any,
        engine: sessions.Sessions,
        audios: list[np.ndarray],
        record_property: Callable[[str, object], None],
    ) -> None:
        """Also in slots that other clips had before it."""
        expected = [offline.reference_rows(audio) for audio in audios]
        slots = []
        llm.collective_rpc(keep_rows)
        for turn in (0, 3, 1):
            order = [(number + turn) % len(audios) for number in range(len(audios))][:: -1 if turn == 3 else 1]
            for number in order:
                engine.upload(f"clip {number} turn {turn}", audios[number])
            engine.settle()
            ((kept, used),) = llm.collective_rpc(take_rows)
            rows_by_clip, slot_of = ({name.split()[1]: each for name, each in by_id.items()} for by_id in (kept, used))
            worst, least = 0.0, np.inf
            for number, whole in enumerate(expected):
                rows = rows_by_clip[str(number)]
                worst = max(worst, offline.relative(rows[: len(whole)], whole))
                assert not rows[len(whole) :].any()
                begin, other = layout.LEFT_PAD_TOKENS, expected[number - 1]
                end = min(len(whole), len(other))
                least = min(least, offline.relative(rows[begin:end], other[begin:end]))
            slots.append([slot_of[str(number)] for number in range(len(audios))])
            assert worst <= ROWS and least > 4 * ROWS, (worst, least)
            record_property(f"rows of uploads, turn {turn}", f"{worst:.2g} of their own clip, {least:.2g} of another")
        assert any(len({*each}) > 1 for each in zip(*slots, strict=True))  # no clip was always in one slot

    def test_uploads_together_in_another_order_again(
        self, llm: Any, audios: list[np.ndarray], record_property: Callable[[str, object], None]
    ) -> None:
        for turn in range(2):
            order = audios[::-1] if turn else audios
            check(record_property, f"uploads together, turn {turn}", order, offline.generate(llm, order))

    def test_rows_of_a_live_session(
        self,
        llm: Any,
        engine: sessions.Sessions,
        audios: list[np.ndarray],
        record_property: Callable[[str, object], None],
    ) -> None:
        audio = max(audios, key=len)
        session = engine.begin("rows", audio)
        while len(session.pcm) - session.sent > 1280:
            engine.feed(session, 1280)
            engine.settle()
        count = session.due + sessions.SHAPE.prompt - 1
        first = max(count - RING, 0)  # those before it are no longer kept
        (rows,) = llm.apply_model(partial(sessions.rows_of_session, name="rows", first=first, count=count - first))
        engine.feed(session, 10**6)
        engine.settle()
        engine.close(session)
        worst = offline.relative(rows, offline.reference_rows(audio)[first:count])
        record_property("rows of a live session", f"{worst:.2g}")
        assert worst <= ROWS
        check(record_property, "a live session", [audio], [session.text])

    def test_live_sessions_beside_uploads(
        self,
        llm: Any,
        engine: sessions.Sessions,
        audios: list[np.ndarray],
        record_property: Callable[[str, object], None],
    ) -> None:
        """In pieces of all sizes; drafts of the uploads, and of the sessions once their audio has ended."""
        before = offline.counters(llm)["spec_decode_num_accepted_tokens"]
        for number, audio in enumerate(audios):
            engine.upload(f"upload {number}", audio)
        heard = engine.hear(audios, [1280, 160, 1000, 5000, 16_000, 10**6], at_once=LIVE)
        check(record_property, "live sessions beside uploads", audios, [session.text for session in heard])
        answers = [tokens for tokens in engine.uploads.values() if tokens is not None]
        check(record_property, "uploads beside live sessions", audios, answers)
        accepted = offline.counters(llm)["spec_decode_num_accepted_tokens"] - before
        record_property("accepted drafts", int(accepted))
        assert accepted > sum(map(len, answers)) / 2


class TestCrowded:
    """Prompts in chunks, and a KV cache for a part of what is asked: requests are preempted and begin again."""

    LIVE = 3  # sessions, for each of which there is room

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, audios: list[np.ndarray]) -> Iterator[Any]:
        longest = max(layout.n_tokens(len(audio), model.DELAY_TOKENS) for audio in audios)
        context = -(-longest // offline.BLOCK) * offline.BLOCK
        options = DRAFTS | sessions.live(cls.LIVE) | {"max_num_batched_tokens": CHUNK}
        drafts = FAST["speculative_config"] | {"num_speculative_tokens_per_batch_size": [[1, 4, 15], [5, 12, 1]]}
        with offline.crowded(context, 12, cls.LIVE, **options | {"speculative_config": drafts}) as running:
            yield running

    @pytest.fixture
    def engine(self, llm: Any) -> sessions.Sessions:
        return sessions.Sessions(llm)

    def test_preempted_requests_have_their_texts(
        self,
        llm: Any,
        engine: sessions.Sessions,
        audios: list[np.ndarray],
        record_property: Callable[[str, object], None],
    ) -> None:
        for number, audio in enumerate(audios):
            engine.upload(f"upload {number}", audio)
        heard = engine.hear(audios[: 2 * self.LIVE], [1280, 4000, 700], at_once=self.LIVE, preempts=True)
        engine.settle()
        check(record_property, "live sessions, crowded", audios[: 2 * self.LIVE], [session.text for session in heard])
        answers = [tokens for tokens in engine.uploads.values() if tokens is not None]
        check(record_property, "uploads, crowded", audios, answers)
        counted = offline.counters(llm)
        record_property("preemptions", int(counted["num_preemptions"]))
        assert counted["num_preemptions"] > 0

    def test_aborts_in_each_state_leave_nothing(
        self,
        llm: Any,
        engine: sessions.Sessions,
        audios: list[np.ndarray],
        record_property: Callable[[str, object], None],
    ) -> None:
        """Of uploads that wait, are in their prompt, decode, or were preempted; of sessions that wait for audio, have
        much of it, or have ended. Then the others' texts, and those of requests that take their places, are right."""
        waiting, fed, ended = (engine.begin(name, audios[number]) for number, name in enumerate(("a", "b", "c")))
        engine.feed(waiting, 12_000)
        engine.feed(fed, len(fed.pcm) - 1)
        engine.feed(ended, 10**6)
        names = [f"upload {number}" for number in range(len(audios))]
        for name, audio in zip(names, audios, strict=True):
            engine.upload(name, audio)
        gone: list[str] = []

        def abort(name: str) -> None:
            engine.engine.abort_request([name])
            engine.uploads.pop(name, None)
            gone.append(name)

        abort(names[0])  # in its prompt, or before it
        abort(names[-1])  # waits
        for number in (1, 2):
            for _ in range(3 * number):
                engine.step()
            abort(names[number])
        abort(waiting.name)
        engine.step()
        abort(fed.name)
        abort(ended.name)
        for session in (waiting, fed, ended):
            engine.close(session)
        engine.settle()
        kept = [audio for name, audio in zip(names, audios, strict=True) if name in engine.uploads]
        assert len(kept) == len(audios) - 4 and len(gone) == 7
        answers = [tokens for tokens in engine.uploads.values() if tokens is not None]
        check(record_property, "beside aborted requests", kept, answers)
        heard = sessions.Sessions(llm).hear(audios[: self.LIVE], [4000], at_once=self.LIVE)
        check(record_property, "after aborted requests", audios[: self.LIVE], [session.text for session in heard])
        for _ in range(2):  # a worker may give up what a request had in the next step that begins one
            offline.generate(llm, audios[:1])
        assert llm.apply_model(sessions.sessions_held) in ([0], [1])
        assert llm.collective_rpc(requests_held) in ([0], [1])


# What workers run


def slots_of(worker: Any) -> dict[str, int]:
    """Slots of AudioRows by request id."""
    runner = worker.model_runner
    slots: dict[str, int] = runner.slots.of if hasattr(runner, "slots") else runner.req_states.req_id_to_index
    return slots


def requests_held(worker: Any) -> int:
    return len(slots_of(worker))


def keep_rows(worker: Any) -> None:
    """From now on keep what the slot of each request has after its first step."""
    worker = getattr(worker, "worker", worker)  # without vLLM's wrapper
    run, worker.kept = worker.execute_model, [{}, {}]
    store = worker.model_runner.get_model().audio_rows

    def keeping(scheduled: Any) -> Any:
        output = run(scheduled)
        for request in scheduled.scheduled_new_reqs:
            slot = slots_of(worker)[request.req_id]
            first, length = int(store.first[slot]), int(store.length[slot])
            worker.kept[0][request.req_id] = store.pool[first : first + length].float().cpu()
            worker.kept[1][request.req_id] = slot
        return output

    worker.execute_model = keeping


def take_rows(worker: Any) -> list[dict[str, Any]]:
    """Rows [n, dim] and slots by request id, since this was last asked."""
    worker = getattr(worker, "worker", worker)
    kept: list[dict[str, Any]] = [dict(each) for each in worker.kept]
    for each in worker.kept:
        each.clear()
    return kept


def graphs_of(worker: Any) -> dict[str, Any]:
    """What is captured: tokens of a request in steps that only decode, and numbers of all other graphs."""
    from vllm.config.compilation import CUDAGraphMode

    model, manager = worker.model_runner.get_model(), worker.model_runner.cudagraph_manager
    captured = manager._capture_descs[CUDAGraphMode.FULL]
    encoder, live, drafts = model.whisper_encoder.graphs, model.live.graphs, model.drafts.graphs
    return {
        "decode": sorted({desc.uniform_token_count for desc in captured if desc.uniform_token_count}),
        "steps": sum(not desc.uniform_token_count for desc in captured),
        "encoder": len(encoder.graphs),
        "live": sum(len(each.graphs) for each in live.values()),
        "drafter": len(drafts),
    }
