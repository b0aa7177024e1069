"""How long the parent of several API processes waits. (On real servers: tests/server/test_shutdown.py.)"""

import re
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from voxtral_serve.patches.drain import ApiProcessDrain


class Manager:
    """Of the form of vLLM's."""

    def __init__(self, listen_address: str, args: Namespace) -> None:
        self.waited: list[float | None] = []

    def shutdown(self, timeout: float | None = None) -> None:
        self.waited.append(timeout)


class Other:
    def __init__(self, args: Namespace) -> None: ...

    def shutdown(self) -> None: ...


def replaces_the_handler() -> None:
    import signal

    def signal_handler(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, signal_handler)


def leaves_the_handler() -> None: ...


def module(manager: Any, setup_server: Any = replaces_the_handler) -> Any:
    """What is used of vllm.entrypoints.cli.serve."""
    own = type("Manager", (), dict(vars(manager)))
    return SimpleNamespace(APIServerProcessManager=own, setup_server=setup_server)


def test_it_waits_as_long_as_the_option_says() -> None:
    patched = module(Manager)
    patch = ApiProcessDrain()
    assert patch.probe(patched)
    patch.apply(patched)
    assert not patch.probe(patched)
    manager = patched.APIServerProcessManager("address", args=Namespace(shutdown_timeout=7))
    manager.shutdown()
    manager.shutdown(timeout=2)
    with pytest.raises(RuntimeError):  # a process has died, and vLLM ends the others
        try:
            raise RuntimeError
        finally:
            manager.shutdown()
    assert manager.waited == [7, 2, None]


def test_a_parent_that_keeps_its_handler_needs_no_patch() -> None:
    assert not ApiProcessDrain().probe(module(Manager, leaves_the_handler))


@pytest.mark.parametrize(
    ("drifted", "found"),
    [
        (module(Other), "LookupError: APIServerProcessManager.shutdown has no timeout"),
        (SimpleNamespace(), "AttributeError: .*APIServerProcessManager"),
    ],
)
def test_drift(drifted: Any, found: str) -> None:
    outcome, reason = ApiProcessDrain().settle(drifted)
    assert outcome == "drifted"
    assert re.match(found, reason)
