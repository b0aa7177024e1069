"""The handshake of live WebSockets in the guard: protocol, key, and the web page that it comes from."""

import asyncio
import json

import pytest
from guarding import KEY, MISTRAL, REALTIME, connected, status_of

from voxtral_serve.guard import limits


@pytest.mark.parametrize(
    ("path", "query", "keys"),
    [
        (REALTIME, "", ["type", "id", "created", "session"]),
        (REALTIME, "model=voxtral", ["type", "id", "created", "session"]),
        (REALTIME, "intent=transcription", ["type", "event_id", "id", "created", "session"]),
        (REALTIME, "intent=transcription&model=voxtral", ["type", "event_id", "id", "created", "session"]),
        (MISTRAL, "model=voxtral", ["type", "session"]),
        (MISTRAL, "", ["type", "session"]),
    ],
)
def test_the_first_event_of_each_protocol(path: str, query: str, keys: list[str]) -> None:
    accept, created = asyncio.run(connected(path, query, authorization=f"Bearer {KEY}"))
    assert accept["type"] == "websocket.accept" and "subprotocol" not in accept
    assert list(json.loads(created["text"])) == keys


def test_a_key_as_a_subprotocol() -> None:
    """As a browser has to send it; only `realtime` is answered."""
    protocols = ("realtime", f"openai-insecure-api-key.{KEY}")
    accept, *_ = asyncio.run(connected(REALTIME, "intent=transcription", protocols))
    assert accept["subprotocol"] == "realtime"
    assert KEY not in str(accept)


@pytest.mark.parametrize(
    ("query", "protocols", "headers"),
    [
        ("", (), {}),
        (f"api_key={KEY}", (), {}),
        ("", ("realtime", "openai-insecure-api-key."), {}),
        ("", ("realtime", "openai-insecure-api-key.other"), {}),
        ("", ("realtime", f"openai-insecure-api-key.{KEY}"), {"authorization": "Bearer other"}),
    ],
)
@pytest.mark.parametrize("path", [REALTIME, MISTRAL])
def test_a_key_that_is_wrong_or_missing(
    path: str, query: str, protocols: tuple[str, ...], headers: dict[str, str]
) -> None:
    sent = asyncio.run(connected(path, query, protocols, **headers))
    assert status_of(sent) == 401
    assert json.loads(sent[1]["body"])["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        ("https://evil.example", "", 403),
        ("null", "", 403),
        ("https://voxtral.example:8000", "", 101),  # the server's own page
        ("https://voxtral.example", "", 403),  # another port
        ("https://app.example", "https://app.example", 101),
        ("https://APP.example", "https://other.example, https://app.example/", 101),
        ("http://app.example", "https://app.example", 403),
        ("https://evil.example", "*", 101),
    ],
)
def test_the_web_page_that_a_client_comes_from(
    origin: str, allowed: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = limits.LIMITS._replace(live_origins=limits.origins(allowed))
    monkeypatch.setattr("voxtral_serve.guard.request.LIMITS", found)
    headers = {"authorization": f"Bearer {KEY}", "host": "voxtral.example:8000", "origin": origin}
    sent = asyncio.run(connected(REALTIME, **headers))
    assert status_of(sent) == status
    if status == 403:
        assert json.loads(sent[1]["body"])["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("https://voxtral.example", "voxtral.example", 101),  # nginx with `proxy_set_header Host $http_host`
        ("https://voxtral.example", "voxtral.example:443", 101),
        ("http://voxtral.example", "voxtral.example:80", 101),
        ("http://voxtral.example", "voxtral.example:443", 403),
        ("https://voxtral.example:8443", "VOXTRAL.example:8443", 101),
        ("https://voxtral.example:8443", "voxtral.example", 403),  # `Host $host` loses the port
        ("http://[::1]:8000", "[::1]:8000", 101),
        ("https://voxtral.example", "upstream", 403),
        ("https://", "", 403),
        ("null", "", 403),
    ],
)
def test_the_servers_own_page(origin: str, host: str, status: int) -> None:
    """It is the page of the host that the browser has asked, also behind a proxy."""
    sent = asyncio.run(connected(REALTIME, authorization=f"Bearer {KEY}", host=host, origin=origin))
    assert status_of(sent) == status


@pytest.mark.parametrize("wrong", ["app.example", "https://", "https://a b", "https://a/path"])
def test_a_wrong_origin_in_the_environment(wrong: str) -> None:
    with pytest.raises(limits.LimitError, match=r"VOXTRAL_SERVE_LIVE_ORIGINS has .*: expected origins"):
        limits.limits({"VOXTRAL_SERVE_LIVE_ORIGINS": wrong})


def test_the_beta_form() -> None:
    """By the header, or by the subprotocol of browsers."""
    key = {"authorization": f"Bearer {KEY}"}
    by_header = asyncio.run(connected(REALTIME, "intent=transcription", **key, openai_beta="realtime=v1"))
    by_protocol = asyncio.run(connected(REALTIME, "intent=transcription", ("openai-beta.realtime-v1",), **key))
    for sent in (by_header, by_protocol):
        *_, error, close = sent
        assert json.loads(error["text"])["error"]["code"] == "beta_api_shape_disabled"
        assert close["code"] == 1008
    assert len(asyncio.run(connected(REALTIME, "", **key, openai_beta="realtime=v1"))) == 2  # vLLM's may have it
