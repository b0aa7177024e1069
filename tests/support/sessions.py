"""Live sessions on an `LLM` without a server (offline.running): audio in pieces of any size, tokens out."""

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from offline import limit, prompt, sampling, without_eos

from mistral_layout import audio as layout
from pico import model
from voxtral_serve.engine import self_test as engine_self_test
from voxtral_serve.engine.live_audio import LivePart
from voxtral_serve.engine.session import OPTION, SESSION, UTILITY, SessionShape

SHAPE = SessionShape(
    layout.LEFT_PAD_TOKENS,
    layout.DELAY_TOKENS,
    layout.right_pad_tokens(layout.DELAY_TOKENS),
    layout.SAMPLES_PER_TOKEN,
    layout.SAMPLE_RATE,
)


def live(most: int) -> dict[str, Any]:
    """Options of an LLM with so many live sessions."""
    return {"additional_config": {OPTION: most}}


def rounded(audio: np.ndarray) -> np.ndarray:
    """float32 [n], as 16 bits hold it: what a session sends, and what an upload of the same must have."""
    return (np.rint(audio * 2**15).clip(-(2**15), 2**15 - 1) / 2**15).astype(np.float32)


def new_id() -> str:
    """A name of a session, as the API server makes them."""
    return f"{uuid.uuid4().hex}-0"


class Session:
    """A session of one clip, float32 [n] as `rounded` has it: `sent` samples of it have gone, `tokens` have come. Its
    delay is in tokens. `name` is that of its request; the engine's name of the session is `id`. `broken` says why the
    engine has ended the request before its audio's end, if it has."""

    def __init__(self, name: str, audio: np.ndarray, delay: int | None = None) -> None:
        self.name, self.id, self.shape = name, new_id(), SHAPE.with_delay(delay)
        self.broken = ""
        self.pcm = (audio * 2**15).astype("<i2")
        self.sent, self.ended, self.added = 0, False, False
        self.tokens: list[int] = []

    @property
    def due(self) -> int:
        """Tokens that the engine can make of what was sent."""
        rows = self.shape.total_rows(self.sent) if self.ended else self.shape.rows(self.sent)
        return max(rows - self.shape.prompt + 1, 0) if self.added and not self.broken else 0

    @property
    def text(self) -> list[int]:
        """The tokens before EOS: an upload ends there."""
        return without_eos(self.tokens[: self.tokens.index(model.EOS) + 1] if model.EOS in self.tokens else self.tokens)


class Sessions:
    """Sessions, and uploads beside them, of an LLM."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.all: dict[str, Session] = {}
        self.uploads: dict[str, list[int] | None] = {}  # None until they are done

    def call(self, *messages: list[Any]) -> dict[str, str]:
        refused: dict[str, str] = self.engine.engine_core.call_utility(UTILITY, [*messages])
        return refused

    def begin(self, name: str, audio: np.ndarray, delay: int | None = None) -> Session:
        session = self.all[name] = Session(name, audio, delay)
        assert self.call(["open", session.id, *([] if delay is None else [delay])]) == {}
        return session

    def feed(self, session: Session, samples: int) -> None:
        """The next samples, and with the last of them the end. The request follows once its prompt's rows are there."""
        piece = session.pcm[session.sent : session.sent + samples]
        session.sent += len(piece)
        messages: list[list[Any]] = [["audio", session.id, piece.tobytes()]]
        if session.sent == len(session.pcm):
            messages.append(["end", session.id])
            session.ended = True
        assert self.call(*messages) == {}
        if not session.added and (session.ended or session.sent >= session.shape.ready_samples):
            self.request(session.name, session.id, session.shape.prompt)
            session.added = True

    def request(self, name: str, session: Any, prompt: int = SHAPE.prompt) -> None:
        """A request of the session, or of whatever is named so."""
        options = sampling(ignore_eos=True, max_tokens=10_000, extra_args={SESSION: session})
        tokens = [model.BOS] + [model.STREAMING_PAD] * (prompt - 1)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, options)

    def upload(self, name: str, audio: np.ndarray) -> None:
        self.uploads[name] = None
        self.engine.add_request(name, prompt(audio), sampling(max_tokens=limit(audio)))

    def settle(self) -> None:
        """Wait for all tokens that are due, and for the uploads."""
        while None in self.uploads.values() or any(len(each.tokens) < each.due for each in self.all.values()):
            self.step()

    def step(self) -> dict[str, str]:
        """Take the outputs of one step. Returns why requests have ended that had an error, or were aborted."""
        ended = {}
        for output in self.engine.step():
            answer = output.outputs[0]
            if output.request_id in self.all:
                self.all[output.request_id].tokens = [*answer.token_ids]
            elif output.finished:
                self.uploads[output.request_id] = without_eos(answer.token_ids)
            if answer.finish_reason in ("error", "abort"):
                ended[output.request_id] = f"{answer.finish_reason}: {answer.stop_reason}"
                if output.request_id in self.all:
                    self.all[output.request_id].broken = ended[output.request_id]
        return ended

    def close(self, session: Session) -> None:
        self.call(["close", session.id])
        del self.all[session.name]

    def preempt(self) -> None:
        """Preempt all running requests: each is computed again from its first row."""
        assert self.engine.engine_core.call_utility("reset_prefix_cache", True, False)

    def hear(
        self,
        audios: Sequence[np.ndarray],
        pieces: Sequence[int],
        at_once: int,
        delays: Sequence[int | None] = (None,),
        preempts: bool = False,
    ) -> list[Session]:
        """All clips, `at_once` at a time; session i takes pieces of `pieces[i]` samples, one a round, and has a delay
        of `delays[i]` tokens. Both begin again after the last. `preempts`: all running requests, in each round."""
        done, waiting, active = [], list(enumerate(audios)), list[tuple[Session, int]]()
        while waiting or active:
            while waiting and len(active) < at_once:
                number, audio = waiting.pop(0)
                session = self.begin(f"session {number}", audio, delays[number % len(delays)])
                active.append((session, pieces[number % len(pieces)]))
            for session, samples in active:
                self.feed(session, samples)
            if preempts:
                self.preempt()
            self.settle()
            for session, _ in active:
                assert len(session.tokens) == session.due
                if session.ended:
                    done.append(session)
                    self.close(session)
            active = [each for each in active if not each[0].ended]
        return sorted(done, key=lambda session: int(session.name.split()[1]))


