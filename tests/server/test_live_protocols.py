"""The protocols of OpenAI and Mistral on a real server: texts are those of uploads, and hostile clients harm nobody."""

import asyncio
import base64
import contextlib
import difflib
import itertools
import json
import re
import socket as socketlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import live
import numpy as np
import pytest
import requests
import soundfile
import soxr
from live import CLOSE, COMPLETED, INPUT, PCM, RATE, TEXT, append, close_of, metric, opened, until_free, uploaded
from openai import AsyncOpenAI, OpenAI
from places import DATA
from servers import MOST_LIVE, Server
from uploads import AUTHORIZED, KEY
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from bench import dataset
from pico import evaluate

PIECES = [1280, 160, 4001, 16000]


@pytest.fixture(scope="module")
def audios() -> list[np.ndarray]:
    """Short clips, as 16 bits hold them."""
    found = dataset.select(dataset.load(DATA)[0], 30, seed=0)
    clips = sorted((clip for clip in found if clip.id not in CLOSE), key=lambda clip: clip.duration_s)
    return [evaluate.read_audio(clip.path) for clip in clips[: len(PIECES)]]


def configure(socket: ClientConnection, turn_detection: Any = None, form: Any = PCM, **session: Any) -> None:
    audio = {"input": {"format": form, "turn_detection": turn_detection}}
    live.send(socket, "session.update", session={"type": "transcription", "audio": audio, **session})


def until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    """The next event of a kind; an error is none of the others."""
    while (event := live.receive(socket))["type"] != kind:
        assert event["type"] != "error", event
    return event


def committed(url: str, content: bytes, piece: int, form: Any = PCM) -> dict[str, Any]:
    with opened(url) as socket:
        configure(socket, form=form)
        append(socket, content, piece)
        live.send(socket, f"{INPUT}.commit")
        return until(socket, COMPLETED)


def test_a_turn_has_the_text_of_the_upload(fast_url: str, audios: list[np.ndarray]) -> None:
    """Of PCM of 16 kHz, to the letter, several at once and in pieces of any size."""
    expected = [uploaded(fast_url, audio) for audio in audios]
    with ThreadPoolExecutor(len(audios)) as pool:
        pieces = [2 * piece + 1 for piece in PIECES]  # odd numbers of bytes
        found = list(pool.map(committed, [fast_url] * len(audios), map(live.pcm16, audios), pieces))
    assert [each["transcript"] for each in found] == expected
    for each, audio in zip(found, audios, strict=True):
        assert each["usage"] == {"type": "duration", "seconds": round(len(audio) / RATE, 3)}


@pytest.mark.parametrize("kind", ["audio/pcm", "audio/pcmu", "audio/pcma"])
def test_formats(fast_url: str, audios: list[np.ndarray], kind: str) -> None:
    """PCM of 24 kHz and G.711 have the text of an upload of the same audio, however it is cut."""
    import audioop
    import io

    rate = 24000 if kind == "audio/pcm" else 8000
    samples = np.frombuffer(live.pcm16(soxr.resample(audios[0], RATE, rate)), "<i2")
    content = samples.tobytes()
    if kind != "audio/pcm":
        to, back = (
            (audioop.lin2ulaw, audioop.ulaw2lin) if kind == "audio/pcmu" else (audioop.lin2alaw, audioop.alaw2lin)
        )
        content = to(content, 2)
        samples = np.frombuffer(back(content, 2), "<i2")
    found = {
        committed(fast_url, content, piece, {"type": kind})["transcript"]
        for piece in ((997, 4800) if kind == "audio/pcm" else (997,))
    }
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    answer = requests.post(
        f"{fast_url}/v1/audio/transcriptions",
        files={"file": ("clip.wav", file.getvalue())},
        data={"model": "voxtral"},
        headers=AUTHORIZED,
        timeout=60,
    )
    assert found == {answer.json()["text"]}


