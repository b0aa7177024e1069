"""How long the parent of several API processes waits. (On real servers: tests/server/test_shutdown.py.)"""

from argparse import Namespace

import pytest
from vllm.v1 import utils

from voxtral_serve import shims
from voxtral_serve.patches import drain


class Manager:
    """Of the form of vLLM's."""

    def __init__(self, listen_address: str, args: Namespace) -> None:
        self.waited: list[float | None] = []

    def shutdown(self, timeout: float | None = None) -> None:
        self.waited.append(timeout)


class Other:
    def __init__(self, args: Namespace) -> None: ...

    def shutdown(self) -> None: ...


def test_it_waits_as_long_as_the_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "APIServerProcessManager", type("Manager", (Manager,), dict(vars(Manager))))
    drain.install()
    drain.install()
    manager = utils.APIServerProcessManager("address", args=Namespace(shutdown_timeout=7))
    manager.shutdown()
    manager.shutdown(timeout=2)
    with pytest.raises(RuntimeError):  # a process has died, and vLLM ends the others
        try:
            raise RuntimeError
        finally:
            manager.shutdown()
    assert manager.waited == [7, 2, None]


@pytest.mark.parametrize("lacks", ["shutdown has no timeout", "is not there"])
def test_drift(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "APIServerProcessManager", Other if lacks.startswith("shutdown") else None)
    with pytest.raises(
        shims.PatchError, match=f"patch drain .* has drifted on vllm .*: APIServerProcessManager {lacks}"
    ):
        drain.install()
