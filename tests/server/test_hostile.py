"""What hostile clients get from a real server, and that a good client beside them is served as if it were alone.

tests/support/attackers.py has the clients. Those of the slow tests work on and on; a good upload beside them may take
twice what it takes alone, or beside as many good ones.
"""

import base64
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attackers
import inputs
import live
import numpy as np
import psutil
import pytest
import requests
import soundfile
from attackers import CLIP, GAUGES, MISTRAL, OPENAI, VLLM, gauge, until_free
from live import close_of, opened
from places import ROOT
from servers import EAGER, MOST_LIVE, UNBOUND, Server
from uploads import AUTHORIZED, RATE, upload

from bench.measure import engine
from voxtral_serve.guard.body import PACE_BYTES_S
from voxtral_serve.units import MIB

CLOSED_S = 20.0  # in which a session ends once its client has closed; its backlog would take longer by far
CUT_S = 10.0  # after which a refused client that still sends is cut off
REVOKED_S = 10.0  # in which a revoked key loses its sockets
GROWTH = 1536 * MIB  # bytes of all processes, whatever is uploaded
FEW_LONG, FEW_LONG_GROWTH = 8, 768 * MIB  # long uploads at a time, and what they may add
ANSWER_BYTES = 4096  # the most that an answer to one event has
ROUNDS = 7  # uploads of a median
SLOWER = 2.0  # the most that a good upload may take beside an attack, of what it takes alone
PATHS = pytest.mark.parametrize("path", attackers.PATHS, ids=["OpenAI", "vLLM", "Mistral"])


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to `fast`: it is up afterwards, and holds nothing."""
    yield
    if "fast" in request.fixturenames:
        fast: Server = request.getfixturevalue("fast")
        assert fast.process.poll() is None
        until_free(fast.url, 10)


@pytest.fixture(scope="module")
def words(fast: Server) -> str:
    """The text of CLIP."""
    text: str = upload(fast.url, CLIP).json()["text"]
    assert text
    return text


class Memory:
    """The memory of a server's processes while this is entered: `growth` is the most that was added, in bytes."""

    def __init__(self, server: Server) -> None:
        self._process, self._stop = psutil.Process(server.process.pid), threading.Event()

    def __enter__(self) -> "Memory":
        self._before, self.growth = self._size(), 0
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _size(self) -> int:
        size = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                size += process.memory_info().rss
        return size

    def _sample(self) -> None:
        previous = self._before
        while not self._stop.wait(0.05):
            size = self._size()
            # A child has its parent's pages, counted twice, until it executes its program: at one of two looks.
            self.growth = max(self.growth, min(size, previous) - self._before)
            previous = size


def ignored(answer: requests.Response) -> set[str]:
    return set(answer.headers.get("x-voxtral-ignored", "").replace(" ", "").split(",")) - {""}


# ---- Uploads


@pytest.mark.parametrize("value", [["x"], "0"], ids=str)
def test_an_upload_names_no_live_session(fast_url: str, words: str, value: Any) -> None:
    """It ended the engine, or was never answered."""
    answer = upload(fast_url, CLIP, vllm_xargs=json.dumps({attackers.SESSION_OPTION: value}))
    assert (answer.status_code, answer.json()["text"]) == (200, words)
    assert ignored(answer) == {"vllm_xargs"}