def test_server_vad_and_word_times(fast_url: str, audios: list[np.ndarray]) -> None:
    """Three clips with pauses: each is a turn, with its words at their times."""
    pause = np.zeros(RATE, np.float32)
    audio = np.concatenate([part for clip in audios[:3] for part in (clip, pause)])
    with opened(fast_url) as socket:
        configure(socket, {"type": "server_vad", "silence_duration_ms": 500})
        append(socket, live.pcm16(audio))
        live.send(socket, f"{INPUT}.clear")
        events: list[dict[str, Any]] = []
        while not events or sum(event["type"] == "conversation.item.done" for event in events) < 3:
            events.append(live.receive(socket))
            assert events[-1]["type"] != "error", events[-1]
    stops = [event["audio_end_ms"] for event in events if event["type"] == f"{INPUT}.speech_stopped"]
    ends = np.cumsum([len(clip) + len(pause) for clip in audios[:3]]) / RATE * 1000
    assert len(stops) == 3 and all(0 <= end - stop <= 1500 for end, stop in zip(ends, stops, strict=True))
    texts = [event["transcript"] for event in events if event["type"] == COMPLETED]
    assert [text.split()[-1] for text in texts] == [uploaded(fast_url, clip).split()[-1] for clip in audios[:3]]
    words = [word for event in events if event["type"] == f"{TEXT}.segment" for word in event["words"]]
    assert [word["word"] for word in words] == " ".join(texts).split()
    for one, other in itertools.pairwise(words):
        assert one["start"] < one["end"] <= other["start"]
    starts = np.cumsum([0] + [len(clip) + len(pause) for clip in audios[:2]]) / RATE
    for text, start, clip in zip(texts, starts, audios[:3], strict=True):
        mine, words = words[: len(text.split())], words[len(text.split()) :]
        assert start - 0.1 <= mine[0]["start"] and mine[-1]["end"] <= start + len(clip) / RATE + 0.7


AHEAD_S = 45  # of audio before the last segment


def texts_of(url: str, pcm: bytes, turn_detection: Any) -> list[str]:
    """Of the turns of a recording that is sent as fast as its text comes."""
    with opened(url, ping_interval=None) as socket:
        configure(socket, turn_detection)
        sent, heard_s, items, texts, cleared = 0, 0.0, 0, list[str](), False
        while not cleared or len(texts) < items:
            if sent < len(pcm) and sent / 2 / RATE - heard_s < AHEAD_S:
                append(socket, pcm[sent : sent + RATE], RATE)
                sent += RATE
                if sent >= len(pcm):
                    live.send(socket, f"{INPUT}.commit", event_id="last")
                    live.send(socket, f"{INPUT}.clear")
                continue
            event = json.loads(socket.recv(timeout=600))
            if event["type"] == "error":  # the last turn may have ended with the audio
                assert (event["error"]["code"], event["error"]["event_id"]) == (f"{INPUT}_commit_empty", "last"), event
            items += event["type"] == f"{INPUT}.committed"
            cleared |= event["type"] == f"{INPUT}.cleared"
            if event["type"] == f"{TEXT}.segment":
                heard_s = event["end"]
            if event["type"] == COMPLETED:
                texts.append(event["transcript"])
        return texts


@pytest.mark.slow
def test_turns_lose_no_words(fast_url: str) -> None:
    """The live set, by turns and in one: at most 1 % of the words are lost or doubled."""

    def counts(path: str) -> np.ndarray:
        """(words in one, those that turns have fewer, more, and other ones, turns)"""
        pcm = live.pcm16(evaluate.read_audio(DATA / path))
        one, turns = (texts_of(fast_url, pcm, detection) for detection in (None, {"type": "server_vad"}))
        assert len(one) == 1 and len(turns) > 5
        words, cut = (re.sub("[^a-z' ]", "", " ".join(texts).lower()).split() for texts in (one, turns))
        codes = difflib.SequenceMatcher(None, words, cut, autojunk=False).get_opcodes()
        changed = [(b - a, d - c) for kind, a, b, c, d in codes if kind != "equal"]
        fewer, more = (sum(max(0, sign * (a - b)) for a, b in changed) for sign in (1, -1))
        found = np.array([len(words), fewer, more, sum(map(min, changed)), len(turns)])
        print(path, *found, flush=True)
        return found

    paths = [json.loads(line)["path"] for line in (DATA / "live.jsonl").read_text().splitlines()]
    with ThreadPoolExecutor(3) as pool:
        words, fewer, more, other, turns = sum(pool.map(counts, paths))
    print(f"{words} words, {fewer} fewer, {more} more, {other} others, {turns} turns")
    assert words > 3000
    assert fewer + more <= 0.01 * words


def test_logprobs(fast_url: str, audios: list[np.ndarray]) -> None:
    with opened(fast_url) as socket:
        configure(socket, include=["item.input_audio_transcription.logprobs"])
        append(socket, live.pcm16(audios[0]))
        live.send(socket, f"{INPUT}.commit")
        found = until(socket, COMPLETED)
    assert "".join(each["token"] for each in found["logprobs"]) == found["transcript"]
    assert all(each["logprob"] <= 0 for each in found["logprobs"])


