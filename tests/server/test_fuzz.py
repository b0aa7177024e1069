"""Forms and live sessions that Hypothesis makes from the guard's own models, against a real server.

No answer is a 5xx, none is late, no input writes a traceback, and nothing is left of them.
"""

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import fuzzing
import inputs
import live
import numpy as np
import pytest
import requests
import soundfile
from attackers import CLIP, MISTRAL, OPENAI, VLLM, until_free
from hypothesis import given
from hypothesis import strategies as st
from live import INPUT, opened
from servers import Server
from uploads import AUTHORIZED, RATE
from websockets.exceptions import ConnectionClosed

from voxtral_serve.guard.fields import UploadFields
from voxtral_serve.guard.live.mistral_codec import Update
from voxtral_serve.guard.live.openai_settings import Session

FEW, MANY = 100, 10_000
ANSWER_S = 20.0  # in which each input has its answer, beside other work
LAST = "fuzz.last"  # the type of an event that no protocol has, after all others
FAILED = 1011  # a close code: the server could not go on
SILENT, SPOKEN_S = 0.1, 1.0  # seconds of the clips in forms


def file(samples: np.ndarray) -> bytes:
    content = io.BytesIO()
    soundfile.write(content, samples, RATE, format="WAV")
    return content.getvalue()


@pytest.fixture
def well(fast: Server) -> Iterator[str]:
    """The server's URL. Afterwards, it is up, holds nothing, and its log has no traceback more."""
    before = fast.log.read_text(errors="replace").count("Traceback")
    yield fast.url
    assert fast.process.poll() is None
    assert requests.get(f"{fast.url}/health", timeout=60).status_code == 200
    until_free(fast.url, 10)
    assert fast.log.read_text(errors="replace").count("Traceback") == before


# ---- Forms

SPOKEN = soundfile.read(CLIP, int(SPOKEN_S * RATE), dtype="float32", start=RATE)[0]
CLIPS = [file(np.zeros(int(SILENT * RATE), np.float32))] * 5 + [file(SPOKEN), b"", b"no audio"]
FORMS = st.tuples(fuzzing.form(UploadFields), st.sampled_from(CLIPS))


def sent_forms(url: str, count: int) -> None:
    statuses: dict[int, int] = {}
    with requests.Session() as session:

        @fuzzing.examples(count)
        @given(FORMS)
        def run(made: tuple[list[fuzzing.Field], bytes]) -> None:
            fields, clip = made
            parts: Any = [*fields, ("file", ("clip.wav", clip))]
            start = time.monotonic()
            answer = session.post(url + inputs.UPLOAD, files=parts, headers=AUTHORIZED, timeout=ANSWER_S)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, answer.text
            assert time.monotonic() - start < ANSWER_S
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"] and error["code"] and error["type"] == "invalid_request_error"

        run()
    print(statuses)
    assert min(statuses.get(200, 0), statuses.get(400, 0)) > count / 10  # it makes both kinds


def test_forms(well: str) -> None:
    sent_forms(well, FEW)


@pytest.mark.slow
def test_many_forms(well: str) -> None:
    sent_forms(well, MANY)


# ---- Live sessions


def of_openai() -> st.SearchStrategy[list[Any]]:
    update = fuzzing.valid(Session).map(lambda session: {"type": "session.update", "session": session})
    return fuzzing.messages([f"{INPUT}.commit", f"{INPUT}.clear"], f"{INPUT}.append", update)


def of_mistral() -> st.SearchStrategy[list[Any]]:
    update = fuzzing.valid(Update).map(lambda session: {"type": "session.update", "session": session})
    return fuzzing.messages(["input_audio.flush", "input_audio.end"], "input_audio.append", update)


def of_vllm() -> st.SearchStrategy[list[Any]]:
    names = st.sampled_from(["voxtral", "whisper-1", "whisper-9"])
    update = names.map(lambda model: {"type": "session.update", "model": model, "vllm_xargs": {"a": 1}})
    final = st.just({"type": f"{INPUT}.commit", "final": True})
    begun = fuzzing.messages([f"{INPUT}.commit"], f"{INPUT}.append", update | final)
    model = json.dumps({"type": "session.update", "model": "voxtral"})
    return begun | begun.map(lambda sent: [model, *sent])  # without a model, nothing else has an effect


PROTOCOLS = pytest.mark.parametrize(
    ("path", "sessions"),
    [(OPENAI, of_openai()), (MISTRAL, of_mistral()), (VLLM, of_vllm())],
    ids=["OpenAI", "Mistral", "vLLM"],
)


def sent_sessions(url: str, path: str, sessions: st.SearchStrategy[list[Any]], count: int) -> None:
    kinds: dict[str, int] = {}

    @fuzzing.examples(count)
    @given(sessions)
    def run(messages: list[Any]) -> None:
        start = time.monotonic()
        with opened(url, "", path) as socket:
            try:
                for message in messages:
                    socket.send(message)
                live.send(socket, LAST)
                while True:
                    answer = socket.recv(timeout=ANSWER_S)
                    event = json.loads(answer)
                    kinds[event["type"]] = kinds.get(event["type"], 0) + 1
                    if event["type"] == "error" and LAST in str(answer):
                        break
            except ConnectionClosed as closed:
                assert closed.rcvd is not None and closed.rcvd.code != FAILED, closed
        assert time.monotonic() - start < ANSWER_S

    run()
    print(kinds)
    assert len(kinds) > 1 and kinds["error"] > count / 10


@PROTOCOLS
def test_live_sessions(well: str, path: str, sessions: st.SearchStrategy[list[Any]]) -> None:
    sent_sessions(well, path, sessions, FEW)


@pytest.mark.slow
@PROTOCOLS
def test_many_live_sessions(well: str, path: str, sessions: st.SearchStrategy[list[Any]]) -> None:
    sent_sessions(well, path, sessions, MANY)
