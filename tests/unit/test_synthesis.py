"""The guard before speech synthesis, around an application that stands for vLLM-Omni."""

import asyncio
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import speaking
from engines import THREADS
from guarding import BILLING, Count, Lines, bearer, text
from speaking import CHUNKS, RATE, SECONDS, SPEECH, VOICES, Engine, OmniApp, ask, encoded, guarded, said

from voxtral_serve.guard.keyring import KeyRing
from voxtral_serve.guard.server import attach, drifted
from voxtral_serve.guard.speech import facts, stages
from voxtral_serve.guard.speech.fields import FORMATS
from voxtral_serve.guard.usage import Usage
from voxtral_serve.patches.live_server import log

SHORT_S = 0.01


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(log, "info", lambda line, *values, extra: found.append(line % values))
    return found


def spoken(made: Any, **more: Any) -> Any:
    return asyncio.run(ask(made, SPEECH, said(**more)))


# ---- Answers and their line in the log


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_and_its_seconds(name: str, lines: list[str]) -> None:
    count, (made, _) = Count(), guarded()
    answer = spoken(made, response_format=name)
    assert (answer.status, answer.body) == (200, encoded(name))
    assert count.grown("speech_audio_seconds_total") == {f"{{format={name}}}": pytest.approx(SECONDS, abs=0.05)}
    assert count.grown("speech_characters_total") == {"": 17}
    assert re.fullmatch(
        rf"POST {SPEECH} 200, \d+ bytes, 0\.5\d s of audio, 17 characters, voice casual_female, {name}, "
        r"first byte \d+ ms, \d+ ms, id [0-9a-f]{32}",
        lines[0],
    )


def test_events_pass_as_they_come(lines: list[str]) -> None:
    count, (made, app) = Count(), guarded()
    answer = spoken(made, response_format="pcm", stream_format="sse")
    assert answer.headers["content-type"] == "text/event-stream"
    events = [json.loads(each.partition(b"data: ")[2]) for each in answer.body.split(b"\n\n")[:-1]]
    assert [each["type"] for each in events[-2:]] == ["speech.audio.delta", "speech.audio.done"]
    assert len(answer.parts) >= CHUNKS + 1
    assert app.asked[0]["stream_format"] == "sse"
    assert count.grown("speech_audio_seconds_total") == {"{format=pcm}": pytest.approx(SECONDS)}
    assert count.grown("speech_first_byte_seconds_count") == {"{streamed=yes}": 1}
    assert "0.50 s of audio, 17 characters, voice casual_female, pcm events, first byte" in lines[0]


def test_audio_that_is_sent_while_it_is_made() -> None:
    made, app = guarded()
    answer = spoken(made, response_format="pcm")
    assert app.asked[0]["stream_format"] == "audio"
    assert (answer.body, len(answer.parts) > CHUNKS) == (encoded("pcm"), True)


@pytest.mark.parametrize("events", [True, False])
def test_the_rate_is_that_of_the_answer(events: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "RATE", 2 * RATE)
    spoken(guarded()[0], response_format="pcm", stream=events)
    assert f"{SECONDS / 2:.2f} s of audio" in lines[0]


def test_samples_without_a_rate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(speaking, "RATE_HEADER", b"x-other")
    answer = spoken(guarded()[0], response_format="pcm")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "without the header x-audio-sample-rate" in caplog.text


def test_what_has_no_effect_is_said() -> None:
    made, _ = guarded()
    assert spoken(made, instructions="Whisper.", seed=4).headers["x-voxtral-ignored"] == "instructions, seed"
    assert "x-voxtral-ignored" not in spoken(made).headers


def test_the_log_has_no_text(lines: list[str]) -> None:
    made, _ = guarded()
    spoken(made, input="A secret.")
    asyncio.run(ask(made, SPEECH, said(input="A secret.", voice="a secret voice")))
    assert len(lines) == 2 and "secret" not in str(lines)


def test_a_line_of_json() -> None:
    made, _ = guarded()
    handler, level = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        spoken(made, response_format="pcm", stream_format="sse")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    (line,) = (each for each in handler.lines if "status" in each)
    given = {name: line[name] for name in ("characters", "voice", "format", "events", "audio_s", "complete", "status")}
    assert given == {
        **{"characters": 17, "voice": "casual_female", "format": "pcm", "events": True, "audio_s": SECONDS},
        **{"complete": True, "status": 200},
    }
    assert 0 <= line["first_byte_ms"] <= line["duration_ms"]


# ---- Failures


def test_events_that_fail_before_their_audio_have_a_status(lines: list[str]) -> None:
    made, _ = guarded(OmniApp(fail_after=0))
    answer = spoken(made, response_format="pcm", stream_format="sse")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert answer.error["message"] == "the speech failed: a stage failed"
    assert made.in_flight == 0 and f"POST {SPEECH} 500" in lines[0]


