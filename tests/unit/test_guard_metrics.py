"""What /metrics says of the guard: each refusal once by its code, requests in flight, bytes and seconds of audio."""

import ast
import asyncio
import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inputs
import numpy as np
import pytest
import yaml
from guarding import (
    KEY,
    MISTRAL,
    RATE,
    REALTIME,
    RULES,
    SAMPLES,
    Count,
    FakeApp,
    connected,
    form,
    guarded,
    handshaken,
    post,
    status_of,
    verify,
)
from livefakes import FakeClient, FakeEngine, service
from places import ROOT

from voxtral_serve.guard import middleware
from voxtral_serve.guard.limits import OpenLimits
from voxtral_serve.guard.metrics import metrics

UPLOAD, CHAT = "/v1/audio/transcriptions", "/v1/chat/completions"
SECONDS = len(SAMPLES) / RATE


def clip() -> tuple[bytes, str]:
    return form(file=("clip.wav", inputs.encoded(SAMPLES)))


async def get(made: middleware.Guard, app: FakeApp, path: str, method: str = "GET", body: bytes = b"") -> None:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()  # a client that stays
        return waiting.pop()

    headers = [(b"content-type", b"application/json")]
    await made({"type": "http", "method": method, "path": path, "headers": headers}, receive, app.send)


def test_an_upload_is_counted() -> None:
    (made, app), (body, kind), count = guarded(), clip(), Count()
    asyncio.run(post(made, app, body, kind))
    assert count.grown("requests_total") == {f"{{path={UPLOAD},status=200}}": 1}
    assert count.grown("received_bytes_total") == {"": len(body)}
    assert count.grown("audio_seconds_total") == {"{kind=upload}": pytest.approx(SECONDS)}
    assert count.grown("requests_refused_total") == {}
    assert count.grown("requests_in_flight") == {}


def a_chat(part: dict[str, Any]) -> bytes:
    return json.dumps({"model": "voxtral", "messages": [{"role": "user", "content": [part]}]}).encode()


def test_the_seconds_of_a_chat() -> None:
    count, (made, app) = Count(), guarded()
    audio = {"data": base64.b64encode(inputs.encoded(SAMPLES)).decode(), "format": "wav"}
    asyncio.run(get(made, app, CHAT, "POST", a_chat({"type": "input_audio", "input_audio": audio})))
    assert app.status == 200
    assert count.grown("audio_seconds_total") == {"{kind=chat}": pytest.approx(SECONDS)}


@pytest.mark.parametrize(
    ("path", "counted"),
    [
        ("/health", "/health"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/a/b", "/v1/models/{id}"),
        ("/v1/nothing", "other"),
        ("/health\r\nx", "other"),
    ],
)
def test_a_path_is_one_of_the_api_or_other(path: str, counted: str) -> None:
    count, (made, app) = Count(), guarded()

    async def models(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"data": [{"id": "a/b"}]}).encode()})

    made.app = models
    asyncio.run(get(made, app, path))
    assert list(count.grown("requests_total")) == [f"{{path={counted},status={app.status}}}"]


def refused(code: str) -> dict[str, float]:
    return {f"{{code={code}}}": 1}


