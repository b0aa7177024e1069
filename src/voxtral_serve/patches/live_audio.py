"""The API server's way to the scheduler for the audio of live sessions: a utility call of vLLM's EngineCore.

vLLM calls `getattr(engine_core, name)` for a utility call of that name, between two steps, and has no place where a
scheduler class or a worker class could add one that reaches the scheduler.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from voxtral_serve.engine.session import UTILITY
from voxtral_serve.shims import Patch


class LiveAudio(Patch):
    name = "live_audio"
    does = f"EngineCore has a utility call `{UTILITY}`, which hands audio of live sessions to the scheduler"
    target = "vllm.v1.engine.core"
    breaks = "audio of live sessions has no way into the engine but a new request for every 80 ms"
    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    upstream = "vLLM's utility calls are methods of EngineCore, with no place to register one"
    until = "vLLM has utility calls that a scheduler class can add, or live audio as a feature of its scheduler"
    expires = "tests/patches/test_live_audio.py::test_vllm_has_no_place_for_a_utility_call"
    used_by = "`max_live_sessions` of the encode-once model"

    def probe(self, module: Any) -> bool:
        for name in ("EngineCore", "EngineCoreProc"):
            if not hasattr(module, name):
                raise LookupError(f"no {name}")
        if not hasattr(module.EngineCoreProc, "_handle_client_request"):
            raise LookupError("EngineCoreProc has no _handle_client_request")
        return not hasattr(module.EngineCore, UTILITY)

    def apply(self, module: Any) -> None:
        def live(self: Any, messages: list) -> Any:  # vLLM reads the annotation as a type
            return self.scheduler.live(messages)

        setattr(module.EngineCore, UTILITY, live)
