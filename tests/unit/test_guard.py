"""The guard's limits, and its middleware around an application that costs nothing."""

import asyncio
import base64
import json
import re
import time
from types import SimpleNamespace
from typing import Any

import inputs
import numpy as np
import pytest
from engines import EngineClient
from guarding import RATE, RULES, SAMPLES, Count, FakeApp, facts, form, guarded, post

from voxtral_serve.guard import access, limits, middleware, transcription
from voxtral_serve.guard import body as arriving
from voxtral_serve.guard import request as guard_request
from voxtral_serve.guard.labeller import LabelError, Labeller
from voxtral_serve.patches.live_server import log
from voxtral_serve.transcript.words import TokenStream

REQUESTS = 50


def test_limits_of_an_empty_environment() -> None:
    expected: tuple[object, ...] = (
        25 << 20,
        600,
        256 << 20,
        None,
        frozenset(),
        60,
        60,
        None,
        frozenset(),
        True,
        30,
        "cpu",
    )
    assert limits.limits({}) == expected


def test_limits() -> None:
    hosts = {"VOXTRAL_SERVE_MEDIA_HOSTS": " A.example.org, b:80,", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
    numbers = {"VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "1", "VOXTRAL_SERVE_MAX_IN_FLIGHT": "7"}
    live = {"VOXTRAL_SERVE_LIVE_IDLE_S": "8", "VOXTRAL_SERVE_LIVE_BACKLOG_S": "9", "VOXTRAL_SERVE_LIVE_SESSION_S": "10"}
    found = limits.limits({**hosts, **numbers, **live})
    assert (found.live_idle_s, found.live_backlog_s, found.live_session_s) == (8, 9, 10)
    assert (found.file_bytes, found.in_flight, found.hosts) == (1 << 20, 7, {"a.example.org", "b:80"})
    assert limits.limits({"VOXTRAL_SERVE_SHUTDOWN_S": "0"}).shutdown_s == 0


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "many", "1e3", " 1", "٣"])
@pytest.mark.parametrize("name", ["VLLM_MAX_AUDIO_DECODE_DURATION_S", "VOXTRAL_SERVE_MAX_IN_FLIGHT"])
def test_a_wrong_limit_is_named(name: str, value: str) -> None:
    with pytest.raises(limits.LimitError, match=f"{name} is .*expected a whole number"):
        limits.limits({name: value})


@pytest.mark.parametrize("value", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:0,1", "cuda:1 ", "cuda:1\n", "cuda:٣"])
def test_a_wrong_device_of_speaker_labels_is_named(value: str) -> None:
    name = "VOXTRAL_SERVE_SPEAKERS_DEVICE"
    with pytest.raises(limits.LimitError, match=f"{name} is .*expected cpu, cuda, or cuda:N"):
        limits.limits({name: value})
    assert [limits.limits({name: each}).speakers_device for each in ("cuda", "cuda:12")] == ["cuda", "cuda:12"]


@pytest.mark.parametrize("hosts", ["http://a", "a/b", "*", "a b", "a@b"])
def test_a_wrong_host_is_named(hosts: str) -> None:
    with pytest.raises(limits.LimitError, match="expected hosts"):
        limits.limits({"VOXTRAL_SERVE_MEDIA_HOSTS": hosts, "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"})


def test_an_allowed_host_must_not_redirect() -> None:
    with pytest.raises(limits.LimitError, match="VLLM_MEDIA_URL_ALLOW_REDIRECTS=0"):
        limits.limits({"VOXTRAL_SERVE_MEDIA_HOSTS": "a"})


def test_the_engine_gets_the_samples_and_a_request_id_that_is_plain() -> None:
    made, app = guarded()
    body, kind = form(file=("clip.flac", inputs.encoded(SAMPLES, RATE, "FLAC")))
    asyncio.run(post(made, app, body, kind, (b"transfer-encoding", b"chunked"), (b"x-request-id", b"a b\r\nc")))
    assert app.status == 200
    assert re.fullmatch(r"[0-9a-f]{32}", app.engine.ids[0])
    np.testing.assert_allclose(app.engine.samples[0], SAMPLES, atol=1e-4)


@pytest.mark.parametrize("allowed", [["*"], ["https://a.example"]])
def test_a_page_that_vllm_allows_may_read_the_answer(allowed: list[str]) -> None:
    cors = access.cors(SimpleNamespace(args=SimpleNamespace(allowed_origins=allowed, allow_credentials=False)))
    made, app = guarded(cors=cors, verify=lambda headers: True)
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    app.send = send  # type: ignore[method-assign]
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    for origin in (b"https://a.example", b"https://b.example"):
        asyncio.run(post(made, app, body, kind, (b"origin", origin)))
    starts = [dict(message["headers"]) for message in answers if message["type"] == "http.response.start"]
    found = [headers.get(b"access-control-allow-origin") for headers in starts]
    assert found == ([b"*", b"*"] if allowed == ["*"] else [b"https://a.example", None])


def test_the_key_is_asked_for_before_the_body() -> None:
    made, app = guarded(verify=lambda headers: False)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": []}
    asyncio.run(made(scope, receive, app.send))
    assert (app.status, app.engine.ids) == (401, [])


def test_a_request_ends_with_its_slot_free() -> None:
    """Whether it is served, refused, or given up while its body comes."""
    made, app = guarded(most_in_flight=1)
    good, bad = form(file=("clip.wav", inputs.encoded(SAMPLES))), form(file=("clip.wav", b"nonsense"))

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def all_of_them() -> list[int]:
        statuses = []
        for body, kind in (good, bad, good):
            await post(made, app, body, kind)
            statuses.append(app.status)
        await made({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}, gone, app.send)
        await post(made, app, *good)
        return [*statuses, app.status]

    assert asyncio.run(all_of_them()) == [200, 400, 200, 200]
    assert made.in_flight == 0


def test_named_twice_it_acts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a profile names it and the container's entrypoint does."""
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lambda line, *values, extra: lines.append(line % values))
    outer, app = guarded()
    outer.app = middleware.Guard(outer.app)
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    asyncio.run(post(outer, app, body, kind))
    assert (app.status, len(app.engine.ids)) == (200, 1)  # the inner one, which knows no vLLM, would say 503
    assert len(lines) == 1


