"""The limit of servers that a session without slow tests may start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import starts

from bench import BenchError, serve


def session(*slow: bool) -> Any:
    """Of one test for each of `slow`."""
    return SimpleNamespace(
        items=[SimpleNamespace(get_closest_marker=lambda _, each=each: each or None) for each in slow]
    )


@pytest.mark.parametrize(
    ("slow", "more", "fails"), [([False], 0, False), ([False], 1, True), ([False, True], 1, False)]
)
def test_a_session_fails_with_one_more(
    slow: list[bool], more: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "STARTED", [])
    for _ in range(starts.MOST + more):
        starts.record("config.yaml", "checkpoint")
    finished = session(*slow)
    finished.exitstatus = 0
    conftest.pytest_sessionfinish(finished)
    assert (finished.exitstatus != 0) == fails


@pytest.mark.parametrize("fake", [False, True])
def test_servers_of_this_environment_are_counted(fake: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a config none comes up."""
    monkeypatch.setattr(starts, "STARTED", [])
    command = ("python",) if fake else ()
    with (
        pytest.raises(BenchError, match="does not exist"),
        serve.server(tmp_path / "none.yaml", tmp_path, 1, tmp_path / "log", "--flag", command=command),
    ):
        pass
    expected = [] if fake else [f"{tmp_path}/none.yaml in {tmp_path} --flag"]
    assert list(map(str, starts.STARTED)) == expected
