"""Several API processes have the whole of --shutdown-timeout for the requests that run.

vLLM 0.20.0's parent of several API processes means to give them that time after SIGTERM. But its `setup_server` puts a
handler for the start in the place of the parent's own; the parent then takes the signal for an interruption and kills
the processes after 5 s. The patch wraps the manager of these processes: where it is not told how long to wait, and no
process has died, it waits as long as the option says.
"""

import inspect
import sys
from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

from voxtral_serve.shims import Patch


class ApiProcessDrain(Patch):
    name = "api_process_drain"
    does = "the parent of several API processes gives them `--shutdown-timeout` to finish their requests"
    target = "vllm.entrypoints.cli.serve"
    breaks = "requests that run at SIGTERM are cut off after 5 s, whatever --shutdown-timeout says"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = "vLLM 0.32.0 sets the handler of the start in a single API process only"
    until = "vLLM 0.20.0 is no longer supported"
    used_by = "`api_server_count` above 1, behind the guard"

    def probe(self, module: Any) -> bool:
        manager = module.APIServerProcessManager
        for method, parameter in (("__init__", "args"), ("shutdown", "timeout")):
            if parameter not in inspect.signature(getattr(manager, method)).parameters:
                raise LookupError(f"APIServerProcessManager.{method} has no {parameter}")
        replaces_handler = "signal.signal(signal.SIGTERM" in inspect.getsource(module.setup_server)
        return replaces_handler and not hasattr(manager.shutdown, "waits_for_requests")

    def apply(self, module: Any) -> None:
        manager = module.APIServerProcessManager
        begin, end = manager.__init__, manager.shutdown
        signature = inspect.signature(begin)

        @wraps(begin)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self.voxtral_serve_grace_s = signature.bind(self, *args, **kwargs).arguments["args"].shutdown_timeout
            begin(self, *args, **kwargs)

        @wraps(end)
        def shutdown(self: Any, timeout: float | None = None) -> None:
            # An exception on its way says that a process has died: nothing is left to wait for.
            told = timeout is None and sys.exc_info()[0] is None
            end(self, timeout=self.voxtral_serve_grace_s if told else timeout)

        shutdown.waits_for_requests = True  # type: ignore[attr-defined]
        manager.__init__, manager.shutdown = __init__, shutdown