VLLMS = {
    **dict.fromkeys(("vllm_xargs", "extra_args", "mm_processor_kwargs", "media_io_kwargs"), '{"a": 1}'),
    **dict.fromkeys(("structured_outputs", "guided_json", "response_schema"), '{"type": "object"}'),
    **{"min_tokens": "400", "ignore_eos": "true", "allowed_token_ids": "[5]", "logit_bias": '{"2": 100}'},
    **{"stop": "e", "stop_token_ids": "[32]", "bad_words": "the", "priority": "-1000", "request_id": "a"},
}
OTHERS = {
    **{"keyterms": "voxtral", "languages": "en", "num_speakers": "2", "known_speaker_names[]": "Ann"},
    **{"known_speaker_references[]": "data:", "boost_param": "x", "to_language": "de", "language": "en", "prompt": "x"},
    "word_boost[]": ["bias"] * 100,
}
SPECIAL = ("</s>", "<s>", "[PAD]", "<unk>", "\u202eabc", "a" * 8 + "\u0301" * 4, "%00", "🎙 mic")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"keywords[]": SPECIAL}, 200),
        ({"keywords[]": ["x y z"] * 100, "context_bias": ["x_y_z"] * 100, "hotwords": "x"}, 400),
        ({"keywords[]": ["[STREAMING_WORD]"] * 2}, 400),  # text of 17 tokens
        ({"keywords[]": ["x"] * 101}, 400),
        ({"hotwords": "," * 20_000}, 200),
        ({"hotwords": "x " * 10_000}, 400),
        ({"context_bias": "\u0000"}, 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_custom_words_of_any_kind(fast_url: str, words: str, fields: dict[str, Any], status: int) -> None:
    """They are text, and change no other text."""
    answer = upload(fast_url, CLIP, **fields)
    assert answer.status_code == status, answer.text
    assert "x-voxtral-ignored" not in answer.headers
    if status == 200:
        assert answer.json()["text"] == words
    else:
        assert answer.json()["error"]["param"].removesuffix("[]") in {name.removesuffix("[]") for name in fields}
        assert len(answer.text) < 400


@pytest.mark.parametrize("fields", [VLLMS, OTHERS], ids=["vLLM's", "others'"])
def test_fields_without_effect_are_named(fast_url: str, words: str, fields: dict[str, Any]) -> None:
    """vLLM's own options, and what other services have: a list of a hundred is one of them."""
    names = {name.removesuffix("[]") for name in fields}
    answer = upload(fast_url, CLIP, **fields)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["text"], ignored(answer)) == (words, names)
    answer = upload(fast_url, CLIP, stream="true", **fields)
    assert answer.status_code == 200 and json.dumps(words) in answer.text
    assert ignored(answer) == names


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("seed", value) for value in (str(2**63), str(-(2**63) - 1), "9" * 400, "1.5", "x")),
        *(("temperature", value) for value in ("nan", "inf", "-inf", "-0.1", "1e400", "2.1e9", "x")),
    ],
    ids=lambda value: value[:20],
)
def test_a_number_that_the_engine_cannot_take_is_refused(fast_url: str, field: str, value: str) -> None:
    answer = upload(fast_url, CLIP, **{field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and field in error["message"]


def test_a_small_file_that_decodes_to_much_costs_its_own_request(fast: Server, words: str) -> None:
    files = attackers.bombs()
    with Memory(fast) as memory, ThreadPoolExecutor(len(files)) as pool:
        answers = [*pool.map(lambda file: upload(fast.url, file), files.values())]
        assert upload(fast.url, CLIP).json()["text"] == words
    assert [answer.status_code for answer in answers] == [400] * len(files), [answer.text for answer in answers]
    assert memory.growth < 512 * MIB


@pytest.mark.slow
def test_long_files_share_the_memory_that_there_is(fast: Server, words: str) -> None:
    """Of ten minutes, 48 kHz and two channels: 115 MB each at their own rate, 38 MB at 16 kHz."""
    file = attackers.stereo()
    with Memory(fast) as memory, ThreadPoolExecutor(FEW_LONG) as pool:
        answers = [*pool.map(lambda _: upload(fast.url, file), range(FEW_LONG))]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all("Retry-After" in answer.headers for answer in refused)
    heard = [answer for answer in answers if answer not in refused]
    assert heard and [(answer.status_code, answer.json()["text"]) for answer in heard] == [(200, words)] * len(heard)
    assert memory.growth < FEW_LONG_GROWTH


def test_a_chat_is_refused_before_its_audio_is_read(fast_url: str) -> None:
    answer = requests.post(
        fast_url + inputs.CHAT, data=attackers.chat(b"no audio" * MIB), headers=AUTHORIZED, timeout=60
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat")


def cut_after(url: str, head: str) -> float:
    """Seconds until the connection of a client that sends on, at twice the pace of a slow one, is closed."""
    piece = bytes(PACE_BYTES_S // 2)
    if "chunked" in head:
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    with attackers.connection(url) as socket:
        start = time.monotonic()
        socket.settimeout(0.25)
        with contextlib.suppress(ConnectionError):
            socket.sendall(head.encode())
            while (spent_s := time.monotonic() - start) < 2 * CUT_S:
                socket.sendall(piece)
                with contextlib.suppress(TimeoutError):
                    if not socket.recv(MIB):
                        break
        return min(spent_s, time.monotonic() - start)


def test_a_refused_client_that_sends_slowly_is_cut_off(fast_url: str) -> None:
    length, key = "Content-Length: 20000000\r\n", f"Authorization: Bearer {inputs.KEY}\r\n"
    heads = {
        "no key": ("/v1/audio/transcriptions", length),
        "no key, chunked": ("/v1/chat/completions", "Transfer-Encoding: chunked\r\n"),
        "too large": ("/v1/audio/transcriptions", f"{key}Content-Length: 99999999999\r\n"),
        "compressed": ("/v1/audio/transcriptions", f"{key}{length}Content-Encoding: gzip\r\n"),
        "no such path": ("/v1/files", f"{key}{length}"),
        "wrong method": ("/v1/models", f"{key}{length}"),
    }
    lines = [f"POST {path} HTTP/1.1\r\nHost: here\r\n{more}\r\n" for path, more in heads.values()]
    with ThreadPoolExecutor(len(lines)) as pool:
        spent_s = dict(zip(heads, pool.map(cut_after, [fast_url] * len(lines), lines), strict=True))
    assert max(spent_s.values()) < 2 * CUT_S, spent_s  # then they would have stopped by themselves


# ---- Live sessions


def test_sockets_that_only_connect_hold_no_place(fast_url: str, words: str) -> None:
    with contextlib.ExitStack() as sockets:
        for number in range(attackers.CONNECTED):
            sockets.enter_context(attackers.websocket(fast_url, attackers.PATHS[number % 3])[0])
        assert [upload(fast_url, CLIP).status_code for _ in range(3)] == [200] * 3
        samples, _ = soundfile.read(CLIP, dtype="float32")
        *_, done = live.transcribe(fast_url, samples, RATE)
        assert done["text"].strip() == words


def told(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode()


LARGE = "x" * attackers.LARGE_PROMPT


def openai_session(**transcription: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"audio": {"input": {"transcription": transcription}}}}


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (OPENAI, openai_session(prompt=LARGE)),
        (OPENAI, openai_session(prompt="x" * 4097)),
        (OPENAI, openai_session(keywords=["x"] * 101)),
        (OPENAI, openai_session(keywords=["x" * 201])),
        (OPENAI, openai_session(language=LARGE)),
        (OPENAI, openai_session(languages=["en"] * 100_000)),
        (OPENAI, openai_session(model=LARGE)),
        (OPENAI, {"type": LARGE}),
        (OPENAI, {"type": "session.update", "event_id": LARGE, "session": {"x": 1}}),
        (OPENAI, {"type": "session.update", "session": {LARGE: 1}}),
        (MISTRAL, {"type": "session.update", "session": {"context_bias": [LARGE]}}),
        (MISTRAL, {"type": "session.update", "session": {"language": LARGE}}),
        (MISTRAL, {"type": "session.update", "session": {"speaker_references": [{"x": LARGE}]}}),
        (MISTRAL, {"type": LARGE}),
        (VLLM, {"type": "session.update", "model": LARGE}),
        (VLLM, {"type": LARGE}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_setting_that_is_too_large_is_an_error_that_does_not_repeat_it(
    fast_url: str, path: str, event: dict[str, Any]
) -> None:
    with opened(fast_url, "", path) as socket:
        live.receive(socket)
        socket.send(json.dumps(event))
        answer = socket.recv(timeout=live.TIMEOUT_S)
    assert json.loads(answer)["type"] == "error", answer[:200]
    assert len(answer) < ANSWER_BYTES


def test_updates_stay_cheap(fast_url: str) -> None:
    """After a refused prompt of 12 MB, and after the largest that is allowed."""
    for prompt, most in ((LARGE, ANSWER_BYTES), ("x" * 4096, 3 * ANSWER_BYTES)):
        with opened(fast_url, "", OPENAI) as socket:
            live.receive(socket)
            socket.send(json.dumps(openai_session(prompt=prompt)))
            answers = [socket.recv(timeout=live.TIMEOUT_S)]
            for number in range(attackers.SMALL_UPDATES):
                socket.send(json.dumps(openai_session(language="en" if number % 2 else "fr")))
                answers.append(socket.recv(timeout=live.TIMEOUT_S))
        assert {json.loads(answer)["type"] for answer in answers[1:]} == {"session.updated"}
        assert max(map(len, answers)) < most


@PATHS
def test_messages_are_not_compressed(fast_url: str, path: str) -> None:
    socket, head = attackers.websocket(fast_url, path, "permessage-deflate; client_max_window_bits")
    with socket:
        assert "sec-websocket-extensions" not in head
        packed = attackers.frame({"type": "session.update"}, deflate=True)
        socket.sendall(packed)
        while content := socket.recv(MIB):  # session.created, then a close frame: RSV1 without the extension
            assert b'"error"' not in content
            if b"\x88" in content:
                break


WAYS = {0: "half closed", 1: "closed", 2: "reset"}
ENDS = {(path, way) for path in attackers.PATHS for way in WAYS}
FEW_ENDS = {(MISTRAL, 2)}  # test_live_sockets.py has OpenAI's


@pytest.mark.parametrize(
    ("path", "way"),
    [
        pytest.param(path, way, id=f"{path} {WAYS[way]}", marks=[] if (path, way) in FEW_ENDS else pytest.mark.slow)
        for path, way in sorted(ENDS)
    ],
)
def test_a_client_that_goes_ends_its_session_whatever_its_backlog(fast: Server, path: str, way: int) -> None:
    """Eight sockets with eight minutes each, which read nothing."""
    attackers.backlog(path, False), attackers.backlog(path, True)  # made beforehand
    with Memory(fast) as memory, contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(MOST_LIVE) as pool:
            sockets = [*pool.map(lambda _: attackers.fill(fast.url, 1.5, path), range(MOST_LIVE))]
        for socket in sockets:
            stack.enter_context(socket)
        start = time.monotonic()
        while gauge(fast.url, GAUGES[1]) < MOST_LIVE:
            assert time.monotonic() - start < 60
        for socket in sockets:
            attackers.end(socket, way)
        until_free(fast.url, CLOSED_S)
    assert memory.growth < 512 * MIB


# ---- A server without a key, and one of several keys


@pytest.mark.slow
def test_a_page_whose_name_was_bound_to_this_address_is_refused(live_url: str) -> None:
    """DNS rebinding: the browser sends the page's own name as both `Origin` and `Host`."""
    rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    for path in ("/v1/models", "/v1/server", "/metrics", "/version"):
        assert requests.get(live_url + path, headers=rebound, timeout=60).status_code == 403, path
    files, data = {"file": (CLIP.name, CLIP.read_bytes())}, {"model": "voxtral"}
    address = live_url + inputs.UPLOAD
    for headers in (rebound, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        answer = requests.post(address, files=files, data=data, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), headers
    own = {"Origin": live_url}
    for headers in ({}, own, {"Host": "asr.internal"}):
        assert requests.post(address, files=files, data=data, headers=headers, timeout=60).status_code == 200, headers
    with attackers.connection(live_url) as socket:
        lines = ["GET /v1/realtime HTTP/1.1", *(f"{name}: {value}" for name, value in rebound.items())]
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Key: " + base64.b64encode(bytes(16)).decode(), "", ""]
        socket.sendall("\r\n".join(lines).encode())
        assert socket.recv(4096).startswith(b"HTTP/1.1 403")


REVOKED = "revoked-0123456789abcdef"
KEYS = f"- {{name: kept, key: {inputs.KEY}}}\n"


@pytest.fixture(scope="module")
def large(hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """(a server of two keys with room for 512 requests in flight, its file of keys)."""
    folder, port = tmp_path_factory.mktemp("large"), engine.free_port()
    (keys := folder / "keys.yaml").write_text(f"{KEYS}- {{name: gone, key: {REVOKED}}}\n")
    flags = (*EAGER, "--api-server-count", "1", "--max-model-len", "512")
    flags += ("--additional-config", json.dumps({"max_live_sessions": MOST_LIVE}))
    variables = {**UNBOUND, "VOXTRAL_SERVE_KEYS": str(keys), "VOXTRAL_SERVE_MAX_IN_FLIGHT": "512"}
    log = folder / "server.log"
    with engine.served(ROOT / "profiles/fast.yaml", hugging_face, port, log, *flags, environment=variables) as process:
        yield Server(f"http://127.0.0.1:{port}", log, process), keys


@pytest.mark.slow
def test_short_clips_are_never_refused_for_memory(large: tuple[Server, Path]) -> None:
    server, _ = large
    samples, _ = soundfile.read(CLIP, dtype="float32")
    clip = inputs.encoded(np.resize(samples, 12 * RATE))
    with ThreadPoolExecutor(256) as pool:
        answers = [*pool.map(lambda _: upload(server.url, clip), range(256))]
    assert {answer.status_code for answer in answers} == {200}
    until_free(server.url, 10)


@pytest.mark.slow
def test_256_long_files_share_the_memory_that_there_is(large: tuple[Server, Path]) -> None:
    server, _ = large
    file = attackers.stereo()
    with Memory(server) as memory, ThreadPoolExecutor(256) as pool:
        answers = [*pool.map(lambda _: upload(server.url, file), range(256))]
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) <= {200, 429} and 200 in statuses
    assert memory.growth < GROWTH
    until_free(server.url, 10)


@pytest.mark.slow
def test_a_revoked_key_loses_its_sockets(large: tuple[Server, Path]) -> None:
    server, keys = large
    headers = {"Authorization": f"Bearer {REVOKED}"}
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(opened(server.url, "", path, additional_headers=headers)) for path in attackers.PATHS
        ]
        kept = stack.enter_context(opened(server.url, "", OPENAI))
        live.send(sockets[0], "input_audio_buffer.append", audio=base64.b64encode(bytes(RATE)).decode())
        keys.write_text(KEYS)
        start = time.monotonic()
        assert [close_of(socket)[0] for socket in sockets] == [1008] * len(sockets)
        assert time.monotonic() - start < REVOKED_S
        kept.ping().wait(5)
        assert requests.get(f"{server.url}/v1/models", headers=headers, timeout=60).status_code == 401
    until_free(server.url, 10)


# ---- A good client beside them


def median_s(url: str, words: str) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.monotonic()
        answer = upload(url, CLIP)
        times.append(time.monotonic() - start)
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == words
    return statistics.median(times)


def good(url: str) -> None:
    assert upload(url, CLIP).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", attackers.ATTACKS)
def test_a_good_upload_beside_an_attack(fast: Server, words: str, name: str) -> None:
    """The engine works for clients that have places in it: beside those, as many good uploads are the measure."""
    others = {"backlogs": attackers.BACKLOGS, "long_stereo": attackers.STEREO_UPLOADS}.get(name, 0)
    with attackers.attacked(fast.url, lambda url, stop: attackers.together(url, stop, others, good)):
        alone_s = median_s(fast.url, words)
    with attackers.attacked(fast.url, attackers.ATTACKS[name]):
        time.sleep(5)
        beside_s = median_s(fast.url, words)
    print(f"{name}: {alone_s:.3f} s alone, {beside_s:.3f} s beside it")
    assert beside_s <= SLOWER * alone_s
