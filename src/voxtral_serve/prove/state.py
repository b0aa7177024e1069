"""What the parts of a run share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from voxtral_serve.measure.engine import Engine
from voxtral_serve.measure.gpus import MemorySampler
from voxtral_serve.measure.live import Timeline
from voxtral_serve.measure.scoring import Errors, word_errors
from voxtral_serve.prove.clips import Clip
from voxtral_serve.prove.job import ProveJob, Size
from voxtral_serve.prove.outcome import skip
from voxtral_serve.prove.target import Target


@dataclass
class Run:
    """
    config   the profile's content; None for a server that was up
    random   why the weights are taken for random; None if they are not
    uploads  the text of each clip of `compared`, as one upload at a time
    passes   the texts of the same clips on other paths; a path may have some of them, and more than once
    live     why there are no live sessions; None if there are, or it is not known
    batched_j_per_s  joules per second of audio of the batched pass
    """

    job: ProveJob
    size: Size
    bundled: list[Clip]
    given: list[Clip]
    given_total: int
    config: dict[str, Any] | None = None
    random: str | None = None
    live: str | None = None
    uploads: list[str] = field(default_factory=list)
    passes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    sessions: list[Timeline] = field(default_factory=list)
    batched_j_per_s: float | None = None
    server: Target | None = None
    engine: Engine | None = None
    gpu: MemorySampler | None = None

    @property
    def compared(self) -> list[Clip]:
        """The clips that go over all paths: the bundled ones, and as many of the user's."""
        return [*self.bundled, *self.given[: len(self.bundled)]]

    @property
    def target(self) -> Target:
        if self.server is None:
            skip("there is no server: the part `start` failed")
        return self.server

    @property
    def sampler(self) -> MemorySampler:
        assert self.gpu is not None  # with the server
        return self.gpu

    def need_words(self) -> None:
        if self.random:
            skip(f"{self.random}, which have no words")

    def need_live(self) -> None:
        capabilities = (self.target.about or {}).get("capabilities", {})
        if capabilities.get("live") is False:
            skip("the server has no live sessions (no max_live_sessions)")
        if self.live:
            skip(self.live)

    def differences(self, texts: Sequence[tuple[int, str]]) -> list[Errors]:
        """Of texts (number of the clip, text) from those of the uploads."""
        return [word_errors(self.uploads[number], text, self.compared[number].language) for number, text in texts]
