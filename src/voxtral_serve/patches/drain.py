"""Give several API processes the full --shutdown-timeout to finish their requests.

In vLLM 0.20.0 the parent of several API processes should wait that long after SIGTERM. But its `setup_server` replaces
the parent's signal handler with the one for the start. The parent then treats the signal as an interruption and kills
the processes after 5 s. The patch wraps the manager of these processes: if the caller gives no timeout and no process
has died, it waits for --shutdown-timeout.
"""

import inspect
import sys
from collections.abc import Mapping
from functools import wraps
from typing import Any, ClassVar

from voxtral_serve.shims import Patch


class ApiProcessDrain(Patch):
    name = "api_process_drain"
    does = "makes the parent of several API processes wait `--shutdown-timeout` for running requests"
    target = "vllm.entrypoints.cli.serve"
    breaks = "vLLM ignores --shutdown-timeout and aborts running requests 5 s after SIGTERM"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": False}
    upstream = "vLLM 0.32.0 replaces the signal handler only if there is one API process"
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
            # An exception that is being handled means that a process has died: there is nothing to wait for.
            told = timeout is None and sys.exc_info()[0] is None
            end(self, timeout=self.voxtral_serve_grace_s if told else timeout)

        shutdown.waits_for_requests = True  # type: ignore[attr-defined]
        manager.__init__, manager.shutdown = __init__, shutdown