# What workers run


def rows_of_session(served: Any, name: str, first: int, count: int) -> torch.Tensor:
    """Rows first to first + count - 1 of the only session whose request's id begins so."""
    live, store = served.live, served.audio_rows
    (slot,) = [slot for request, slot in live.slot_of.items() if request.startswith(name)]
    numbers = torch.arange(first, first + count) % store.ring
    rows: torch.Tensor = store.live()[slot * store.ring + numbers.to(store.pool.device)].float().cpu()
    return rows


def sessions_held(served: Any) -> int:
    """Slots of live sessions that are in use. All others are free, once each."""
    live = served.live
    assert sorted([*live.free, *live.slot_of.values()]) == list(range(live.slots))
    return len(live.slot_of)


def drop_slot(served: Any, name: str) -> None:
    """Have the encoder forget the only session whose request's id begins so."""
    (request,) = [request for request in served.live.slot_of if request.startswith(name)]
    served.live.end(request)


def spoil_parts(served: Any, name: str, fault: str) -> None:
    """From now on the parts of requests whose id begins so are not what the encoder expects."""
    encode = served.live.encode

    def spoiled(parts: Mapping[str, LivePart]) -> dict[str, str]:
        return encode({request: spoil(part) if request.startswith(name) else part for request, part in parts.items()})

    def spoil(part: LivePart) -> LivePart:
        if fault == "short":
            return part._replace(samples=part.samples[1:])
        if fault == "float":
            return part._replace(samples=part.samples.astype(np.float32))
        return part._replace(first=part.first + 1)

    served.live.encode = spoiled


def mend_parts(served: Any) -> None:
    del served.live.encode


def take_slots(served: Any, taken: bool) -> None:
    """Have no slot free, or have those free again."""
    live = served.live
    held = set(live.slot_of.values())
    live.free = [] if taken else [slot for slot in range(live.slots) if slot not in held]


def self_test(worker: Any, fault: str = "") -> str:
    """What the worker's self-test says with a fault in it; nothing if it finds none."""
    rows, runner = worker.model_runner.get_model().audio_rows, worker.model_runner
    put, live, slots = rows.put, rows.put_live, runner.get_model().live.slots
    test = engine_self_test.SelfTest(worker)
    with pytest.MonkeyPatch.context() as patched:
        if fault == "another's slot":
            patched.setattr(rows, "put", lambda slot, clip, delay=None: put((slot + 1) % rows.slots, clip, delay))
        elif fault == "a row late":
            patched.setattr(rows, "put", lambda slot, clip, delay=None: put(slot, clip.roll(1, 0), delay))
        elif fault == "another's ring":
            patched.setattr(rows, "put_live", lambda slot, ring, delay: live(slot, (ring + 1) % slots, delay))
        elif fault == "no sum":
            patched.setattr(test, "_compare", partial(_compare_without_sum, test))
        elif fault == "no step":
            patched.setattr(runner, "execute_model", _refused)
        try:
            test.check()
        except engine_self_test.SelfTestError as error:
            return str(error)
        finally:
            patched.undo()
            test.clean()
    return ""


def _compare_without_sum(test: Any, requests: Any) -> None:
    test.rows.embeddings.zero_()
    type(test)._compare(test, requests)


def _refused(*args: Any, **kwargs: Any) -> None:
    raise TypeError("no such argument")