def alarms(alert: str, code: str) -> bool:
    """Whether an alert of deploy/rules.yml counts refusals with this code."""
    rules = yaml.safe_load((ROOT / "deploy/rules.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    (expression,) = [rule["expr"] for rule in rules if rule["alert"] == alert]
    (codes,) = re.findall(r'code=~?"([\w|]+)"', expression)
    return re.fullmatch(codes, code) is not None


LONG = np.zeros(601 * 8000, np.float32)  # the decoder's limit is 600 s
URL = {"type": "audio_url", "audio_url": {"url": "https://elsewhere.example/a.wav"}}


@pytest.mark.parametrize(
    ("code", "more", "method", "path", "body"),
    [
        ("overloaded", {"most_in_flight": 1}, "POST", UPLOAD, b"a"),
        ("invalid_api_key", {"verify": lambda headers: False}, "POST", UPLOAD, b"a"),
        ("file_too_large", {}, "POST", UPLOAD, bytes(RULES.upload_bytes + 1)),
        ("invalid_form", {}, "POST", UPLOAD, b"a"),
        ("url_not_allowed", {}, "POST", CHAT, a_chat(URL)),
        ("no_chat", {"chats": False}, "POST", CHAT, a_chat({"type": "text", "text": "a"})),
        ("not_found", {}, "GET", "/v1/nothing", b""),
        ("method_not_allowed", {}, "DELETE", "/health", b""),
    ],
)
def test_a_refusal_by_its_code(code: str, more: dict[str, Any], method: str, path: str, body: bytes) -> None:
    made, app = guarded(**more)
    made.in_flight = 1  # another request's
    count = Count()
    asyncio.run(get(made, app, path, method, body))
    assert app.status >= 400
    assert count.grown("requests_refused_total") == refused(code)
    assert count.grown("live_refused_total") == {}
    assert alarms("VoxtralFull", code) == (code == "overloaded")


def test_a_clip_beyond_the_limit_of_seconds() -> None:
    count, (made, app) = Count(), guarded()
    asyncio.run(post(made, app, *form(file=("clip.flac", inputs.encoded(LONG, 8000, "FLAC")))))
    assert count.grown("requests_refused_total") == refused("clip_too_long")


def test_a_server_that_is_not_ready() -> None:
    count, (made, app) = Count(), guarded()
    made.facts = None
    asyncio.run(get(made, app, "/health"))
    assert count.grown("requests_refused_total") == refused("not_ready")
    assert count.grown("requests_total") == {"{path=/health,status=503}": 1}


@pytest.mark.parametrize(("bodies", "status", "code"), [(0, 408, "too_slow"), (1, 429, "overloaded")])
def test_a_body_that_is_ended_to_make_room(bodies: int, status: int, code: str) -> None:
    """OPEN_BODIES refuses the slowest; OPEN_BYTES asks one at the pace to come back."""
    count, (made, app), (body, kind) = Count(), guarded(open=OpenLimits(bodies, 1)), clip()
    asyncio.run(post(made, app, body, kind))
    assert (app.status, count.grown("requests_refused_total")) == (status, refused(code))


def test_requests_in_flight_while_they_run() -> None:
    made, app = guarded(most_in_flight=9)
    gauge = metrics().in_flight._value
    before, seen = gauge.get(), list[float]()

    def step_s(samples: Any) -> float:
        seen.append(gauge.get() - before)
        return 0.0

    app.engine.step_s = step_s
    asyncio.run(post(made, app, *clip()))
    assert (seen, gauge.get() - before) == ([1], 0)


@pytest.mark.parametrize(
    ("code", "path", "headers"),
    [
        ("invalid_api_key", REALTIME, {}),
        ("origin_not_allowed", REALTIME, {"authorization": f"Bearer {KEY}", "origin": "https://evil.example"}),
        ("not_found", "/v1/elsewhere", {"authorization": f"Bearer {KEY}"}),
    ],
)
def test_refused_handshakes_by_their_code(code: str, path: str, headers: dict[str, str]) -> None:
    count = Count()
    asyncio.run(connected(path, **headers))
    assert count.grown("live_refused_total") == refused(code)
    assert count.grown("requests_refused_total") == {}


def test_a_model_that_is_not_served() -> None:
    """It is told after the handshake, in the protocol's events."""
    count = Count()
    asyncio.run(connected(MISTRAL, "model=another", authorization=f"Bearer {KEY}"))
    assert count.grown("live_refused_total") == refused("model_not_found")


def test_a_live_connection_is_counted_once_it_has_ended() -> None:
    async def run() -> Count:
        made, _ = guarded(sessions=service(FakeEngine()), verify=verify)
        count = Count()
        await handshaken(made, REALTIME, authorization=f"Bearer {KEY}")
        return count

    assert asyncio.run(run()).grown("requests_total") == {f"{{path={REALTIME},status=101}}": 1}


def test_live_clients_have_a_limit_of_their_own() -> None:
    async def run() -> Count:
        live = service(FakeEngine())
        made, _ = guarded(sessions=live, verify=verify, most_in_flight=0)
        count = Count()
        assert status_of(await handshaken(made, REALTIME, authorization=f"Bearer {KEY}")) == 101
        live.most = 0
        await handshaken(made, REALTIME, authorization=f"Bearer {KEY}")
        return count

    assert asyncio.run(run()).grown("live_refused_total") == refused("too_many_connections")


def test_a_server_without_live_sessions() -> None:
    count, (made, _) = Count(), guarded(verify=verify, live=False)
    sent = asyncio.run(handshaken(made, REALTIME, authorization=f"Bearer {KEY}"))
    assert sent[0]["type"] == "websocket.accept"
    assert count.grown("live_refused_total") == refused("realtime_not_supported")


def test_sessions_beyond_the_engine_s_and_their_seconds() -> None:
    async def run() -> Count:
        count, live = Count(), service(FakeEngine(most=1))
        first, second = FakeClient(live), FakeClient(live)
        for client in (first, second):
            client.begin()
            await client.until("created")
            await asyncio.sleep(0.01)
        await second.gone()
        first.speak(bytes(2 * RATE * 2))
        first.end()
        await first.until("done")
        first.leave()
        await first.gone()
        return count

    count = asyncio.run(run())
    assert count.grown("live_refused_total") == refused("too_many_sessions")
    assert alarms("VoxtralLiveFull", "too_many_sessions")
    assert count.grown("audio_seconds_total") == {"{kind=live}": pytest.approx(2)}


# ---- The labels have few values


def codes(path: Path) -> Iterator[tuple[str, str]]:
    """(where, the code as written) of each error that is made in a file of the guard."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RefusedError":
            yield f"{path.name}:{node.lineno}", ast.unparse(node.args[2])


def test_a_code_is_a_constant() -> None:
    found = dict(each for path in (ROOT / "src/voxtral_serve/guard").rglob("*.py") for each in codes(path))
    assert len(found) >= 35
    others = {code for code in found.values() if not re.fullmatch("'[a-z_]+'", code)}
    assert others == {"error.code", "problem.code"}  # of AudioError, and of guard.typed.Fault
    decode = (ROOT / "src/voxtral_serve/audio/decode.py").read_text(encoding="utf-8")
    made = [
        node
        for node in ast.walk(ast.parse(decode))
        if isinstance(node, ast.Call) and "AudioError" in ast.unparse(node.func)
    ]
    assert len(made) >= 5
    codes_of = [argument for node in made for argument in node.args[1:] if ast.unparse(argument) != "NO_CHANNEL"]
    assert len(codes_of) >= 5 and all(isinstance(argument, ast.Constant) for argument in codes_of)


def test_a_request_costs_little() -> None:
    """All counts of one request together, in CPU time; a request takes milliseconds."""
    made, _ = guarded()
    rounds, start = 2000, time.thread_time()
    for _ in range(rounds):
        made.metrics.requests.labels(UPLOAD, 200).inc()
        made.metrics.bodies.inc(1)
        made.metrics.audio.labels("upload").inc(0)
        made.metrics.in_flight.inc()
        made.metrics.in_flight.dec()
    assert (time.thread_time() - start) / rounds < 0.5e-3