def test_the_client_of_openai(fast_url: str, audios: list[np.ndarray]) -> None:
    """Unmodified, sync and async, with a model in the URL and without an intent."""
    expected, content = uploaded(fast_url, audios[0]), live.pcm16(audios[0])
    session: Any = {"type": "transcription", "audio": {"input": {"format": PCM, "turn_detection": None}}}
    audio = base64.b64encode(content).decode()
    with OpenAI(api_key=KEY, base_url=f"{fast_url}/v1").realtime.connect(model="voxtral") as connection:
        connection.session.update(session=session)
        connection.input_audio_buffer.append(audio=audio)
        connection.input_audio_buffer.commit()
        for event in connection:
            assert event.type != "error", event
            if event.type == COMPLETED:
                assert event.transcript == expected
                break

    async def run() -> str:
        client = AsyncOpenAI(api_key=KEY, base_url=f"{fast_url}/v1")
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(session=session)
            await connection.input_audio_buffer.append(audio=audio)
            await connection.input_audio_buffer.commit()
            async for event in connection:
                assert event.type != "error", event
                if event.type == COMPLETED:
                    return event.transcript
        raise AssertionError

    assert asyncio.run(run()) == expected


def test_mistrals_protocol(fast_url: str, audios: list[np.ndarray]) -> None:
    with opened(fast_url, "model=voxtral", "/v1/audio/transcriptions/realtime") as socket:
        assert live.receive(socket)["session"]["model"] == "voxtral"
        live.send(socket, "session.update", session={"audio_format": {"encoding": "pcm_s16le", "sample_rate": RATE}})
        append(socket, live.pcm16(audios[0]), kind="input_audio.append")
        live.send(socket, "input_audio.flush")
        live.send(socket, "input_audio.end")
        assert until(socket, "transcription.language")["audio_language"] == "en"
        done = until(socket, "transcription.done")
        assert (done["text"], done["language"]) == (uploaded(fast_url, audios[0]), "en")
        assert " ".join(each["text"] for each in done["segments"]) == done["text"]
        assert close_of(socket) == (1000, "the text is complete")


def test_custom_words_of_some_sessions(fast_url: str) -> None:
    """At the same time, in both protocols: the text of the upload with them, and without."""
    (clip,) = (each for each in dataset.load(DATA)[0] if each.id == "230")
    audio = evaluate.read_audio(clip.path)
    plain, preferring = (uploaded(fast_url, audio, **fields) for fields in ({}, {"keywords[]": "old"}))
    assert plain != preferring and "old" in preferring

    def openais(keywords: list[str] | None) -> str:
        with opened(fast_url) as socket:
            transcription = {"model": "voxtral", "keywords": keywords}
            audio_input = {"format": PCM, "turn_detection": None, "transcription": transcription}
            live.send(socket, "session.update", session={"type": "transcription", "audio": {"input": audio_input}})
            append(socket, live.pcm16(audio))
            live.send(socket, f"{INPUT}.commit")
            return str(until(socket, COMPLETED)["transcript"])

    def mistrals(context_bias: list[str]) -> str:
        with opened(fast_url, "model=voxtral", "/v1/audio/transcriptions/realtime") as socket:
            form = {"encoding": "pcm_s16le", "sample_rate": RATE}
            live.send(socket, "session.update", session={"audio_format": form, "context_bias": context_bias})
            assert until(socket, "session.updated")["session"].get("context_bias", []) == context_bias
            append(socket, live.pcm16(audio), kind="input_audio.append")
            live.send(socket, "input_audio.end")
            return str(until(socket, "transcription.done")["text"])

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(openais, ["old"]), pool.submit(openais, None)]
        asked += [pool.submit(mistrals, ["old", "New York"]), pool.submit(mistrals, [])]
        assert [each.result() for each in asked] == [preferring, plain] * 2


def delayed(url: str, content: bytes, delay_ms: int) -> dict[str, Any]:
    """What Mistral's protocol says of a session of this delay."""
    with opened(url, "model=voxtral", "/v1/audio/transcriptions/realtime") as socket:
        form = {"encoding": "pcm_s16le", "sample_rate": RATE}
        live.send(socket, "session.update", session={"audio_format": form, "target_streaming_delay_ms": delay_ms})
        append(socket, content, kind="input_audio.append")
        live.send(socket, "input_audio.end")
        return until(socket, "transcription.done")


