"""Live sessions of the encode-once model over `/v1/realtime`: the text of an upload, many at once, and their ends."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import live
import numpy as np
import pytest
from live import CLOSE, close_of, metric, uploaded
from places import DATA
from servers import LIVE_AGE_S, MOST_LIVE, Server
from websockets.sync.client import ClientConnection

from bench import dataset
from pico import evaluate

AT_ONCE = 4
PIECES = [1280, 480, 4001, 100000]
APPEND, COMMIT = "input_audio_buffer.append", "input_audio_buffer.commit"


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    found = dataset.select(dataset.load(DATA)[0], 30, seed=0)
    clear = [clip for clip in found if clip.id not in CLOSE]
    return sorted(clear, key=lambda clip: clip.duration_s)[: len(PIECES)]


def spoken(url: str, audio: np.ndarray, piece: int) -> str:
    created, *deltas, done = live.transcribe(url, audio, piece)
    assert (created["type"], done["type"]) == ("session.created", "transcription.done"), done
    assert "".join(delta["delta"] for delta in deltas) == done["text"]
    assert len(deltas) == done["usage"]["completion_tokens"]
    text: str = done["text"]
    return text.strip()


def begun(url: str) -> ClientConnection:
    socket = live.session(url)
    live.receive(socket)
    live.send(socket, "session.update", model="voxtral")
    live.send(socket, COMMIT)
    return socket


def say(socket: ClientConnection, audio: np.ndarray) -> None:
    live.send(socket, APPEND, audio=live.base64.b64encode(live.pcm16(audio)).decode())


def until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while (event := live.receive(socket))["type"] != kind:
        assert event["type"] == "transcription.delta", event
    return event


def test_a_live_clip_has_the_text_of_the_upload(fast_url: str, clips: list[dataset.Clip]) -> None:
    """Alone, and four at once while clips are uploaded."""
    audios = [evaluate.read_audio(clip.path) for clip in clips]
    expected = [uploaded(fast_url, audio) for audio in audios]
    assert all(expected)
    assert [spoken(fast_url, audios[0], 1280)] == expected[:1]
    with ThreadPoolExecutor(2 * AT_ONCE) as pool:
        uploads = [pool.submit(uploaded, fast_url, audio) for audio in audios]
        texts = list(pool.map(spoken, [fast_url] * len(audios), audios, PIECES))
        assert texts == expected
        assert [each.result() for each in uploads] == expected
    assert metric(fast_url, "lag_seconds_count") > 0
    assert metric(fast_url, 'sessions_ended_total{reason="done"}') >= 1 + len(audios)


def test_words_come_while_they_are_spoken(fast_url: str, clips: list[dataset.Clip]) -> None:
    audio = evaluate.read_audio(clips[-1].path)
    with begun(fast_url) as socket:
        for start in range(0, len(audio), 1280):
            say(socket, audio[start : start + 1280])
            time.sleep(0.08)
        early = 0
        while True:
            try:
                early += live.json.loads(socket.recv(timeout=1))["type"] == "transcription.delta"
            except TimeoutError:
                break
        assert early == (len(audio) - 40) // 1280 - 6  # each row's but the padding's
        live.send(socket, COMMIT, final=True)
        until(socket, "transcription.done")


def test_the_protocol_is_vllms(fast_url: str, clips: list[dataset.Clip]) -> None:
    """As server/test_realtime.py has it of vLLM's own server."""
    audio = evaluate.read_audio(clips[0].path)
    with live.session(fast_url) as socket:
        # vLLM's fields, and those that clients of OpenAI's protocol look for
        assert live.receive(socket).keys() == {"type", "id", "created", "session"}
        for kind, code in (
            ("session.update", "invalid_event"),
            ("input_audio_buffer.clear", "unknown_event"),
            (COMMIT, "model_not_validated"),
        ):
            live.send(socket, kind)
            event = live.receive(socket)
            assert (event["type"], event["code"], type(event["error"])) == ("error", code, str)
        live.send(socket, "session.update", model="other")
        assert live.receive(socket)["code"] == "model_not_found"
        live.send(socket, "session.update", model="whisper-1")
        texts = []
        for first in (True, False):
            if first:
                live.send(socket, COMMIT)
            say(socket, audio)
            if not first:
                live.send(socket, COMMIT)
            live.send(socket, COMMIT, final=True)
            texts.append(until(socket, "transcription.done")["text"].strip())
        assert texts == [uploaded(fast_url, audio)] * 2
        live.send(socket, COMMIT)
        live.send(socket, COMMIT, final=True)
        assert until(socket, "transcription.done")["text"] == ""


def test_beyond_the_limit_a_client_is_told_at_once(
    fast_url: str, clips: list[dataset.Clip], request: pytest.FixtureRequest
) -> None:
    """And clients that go, whatever they were doing, leave their places."""
    audio = evaluate.read_audio(clips[0].path)
    sockets = [begun(fast_url) for _ in range(MOST_LIVE)]
    for socket in sockets:
        request.addfinalizer(socket.socket.close)
    for socket in sockets[1:]:
        say(socket, audio)
    until(sockets[1], "transcription.delta")
    assert metric(fast_url, "sessions ") == MOST_LIVE
    with begun(fast_url) as socket:
        error = live.receive(socket)
        assert (error["type"], error["code"]) == ("error", "too_many_sessions")
        assert f"max_live_sessions is {MOST_LIVE}" in error["error"]
        assert error["error"].endswith(f", try again in {error['retry_after']} s") and 1 <= error["retry_after"] <= 60
        assert close_of(socket) == (1013, error["error"])
    live.send(sockets[1], COMMIT, final=True)
    assert until(sockets[1], "transcription.done")["text"].strip() == uploaded(fast_url, audio)
    for number, socket in enumerate(sockets):
        if number % 2:
            socket.close_timeout = 0.2  # the answer lies behind deltas that nobody has read
            socket.close()
        else:
            socket.socket.close()  # no close frame
    gone = time.monotonic()
    while metric(fast_url, "sessions "):
        assert time.monotonic() - gone < 20
    again = [begun(fast_url) for _ in range(MOST_LIVE)]
    for socket in again:
        live.send(socket, COMMIT, final=True)
        until(socket, "transcription.done")
        socket.close()


def test_a_session_is_one_line_in_the_log(fast: Server, clips: list[dataset.Clip]) -> None:
    audio = evaluate.read_audio(clips[0].path)
    with begun(fast.url) as socket:
        say(socket, audio[:32000])
        live.send(socket, COMMIT, final=True)
        tokens = until(socket, "transcription.done")["usage"]["completion_tokens"]
    time.sleep(0.5)
    line = [each for each in fast.log.read_text().splitlines() if "WEBSOCKET /v1/realtime" in each][-1]
    assert f" 101, 2.00 s of audio, {tokens} tokens, 1 texts, worst lag " in line
    assert " 0 rollovers, ended: done, " in line


@pytest.mark.slow
def test_a_session_goes_on_when_its_request_is_full(fast_url: str, clips: list[dataset.Clip]) -> None:
    """The same sentence until four requests are full: none is lost, none doubled."""
    audio = evaluate.read_audio(clips[0].path)
    pause = np.zeros(9600, np.float32)
    count = round(80 / ((len(audio) + len(pause)) / 16000))
    before = metric(fast_url, "rollovers_total")
    text = spoken(fast_url, np.concatenate([audio, pause] * count), 1280)
    assert metric(fast_url, "rollovers_total") >= before + 80 // LIVE_AGE_S - 1
    last = uploaded(fast_url, audio).split()[-1]
    assert text.split().count(last) == count
