"""Patches that the guard applies to live objects: vLLM's engine client and handlers, and uvicorn's server.

Each patch is settled on the object, once per server. A drifted patch ends the start.
"""

import asyncio
import inspect
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

from voxtral_serve import shims
from voxtral_serve.shims import Patch
from voxtral_serve.units import MIB

log = logging.getLogger("vllm.voxtral_serve.guard")  # below vLLM's logger: same handler and format


class EngineDeadError(RuntimeError):
    """Raised after the server has stopped, so that the process ends with a non-zero status."""


class ServerPatch(Patch):
    """A patch of an object. The argument `module` of probe and apply is this object."""

    library = "vllm"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": True, "0.32.0": True}
    used_by = "`middleware: voxtral_serve.guard.Guard`"

    def settle_on(self, target: Any) -> None:
        """Raises PatchError if the object is not as expected."""
        outcome, found = self.settle(target)
        if (finder := shims.active()) is not None:
            finder.outcomes[self.name] = outcome, found
        if outcome == "drifted":
            raise shims.PatchError(f"{self.drifted(found)}. {shims.ADVICE}")


class FileLimit(ServerPatch):
    """Object: the state of vLLM's FastAPI application."""

    name = "file_limit"
    does = (
        "raises vLLM's limit on file size, because the guard sends vLLM the decoded audio of chats; the guard applies "
        "the limit to the client's file"
    )
    target = "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"
    breaks = "Maximum file size exceeded (for a small file whose decoded audio is larger than the limit)"
    upstream = "vLLM has no interface for decoded audio in a chat: it decodes every file itself"
    until = "vLLM's chats accept decoded samples from a middleware"
    expires = "tests/patches/test_live_server.py::test_vllm_limits_the_bytes_of_what_it_is_sent"
    needed: ClassVar[Mapping[str, bool]] = {"0.20.0": False, "0.32.0": True}
    used_by = "models that chat, behind the guard"

    variable = "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"

    def __init__(self, file_bytes: int = 0, decoded_bytes: int = 0) -> None:
        """The maximum size in bytes of a client's file, and of its decoded samples."""
        self.most_mib = max(file_bytes, decoded_bytes) // MIB + 1

    def probe(self, module: Any) -> bool:
        from vllm.multimodal.media.audio import AudioMediaIO

        limited = hasattr(AudioMediaIO, "get_max_bytes")  # not in 0.20.0
        return limited and os.environ.get(self.variable) != str(self.most_mib)

    def apply(self, module: Any) -> None:
        os.environ[self.variable] = str(self.most_mib)  # vLLM reads it for each file


class GracefulStop(ServerPatch):
    """Object: uvicorn's Server.

    Stock vLLM stops the engine while requests still run, and a server without an engine ends with status 0. With the
    patch, uvicorn stops listening and waits for the running requests; then vLLM stops the engine.
    """

    name = "graceful_stop"
    does = (
        "lets running requests finish within `--shutdown-timeout` after SIGTERM, and ends the server with status 1 if "
        "its engine has died"
    )
    target = "uvicorn.Server"
    breaks = "running requests fail at SIGTERM, and a server whose engine has died ends with status 0"
    upstream = "vLLM's --shutdown-timeout limits the shutdown of the engine, not that of the requests"
    until = "vLLM drains requests on SIGTERM, and exits with an error status if its engine has died"
    expires = "tests/patches/test_live_server.py::test_vllm_ends_with_status_0_where_its_engine_has_died"

    def __init__(
        self,
        engine: Any = None,
        drain: Callable[[float], Awaitable[None]] | None = None,
        grace_s: float | None = None,
    ) -> None:
        """`engine`: vLLM's EngineClient, or another object that has `errored`.

        `drain` is awaited before uvicorn closes all WebSockets, which it does at once; it is given the seconds that it
        has. `grace_s`: seconds that running requests have; by default the engine's shutdown_timeout.
        """
        self.engine, self.drain, self.grace_s = engine, drain, grace_s

    def probe(self, module: Any) -> bool:
        if not inspect.iscoroutinefunction(module.shutdown):
            raise TypeError("shutdown is no coroutine function")
        return not hasattr(module.shutdown, "tells_a_dead_engine")

    def apply(self, module: Any) -> None:
        stock = module.shutdown
        grace_s = self.engine.vllm_config.shutdown_timeout if self.grace_s is None else self.grace_s

        def errored() -> Any:
            return self.engine.errored

        errored()  # raises an AttributeError now instead of at shutdown
        module.config.timeout_graceful_shutdown = grace_s

        async def shutdown(*args: Any, **kwargs: Any) -> None:
            died = errored()
            if self.drain is not None and not died:
                start = time.monotonic()
                for server in module.servers:  # that they listen no more
                    server.close()
                draining = asyncio.ensure_future(self.drain(grace_s))
                while not (draining.done() or module.force_exit):
                    await asyncio.wait({draining}, timeout=0.1)
                module.config.timeout_graceful_shutdown = max(0.0, grace_s - (time.monotonic() - start))
            await stock(*args, **kwargs)
            if died:
                raise EngineDeadError("vLLM's engine has died, so the server stops. The log lines above may say why")

        def stop() -> None:
            if module.should_exit:
                module.force_exit = True
                return
            log.info("stopping: waiting up to %d s for running requests (--shutdown-timeout)", grace_s)
            module.should_exit = True

        shutdown.tells_a_dead_engine = True  # type: ignore[attr-defined]
        module.shutdown = shutdown
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)