def test_each_session_has_its_own_delay(fast_url: str, audios: list[np.ndarray]) -> None:
    """Five at the same time. The engine's prompt has the delay; its tests compare the tokens that follow."""
    delays = [160, 240, 480, 960, 2400]
    expected, content = uploaded(fast_url, audios[-1]), live.pcm16(audios[-1])
    with ThreadPoolExecutor(len(delays)) as pool:
        found = list(pool.map(lambda delay_ms: delayed(fast_url, content, delay_ms), delays))
    assert [each["usage"]["prompt_tokens"] for each in found] == [33 + delay_ms // 80 for delay_ms in delays]
    assert found[2]["text"] == expected
    for each in found:
        assert difflib.SequenceMatcher(None, each["text"].split(), expected.split()).ratio() >= 0.7


# ---- Hostile clients: each gets an error or a close, and a session beside them has its text


@pytest.fixture
def beside(fast_url: str, audios: list[np.ndarray]) -> Iterator[None]:
    """A session of another client, in which a clip goes on while the test runs."""
    with opened(fast_url) as socket:
        configure(socket)
        content = live.pcm16(audios[1])
        half = len(content) // 4 * 2
        append(socket, content[:half])
        until(socket, "session.updated")
        yield
        append(socket, content[half:])
        live.send(socket, f"{INPUT}.commit")
        assert until(socket, COMPLETED)["transcript"] == uploaded(fast_url, audios[1])
    until_free(fast_url)


WRONG: list[tuple[str | bytes, str]] = [
    ("{", "invalid_json"),
    ("[1]", "processing_error"),
    ("[" * 100_000, "invalid_json"),
    ('{"type":"response.create"}', "invalid_value"),
    ('{"type":"transcription_session.update"}', "beta_api_shape_disabled"),
    ('{"type":"session.update","session":{"type":"realtime"}}', "invalid_value"),
    ('{"type":"input_audio_buffer.append","audio":7}', "processing_error"),
    ('{"type":"input_audio_buffer.append","audio":"?"}', "invalid_audio"),
    ('{"type":"input_audio_buffer.append","audio":"' + "A" * (15 * 2**20 + 4) + '"}', "invalid_audio"),
    ('{"type":"input_audio_buffer.commit"}', "input_audio_buffer_commit_empty"),
    (b"\x00\x01", "invalid_event"),
]


@pytest.mark.usefixtures("beside")
def test_a_wrong_event_is_told(fast_url: str, audios: list[np.ndarray]) -> None:
    """All of them in one session, which goes on and has its text."""
    with opened(fast_url) as socket:
        live.receive(socket)
        for sent, code in WRONG:
            socket.send(sent)
            error = live.receive(socket)
            assert (error["type"], error["error"]["code"]) == ("error", code), (sent[:60], error)
        configure(socket)
        append(socket, live.pcm16(audios[0]))
        live.send(socket, f"{INPUT}.commit")
        assert until(socket, COMPLETED)["transcript"] == uploaded(fast_url, audios[0])


@pytest.mark.usefixtures("beside")
def test_strange_audio_is_no_error(fast_url: str, audios: list[np.ndarray]) -> None:
    """Empty appends, thousands of one byte and of one sample."""
    content = live.pcm16(audios[0])
    with opened(fast_url) as socket:
        configure(socket)
        live.send(socket, f"{INPUT}.append", audio="")
        append(socket, content[:5001], 1)
        append(socket, content[5001:11001], 2)
        append(socket, content[11001:], 2560)
        live.send(socket, f"{INPUT}.commit")
        assert until(socket, COMPLETED)["transcript"] == uploaded(fast_url, audios[0])


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_audio_slower_than_speech(fast_url: str, audios: list[np.ndarray]) -> None:
    """It waits for its audio, and has the text of the upload."""
    content = live.pcm16(audios[0])
    with opened(fast_url) as socket:
        configure(socket)
        for start in range(0, len(content), len(content) // 4 // 2 * 2):
            append(socket, content[start : start + len(content) // 4 // 2 * 2])
            time.sleep(len(audios[0]) / RATE / 2)  # half of the pace of speech
        live.send(socket, f"{INPUT}.commit")
        assert until(socket, COMPLETED)["transcript"] == uploaded(fast_url, audios[0])


MISTRAL, VLLM = ("model=voxtral", "/v1/audio/transcriptions/realtime"), ("", "/v1/realtime")


@pytest.mark.usefixtures("beside")
def test_a_wrong_event_is_told_in_mistrals_protocol(fast_url: str, audios: list[np.ndarray]) -> None:
    """All of them in one session, which goes on and has its text."""
    append_of = '{"type":"input_audio.append","audio":'
    wrong = [
        *("{", "[1]", "[" * 100_000, b"\x00\x01", '{"type":"input_audio_buffer.append","audio":""}', append_of + "7}"),
        *(append_of + '"?"}', append_of + '"' + "A" * (15 * 2**20 + 4) + '"}'),
        '{"type":"session.update","session":{"audio_format":{"encoding":"opus"}}}',
    ]
    with opened(fast_url, *MISTRAL) as socket:
        live.receive(socket)
        for sent in wrong:
            socket.send(sent)
            error = live.receive(socket)
            assert (error["type"], error["error"]["code"]) == ("error", 400), (sent[:60], error)
        live.send(socket, "input_audio.append", audio="")
        append(socket, live.pcm16(audios[0]), 2561, kind="input_audio.append")
        live.send(socket, "input_audio.end")
        assert until(socket, "transcription.done")["text"] == uploaded(fast_url, audios[0])


@pytest.mark.usefixtures("beside")
def test_a_wrong_event_is_told_in_vllms_protocol(fast_url: str, audios: list[np.ndarray]) -> None:
    wrong = [
        *(("{", "invalid_json"), ("[1]", "processing_error"), ("[" * 100_000, "invalid_json")),
        *((b"\x00\x01", "invalid_event"), ('{"type":"response.create"}', "unknown_event")),
        *(
            ('{"type":"input_audio_buffer.commit"}', "model_not_validated"),
            ('{"type":"session.update"}', "invalid_event"),
        ),
        *(('{"type":"input_audio_buffer.append","audio":"' + end, "invalid_audio") for end in ('"}', '?"}', 'AAAA"}')),
        ('{"type":"session.update","model":"whisper-9"}', "model_not_found"),
    ]
    with opened(fast_url, *VLLM) as socket:
        live.receive(socket)
        for sent, code in wrong:
            socket.send(sent)
            error = live.receive(socket)
            assert (error["type"], error["code"]) == ("error", code), (sent[:60], error)
        live.send(socket, "session.update", model="voxtral")
        live.send(socket, f"{INPUT}.commit")
        append(socket, live.pcm16(audios[0]))
        live.send(socket, f"{INPUT}.commit", final=True)
        assert until(socket, "transcription.done")["text"].strip() == uploaded(fast_url, audios[0])


@pytest.mark.usefixtures("beside")
def test_a_message_that_is_too_large(fast_url: str) -> None:
    """Over 16 MiB the WebSocket library does not read it: it closes.

    The frame's head says so (RFC 6455, section 5.2). Of a client that sends on, the close may be lost in a reset.
    """
    masked_text = bytes([0x81, 0x80 | 127]) + (17 * 2**20).to_bytes(8, "big") + bytes(4)
    for place in (("intent=transcription", "/v1/realtime"), MISTRAL, VLLM):
        with opened(fast_url, *place) as socket:
            live.receive(socket)
            socket.socket.sendall(masked_text + b"A" * 1000)
            assert close_of(socket)[0] == 1009


def unread(url: str) -> float:
    """Sessions that were ended because their clients did not read."""
    name = 'voxtral_serve_live_sessions_ended_total{reason="unread"} '
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [("intent=transcription", "/v1/realtime"), MISTRAL, VLLM], ids=["OpenAI", "Mistral", "vLLM"]
)
@pytest.mark.usefixtures("beside")
def test_a_client_that_reads_nothing(fast_url: str, place: tuple[str, str]) -> None:
    """Its wrong events are answered until nothing more fits into the sockets' buffers; then it has 30 s."""
    before = unread(fast_url)
    narrow = socketlib.socket()
    narrow.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_RCVBUF, 8192)  # bytes, before the connection
    narrow.connect((urlsplit(fast_url).hostname, urlsplit(fast_url).port))
    with opened(fast_url, *place, ping_interval=None, max_queue=1, compression=None, sock=narrow) as socket:
        stopped = threading.Event()

        def flood() -> None:
            with contextlib.suppress(ConnectionClosed, OSError):
                while not stopped.is_set():
                    socket.send('{"type":"' + "x" * 40 + '"}')

        flooding = threading.Thread(target=flood)
        flooding.start()
        start = time.monotonic()
        while unread(fast_url) == before:
            assert time.monotonic() - start < 300
            time.sleep(1)
        stopped.set()
        socket.socket.shutdown(socketlib.SHUT_RDWR)  # wakes the flood, which waits in `send`; a close would not
        flooding.join(30)


@pytest.mark.slow
def test_the_largest_append(fast_url: str, audios: list[np.ndarray]) -> None:
    """15 MiB of base64: six minutes of silence, faster than speech. Pings are answered.

    The session beside it is no `beside`, which would be silent for longer than the server allows.
    """
    with opened(fast_url) as socket:
        configure(socket)
        append(socket, bytes(15 * 2**20 // 4 * 3), 15 * 2**20)
        live.send(socket, f"{INPUT}.commit")
        with opened(fast_url) as other:
            configure(other)
            append(other, live.pcm16(audios[1]))
            live.send(other, f"{INPUT}.commit")
            assert until(other, COMPLETED)["transcript"] == uploaded(fast_url, audios[1])
        while (event := json.loads(socket.recv(timeout=900)))["type"] != COMPLETED:
            assert event["type"] != "error", event
        assert event["usage"]["seconds"] == pytest.approx(368.64)


@pytest.mark.usefixtures("beside")
def test_keys_and_pages(fast_url: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for path in ("/v1/realtime", "/v1/audio/transcriptions/realtime"):
            with pytest.raises(InvalidStatus) as refused:
                opened(fast_url, f"api_key={KEY}", path, additional_headers=headers)
            assert refused.value.response.status_code == 401
    for path in ("/v1/realtime", "/v1/audio/transcriptions/realtime"):
        with pytest.raises(InvalidStatus) as refused:
            opened(fast_url, path=path, origin="https://evil.example")
        assert refused.value.response.status_code == 403
        assert json.loads(refused.value.response.body)["error"]["code"] == "origin_not_allowed"
    protocols: Any = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with opened(fast_url, additional_headers={}, subprotocols=protocols) as socket:
        assert socket.subprotocol == "realtime"
        assert live.receive(socket)["type"] == "session.created"


@pytest.mark.usefixtures("beside")
def test_reconnect_storms_and_half_closed_sockets(fast: Server, audios: list[np.ndarray]) -> None:
    """Clients that connect, send some audio, and go in any way: their places are free soon."""
    content = live.pcm16(audios[0][: 2 * RATE])

    def storm(number: int) -> None:
        for _ in range(8):
            socket = opened(fast.url)
            try:
                if number % 3:
                    configure(socket)
                    append(socket, content)
                if number % 3 == 2:
                    live.send(socket, f"{INPUT}.commit")
            except ConnectionClosed as closed:  # the server has not yet seen that the one before has gone
                assert closed.rcvd is not None and closed.rcvd.code == 1013
            finally:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(number % 3)  # read, write, or both
                socket.socket.close()

    with ThreadPoolExecutor(MOST_LIVE - 2) as pool:
        list(pool.map(storm, range(MOST_LIVE - 2)))
    start = time.monotonic()
    while metric(fast.url, "sessions ") > 1:  # but for the one beside
        assert time.monotonic() - start < 60
        time.sleep(0.05)


def test_too_many_sessions(fast_url: str) -> None:
    """The first audio beyond the limit is refused with the protocol's own error."""
    until_free(fast_url)
    sockets = [opened(fast_url) for _ in range(MOST_LIVE)]
    try:
        for socket in sockets:
            configure(socket)
            append(socket, bytes(3200))
            until(socket, "session.updated")
        start = time.monotonic()
        while metric(fast_url, "sessions ") < MOST_LIVE:
            assert time.monotonic() - start < 60
        with opened(fast_url) as socket:
            append(socket, bytes(3200))
            error = [live.receive(socket), live.receive(socket)][1]["error"]
            assert error["code"] == "too_many_sessions" and f"max_live_sessions is {MOST_LIVE}" in error["message"]
            assert error["message"].endswith(f", try again in {error['retry_after']} s")
            assert close_of(socket) == (1013, error["message"])
        path = "/v1/audio/transcriptions/realtime"
        with opened(fast_url, "model=voxtral", path) as socket:
            append(socket, bytes(3200), kind="input_audio.append")
            assert [live.receive(socket), live.receive(socket)][1]["error"]["code"] == 429
    finally:
        for socket in sockets:
            socket.close()
    assert metric(fast_url, 'sessions_ended_total{reason="refused"}') >= 2
