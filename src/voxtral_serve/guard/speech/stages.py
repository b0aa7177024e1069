"""The stages of vLLM-Omni's engine, each a process. A server that has lost one stops, as vLLM's without its engine.

vLLM-Omni 0.32.0rc1 goes on: `errored` is true only without its orchestrator, so that a model of several modalities can
still serve some. Voxtral TTS speaks only with both of its stages, VoxCPM2 with its only one.
"""

import asyncio
from typing import Any

from voxtral_serve.patches.live_server import log

CHECK_S = 1.0


class Stages:
    """vLLM-Omni's AsyncOmni with the attribute `errored`, which `patches.live_server.GracefulStop` reads."""

    def __init__(self, client: Any, grace_s: int, server: Any) -> None:
        """`grace_s`: seconds that running requests have at a shutdown. `server`: uvicorn's."""
        self.client, self.grace_s, self.server = client, grace_s, server
        self._died = False

    @property
    def errored(self) -> bool:
        """Whether a stage has died, or all of the engine."""
        return self._died or bool(self.client.errored)

    async def watch(self) -> None:
        """Look at the stages every CHECK_S, for as long as the task runs. Stops the server if one has died."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while not self._died:
            await asyncio.sleep(CHECK_S)
            try:
                await self.client.check_health()
            except EngineDeadError as error:
                self._died = True
                log.error("the engine has lost a stage, so the server stops: %s", error)
                self.server.should_exit = True
