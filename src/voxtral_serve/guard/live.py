"""What a client of `/v1/realtime` is told by a server of the encode-once model, which needs a clip as a whole.

vLLM mounts that route only for a model that takes audio in pieces; for any other the WebSocket handshake gets a bare
403. `WholeClipsOnly`, named under `middleware` in a config, answers it in the protocol's own form.
"""

import json

from voxtral_serve.guard.asgi import App, Message, Receive, Send

PATH = "/v1/realtime"
ERROR = {
    "type": "error",
    "error": (
        "this server transcribes whole clips only, at POST /v1/audio/transcriptions: its model encodes a clip once, "
        "when all of it is there. Live audio is served by `vllm serve --config profiles/realtime.yaml`"
    ),
    "code": "realtime_not_supported",
}
REFUSED = 1008  # the WebSocket status of a policy's violation


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
        await send({"type": "websocket.close", "code": REFUSED, "reason": "whole clips only"})
