"""What the handshake of a live WebSocket says: its protocol and its key.

A browser cannot set the header `Authorization`, so a key may come as a subprotocol, as OpenAI has it. It never comes in
the URL, which proxies write to their logs.
"""

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qs

from msgspec import UNSET

from voxtral_serve.guard.asgi import Message
from voxtral_serve.guard.live.events import Event, EventError, is_object
from voxtral_serve.guard.live.mistral_dialect import MistralDialect
from voxtral_serve.guard.live.openai_dialect import BETA_UPDATE, UPDATE, OpenAiDialect, created
from voxtral_serve.guard.live.openai_settings import OpenAiSettings
from voxtral_serve.guard.live.socket import Dialect, LiveSocket
from voxtral_serve.guard.live.vllm_dialect import VllmDialect
from voxtral_serve.guard.live.whole_clips import PATH

SUBPROTOCOL = "realtime"
KEY, BETA_SUBPROTOCOL = "openai-insecure-api-key.", "openai-beta.realtime-v1"
AUTHORIZATION = b"authorization"
MISTRAL_PATH = "/v1/audio/transcriptions/realtime"
PATHS = (PATH, MISTRAL_PATH)


class Handshake(NamedTuple):
    """
    dialect      makes the protocol of the socket
    subprotocol  that is accepted
    """

    dialect: Callable[[LiveSocket], Dialect]
    subprotocol: str | None


def read(path: str, scope: Message, headers: dict[bytes, bytes]) -> Handshake:
    """Of a WebSocket to one of PATHS."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    model = query.get("model", [None])[-1]
    if path == MISTRAL_PATH:
        return Handshake(lambda socket: MistralDialect(socket, model), None)
    offered = scope.get("subprotocols") or ()
    subprotocol = SUBPROTOCOL if SUBPROTOCOL in offered else None
    beta = b"realtime=v1" in headers.get(b"openai-beta", b"") or BETA_SUBPROTOCOL in offered
    if query.get("intent", [""])[-1] == "transcription":
        return Handshake(lambda socket: OpenAiDialect(socket, beta, model), subprotocol)
    return Handshake(lambda socket: Undecided(socket, beta), subprotocol)


class Undecided(VllmDialect):
    """A client of vLLM's or of OpenAI's protocol: the first session.update tells which."""

    def __init__(self, socket: LiveSocket, beta: bool = False) -> None:
        super().__init__(socket)
        self._beta, self._decided = beta, False

    async def greet(self) -> None:
        await self.socket.say("session.created", **created(self.socket, OpenAiSettings(self.service)))

    async def event(self, event: Event, large: bool) -> None:
        kind, named = event.type, event.model is not UNSET
        if not self._decided and self.session is None:
            nested = kind == UPDATE and not named and is_object(event.session)
            if nested or kind == BETA_UPDATE:
                await self._become_openai(event, large)
                return
            self._decided = kind == UPDATE and named
        await super().event(event, large)

    async def _become_openai(self, event: Event, large: bool) -> None:
        dialect = self.socket.dialect = OpenAiDialect(self.socket, self._beta)
        dialect.draining = self.draining
        if self._beta:
            await dialect.greet()
            return
        try:
            await dialect.event(event, large)
        except EventError as error:
            await dialect.refuse(error, event)
        with self.taken_early() as early:
            await dialect.take(early)


def key_as_header(scope: Message, headers: dict[bytes, bytes]) -> None:
    """Have a key that came as a subprotocol where the other keys are."""
    given = [name.removeprefix(KEY) for name in scope.get("subprotocols") or () if name.startswith(KEY)]
    if given and AUTHORIZATION not in headers:
        headers[AUTHORIZATION] = value = f"Bearer {given[-1]}".encode("latin-1", "replace")
        scope["headers"] = [*scope["headers"], (AUTHORIZATION, value)]