class HeaderLimit(ServerPatch):
    """Object: uvicorn's Config, once it is loaded.

    Headers and trailers are counted as the bytes that come without a byte of a body. h11, which uvicorn takes where
    httptools is not installed, has a limit of its own.
    """

    name = "header_limit"
    does = "closes a connection whose request has more than 64 KiB of headers, or whose headers take more than 30 s"
    target = "uvicorn.Config.http_protocol_class"
    breaks = "50 MB of headers take 1.2 GB of memory, and 77 MB of one header the event loop for 10 s: without a key"
    upstream = "uvicorn limits headers with h11 only, and vLLM installs httptools"
    until = "uvicorn limits headers with httptools"
    expires = "tests/patches/test_live_server.py::test_uvicorn_takes_headers_without_limit"

    MOST_BYTES, MOST_S = 64 << 10, 30.0

    def probe(self, module: Any) -> bool:
        return not hasattr(module.http_protocol_class, "limits_headers")

    def apply(self, module: Any) -> None:
        stock, most_bytes, most_s = module.http_protocol_class, self.MOST_BYTES, self.MOST_S
        if not hasattr(stock, "on_headers_complete"):
            module.http_protocol_class = type(stock.__name__, (stock,), {"limits_headers": True})
            return

        class Limited(stock):  # type: ignore[misc,valid-type]
            limits_headers = True
            head = 0  # bytes since the last ones of a body

            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                self.deadline = self.loop.call_later(most_s, transport.close)

            def connection_lost(self, exc: Exception | None) -> None:
                self.deadline.cancel()
                super().connection_lost(exc)

            def data_received(self, data: bytes) -> None:
                self.head += len(data)
                super().data_received(data)
                if self.head > most_bytes and not self.transport.is_closing():
                    self.send_400_response("The headers are too large.")

            def on_message_begin(self) -> None:
                self.deadline.cancel()
                self.deadline = self.loop.call_later(most_s, self.transport.close)
                super().on_message_begin()

            def on_headers_complete(self) -> None:
                self.deadline.cancel()
                self.head = 0
                super().on_headers_complete()

            def on_body(self, body: bytes) -> None:
                self.head = 0
                super().on_body(body)

        module.http_protocol_class = Limited


class ConnectionHeaders(ServerPatch):
    """Object: uvicorn's Config, once it is loaded.

    The handshake of a WebSocket may have `Connection: Upgrade` and `Connection: keep-alive`: one list, as HTTP has it.
    """

    name = "connection_headers"
    does = "opens WebSockets to clients that send several Connection headers, as LiveKit's plugin for Mistral does"
    target = "uvicorn.Config.http_protocol_class"
    breaks = "Unsupported upgrade request, and status 404"
    upstream = "uvicorn reads the last Connection header only (its pull request 2002 was closed)"
    until = "uvicorn reads all Connection headers"
    expires = "tests/patches/test_live_server.py::test_uvicorn_reads_the_last_connection_header"
    used_by = "live sessions of the encode-once model"

    handshake = ((b"connection", b"Upgrade"), (b"upgrade", b"websocket"), (b"connection", b"keep-alive"))

    def probe(self, module: Any) -> bool:
        headers = SimpleNamespace(headers=list(self.handshake))
        return bool(module.http_protocol_class._get_upgrade(headers) is None)

    def apply(self, module: Any) -> None:
        stock = module.http_protocol_class

        def joined(protocol: Any) -> Any:
            others = [(name, value) for name, value in protocol.headers if name != b"connection"]
            connection = b",".join(value for name, value in protocol.headers if name == b"connection")
            return stock._get_upgrade(SimpleNamespace(headers=[*others, (b"connection", connection)]))

        module.http_protocol_class = type(stock.__name__, (stock,), {"_get_upgrade": joined})


