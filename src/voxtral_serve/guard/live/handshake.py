"""What the handshake of a live WebSocket says: its protocol and its key.

A browser cannot set the header `Authorization`, so a key may come as a subprotocol, as OpenAI has it. It never comes in
the URL, which proxies write to their logs.
"""

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qs

from msgspec import UNSET

from voxtral_serve.guard.asgi import Message
from voxtral_serve.guard.live import commands
from voxtral_serve.guard.live.codec import Become, Codec, CodecContext, Command, written
from voxtral_serve.guard.live.events import Event, is_object
from voxtral_serve.guard.live.mistral_codec import MistralCodec
from voxtral_serve.guard.live.openai_codec import BETA_UPDATE, UPDATE, OpenAiCodec, opened
from voxtral_serve.guard.live.openai_settings import OpenAiSettings
from voxtral_serve.guard.live.vllm_codec import VllmCodec
from voxtral_serve.guard.live.whole_clips import PATH

SUBPROTOCOL = "realtime"
KEY, BETA_SUBPROTOCOL = "openai-insecure-api-key.", "openai-beta.realtime-v1"
AUTHORIZATION = b"authorization"
MISTRAL_PATH = "/v1/audio/transcriptions/realtime"
PATHS = (PATH, MISTRAL_PATH)


class Handshake(NamedTuple):
    """
    codec        makes the codec of the connection's protocol
    subprotocol  that is accepted
    """

    codec: Callable[[CodecContext], Codec]
    subprotocol: str | None


def read(path: str, scope: Message, headers: dict[bytes, bytes]) -> Handshake:
    """The handshake of a WebSocket to one of PATHS."""
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    model = query.get("model", [None])[-1]
    if path == MISTRAL_PATH:
        return Handshake(lambda context: MistralCodec(context, model), None)
    offered = scope.get("subprotocols") or ()
    subprotocol = SUBPROTOCOL if SUBPROTOCOL in offered else None
    is_beta = b"realtime=v1" in headers.get(b"openai-beta", b"") or BETA_SUBPROTOCOL in offered
    if query.get("intent", [""])[-1] == "transcription":
        return Handshake(lambda context: OpenAiCodec(context, is_beta, model), subprotocol)
    return Handshake(lambda context: UndecidedCodec(context, is_beta), subprotocol)


class UndecidedCodec(VllmCodec):
    """A client of vLLM's or of OpenAI's protocol: the first session.update tells which."""

    def __init__(self, context: CodecContext, is_beta: bool = False) -> None:
        super().__init__(context)
        self._is_beta, self._is_vllms = is_beta, False

    def open(self) -> list[Command]:
        return [commands.Answer(written("session.created", **opened(self.context, OpenAiSettings(self.context))))]

    def decode(self, event: Event, begun: bool) -> list[Command]:
        kind, named = event.type, event.model is not UNSET
        if not self._is_vllms and not begun:
            nested = kind == UPDATE and not named and is_object(event.session)
            if nested or kind == BETA_UPDATE:
                return [Become(OpenAiCodec(self.context, self._is_beta), opens=self._is_beta)]
            self._is_vllms = kind == UPDATE and named
        return super().decode(event, begun)


def key_as_header(scope: Message, headers: dict[bytes, bytes]) -> None:
    """Put a key that came as a subprotocol where other keys come, in the header `Authorization`."""
    keys = [name.removeprefix(KEY) for name in scope.get("subprotocols") or () if name.startswith(KEY)]
    if keys and AUTHORIZATION not in headers:
        headers[AUTHORIZATION] = value = f"Bearer {keys[-1]}".encode("latin-1", "replace")
        scope["headers"] = [*scope["headers"], (AUTHORIZATION, value)]
