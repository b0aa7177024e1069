"""The answer to a client of `/v1/realtime` from a server that transcribes whole clips only.

vLLM mounts that route only for a model that takes live audio; for any other model the WebSocket handshake gets a bare
403. `WholeClipsOnly`, named under `middleware` in a config, answers in the form of vLLM's protocol.
"""

import json

from voxtral_serve.guard.asgi import App, Message, Receive, Send

PATH = "/v1/realtime"
ERROR = {
    "type": "error",
    "error": (
        "this server transcribes whole clips only, at POST /v1/audio/transcriptions: its model encodes a clip once, "
        "when all of it is there. Live audio is served with additional_config: {max_live_sessions: N}, as in "
        "profiles/fast.yaml and profiles/realtime.yaml"
    ),
    "code": "realtime_not_supported",
}
POLICY_VIOLATION = 1008  # a WebSocket close code (RFC 6455)


class WholeClipsOnly:
    """ASGI middleware: a WebSocket to `/v1/realtime` is accepted, gets one error event, and is closed."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket" or not scope["path"].endswith(PATH):
            await self.app(scope, receive, send)
            return
        await receive()  # the handshake's `websocket.connect`
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": json.dumps(ERROR)})
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": "whole clips only"})