def test_nothing_is_served_before_vllm_is_known() -> None:
    made, app = guarded()
    made.facts = None
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    asyncio.run(post(made, app, body, kind))
    assert (app.status, app.engine.ids) == (503, [])


MODELS = [{"id": name, "object": "model", "owned_by": "vllm"} for name in ("voxtral", "mistralai/Voxtral-Mini-3B-2507")]


class ListApp(FakeApp):
    """vLLM with a list of models. `body` is what the client was answered."""

    body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert (scope["path"], scope["method"]) == ("/root/v1/models", "GET")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"object": "list", "data": MODELS}).encode()})

    async def send(self, message: Any) -> None:
        await super().send(message)
        self.body += message.get("body", b"")


def model(path: str, **more: Any) -> tuple[int, Any]:
    """(status, JSON)"""
    app = ListApp()
    made = middleware.Guard(app)
    made.begin(facts(EngineClient())._replace(**more))
    scope = {"type": "http", "method": "GET", "path": f"/root{path}", "root_path": "/root", "headers": []}
    asyncio.run(made(scope, asyncio.Event().wait, app.send))
    return app.status, json.loads(app.body)


@pytest.mark.parametrize("found", MODELS, ids=lambda found: found["id"])
def test_a_model_of_the_list(found: dict[str, str]) -> None:
    assert model(f"/v1/models/{found['id']}") == (200, found)


@pytest.mark.parametrize("name", ["", "voxtra", "voxtral/", "mistralai", "a\nb" * 100])
def test_a_model_that_is_not_served(name: str) -> None:
    status, answer = model(f"/v1/models/{name}")
    error = answer["error"]
    assert (status, error["code"], error["type"], error["param"]) == (
        *(404, "model_not_found", "invalid_request_error"),
        "model",
    )
    assert "this server has voxtral, mistralai/Voxtral-Mini-3B-2507" in error["message"]


def test_a_model_needs_the_key() -> None:
    assert model("/v1/models/voxtral", verify=lambda headers: False)[0] == 401


