"""The events of vLLM's `/v1/realtime`, as its own server has them, around live sessions.

session.update names the model, input_audio_buffer.commit begins a text, input_audio_buffer.append has its audio, a
commit that is `final` ends it. The answers are one transcription.delta for each token, most of them empty, and
transcription.done; then another text may begin. An event that is wrong gets an error event, and the socket stays.
What vLLM's server does not have: the socket is closed with an error event and a reason where it cannot go on.
"""

import asyncio
import contextlib
import json
import time
from typing import Any

import msgspec
import pybase64

from voxtral_serve.guard.asgi import Message, Receive, Send
from voxtral_serve.guard.live.cuts import SAMPLE_BYTES
from voxtral_serve.guard.live.link import EngineGoneError, LinkError
from voxtral_serve.guard.live.service import DEAD, FAILED, LATER, STOPPING, Ending, LiveService
from voxtral_serve.guard.live.session import LiveSession
from voxtral_serve.patches.live_server import log
from voxtral_serve.units import MIB

MOST_APPEND = 15 * MIB  # bytes of one append's base64, as OpenAI has it; uvicorn takes messages of 16 MiB
MOST_EARLY = 16 * MIB  # bytes of audio that wait for the commit that begins their text
LARGE = 256 * 1024  # characters of an event that is decoded in a thread: more takes over a millisecond
LAST_WORD_S = 1.0  # for the error event and the close of a socket whose client may not read
EMPTY: Message = {"type": "websocket.send", "text": '{"type":"transcription.delta","delta":""}'}
NOT_VALIDATED = "Model not validated. Make sure to validate the model by sending a session.update event."
_decode = msgspec.json.Decoder().decode


