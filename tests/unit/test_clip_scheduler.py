"""Uploads that begin together: which steps begin none, and what vLLM's scheduler sees meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest

from voxtral_serve.engine import clip_scheduler
from voxtral_serve.engine.clip_scheduler import MOST_RUNNING, SHARE, WAIT_S, ClipsTogether
from voxtral_serve.engine.live_scheduler import LiveSessions

TOGETHER = 4


class Stock:
    """vLLM's scheduler, as far as requests begin: as many as wait, up to its limits."""

    def __init__(self, vllm_config: Any, names: tuple[str, ...] = MOST_RUNNING) -> None:
        self.vllm_config = vllm_config
        self.running: list[int] = []
        self.waiting: list[int] = []
        for name in names:
            setattr(self, name, 256)
        self.names = names

    def schedule(self, *, fails: bool = False) -> int:
        """The number of requests that begin."""
        if fails:
            raise RuntimeError("no step")
        spare = min(getattr(self, name) for name in self.names) - len(self.running)
        begun, self.waiting = self.waiting[:spare], self.waiting[spare:]
        self.running += begun
        return len(begun)


class Scheduler(ClipsTogether, Stock):  # type: ignore[misc]
    pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clip_scheduler, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def scheduler(running: int, together: int = TOGETHER, **others: Any) -> Scheduler:
    held = Scheduler(SimpleNamespace(additional_config={"clips_together": together}), **others)
    held.running = [0] * running
    return held


@pytest.mark.parametrize(
    ("running", "wanted"),
    [(0, 1), (SHARE, 1), (2 * SHARE - 1, 1), (2 * SHARE, 2), (3 * SHARE + 5, 3), (TOGETHER * SHARE, 4), (250, 4)],
)
@pytest.mark.parametrize("names", [MOST_RUNNING, MOST_RUNNING[:1]])
def test_the_more_run_the_more_begin_together(running: int, wanted: int, names: tuple[str, ...], clock: Any) -> None:
    held = scheduler(running, names=names)
    for waiting in range(1, wanted + 1):
        held.waiting.append(1)
        assert held.schedule() == (waiting if waiting == wanted else 0)
    assert [getattr(held, name) for name in names] == [256] * len(names)


def test_none_waits_longer_than_the_bound(clock: Any) -> None:
    held = scheduler(200)
    held.waiting.append(1)
    assert held.schedule() == 0
    clock.now += 0.8 * WAIT_S
    held.waiting.append(1)
    assert held.schedule() == 0
    clock.now += 0.2 * WAIT_S + 1e-6
    assert held.schedule() == 2
    held.waiting.append(1)  # the next one waits anew
    assert held.schedule() == 0


def test_what_finds_no_place_is_not_counted(clock: Any) -> None:
    held = scheduler(255)
    held.waiting = [1] * 20
    assert held.schedule() == 0  # one place: 4 clips will begin when 4 requests have ended
    del held.running[:2]
    assert held.schedule() == 0
    del held.running[:1]
    assert held.schedule() == 4
    assert len(held.running) == 256
    assert held.schedule() == 0  # vLLM decides: there is no place
    assert held.held_since is None


def test_the_limits_come_back_after_an_error(clock: Any) -> None:
    held = scheduler(200)
    held.waiting.append(1)
    with pytest.raises(RuntimeError, match="no step"):
        held.schedule(fails=True)
    assert [getattr(held, name) for name in MOST_RUNNING] == [256, 256]


@pytest.mark.parametrize("options", [None, {}, {"clips_together": 0}, object()])
def test_without_the_option_none_waits(options: Any) -> None:
    held = Scheduler(SimpleNamespace(additional_config=options))
    held.running, held.waiting = [0] * 200, [1]
    assert held.schedule() == 1


class WithSessions(LiveSessions, Stock):  # type: ignore[misc]
    pass


def test_with_a_live_session_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveSessions, "__init__", lambda self, *args: super(LiveSessions, self).__init__(*args))
    held = WithSessions(SimpleNamespace(additional_config={"clips_together": TOGETHER}))
    held.running, held.waiting, held.audio_of = [0] * 200, [1], {"r": None}  # type: ignore[dict-item]
    assert not held.holds()
    held.audio_of = {}
    assert held.holds()
