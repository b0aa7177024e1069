"""Several API processes have the whole of --shutdown-timeout for the requests that run.

vLLM 0.20.0's parent of several API processes means to give them that time after SIGTERM. But it hears the signal by a
handler that was there for the start only, takes it for an interruption, and kills them after 5 s. `install` wraps the
manager of these processes: where it is not told how long to wait, and no process has died, it waits as long as the
option says.
"""

import inspect
import sys
from functools import wraps
from typing import Any

from voxtral_serve import shims

MARK = "voxtral_serve_drain"


def install() -> None:
    """Wrap this process' APIServerProcessManager; twice does no harm. Raises PatchError where it is not as expected."""
    from vllm.v1 import utils

    manager: Any = getattr(utils, "APIServerProcessManager", None)
    if manager is not None and MARK in vars(manager):
        return
    if manager is None:
        raise _drifted("is not there")
    expected = {"__init__": "args", "shutdown": "timeout"}
    signatures = {name: inspect.signature(getattr(manager, name)) for name in expected}
    lacking = [f"{name} has no {used}" for name, used in expected.items() if used not in signatures[name].parameters]
    if lacking:
        raise _drifted(", ".join(lacking))
    begin, end = manager.__init__, manager.shutdown

    @wraps(begin)
    def beginning(self: Any, *args: Any, **kwargs: Any) -> None:
        self.voxtral_serve_grace_s = (
            signatures["__init__"].bind(self, *args, **kwargs).arguments["args"].shutdown_timeout
        )
        begin(self, *args, **kwargs)

    @wraps(end)
    def ending(self: Any, timeout: float | None = None) -> None:
        # An exception on its way says that a process has died: nothing is left to wait for.
        told = timeout is None and sys.exc_info()[0] is None
        end(self, timeout=self.voxtral_serve_grace_s if told else timeout)

    manager.__init__, manager.shutdown = beginning, ending
    setattr(manager, MARK, True)


def _drifted(why: str) -> shims.PatchError:
    return shims.PatchError(
        f"patch drain (of vllm.v1.utils) has drifted on vllm {shims.installed('vllm')}: APIServerProcessManager {why}. "
        f"{shims.ADVICE}"
    )