class EventError(Exception):
    """An event is answered with an error event. `code` is vLLM's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class VllmSocket:
    """One WebSocket, from its acceptance to its close."""

    def __init__(self, service: LiveService, receive: Receive, send: Send, id: str) -> None:
        self.service, self.receive, self.client, self.id = service, receive, send, id
        self.session: LiveSession | None = None
        self.listening_since: float | None = None
        self.sending_since: float | None = None
        self.reason = ""
        # Of all texts of the socket, for its line in the log
        self.texts = self.samples = self.tokens = self.rollovers = 0
        self.worst_lag_s = 0.0
        self._model_known = self._draining = False
        self._early: list[bytes] = []  # audio before its text begins
        self._early_bytes = 0
        self._early_end = False
        self._ending: Ending | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._writer: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Until the client leaves or is told to."""
        task = self._reader = asyncio.current_task()
        assert task is not None
        self.service.add(self, task)
        try:
            with contextlib.suppress(OSError):  # uvicorn's ClientDisconnected
                await self._read()
            self.reason = "client" if self.session is not None else "done"
        except asyncio.CancelledError:
            if self._ending is None:  # uvicorn's, once the grace period is over
                self._ending = STOPPING
                raise
            task.uncancel()
        except Exception:
            log.exception("a live session failed, id %s", self.id)
            self._ending = Ending("error", FAILED, "the session failed", "processing_error")
        finally:
            self._reader = None
            self.reason = self._ending.reason if self._ending else self.reason or "error"
            await self._release()
            self.service.remove(self, self.reason)
        if self._ending is not None:
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                await asyncio.wait_for(self._last_word(self._ending), LAST_WORD_S)

    def stop(self, ending: Ending) -> None:
        if self._ending is None and self._reader is not None:
            self._ending = ending
            self._reader.cancel()

    def drain(self) -> None:
        self._draining = True
        if self.session is None:
            self.stop(STOPPING)
        else:
            self.session.end()

    def report(self) -> str:
        """What the line in the log says of it."""
        return (
            f"{self.samples / self.service.link.shape.rate_hz:.2f} s of audio, {self.tokens} tokens, "
            f"{self.texts} texts, worst lag {1000 * self.worst_lag_s:.0f} ms, {self.rollovers} rollovers, "
            f"ended: {self.reason}"
        )

    async def _read(self) -> None:
        await self.receive()  # the handshake's `websocket.connect`
        await self.client({"type": "websocket.accept"})
        await self._say("session.created", id=f"sess-{self.id}", created=int(time.time()))
        if self.service.stopping:
            self.stop(STOPPING)
        while True:
            self.listening_since = time.monotonic()
            message = await self.receive()
            if message["type"] != "websocket.receive":
                return
            self.listening_since = None
            try:
                await self._event(message)
            except EventError as error:
                await self._say("error", error=str(error), code=error.code)

    async def _event(self, message: Message) -> None:
        text = message.get("text")
        if text is None:
            raise EventError("a binary message: expected events as JSON text", "invalid_event")
        large = len(text) > LARGE
        event = await asyncio.to_thread(parsed, text) if large else parsed(text)
        kind = event.get("type")
        if kind == "input_audio_buffer.append":
            audio = event.get("audio")
            await self._append(await asyncio.to_thread(decoded, audio) if large else decoded(audio))
        elif kind == "session.update":
            self._update(event.get("model"))
        elif kind == "input_audio_buffer.commit":
            if not self._model_known:
                raise EventError(NOT_VALIDATED, "model_not_validated")
            await self._commit(str(event.get("final", False)).lower() in ("true", "1"))
        else:
            raise EventError(f"Unknown event type: {kind}", "unknown_event")

    def _update(self, model: Any) -> None:
        if model is None:
            raise EventError("Missing required field: model", "invalid_event")
        if not self.service.serves(model):
            raise EventError(f"The model `{model}` does not exist.", "model_not_found")
        self._model_known = True

    async def _append(self, pcm: bytes) -> None:
        if self.session is not None:
            await self.session.feed(pcm)  # which drops what comes after the text's end, as vLLM does
        elif self._early_bytes + len(pcm) > MOST_EARLY:
            raise EventError(
                f"{self._early_bytes} bytes of audio wait for input_audio_buffer.commit, and this append is too much: "
                f"expected at most {MOST_EARLY}",
                "invalid_audio",
            )
        else:
            self._early.append(pcm)
            self._early_bytes += len(pcm)

    async def _commit(self, final: bool) -> None:
        if final:
            if self.session is not None:
                self.session.end()
            else:
                self._early_end = True  # of the next text, as in vLLM
            return
        if self.session is not None:
            return  # vLLM ignores it as well
        session = self.session = self.service.session(self._failed)
        try:
            await session.begin()
        except EngineGoneError:
            self.stop(DEAD)
            return
        except LinkError as error:
            words = f"{error}: this server has no place for another live session, try again later"
            self.stop(Ending("refused", LATER, words, "too_many_sessions"))
            return
        self.texts += 1
        self._writer = asyncio.get_running_loop().create_task(self._write(session))
        early, self._early, self._early_bytes = b"".join(self._early), [], 0
        ends, self._early_end = self._early_end, False
        await session.feed(early)
        if ends or self._draining:
            session.end()

    async def _write(self, session: LiveSession) -> None:
        """The text of a session, and what ends the socket with it."""
        pieces: list[str] = []
        try:
            async with contextlib.aclosing(session.deltas()) as deltas:
                async for text, count in deltas:
                    for _ in range(count - 1 if text else count):
                        await self._send(EMPTY)
                    if text:
                        pieces.append(text)
                        delta = json.dumps(text, ensure_ascii=False)
                        await self._send(_event('{"type":"transcription.delta","delta":' + delta + "}"))
            usage = {
                "prompt_tokens": session.prompt_tokens,
                "total_tokens": session.prompt_tokens + session.tokens,
                "completion_tokens": session.tokens,
                "prompt_tokens_details": None,
            }
            self._count(session)
            await self._say("transcription.done", text="".join(pieces), usage=usage)
            if self._draining:
                self.stop(STOPPING)
            self.listening_since = time.monotonic() if self.listening_since is not None else None
        except OSError:  # the client has left: the reader sees it, too
            pass
        except Exception as error:
            if self.service.link.engine.dead():
                self.stop(DEAD)
            else:
                log.exception("a live session failed, id %s", self.id)
                self._failed(str(error))

    def _failed(self, why: str) -> None:
        self.stop(Ending("error", FAILED, f"the session failed: {why}", "processing_error"))

    def _count(self, session: LiveSession) -> None:
        """The text is complete or given up: another may begin."""
        session.close()
        self.session = None
        self.samples += session.samples
        self.tokens += session.tokens
        self.rollovers += session.rollovers
        self.worst_lag_s = max(self.worst_lag_s, session.worst_lag_s)

    async def _release(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._writer
        if self.session is not None:
            self._count(self.session)

    async def _last_word(self, ending: Ending) -> None:
        if ending.code is not None:
            await self._say("error", error=ending.words, code=ending.code)
        reason = ending.words.encode()[:120].decode(errors="ignore")  # a close frame has room for 123 bytes
        await self.client({"type": "websocket.close", "code": ending.close, "reason": reason})

    async def _say(self, kind: str, **fields: Any) -> None:
        content = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
        await self._send(_event(content))

    async def _send(self, message: Message) -> None:
        self.sending_since = time.monotonic()
        await self.client(message)
        self.sending_since = None


def _event(text: str) -> Message:
    return {"type": "websocket.send", "text": text}


def parsed(text: str) -> dict[str, Any]:
    """Raises EventError for what is no event."""
    try:
        event = _decode(text)
    except ValueError:  # msgspec's errors are of this kind
        raise EventError("Invalid JSON", "invalid_json") from None
    if not isinstance(event, dict):
        raise EventError("an event is a JSON object with `type`", "processing_error")
    return event


def decoded(audio: Any) -> bytes:
    """PCM16 of an append's base64. Raises EventError."""
    if not isinstance(audio, str):
        raise EventError("input_audio_buffer.append has no `audio`: expected base64 of PCM16", "processing_error")
    try:
        pcm: bytes = pybase64.b64decode(audio) if len(audio) <= MOST_APPEND else b""
    except ValueError:
        pcm = b""
    if not pcm or len(pcm) % SAMPLE_BYTES:
        raise EventError("Invalid audio data", "invalid_audio")
    return pcm