def test_events_that_fail_later(lines: list[str]) -> None:
    count, (made, _) = Count(), guarded(OmniApp(fail_after=2))
    answer = spoken(made, response_format="pcm", stream_format="sse")
    last = json.loads(answer.body.split(b"\n\n")[-2].partition(b"data: ")[2])
    assert (answer.status, last["type"], last["error"]["code"]) == (200, "speech.audio.error", 500)
    assert count.grown("speech_incomplete_total") == {"": 1}
    assert "0.25 s of audio" in lines[0] and ", incomplete, " in lines[0]


def test_audio_that_breaks_off(lines: list[str]) -> None:
    """The connection is closed before the end of its body: the client's library says so."""
    count, (made, _) = Count(), guarded(OmniApp(fail_after=2))
    answer = spoken(made, response_format="pcm")
    assert (answer.status, answer.complete) == (200, False)
    assert count.grown("speech_incomplete_total") == {"": 1}
    assert made.in_flight == 0 and ", incomplete, " in lines[0] and f"POST {SPEECH} 500" in lines[0]


@pytest.mark.parametrize("events", [True, False])
def test_a_client_that_leaves_ends_its_request(events: bool, lines: list[str]) -> None:
    async def run() -> OmniApp:
        leave = asyncio.Event()

        async def wait() -> None:
            await asyncio.sleep(0)
            if len(app.asked) == 1 and made.in_flight:
                leave.set()
                await asyncio.Event().wait()

        made, app = guarded(OmniApp(wait=wait))
        await ask(made, SPEECH, said(response_format="pcm", **({"stream": True} if events else {})), leave=leave)
        assert made.in_flight == 0
        return app

    assert asyncio.run(run()).gone == 1
    assert f"POST {SPEECH} 499" in lines[0]


# ---- Paths and limits


PATHS = [
    *(("POST", path) for path in ("/v1/audio/speech/batch", "/v1/audio/generate", "/v1/chat/completions")),
    *(("POST", path) for path in ("/v1/omni/sleep", "/v1/omni/wakeup", "/tokenize", "/start_profile")),
    *(("POST", path) for path in ("/v1/images/generations", "/v1/videos", "/v1/audio/transcriptions")),
    *(("GET", path) for path in ("/docs", "/openapi.json", "/version", "/ping", "/load", "/", "/page/main.js")),
    *(("DELETE", "/v1/audio/voices/x"), ("GET", "/v1/audio/voices/x"), ("POST", "/update_weights")),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_other_path_is_unknown(method: str, path: str) -> None:
    made, app = guarded()
    answer = asyncio.run(ask(made, path, None if method == "GET" else {}, method=method))
    assert (answer.status, answer.error["code"], app.paths) == (404, "not_found", [])
    assert "this server has /health, /metrics, /v1/models, /v1/server, /v1/audio/voices, /v1/audio/speech" in str(
        answer.error["message"]
    )


@pytest.mark.parametrize("path", ["/v1/audio/speech/stream", "/v1/realtime", "/v1/duplex", "/v1/video/chat/stream"])
def test_no_websocket(path: str) -> None:
    made, app = guarded()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "subprotocols": []}
    asyncio.run(made(scope, asyncio.Event().wait, send))
    assert (sent[0]["type"], sent[0]["status"], app.paths) == ("websocket.http.response.start", 404, [])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_voices_are_listed_and_not_taken(method: str) -> None:
    made, app = guarded()
    listed = asyncio.run(ask(made, "/v1/audio/voices"))
    assert json.loads(listed.body) == {"voices": [*VOICES], "uploaded_voices": []}
    answer = asyncio.run(ask(made, "/v1/audio/voices", {"name": "a"}, method=method))
    assert (answer.status, answer.headers["allow"], app.paths) == (405, "GET", [])
    assert answer.error["message"].startswith("this server has the voices of its checkpoint and takes no others")


def test_paths_of_vllm_and_of_the_guard() -> None:
    made, app = guarded()
    for path in ("/health", "/metrics", "/v1/models"):
        assert asyncio.run(ask(made, path)).status == 200
    assert app.paths == ["/health", "/metrics", "/v1/models"]
    assert json.loads(asyncio.run(ask(made, "/v1/models/tts")).body) == {"id": "tts"}
    missing = asyncio.run(ask(made, "/v1/models/other"))
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert json.loads(asyncio.run(ask(made, "/v1/server")).body) == {"object": "server"}


def test_the_key_is_asked_for() -> None:
    made, app = guarded(verify=lambda headers: headers.get("authorization") == "Bearer secret")
    for path, content in ((SPEECH, said()), ("/v1/audio/voices", None), ("/v1/models", None), ("/v1/server", None)):
        assert asyncio.run(ask(made, path, content)).status == 401
        assert asyncio.run(ask(made, path, content, (b"authorization", b"Bearer secret"))).status == 200
    assert [asyncio.run(ask(made, path)).status for path in ("/health", "/metrics")] == [200, 200]
    assert len(app.asked) == 1


