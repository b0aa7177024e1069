"""The log as lines of JSON: what a line has, of vLLM's own lines too, and when a start is refused."""

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
from typing import Any

import inputs
import pytest
from engines import THREADS
from guarding import KEY, REALTIME, SAMPLES, Lines, form, guarded, post, verify
from livefakes import FakeEngine, service
from places import ROOT

from voxtral_serve import logs
from voxtral_serve.guard import server
from voxtral_serve.logs import JsonLines, LineHandler
from voxtral_serve.patches.live_server import log

SECRET = "a-secret"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VOXTRAL_SERVE_REPLICA", "replica-3")
    handler = Lines()
    watched = [log, logging.getLogger("uvicorn.error"), logging.getLogger("vllm.test")]
    levels = [each.level for each in watched]
    for each in watched:
        each.addHandler(handler)
        each.setLevel(logging.INFO)
    yield handler.lines
    for each, level in zip(watched, levels, strict=True):
        each.removeHandler(handler)
        each.setLevel(level)


HEAD = ["time", "level", "logger", "process", "pid", "replica", "message"]


def test_a_line(lines: Any) -> None:
    logging.getLogger("vllm.test").warning("two\nlines of %s", "Wörter", extra={"password": SECRET})
    (line,) = lines
    assert list(line) == HEAD
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (line["level"], line["logger"], line["pid"]) == ("WARNING", "vllm.test", os.getpid())
    assert (line["replica"], line["message"]) == ("replica-3", "two\nlines of Wörter")


def test_the_replica_is_by_default_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VOXTRAL_SERVE_REPLICA", raising=False)
    line = json.loads(JsonLines().format(logging.makeLogRecord({"name": "a", "msg": "a"})))
    assert line["replica"] == socket.gethostname()


def test_an_exception(lines: Any) -> None:
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("vllm.test").exception("failed")
    (line,) = lines
    assert line["message"] == "failed"
    assert line["exception"].endswith("KeyError: 'gone'")


def test_uvicorn_s_lines_have_no_queries(lines: Any) -> None:
    logging.getLogger("uvicorn.error").info('%s - "WebSocket %s" 403', "1.2.3.4:5", f"/v1/realtime?api_key={SECRET}")
    (line,) = lines
    assert line["message"] == '1.2.3.4:5 - "WebSocket /v1/realtime" 403'


def test_an_upload_s_line_and_those_of_vllm_within_it(lines: Any) -> None:
    made, app = guarded()
    app.engine.step_s = lambda samples: logging.getLogger("vllm.test").warning("within") or 0.0  # type: ignore[func-returns-value]
    body, kind = form(file=("clip.wav", inputs.encoded(SAMPLES)))

    async def run() -> None:
        await post(made, app, body, kind, (b"x-request-id", b"the-id"), (b"authorization", f"Bearer {SECRET}".encode()))
        logging.getLogger("vllm.test").warning("after")

    asyncio.run(run())
    within, own, after = lines
    assert (within["message"], within["request_id"]) == ("within", "the-id")
    more = {name: value for name, value in own.items() if name not in (*HEAD, "duration_ms", "timing_ms")}
    assert more == {
        **{"request_id": "the-id", "method": "POST", "path": "/v1/audio/transcriptions", "status": 200},
        **{"bytes": len(body), "audio_s": 2.0},
    }
    assert own["message"].startswith("POST /v1/audio/transcriptions 200, ")
    assert own["duration_ms"] >= 0
    assert "request_id" not in after
    assert SECRET not in str(lines)


def test_a_task_that_outlives_its_request_is_no_longer_that_request_s(lines: Any) -> None:
    made, app = guarded()
    tasks = []

    async def later() -> None:
        await asyncio.sleep(0.05)
        logging.getLogger("vllm.test").warning("later")

    def begun(samples: Any) -> float:
        tasks.append(asyncio.create_task(later()))
        return 0.0

    app.engine.step_s = begun

    async def run() -> None:
        await post(made, app, *form(file=("clip.wav", inputs.encoded(SAMPLES))))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [(line["message"][:5], "request_id" in line) for line in lines] == [("POST ", True), ("later", False)]