class Wire:
    """The TCP connection under a WebSocket: what ASGI does not say of it.

    heard     time.monotonic() of the last bytes from the client, pongs included
    arriving  bytes since the last whole message, which uvicorn holds
    """

    PONG = b"\x8a\x00"  # a frame that RFC 6455 lets either side send unasked, and that nobody answers
    # Milliseconds in which the client's system acknowledges nothing, longer than a client may leave its text unread.
    # With uvicorn's ping each 20 s, a system that is gone is found within 55 s.
    UNACKNOWLEDGED_MS = 35_000

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport, self.heard, self.arriving = transport, time.monotonic(), 0
        self._poll = select.poll()
        found = transport.get_extra_info("socket")
        self._poll.register(found.fileno(), select.POLLRDHUP)
        if found.family in (socket.AF_INET, socket.AF_INET6):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self.UNACKNOWLEDGED_MS)

    def gone(self) -> bool:
        """Whether the client has closed or reset the connection, although not all that it sent is read.

        A FIN that has come is seen behind unread bytes. One that the client's system holds back, because there is no
        room for the bytes before it, is not; but that system answers `beat` with a reset, since nobody reads there.
        """
        return self.transport.is_closing() or bool(self._poll.poll(0))

    def beat(self) -> None:
        """Send what a system answers with a reset if its program has closed the connection."""
        self.transport.write(self.PONG)


class ClientWatch(ServerPatch):
    """Object: uvicorn's Config, once it is loaded.

    uvicorn still sends its pings. While a client's audio waits for room it may read nothing, so it cannot demand a
    pong: the live sockets look at their `Wire`, whatever waits.
    """

    name = "client_watch"
    does = (
        "tells live sockets of the connection under them, which shows a client that has gone while its audio waits "
        "for room; no pong is demanded meanwhile"
    )
    target = "uvicorn.Config.ws_protocol_class, ws_ping_timeout"
    breaks = (
        "a client that closes while its audio waits keeps its session for minutes, and one that has sent a pong is "
        "closed with 1011, keepalive ping timeout"
    )
    upstream = "uvicorn reads nothing, closes and pongs included, while the application has not taken a message"
    until = "uvicorn tells the application of a close, and reads pongs, while messages wait"
    expires = "tests/patches/test_live_server.py::test_uvicorn_reads_no_pong_while_a_message_waits"
    used_by = ConnectionHeaders.used_by

    EXTENSION = "voxtral_serve.wire"  # of the ASGI scope

    def probe(self, module: Any) -> bool:
        if not inspect.iscoroutinefunction(module.ws_protocol_class.run_asgi):
            raise TypeError("run_asgi is no coroutine function")
        return module.ws_ping_timeout is not None or not hasattr(module.ws_protocol_class, "tells_of_the_wire")

    def apply(self, module: Any) -> None:
        stock, extension = module.ws_protocol_class, self.EXTENSION

        class Watched(stock):  # type: ignore[misc,valid-type]
            tells_of_the_wire = True

            def connection_made(self, transport: asyncio.Transport) -> None:
                self.wire = Wire(transport)
                super().connection_made(transport)

            def data_received(self, data: bytes) -> None:
                self.wire.heard = time.monotonic()
                self.wire.arriving += len(data)
                super().data_received(data)

            async def run_asgi(self) -> None:
                self.scope["extensions"][extension] = self.wire
                await super().run_asgi()

        module.ws_protocol_class, module.ws_ping_timeout = Watched, None


class NoCompression(ServerPatch):
    """Object: uvicorn's Config."""

    name = "no_compression"
    does = "has WebSockets without compression, so that a message is not larger in memory than what a client sent"
    target = "uvicorn.Config.ws_per_message_deflate"
    breaks = "2.4 MB of compressed messages take 1 GB of memory and all of the event loop's time for seconds"
    upstream = "uvicorn offers permessage-deflate unless it is told not to; vLLM has no option for it"
    until = "vLLM has an option for it, or does not offer it"
    expires = "tests/patches/test_live_server.py::test_uvicorn_inflates_messages"
    used_by = ConnectionHeaders.used_by

    def probe(self, module: Any) -> bool:
        return bool(module.ws_per_message_deflate)

    def apply(self, module: Any) -> None:
        module.ws_per_message_deflate = False
