"""Which web pages may use a server without keys, on every route, and by which names of it."""

import asyncio
import json
import socket
from typing import Any

import pytest
from guarding import REALTIME, FakeApp, guarded, handshaken

from voxtral_serve.guard import limits, origins
from voxtral_serve.guard.errors import RefusedError

PATHS = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions")]
PATHS += [("GET", "/v1/server"), ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/audio/translations")]


def refused(origin: str, host: str, allowed: str = "", keyless: bool = True) -> str | None:
    """The message for a page of this origin that asks this host."""
    headers = {b"origin": origin.encode(), b"host": host.encode()}
    try:
        origins.check(headers, limits.origins(allowed), keyless)
    except RefusedError as error:
        assert (error.status, error.code) == (403, "origin_not_allowed")
        return str(error)
    return None


async def asked(method: str, path: str, *more: tuple[bytes, bytes], **facts: Any) -> tuple[int, Any]:
    """(status, body)"""
    made, app = guarded(**facts)
    body = b""

    async def send(message: Any) -> None:
        nonlocal body
        body += message.get("body", b"")
        await app.send(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}  # of a client that has left meanwhile: it is refused before

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"host", b"voxtral.example"), *more]}
    await made(scope, receive, send)
    return app.status, body


OWN = (b"origin", b"http://voxtral.example")


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_route_of_a_server_without_keys(method: str, path: str) -> None:
    for origin in (OWN, (b"origin", b"http://evil.example"), (b"origin", b"null")):
        status, body = asyncio.run(asked(method, path, origin))
        assert (status, json.loads(body)["error"]["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_a_client_that_is_no_browser(method: str, path: str) -> None:
    """By whatever name it knows the server."""
    assert asyncio.run(asked(method, path))[0] != 403


def test_with_a_key_a_page_is_asked_for_it() -> None:
    """Any page may send it: vLLM's --allowed-origins says which of them a browser lets read the answer."""
    assert asyncio.run(asked("GET", "/v1/models", OWN, verify=lambda headers: True))[0] == 200
    assert asyncio.run(asked("GET", "/v1/models", OWN, verify=lambda headers: False))[0] == 401


def test_a_preflight_is_vllm_s() -> None:
    made, app = guarded()
    headers = [OWN, (b"access-control-request-method", b"POST")]
    scope = {"type": "http", "method": "OPTIONS", "path": "/v1/audio/transcriptions", "headers": headers}
    asyncio.run(made(scope, asyncio.Event().wait, app.send))
    assert (app.status, len(app.paths)) == (200, 1)


def test_options_alone_are_no_way_to_metrics() -> None:
    made, app = guarded()
    for headers in ([], [OWN]):
        scope = {"type": "http", "method": "OPTIONS", "path": "/metrics", "headers": headers}
        asyncio.run(made(scope, asyncio.Event().wait, app.send))
        assert (app.status, app.paths) == (405, [])


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fd00::7]", "localhost:8000", "LOCALHOST", "page.localhost:8000"],
)
def test_names_that_no_stranger_owns(host: str) -> None:
    assert refused(f"http://{host}", host) is None


def test_the_machine_s_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU-box")
    monkeypatch.setattr(socket, "getfqdn", lambda: "gpu-box.corp.example")
    origins.own_names.cache_clear()
    try:
        for host in ("gpu-box", "gpu-box:8000", "gpu-box.local", "GPU-box.corp.example:8000"):
            assert refused(f"http://{host}", host) is None
        assert refused("http://gpu-box.evil.example", "gpu-box.evil.example")
    finally:
        origins.own_names.cache_clear()


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.1@evil.example",
        "[::1",
        "",
        "::1",
    ],
)
def test_a_rebound_name(host: str) -> None:
    """Its page has the Host that it asks, as the server's own pages have."""
    message = refused(f"http://{host}", host)
    assert message is not None
    if host.startswith("evil"):
        assert "the web page http://evil.example:8000 may not use this server at evil.example:8000" in message
        assert message.endswith("Add the page's origin there, or set a key")
        assert refused(f"http://{host}", host, keyless=False) is None  # without the key it gets nothing


def test_the_allow_list() -> None:
    """It has pages; their hosts are names by which the server may be asked."""
    listed = "https://speech.example:8443, http://other.example"
    assert refused("https://speech.example:8443", "voxtral.example", listed) is None
    assert refused("http://speech.example", "speech.example", listed) is None
    assert refused("http://third.example", "third.example", listed)
    assert refused("http://third.example", "third.example", "*") is None


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8001", "https://127.0.0.1", "http://[::1", "x", "http://"])
def test_another_page(origin: str) -> None:
    assert refused(origin, "127.0.0.1:8000")


def test_a_websocket() -> None:
    def status(**headers: str) -> int:
        made, _ = guarded(live=True)
        made.app = Accepting()
        return 101 if asyncio.run(handshaken(made, REALTIME, **headers))[0]["type"] == "websocket.accept" else 403

    assert status(host="voxtral.example", origin="http://voxtral.example") == 403
    assert status(host="127.0.0.1", origin="http://127.0.0.1") == 101
    assert status(host="voxtral.example") == 101


class Accepting(FakeApp):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