@pytest.mark.parametrize(
    ("pieces", "more", "closed"),
    [(2, (), False), (1000, (), True), (1000, ((b"expect", b"100-continue"),), True)],
    ids=["whole", "slow", "waits for 100 Continue"],
)
def test_without_a_key(
    pieces: int, more: tuple[tuple[bytes, bytes], ...], closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes once a body is whole that is on its way; a slow one is closed after the answer."""
    monkeypatch.setattr(arriving, "HOLD_S", 0.05)
    monkeypatch.setattr(arriving, "LINGER_S", 0.05)
    made, _ = guarded(verify=lambda headers: False)
    log: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0.005)
        log.append("received")
        return {"type": "http.request", "body": b"a", "more_body": len(log) < pieces}

    async def send(message: Any) -> None:
        log.append(message)

    headers = [(b"content-length", b"1000"), *more]
    scope = {"type": "http", "method": "POST", "path": "/v1/audio/transcriptions", "headers": headers}
    asyncio.run(made(scope, receive, send))
    start, answer, *end = (message for message in log if message != "received")
    assert (start["status"], (b"connection", b"close") in start["headers"]) == (401, closed)
    assert json.loads(answer["body"])["error"]["code"] == "invalid_api_key"
    assert end == ([{"type": "http.response.body", "body": b""}] if closed else [])
    assert (log[0] == start) == bool(more)


def test_bodies_that_arrive_take_no_place_in_the_queue() -> None:
    """A full queue answers 429; one that is full of open bodies is not full."""
    made, app = guarded(most_in_flight=1)
    good, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/audio/transcriptions",
        "headers": [(b"content-length", b"9")],
    }

    async def test() -> list[int]:
        idle = [asyncio.create_task(made({**scope}, asyncio.Event().wait, app.send)) for _ in range(300)]
        await asyncio.sleep(0.01)
        assert len(made.bodies.bodies) == 300 and made.in_flight == 0
        await post(made, app, good, kind)
        statuses = [app.status]
        made.in_flight = 1
        await post(made, app, good, kind)
        statuses.append(app.status)
        made.in_flight = 0
        for task in idle:
            task.cancel()
        await asyncio.gather(*idle, return_exceptions=True)
        return statuses

    assert asyncio.run(test()) == [200, 429]


def known_speaker(clip: bytes) -> dict[str, Any]:
    """The fields of a form for a known speaker with this clip."""
    url = f"data:audio/wav;base64,{base64.b64encode(clip).decode()}"
    return {"known_speaker_names[]": (None, "Ann"), "known_speaker_references[]": (None, url)}


def test_few_requests_ask_for_speakers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is refused before its file is decoded; one that does not need them is served without, and keeps no
    clip of a known speaker."""
    stream = TokenStream(32, 33, 0.08, lambda tokens: " word", lambda token: b" word")
    labeller = Labeller(most=1)
    made, app = guarded(labeller=labeller, stream=stream)
    app.engine.texts = lambda samples: [" word"]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app.send = send  # type: ignore[method-assign]
    file = ("clip.wav", inputs.encoded(SAMPLES))
    transcribe, clips = transcription.TranscriptionRequest._transcribe, list[list[Any]]()

    async def transcribed(self: Any, request: Any, file: Any, known: list[Any], *more: Any) -> Any:
        clips.append(known)
        return await transcribe(self, request, file, known, *more)

    monkeypatch.setattr(transcription.TranscriptionRequest, "_transcribe", transcribed)

    async def without_a_place() -> None:
        async with labeller.place():
            await post(made, app, *form(file=("clip.wav", b"nonsense"), diarize=(None, "true")))
            known = known_speaker(inputs.encoded(SAMPLES))
            await post(made, app, *form(file=file, diarize=(None, "optional"), **known))

    asyncio.run(without_a_place())
    assert clips == [[], []]
    asyncio.run(post(made, app, *form(file=("clip.wav", b"nonsense"), diarize=(None, "true"))))  # the place is free
    asyncio.run(post(made, app, *form(file=("clip.wav", b"nonsense"), diarize=(None, "true"))))  # and again
    refused, served, *wrong = (message for message in sent if message["type"] == "http.response.start")
    bodies = [json.loads(message["body"]) for message in sent if message.get("body")]
    assert (refused["status"], bodies[0]["error"]["code"]) == (503, "no_speaker_labels")
    assert (b"retry-after", b"1") in refused["headers"]
    assert served["status"] == 200 and (b"x-voxtral-ignored", b"diarize") in served["headers"]
    assert bodies[1]["text"] and bodies[1]["segments"] == []
    assert [message["status"] for message in wrong] == [400, 400]


NOISE = np.random.default_rng(0).normal(0, 0.1, 600 * 2000).clip(-1, 1).astype(np.float32)
TEN_MINUTES = inputs.encoded(NOISE, 2000, "WAV", "ULAW")


@pytest.mark.parametrize(
    ("clip", "code", "message"),
    [
        (inputs.encoded(NOISE[: 5 * RATE]), "invalid_value", "the clip of 'Ann' has 0.00 s of speech"),
        (inputs.encoded(np.zeros(5 * RATE)), "invalid_value", "the clip of 'Ann' has 0.00 s of speech: expected 1 s"),
        (inputs.encoded(SAMPLES[:RATE]), "invalid_value", "the clip of 'Ann' has 1.00 s: expected 2 to 10 s"),
        (TEN_MINUTES, "clip_too_long", "the clip lasts 600.00 s and this server takes at most 10.00 s"),
        (b"\0" * 5000, "invalid_audio", ""),
        (b"#!/bin/sh\n", "invalid_audio", ""),
        (inputs.encoded(np.full(3 * RATE, np.nan), RATE, "WAV", "FLOAT"), "invalid_audio", "the file has samples that"),
        (b"", "empty_file", "the file is empty"),
    ],
)
def test_a_clip_of_a_known_speaker_that_cannot_be_used(clip: bytes, code: str, message: str) -> None:
    """It is refused before the file is decoded, and vLLM gets nothing. No process labels speakers for it."""
    labeller, sent = Labeller(), list[Any]()
    made, app = guarded(labeller=labeller, stream=TokenStream(32, 33, 0.08, lambda tokens: "", lambda token: b""))

    async def send(message: Any) -> None:
        sent.append(message)

    app.send = send  # type: ignore[method-assign]
    known = known_speaker(clip)
    asyncio.run(post(made, app, *form(file=("clip.wav", b"nonsense"), diarize=(None, "true"), **known)))
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert (error["code"], error["param"]) == (code, "known_speaker_references[0]")
    assert error["message"].startswith(f"known_speaker_references[0]: {message}")
    assert (app.engine.ids, labeller._process) == ([], None)


def test_clips_of_known_speakers_count_as_audio_before_their_voices_are_computed() -> None:
    class Unheard(Labeller):
        async def voices(self, clip: Any, speech: Any) -> Any:
            counted.append(count.grown("audio_seconds_total"))
            raise LabelError("no labels")

    counted, count = list[Any](), Count()
    stream = TokenStream(32, 33, 0.08, lambda tokens: " word", lambda token: b" word")
    made, app = guarded(labeller=Unheard(), stream=stream)
    file = inputs.encoded(SAMPLES)
    fields = {"file": ("clip.wav", file), "diarize": (None, "optional"), **known_speaker(file)}
    asyncio.run(post(made, app, *form(**fields)))
    assert app.status == 200
    assert counted == [{"{kind=upload}": pytest.approx(2 * len(SAMPLES) / RATE)}]


def test_separate_channels_share_the_bytes_of_a_clip() -> None:
    bounds = RULES.bounds._replace(most_bytes=SAMPLES.nbytes * 3 // 2)
    body, kind = form(file=("clip.wav", inputs.encoded(np.stack([SAMPLES] * 2, axis=1))), channels=(None, "separate"))
    made, app = guarded(rules=RULES._replace(bounds=bounds))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app.send = send  # type: ignore[method-assign]
    asyncio.run(post(made, app, body, kind))
    error = json.loads(sent[1]["body"])["error"]
    assert (sent[0]["status"], error["code"], app.engine.ids) == (400, "clip_too_long", [])
    assert "VLLM_MAX_AUDIO_DECODE_BYTES" in error["message"]


@pytest.mark.parametrize(("in_flight", "most"), [(16, 4), (3, 1), (1024, 16)])
def test_a_quarter_of_the_requests_in_flight_may_ask_for_speakers(in_flight: int, most: int) -> None:
    assert Labeller.of_environment(in_flight).most == most


@pytest.mark.slow
@pytest.mark.parametrize(("container", "subtype"), [("WAV", "PCM_16"), ("OGG", "OPUS")])
def test_a_clip_takes_less_than_4_ms_of_the_event_loop(container: str, subtype: str) -> None:
    """12 s of it: the rest is work of other threads."""
    made, app = guarded()
    body, kind = form(
        file=("clip", inputs.encoded(np.tile(SAMPLES, 6), RATE, container, subtype)), model=(None, "voxtral")
    )

    async def measured() -> float:
        for _ in range(3):
            await post(made, app, body, kind)
        start = time.thread_time()
        for _ in range(REQUESTS):
            await post(made, app, body, kind)
        return (time.thread_time() - start) / REQUESTS

    took = asyncio.run(measured())
    print(f"{container}: {1000 * took:.2f} ms of the event loop's thread for each of {REQUESTS} requests")
    assert app.status == 200
    assert took < 0.004


def test_a_server_of_whole_clips_says_so_to_a_client_with_live_audio() -> None:
    from vllm.entrypoints.speech_to_text.realtime.protocol import ErrorEvent

    made, _ = guarded(live=False)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(made({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send))
    accept, said, close = sent
    event = json.loads(said["text"])
    assert accept["type"] == "websocket.accept"
    assert ErrorEvent.model_validate(event).model_dump() == event
    assert "POST /v1/audio/transcriptions" in event["error"] and "max_live_sessions" in event["error"]
    assert (close["code"], close["reason"]) == (1008, "whole clips only")


# ---- Crashes


class Broken(FakeApp):
    """Raises after `begun` messages of an answer."""

    def __init__(self, begun: int) -> None:
        super().__init__()
        self.begun = begun
        self.sent: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for message in ({"type": "http.response.start", "status": 200, "headers": []},)[: self.begun]:
            await send(message)
        raise ZeroDivisionError("a secret of the server")

    async def send(self, message: Any) -> None:
        self.sent.append(message)


def crashed(begun: int, caplog: pytest.LogCaptureFixture) -> tuple[list[Any], Any]:
    """(messages to the client, the counts of its status)"""
    from guarding import Count

    app, count = Broken(begun), Count()
    made, _ = guarded()
    made.app = app
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"x-request-id", b"mine")]}
    log.propagate = True
    with caplog.at_level("INFO", log.name):
        asyncio.run(made(scope, asyncio.Event().wait, app.send))
    assert caplog.text.count("ZeroDivisionError: a secret of the server") == 1
    assert "a request failed, id mine" in caplog.text and "GET /v1/models 500" in caplog.text
    return app.sent, count.grown("requests_total")