def test_a_live_session_s_line(lines: Any) -> None:
    engine = FakeEngine()

    async def run() -> None:
        made, _ = guarded(sessions=service(engine), verify=verify)
        events = [
            {"type": "session.update", "model": "voxtral"},
            {"type": "input_audio_buffer.commit"},
            {"type": "input_audio_buffer.append", "audio": "AAAA" * 8000},
            {"type": "input_audio_buffer.commit", "final": True},
        ]
        inbox = [{"type": "websocket.connect"}, *({"type": "websocket.receive", "text": json.dumps(e)} for e in events)]
        done = asyncio.Event()

        async def receive() -> Any:
            if inbox:
                return inbox.pop(0)
            await done.wait()
            return {"type": "websocket.disconnect", "code": 1000}

        async def send(message: Any) -> None:
            if "transcription.done" in message.get("text", ""):
                done.set()

        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"x-request-id", b"live-1")]
        scope = {"type": "websocket", "path": REALTIME, "headers": headers, "query_string": f"key={SECRET}".encode()}
        await asyncio.wait_for(made({**scope, "subprotocols": []}, receive, send), 30)

    asyncio.run(run())
    (line,) = lines
    assert (line["request_id"], line["status"], line["ended"], line["texts"]) == ("live-1", 101, "done", 1)
    assert engine.opened == [f"{line['session_id']}-0"]
    assert line["audio_s"] == 0.75
    assert SECRET not in str(line) and KEY not in str(line)


# ---- The configuration: vLLM's own lines, and starts that are refused

START = """
import logging, sys
from vllm import logger
if hasattr(logger, "configure_logging"):  # vLLM 0.20.0 configures at the import
    from vllm.config.logging import LoggingConfig
    logger.configure_logging(LoggingConfig())
from voxtral_serve import logs
logs.check_settings()
logger.init_logger("vllm.test").info("of %s", "vllm")
logger.init_logger("vllm.test").debug("not at this level")
import uvicorn
uvicorn.Config("app", log_config=__import__("json").load(open(__import__("os").environ["VLLM_LOGGING_CONFIG_PATH"])))
logs.check_loggers()
logging.getLogger("uvicorn.error").info("of uvicorn")
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "a:1", "GET", "/x?key=a-secret", "1.1", 200)
logging.getLogger("elsewhere").warning("of another")
"""


@pytest.mark.slow
def test_lines_of_vllm_and_uvicorn() -> None:
    environment = {**os.environ, "VOXTRAL_SERVE_LOG": "json", "VOXTRAL_SERVE_REPLICA": "r1"}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ours = [
        line["message"] for line in found if not line["logger"].startswith("vllm.") or line["logger"] == "vllm.test"
    ]
    assert ours == ["of vllm", "of uvicorn", 'a:1 - "GET /x HTTP/1.1" 200', "of another"]
    assert {line["replica"] for line in found} == {"r1"}


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"VOXTRAL_SERVE_LOG": "xml"}, "VOXTRAL_SERVE_LOG is 'xml': expected json, or text"),
        ({"VOXTRAL_SERVE_LOG": ""}, "VOXTRAL_SERVE_LOG is '': expected json, or text"),
        ({"VOXTRAL_SERVE_LOG": "json", "VLLM_LOGGING_CONFIG_PATH": "/a.json"}, "unset one of them"),
        ({"VOXTRAL_SERVE_REPLICA": ""}, "VOXTRAL_SERVE_REPLICA is '': expected a name"),
        ({"VOXTRAL_SERVE_REPLICA": "a\nb"}, "expected a name"),
    ],
)
def test_a_start_is_refused(variables: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VOXTRAL_SERVE_LOG", "VOXTRAL_SERVE_REPLICA", "VLLM_LOGGING_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    logs.check_settings()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(logs.LogError, match=re.escape(why)):
        logs.check_settings()


def test_a_log_that_vllm_was_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --log-config-file, which is read after the variables were checked."""
    monkeypatch.setenv("VOXTRAL_SERVE_LOG", "json")
    with pytest.raises(logs.LogError, match="remove --log-config-file"):
        logs.check_loggers()
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(logs.CONFIG))
    try:
        server.attach(None, THREADS)
    except logs.LogError as error:
        assert server.drifted(error) == str(error)


def test_a_stream_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "/tmp/a.log")
    with pytest.raises(ValueError, match=r"VLLM_LOGGING_STREAM is '/tmp/a.log': with .* expected ext://sys.stdout"):
        LineHandler()


def test_the_link_of_all_sessions_is_of_no_request() -> None:
    """Its task goes on for other sessions than the one that started it."""
    seen = []

    class Watched(FakeEngine):
        async def call(self, method: str, messages: list[list[Any]]) -> dict[str, str]:
            seen.append(logs.SERVED.get())
            return await super().call(method, messages)

    async def run() -> None:
        logs.SERVED.set({"request_id": "one"})
        await Watched().link().open("a")

    asyncio.run(run())
    assert seen == [None]
