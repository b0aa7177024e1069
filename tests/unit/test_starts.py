"""The limit of servers that a session without slow tests may start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import starts

from bench import BenchError
from bench.measure import engine


@pytest.mark.parametrize(
    ("marks", "more", "fails"), [("not slow", 0, False), ("not slow", 1, True), ("slow", 1, False)]
)
def test_a_session_fails_with_one_more(marks: str, more: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "STARTED", [])
    for _ in range(starts.MOST + more):
        starts.record("config.yaml", "checkpoint")
    session: Any = SimpleNamespace(exitstatus=0, config=SimpleNamespace(option=SimpleNamespace(markexpr=marks)))
    conftest.pytest_sessionfinish(session)
    assert (session.exitstatus != 0) == fails


@pytest.mark.parametrize("fake", [False, True])
def test_servers_of_this_environment_are_counted(fake: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a config none comes up."""
    monkeypatch.setattr(starts, "STARTED", [])
    command = ("python",) if fake else ()
    with (
        pytest.raises(BenchError, match="does not exist"),
        engine.served(tmp_path / "none.yaml", tmp_path, 1, tmp_path / "log", "--flag", command=command),
    ):
        pass
    expected = [] if fake else [f"{tmp_path}/none.yaml in {tmp_path} --flag"]
    assert list(map(str, starts.STARTED)) == expected
