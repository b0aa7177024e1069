"""Live sessions on an `LLM` without a server (offline.running): audio in pieces of any size, tokens out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from offline import prompt, sampling

from pico import model
from voxtral_serve.engine.session import SESSION, UTILITY, SessionShape

SHAPE = SessionShape(
    model.LEFT_PAD_TOKENS,
    model.DELAY_TOKENS,
    model.n_tokens(0) - model.LEFT_PAD_TOKENS,
    model.SAMPLES_PER_TOKEN,
    model.SAMPLE_RATE,
)


class Session:
    """One session of a clip, float32 [n]: `sent` samples of it have gone to the engine, `tokens` have come."""

    def __init__(self, name: str, audio: np.ndarray) -> None:
        self.name = name
        self.pcm = (np.rint(audio * 2**15).clip(-(2**15), 2**15 - 1)).astype("<i2")
        self.sent, self.ended, self.tokens = 0, False, list[int]()
        self.added = False

    @property
    def rows(self) -> int:
        return SHAPE.total_rows(self.sent) if self.ended else SHAPE.rows(self.sent)

    @property
    def due(self) -> int:
        """Tokens that the engine can make of what was sent."""
        return max(self.rows - SHAPE.prompt + 1, 0) if self.added else 0


class Sessions:
    """Sessions of an LLM whose additional_config has max_live_sessions."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.open: dict[str, Session] = {}
        self.uploads: dict[str, list[int]] = {}

    def call(self, *messages: list[Any]) -> dict[str, str]:
        refused: dict[str, str] = self.engine.engine_core.call_utility(UTILITY, [*messages])
        return refused

    def begin(self, name: str, audio: np.ndarray) -> Session:
        assert self.call(["open", name]) == {}
        self.open[name] = Session(name, audio)
        return self.open[name]

    def feed(self, session: Session, samples: int) -> None:
        """The next samples; with the last of them the end. The request is added as soon as its prompt's rows are there."""
        piece = session.pcm[session.sent : session.sent + samples]
        session.sent += len(piece)
        messages: list[list[Any]] = [["audio", session.name, piece.tobytes()]]
        if session.sent == len(session.pcm):
            messages.append(["end", session.name])
            session.ended = True
        assert self.call(*messages) == {}
        if not session.added and session.rows >= SHAPE.prompt:
            ids = prompt(np.zeros(0, np.float32))["prompt_token_ids"]
            options = sampling(ignore_eos=True, max_tokens=10_000, extra_args={SESSION: session.name})
            self.engine.add_request(session.name, {"prompt_token_ids": ids}, options)
            session.added = True

    def upload(self, name: str, audio: np.ndarray) -> None:
        self.uploads[name] = []
        self.engine.add_request(name, prompt(audio), sampling())

    def settle(self) -> None:
        """Wait for all tokens that are due, of uploads as well."""
        while any(len(each.tokens) < each.due for each in self.open.values()) or self.engine_has_uploads():
            for output in self.engine.step():
                tokens = [*output.outputs[0].token_ids]
                name = output.request_id
                if name in self.open:
                    self.open[name].tokens = tokens
                else:
                    self.uploads[name] = tokens
                    if output.finished:
                        self.done.add(name)

    def __post_init__(self) -> None: ...