def test_a_crash_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    (start, answer), counted = crashed(0, caplog)
    error = json.loads(answer["body"])["error"]
    assert (start["status"], error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert "mine" in error["message"] and "secret" not in answer["body"].decode()
    assert counted == {"{path=/v1/models,status=500}": 1}


def test_a_crash_within_an_answer_leaves_it_incomplete(caplog: pytest.LogCaptureFixture) -> None:
    """For which uvicorn closes the connection."""
    (start,), counted = crashed(1, caplog)
    assert start["status"] == 200
    assert counted == {"{path=/v1/models,status=500}": 1}


# ---- Clients that hold on to what they have


def test_a_client_that_does_not_read_its_answer_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_request, "SEND_S", 0.05)
    lines: list[str] = []
    monkeypatch.setattr(log, "info", lambda line, *values, extra: lines.append(line % values))
    monkeypatch.setattr(log, "exception", lambda *line: lines.append("a crash"))
    made, app = guarded()
    app.send = lambda message: asyncio.Event().wait()  # type: ignore[method-assign, assignment, return-value]
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))
    asyncio.run(asyncio.wait_for(post(made, app, body, kind), 30))
    assert made.in_flight == 0
    assert len(lines) == 1 and "a crash" not in lines


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/voxtral"])
def test_a_body_that_nobody_asked_for_is_not_waited_for(path: str) -> None:
    made, app = guarded()

    async def models(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"data": MODELS}).encode()})

    made.app = models
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"content-length", b"9")]}
    asyncio.run(asyncio.wait_for(made(scope, asyncio.Event().wait, app.send), 30))
    assert app.status == 200


def test_an_idle_session_of_vllms_own_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcription, "CHECK_S", 0.01)
    monkeypatch.setattr(transcription, "LIMITS", limits.LIMITS._replace(live_idle_s=0))
    made, _ = guarded(live=True)
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("session")

    made.app = app
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    asyncio.run(asyncio.wait_for(made(scope, asyncio.Event().wait, send), 20))
    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.close"]
    assert (sent[-1]["code"], sent[-1]["reason"]) == (1008, "no audio and no event for 0 s")
    assert ended == ["session"] and made.sockets == 0