def test_a_full_queue() -> None:
    made, app = guarded(most_in_flight=0)
    answer = spoken(made)
    assert (answer.status, answer.headers["retry-after"], answer.error["code"]) == (429, "1", "overloaded")
    assert app.asked == []


def test_a_body_that_is_too_large() -> None:
    made, app = guarded()
    answer = asyncio.run(ask(made, SPEECH, b" " * (facts.BODY_BYTES + 1)))
    assert (answer.status, answer.error["code"], app.asked) == (413, "body_too_large", [])
    assert answer.error["message"].endswith("but this server accepts at most 131072")


def test_limits_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text(in_flight=1, audio_seconds_per_minute=1))
    ring = KeyRing(file, Usage())
    count, (made, app) = Count(), guarded(keys=ring)

    async def run() -> list[speaking.Answer]:
        ask_as_billing = lambda: ask(made, SPEECH, said(), bearer(BILLING))  # noqa: E731
        async with ring.place(ring.keys["billing"], "in_flight"):
            refused = await ask_as_billing()
        return [refused, *[await ask_as_billing() for _ in range(3)]]

    refused, *answers = asyncio.run(run())
    assert refused.error["message"].startswith("the limit in_flight of the key billing is reached")
    assert [answer.status for answer in answers] == [200, 200, 429]  # 0.5 s each; then none is left
    assert len(app.asked) == 2
    assert count.grown("key_audio_seconds_total") == {"{key=billing,kind=speech}": pytest.approx(1, abs=0.1)}
    assert count.grown("key_refused_total") == {
        "{key=billing,limit=in_flight}": 1,
        "{key=billing,limit=audio_seconds_per_minute}": 1,
    }


# ---- What the server serves


def state_of(architecture: str = facts.ARCHITECTURES[0], speech: Any = True, **more: Any) -> Any:
    has = SimpleNamespace(
        supported_speakers=frozenset(more.pop("speakers", ("Neutral_Male", "casual_female"))),
        precomputed_speakers=more.pop("precomputed", {}),
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(architecture=architecture),
        parallel_config=SimpleNamespace(_api_process_count=more.pop("processes", 1)),
        scheduler_config=SimpleNamespace(max_num_seqs=32),
    )
    serving = speech
    if speech is True:
        adapter = SimpleNamespace(capabilities=has)
        serving = SimpleNamespace(_generate_audio_sse_events=None, _get_tts_adapter=lambda: adapter)
    return SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=config),
        openai_serving_speech=serving,
        openai_serving_models=SimpleNamespace(base_model_paths=[SimpleNamespace(name="voxtral-tts")]),
        args=SimpleNamespace(api_key=None),
        server=SimpleNamespace(),
        **more,
    )


def test_facts_of_voxtral_tts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    found = facts.read(state_of())
    assert (found.voices, found.most_in_flight) == (VOICES, 128)
    assert found.stages.grace_s == 30
    assert (found.about["models"], found.about["capabilities"]) == (["voxtral-tts"], {"speech": True})
    assert found.about["limits"] == {"characters": 4096, "in_flight": 128}


def test_facts_of_voxcpm2() -> None:
    """It has vLLM-Omni's one voice, and those of profiles that were computed before the start."""
    state = state_of("VoxCPM2TalkerForConditionalGeneration", speakers=["default"], precomputed={"Anna": {}})
    assert facts.read(state).voices == ("anna", "default")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            state_of("Qwen3TTSForConditionalGeneration"),
            "cannot serve Qwen3TTSForConditionalGeneration: expected a model",
        ),
        (state_of("MistralForCausalLM", None, openai_serving_transcription=None), "cannot serve MistralForCausalLM"),
        (state_of(speech=SimpleNamespace()), "has no events for speech: `middleware: voxtral_serve.guard.Guard` needs"),
        (state_of(processes=2), "api_server_count is 2: expected 1"),
        (state_of(speakers=[]), "vllm-omni has no voices for this checkpoint"),
    ],
)
def test_a_server_of_another_kind_is_refused_by_name(state: Any, message: str) -> None:
    with pytest.raises(facts.KindError, match=re.escape(message)) as caught:
        attach(state, THREADS)
    assert drifted(caught.value) == str(caught.value)


def test_a_lost_stage_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "CHECK_S", SHORT_S)
    engine, server = Engine(), SimpleNamespace(should_exit=False)
    watched = stages.Stages(engine, 30, server)

    async def run() -> None:
        watching = asyncio.create_task(watched.watch())
        await asyncio.sleep(5 * SHORT_S)
        assert (watched.errored, server.should_exit, watching.done()) == (False, False, False)
        engine.dead = True
        await asyncio.wait_for(watching, 10)

    asyncio.run(run())
    assert (watched.errored, server.should_exit) == (True, True)
