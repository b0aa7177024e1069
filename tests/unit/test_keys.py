"""VOXTRAL_SERVE_KEYS: the file, what its keys may use, reloads, and the guard with it."""

import asyncio
import gzip
import hashlib
import json
import logging
import multiprocessing
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inputs
import pytest
from guarding import (
    BILLING,
    CALLS,
    MISTRAL,
    RATE,
    REALTIME,
    SAMPLES,
    Count,
    FakeApp,
    Lines,
    bearer,
    form,
    guarded,
    handshaken,
    post,
    sha256,
    text,
)
from livefakes import SHAPE, FakeEngine, service

from voxtral_serve import keys
from voxtral_serve.deploy import probe
from voxtral_serve.guard import access, keyring, middleware, server, transcription
from voxtral_serve.guard.keyring import KeyRing
from voxtral_serve.guard.usage import DIRECTORY, Usage, shared_file
from voxtral_serve.keys import Key, KeysError
from voxtral_serve.patches.live_server import log

SECONDS = len(SAMPLES) / RATE
CLIP = form(file=("clip.wav", inputs.encoded(SAMPLES)))


# ---- The file


def test_a_file() -> None:
    found = keys.parsed(text(in_flight=2, live_sessions=1, audio_seconds_per_minute=60).encode(), "keys.yaml")
    assert found == (
        Key("billing", hashlib.sha256(BILLING.encode()).digest(), 2, 1, 60),
        Key("calls", hashlib.sha256(CALLS.encode()).digest()),
    )
    both = f"- {{name: a, key: {BILLING}, sha256: {sha256(BILLING).upper()}}}"
    assert keys.parsed(both.encode(), "keys.yaml")[0].digest == found[0].digest


ENTRY = f"- {{name: billing, key: {BILLING}"
WRONG = {
    "": "keys.yaml holds empty: expected a list of one or more keys",
    "[]": "keys.yaml holds a list: expected a list of one or more keys",
    "name: a": "keys.yaml holds a dict: expected a list of one or more keys",
    f"- {BILLING}": "entry 1 is text of 24 characters: expected a mapping with name and key",
    f"- {{key: {BILLING}}}": "entry 1: its name is None: expected text of 1 to 64",
    f"- {{name: {BILLING} a, key: {BILLING}}}": "entry 1: its name is text of 26 characters: expected",
    f"- {{name: 7, key: {BILLING}}}": "entry 1: its name is 7: expected",
    f"{ENTRY}, limit: 7}}": "entry 1 has a field 'limit': expected some of name, key, sha256, in_flight",
    f"{ENTRY}, {BILLING}: 7}}": "entry 1 has a field text of 24 characters: expected some of",
    "- name: billing": "entry 1 (billing) has neither key nor sha256",
    "- {name: billing, key: }": "entry 1 (billing): its key is empty: expected text of 16 or more",
    "- {name: billing, key: ''}": "entry 1 (billing): its key is empty: expected text of 16 or more",
    "- {name: billing, key: short-secret}": "entry 1 (billing): its key is text of 12 characters: expected",
    "- {name: billing, key: 1234567890123456}": "its key is a int: expected text of 16 or more printable",
    f"- {{name: billing, key: {BILLING} two}}": "its key is text of 28 characters: expected",
    f"- {{name: billing, key: {BILLING}é}}": "its key is text of 25 characters: expected",
    "- {name: billing, sha256: 12ab}": "its sha256 is text of 4 characters: expected text of 64 digits",
    f"{ENTRY}, sha256: {sha256(CALLS)}}}": "its sha256 is not that of its key",
    f"{ENTRY}, in_flight: 0}}": "its in_flight is 0: expected a whole number of 1 or more",
    f"{ENTRY}, live_sessions: yes}}": "its live_sessions is True: expected a whole number",
    f"{ENTRY}, audio_seconds_per_minute: 1.5}}": "its audio_seconds_per_minute is 1.5: expected a whole number",
    f"{ENTRY}, in_flight: }}": "its in_flight is None: expected a whole number",
    f"{ENTRY}}}\n- {{name: billing, key: {CALLS}}}": "entry 2: its name is 'billing', as another entry's",
    f"{ENTRY}}}\n- {{name: b, sha256: {sha256(BILLING)}}}": "entry 2 (b): it has the key of billing",
    f"{ENTRY}, key: {CALLS}}}": "keys.yaml is not valid YAML at line 1, column 3, where a field is given twice",
    f"- name: billing\n  key: @{BILLING}": "keys.yaml is not valid YAML at line 2, column 8",
    f"- *{BILLING}": "keys.yaml is not valid YAML at line 1",
    "- !!map [a, b]": "keys.yaml is not valid YAML at line 1, column 3",
    "- !!timestamp x": "keys.yaml is not valid YAML",
    "\0": "keys.yaml is not valid YAML: expected a list of keys, in UTF-8",
}


@pytest.mark.parametrize(("content", "message"), WRONG.items())
def test_a_wrong_file_is_named_without_its_keys(content: str, message: str) -> None:
    with pytest.raises(KeysError) as raised:
        keys.parsed(content.encode(), "keys.yaml")
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not any(secret in str(raised.value) for secret in (BILLING, CALLS, "short-secret", "1234567890"))


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"VOXTRAL_SERVE_KEYS names .*, which cannot be read \(.+\): expected a YAML"):
        keys.content(tmp_path / name)


def state(**arguments: Any) -> Any:
    parallel = SimpleNamespace(_api_process_rank=0)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    return SimpleNamespace(args=SimpleNamespace(api_key=None, **arguments), engine_client=engine)


def test_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, with a file, with a wrong one, and with a key of vLLM's as well."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv(keys.VARIABLE, raising=False)
    assert access.ring(state(), 1) is None
    file = tmp_path / "keys.yaml"
    file.write_text(text())
    monkeypatch.setenv(keys.VARIABLE, str(file))
    ring = access.ring(state(), 1)
    assert ring is not None and list(ring.keys) == ["billing", "calls"]
    monkeypatch.setenv("VLLM_API_KEY", CALLS)
    with pytest.raises(KeysError, match="add that key to the file as an entry") as raised:
        access.ring(state(), 1)
    assert server.drifted(raised.value) == keys.BOTH
    monkeypatch.setenv("VLLM_API_KEY", "")
    file.write_text("a: b")
    with pytest.raises(KeysError, match="expected a list"):
        access.ring(state(), 1)


# ---- What keys use


def test_audio_is_refilled() -> None:
    usage = Usage()
    assert usage.spend("a", 60, 60, now=100) == 0
    assert usage.spend("a", 1, 60, now=100) == pytest.approx(1, abs=1e-3)
    assert usage.spend("a", 30, 60, now=120) == pytest.approx(10, abs=1e-3)
    assert usage.spend("a", 30, 60, now=130.1) == 0
    assert usage.spend("b", 60, 60, now=130.1) == 0  # of its own
    assert usage.spend("a", 70, 60, anyway=True, now=200.1) > 0
    assert usage.wait_s("a", 0, 60, now=200.1) == pytest.approx(10, abs=1e-3)
    assert usage.wait_s("a", 0, 120, now=200.1) == 0  # of a limit that was raised


def test_speech_at_its_own_pace_does_not_use_up_its_allowance() -> None:
    """A live session sends a second of audio each second, a little early or late."""
    usage = Usage()
    for second in range(3600):
        assert usage.spend("a", 1.0, 60, now=second + 0.4 * (second % 3)) == 0


PROCESSES, ROUNDS, MOST, WAIT_S = 4, 300, 3, 60


def _hold(file: str, process: int, most_seen: Any, lock: Any) -> None:
    usage = Usage(file, process)

    def take() -> bool:
        taken = usage.take("a", "in_flight", MOST)
        if taken:
            with lock:
                most_seen.value = max(most_seen.value, usage.held("a", "in_flight"))
            usage.give("a", "in_flight")
        return taken

    taken = False
    for _ in range(ROUNDS):
        taken |= take()
        usage.spend("a", 1.0, 1, anyway=True)
    # The others may wait for a core, holding theirs, for all of these rounds: they give them back.
    end = time.monotonic() + WAIT_S
    while not taken:
        assert time.monotonic() < end
        time.sleep(0.01)
        taken = take()


def test_a_limit_holds_over_all_processes(tmp_path: Path) -> None:
    file = str(tmp_path / "usage.sqlite")
    context = multiprocessing.get_context("fork")
    seen, lock = context.Value("i", 0), context.Lock()
    Usage(file, 0).close()
    workers = [context.Process(target=_hold, args=(file, number + 1, seen, lock)) for number in range(PROCESSES)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert [each.exitcode for each in workers] == [0] * PROCESSES
    assert 1 <= seen.value <= MOST
    usage = Usage(file, PROCESSES + 1)
    assert usage.held("a", "in_flight") == 0
    # One second a minute is refilled, so in the seconds of this test less than one
    assert usage._used("a", 1, time.monotonic()) == pytest.approx(PROCESSES * ROUNDS, abs=3)


def test_a_process_that_starts_anew_holds_nothing(tmp_path: Path) -> None:
    file = str(tmp_path / "usage.sqlite")
    first, second = Usage(file, 0), Usage(file, 1)
    assert first.take("a", "live_sessions", 2) and second.take("a", "live_sessions", 2)
    assert not second.take("a", "live_sessions", 2)
    first.close()
    again = Usage(file, 0)
    assert again.held("a", "live_sessions") == 1
    assert again.take("a", "live_sessions", 2)


def test_where_the_processes_share_their_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_file(1) == ":memory:"
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    assert Path(shared_file(4)).parent == tmp_path
    monkeypatch.delenv(DIRECTORY)
    with pytest.raises(KeyError):
        shared_file(4)


def test_a_count_costs_little(tmp_path: Path) -> None:
    usage, rounds = Usage(str(tmp_path / "usage.sqlite")), 500
    start = time.thread_time()
    for _ in range(rounds):
        usage.take("a", "in_flight", 1)
        usage.spend("a", 0.0, 60)
        usage.give("a", "in_flight")
    assert (time.thread_time() - start) / rounds < 5e-3


# ---- Reloads


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "keys.yaml"
    made.write_text(text())
    return made


def settle(ring: KeyRing) -> None:
    """Wait until all is counted."""
    ring._thread.submit(int).result()


@pytest.fixture
def ring(file: Path) -> Iterator[KeyRing]:
    made = KeyRing(file, Usage())
    yield made
    settle(made)
    made.usage.close()


def names(ring: KeyRing) -> list[str]:
    return list(ring.keys)


def test_a_changed_file_takes_over_once_it_is_settled(ring: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    one = f"- {{name: other, key: {BILLING}-2}}\n".encode()
    log.propagate = True
    with caplog.at_level(logging.INFO, log.name):
        ring.take(one[:-9])  # half of it is written
        ring.take(one)
        assert names(ring) == ["billing", "calls"]
        ring.take(one)
    assert names(ring) == ["other"]
    assert ring.find(f"Bearer {BILLING}".encode()) is None
    assert ring.find(f"bearer {BILLING}-2".encode()) == ring.keys["other"]


def test_a_bad_file_leaves_the_keys(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "error", lambda line, *values: lines.append(line % values))
    for _ in range(4):  # it is said once
        ring.take(b"- {name: a, key: short}")
    assert names(ring) == ["billing", "calls"]
    (line,) = lines
    assert line.startswith("the keys stay as they are: ") and "its key is text of 5 characters" in line
    for _ in range(2):
        ring.take(text().replace("calls", "talks").encode())
    assert names(ring) == ["billing", "talks"]


def test_the_file_is_watched(file: Path, ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring, "CHECK_S", 0.01)
    lines: list[str] = []
    monkeypatch.setattr(log, "error", lambda line, *values: lines.append(line % values))

    async def run() -> None:
        watcher = asyncio.create_task(ring.watch())
        file.rename(file.with_suffix(".old"))
        async with asyncio.timeout(30):
            while not lines:
                await asyncio.sleep(0.01)
            file.write_text(text().replace("calls", "talks"))
            while names(ring) != ["billing", "talks"]:
                await asyncio.sleep(0.01)
        watcher.cancel()

    asyncio.run(run())
    assert len(lines) == 1 and "cannot be read (No such file or directory): the keys stay" in lines[0]


def test_a_key_that_is_gone_or_changed(ring: KeyRing) -> None:
    billing, calls = ring.keys["billing"], ring.keys["calls"]
    for _ in range(2):
        ring.take(text(in_flight=1).replace("calls", "talks").encode())
    assert ring.valid(billing) and ring.valid(calls)  # with another limit, and by another name
    for _ in range(2):
        ring.take(text().replace(BILLING, f"{BILLING}-2").encode())
    assert not ring.valid(billing) and ring.valid(calls)


# ---- Counts are made in a thread


def test_the_event_loop_does_not_wait_for_the_database(file: Path, tmp_path: Path) -> None:
    """Which another process has locked for longer than a request takes."""
    database = str(tmp_path / "usage.sqlite")
    ring = KeyRing(file, Usage(database))
    key = ring.keys["billing"]._replace(in_flight=1)
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def run() -> tuple[int, float]:
        turns, worst_s = 0, 0.0

        async def hold() -> None:
            async with ring.place(key, "in_flight"):
                pass

        holding = asyncio.create_task(hold())
        while not holding.done():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            turns, worst_s = turns + 1, max(worst_s, time.monotonic() - before)
            if turns == 300:
                other.execute("ROLLBACK")
        await holding
        return turns, worst_s

    turns, worst_s = asyncio.run(run())
    assert turns >= 300 and worst_s < 1  # SQLite waits for up to 5 s
    settle(ring)
    assert ring.usage.held("billing", "in_flight") == 0


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("most", [None, 1])
def test_a_place_of_a_cancelled_request_is_given_back(
    most: int | None, locked: bool, file: Path, tmp_path: Path
) -> None:
    """Whether it waits for the place or has it."""
    database = str(tmp_path / "usage.sqlite")
    ring = KeyRing(file, Usage(database))
    key = ring.keys["billing"]._replace(in_flight=most)
    other = sqlite3.connect(database, isolation_level=None)

    async def run() -> None:
        if locked:
            other.execute("BEGIN IMMEDIATE")

        async def hold() -> None:
            async with ring.place(key, "in_flight"):
                await asyncio.Event().wait()

        holding = [asyncio.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0.1)
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
        if locked:
            other.execute("ROLLBACK")

    asyncio.run(run())
    settle(ring)
    assert ring.usage.held("billing", "in_flight") == 0


def test_a_count_that_fails_and_that_nobody_waits_for(ring: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    log.propagate = True
    key = ring.keys["billing"]._replace(audio_seconds_per_minute=1)
    ring.keys["billing"] = key
    ring.usage.close()
    ring.spend_anyway(key, 1.0, "speech")
    settle(ring)
    assert "what a key uses was not counted" in caplog.text


# ---- The guard


def keyed(tmp_path: Path, content: str | None = None, **more: Any) -> tuple[middleware.Guard, FakeApp]:
    file = tmp_path / "keys.yaml"
    file.write_text(content or text())
    return guarded(keys=KeyRing(file, Usage()), **more)


class Answer(FakeApp):
    """Keeps the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: dict[bytes, bytes] = {}
        self.body = b""

    async def send(self, message: Any) -> None:
        await super().send(message)
        self.answer |= dict(message.get("headers", ()))
        self.body += message.get("body", b"")

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def posted(made: middleware.Guard, *headers: tuple[bytes, bytes]) -> Answer:
    answer = Answer()
    asyncio.run(post(made, answer, *CLIP, *headers))
    return answer


def test_each_key_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, app = keyed(tmp_path)
    lines: list[tuple[str, Any]] = []
    monkeypatch.setattr(log, "info", lambda line, *values, extra: lines.append((line % values, extra)))
    count = Count()
    for key in (BILLING, CALLS):
        assert posted(made, bearer(key)).status == 200
    assert [line.rpartition(", ")[2] for line, _ in lines] == ["key billing", "key calls"]
    assert not any(secret in str(lines) for secret in (BILLING, CALLS))
    assert count.grown("key_requests_total") == {f"{{key={key},status=200}}": 1 for key in ("billing", "calls")}
    assert count.grown("key_audio_seconds_total") == {
        f"{{key={key},kind=upload}}": pytest.approx(SECONDS) for key in ("billing", "calls")
    }
    assert len(app.engine.ids) == 2


@pytest.mark.parametrize("headers", [(), (bearer("unknown"),), ((b"authorization", BILLING.encode()),)])
def test_another_key_is_refused(headers: tuple[tuple[bytes, bytes], ...], tmp_path: Path) -> None:
    made, app = keyed(tmp_path)
    answer = posted(made, *headers)
    assert (answer.status, answer.error["code"], app.engine.ids) == (401, "invalid_api_key", [])
    assert answer.answer[b"www-authenticate"] == b"Bearer"


def test_the_limit_of_requests_is_each_key_s_own(tmp_path: Path) -> None:
    made, app = keyed(tmp_path, text(in_flight=1))
    ring = made.facts.keys if made.facts else None
    assert ring is not None
    count = Count()

    async def both() -> tuple[Answer, Answer]:
        refused, other = Answer(), Answer()
        async with ring.place(ring.keys["billing"], "in_flight"):
            await post(made, refused, *CLIP, bearer(BILLING))
            await post(made, other, *CLIP, bearer(CALLS))
        return refused, other

    refused, other = asyncio.run(both())
    assert other.status == 200
    assert (refused.status, refused.error["code"], refused.error["type"]) == (
        *(429, "rate_limit_exceeded"),
        "rate_limit_error",
    )
    assert refused.error["message"].startswith("the limit in_flight of the key billing is reached, which is 1")
    assert refused.answer[b"retry-after"] == b"1"
    assert count.grown("key_refused_total") == {"{key=billing,limit=in_flight}": 1}
    assert posted(made, bearer(BILLING)).status == 200
    settle(ring)
    assert ring.usage.held("billing", "in_flight") == 0
    assert count.grown("key_requests_in_flight") == {}
    assert len(app.engine.ids) == 2


def test_seconds_of_audio_a_minute(tmp_path: Path) -> None:
    """Two clips of 2 s fit into 5 s; the third is refused before vLLM sees it."""
    made, app = keyed(tmp_path, text(audio_seconds_per_minute=5))
    answers = [posted(made, bearer(BILLING)) for _ in range(3)]
    assert [each.status for each in answers] == [200, 200, 429] and len(app.engine.ids) == 2
    message = answers[-1].error["message"]
    assert message.startswith("the limit audio_seconds_per_minute of the key billing is reached, which is 5")
    retry_s = int(answers[-1].answer[b"retry-after"])
    assert 1 <= retry_s <= 12 and message.endswith(f"Try again in {retry_s} s")  # 1 s is missing, at 5 s a minute
    assert posted(made, bearer(CALLS)).status == 200


def test_a_clip_that_no_waiting_lets_pass(tmp_path: Path) -> None:
    made, app = keyed(tmp_path, text(audio_seconds_per_minute=1))
    answer = posted(made, bearer(BILLING))
    assert (answer.status, answer.error["code"], app.engine.ids) == (400, "clip_too_long", [])
    assert "2.00 s of audio at once are more than the limit audio_seconds_per_minute" in answer.error["message"]


def test_a_line_of_json_has_the_name(tmp_path: Path) -> None:
    made, _ = keyed(tmp_path)
    handler, level = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        posted(made, bearer(CALLS))
        posted(made)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert [line.get("key") for line in handler.lines if "status" in line] == ["calls", None]


def test_the_probe_s_key() -> None:
    given = {"VLLM_API_KEY": "a", "OPENAI_API_KEY": "b"}
    assert probe.api_key(given) == "a"
    assert probe.api_key({**given, "VOXTRAL_SERVE_KEYS": "keys.yaml"}) == "b"


# ---- /metrics


def scraped(made: middleware.Guard, *headers: tuple[bytes, bytes]) -> Answer:
    from prometheus_client import make_asgi_app

    made.app = make_asgi_app()
    answer = Answer()
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": headers, "query_string": b""}
    asyncio.run(made(scope, asyncio.Event().wait, answer.send))
    return answer


OPEN_METRICS = (b"accept", b"application/openmetrics-text; version=1.0.0")


@pytest.mark.parametrize("form", [(), (OPEN_METRICS,)])
@pytest.mark.parametrize("key", [(), (bearer("unknown"),)])
def test_metrics_without_a_key_name_nobody(
    key: tuple[tuple[bytes, bytes], ...], form: tuple[tuple[bytes, bytes], ...], tmp_path: Path
) -> None:
    made, _ = keyed(tmp_path)
    posted(made, bearer(BILLING))
    answer = scraped(made, *key, *form, (b"accept-encoding", b"gzip"))
    body = answer.body.decode()
    assert answer.status == 200 and b"content-encoding" not in answer.answer
    assert answer.answer[b"content-length"] == b"%d" % len(answer.body)
    assert "billing" not in body and "voxtral_serve_key_" not in body
    whole = scraped(made, bearer(CALLS), *form).body.decode()
    assert 'voxtral_serve_key_requests_total{key="billing",status="200"}' in whole
    families = [line for line in whole.splitlines() if line.startswith("# TYPE ") and "_serve_key_" not in line]
    assert len(families) > 5
    assert [line for line in body.splitlines() if line.startswith("# TYPE ")] == families


def test_metrics_with_a_key_may_be_compressed(tmp_path: Path) -> None:
    made, _ = keyed(tmp_path)
    answer = scraped(made, bearer(BILLING), (b"accept-encoding", b"gzip"))
    assert b"voxtral_serve_key_" in gzip.decompress(answer.body)


# ---- Live clients


def events(sent: list[Any]) -> list[dict[str, Any]]:
    return [json.loads(message["text"]) for message in sent if message["type"] == "websocket.send"]


async def spoken(made: middleware.Guard, seconds: float) -> list[Any]:
    """What a live client of BILLING gets that sends so much audio at once, in parts of 0.5 s, and waits for the end."""
    part = {"type": "input_audio_buffer.append", "audio": "AAAA" * (SHAPE.rate_hz // 3 + 1)}
    said = [
        *({"type": "session.update", "model": "voxtral"}, {"type": "input_audio_buffer.commit"}),
        *[part] * round(2 * seconds),
    ]
    inbox = [{"type": "websocket.connect"}, *({"type": "websocket.receive", "text": json.dumps(e)} for e in said)]
    sent, closed = [], asyncio.Event()

    async def receive() -> Any:
        if inbox:
            return inbox.pop(0)
        await closed.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "websocket.close":
            closed.set()

    scope = {"type": "websocket", "path": REALTIME, "headers": [bearer(BILLING)], "query_string": b""}
    await asyncio.wait_for(made({**scope, "subprotocols": []}, receive, send), 60)
    return sent


def test_a_session_over_its_allowance_is_told_and_closed(tmp_path: Path) -> None:
    """With the text of the audio so far."""

    async def run() -> tuple[list[Any], KeyRing, dict[str, float]]:
        count = Count()
        made, _ = keyed(tmp_path, text(audio_seconds_per_minute=4), sessions=service(FakeEngine()))
        sent = await spoken(made, 10)
        assert made.facts is not None and made.facts.keys is not None
        return sent, made.facts.keys, count.grown("key_audio_seconds_total") | count.grown("live_sessions_ended")

    sent, ring, grown = asyncio.run(run())
    *_, done, error = events(sent)
    assert done["type"] == "transcription.done" and done["text"]
    assert (error["type"], error["code"]) == ("error", "rate_limit_exceeded")
    assert error["error"].startswith("the limit audio_seconds_per_minute of the key billing is reached, which is 4")
    assert sent[-1]["code"] == 1013
    assert grown == {
        "_total{reason=rate_limited}": 1,
        "{key=billing,kind=live}": pytest.approx(4, abs=0.6),
    }
    settle(ring)
    assert ring.usage.held("billing", "live_sessions") == 0


@pytest.mark.parametrize("path", [REALTIME, MISTRAL])
def test_live_sessions_of_a_key(path: str, tmp_path: Path) -> None:
    async def run() -> tuple[list[Any], list[Any], dict[str, float]]:
        made, _ = keyed(tmp_path, text(live_sessions=1), sessions=service(FakeEngine()))
        assert made.facts is not None and made.facts.keys is not None
        ring, count = made.facts.keys, Count()
        async with ring.place(ring.keys["billing"], "live_sessions"):
            refused = await handshaken(made, path, "model=voxtral", authorization=f"Bearer {BILLING}")
            other = await handshaken(made, path, "model=voxtral", authorization=f"Bearer {CALLS}")
        return refused, other, count.grown("key_refused_total") | count.grown("live_refused_total")

    refused, other, grown = asyncio.run(run())
    assert refused[0]["type"] == "websocket.accept"
    assert "the limit live_sessions of the key billing is reached, which is 1" in refused[-2]["text"]
    assert "rate_limit_exceeded" in refused[-2]["text"] or path == MISTRAL
    assert (refused[-1]["type"], refused[-1]["code"]) == ("websocket.close", 1013)
    assert [message["type"] for message in other] == ["websocket.accept", "websocket.send"]
    assert grown == {"{key=billing,limit=live_sessions}": 1, "{code=rate_limit_exceeded}": 1}


def test_a_key_as_a_subprotocol(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        made, _ = keyed(tmp_path, sessions=service(FakeEngine()))
        return await handshaken(made, REALTIME, "", ("realtime", f"openai-insecure-api-key.{CALLS}"))

    accept, *_ = asyncio.run(run())
    assert accept == {"type": "websocket.accept", "subprotocol": "realtime"} | accept


def test_audio_that_the_guard_cannot_count(tmp_path: Path) -> None:
    """vLLM's own live sessions are not for a key whose audio is limited."""
    made, _ = keyed(tmp_path, text(audio_seconds_per_minute=60), live=True)
    sent = asyncio.run(handshaken(made, REALTIME, authorization=f"Bearer {BILLING}"))
    assert sent[0]["status"] == 404
    assert "no live sessions for the key billing, which has audio_seconds_per_minute" in sent[1]["body"].decode()


def test_a_revoked_key_loses_vllms_own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a server with live sessions are LiveService.sweep's."""
    monkeypatch.setattr(transcription, "CHECK_S", 0.01)
    ended = []

    async def session(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "websocket.accept"})
            await asyncio.Event().wait()
        finally:
            ended.append(scope["path"])

    async def run() -> list[Any]:
        made, _ = keyed(tmp_path, live=True)
        made.app = session
        ring = made.facts.keys if made.facts else None
        assert ring is not None
        task = asyncio.create_task(handshaken(made, REALTIME, authorization=f"Bearer {BILLING}"))
        await asyncio.sleep(0.1)
        assert not task.done()
        for _ in range(2):
            ring.take(text().replace(BILLING, f"{BILLING}-2").encode())
        return await asyncio.wait_for(task, 30)

    _, close = asyncio.run(run())
    assert (close["type"], close["code"], close["reason"]) == ("websocket.close", 1008, "the key is no longer valid")
    assert ended == [REALTIME]


# ---- The key of vLLM


@pytest.mark.parametrize("named", [["first", "second"], None])
def test_vllm_s_own_key_opens(named: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of --api-key, or VLLM_API_KEY, by vLLM's own rule for the header."""
    from starlette.datastructures import Headers

    monkeypatch.setenv("VLLM_API_KEY", "third")
    verified = access.verify(SimpleNamespace(args=SimpleNamespace(api_key=named)))
    assert verified is not None
    opens = {"first", "second"} if named else {"third"}
    for key in ("first", "second", "third", "fourth", ""):
        assert verified(Headers({"Authorization": f"bearer {key}"})) == (key in opens)
        assert not verified(Headers({"Authorization": f"Basic {key}"}))
    assert not verified(Headers({}))
    monkeypatch.delenv("VLLM_API_KEY")
    assert access.verify(SimpleNamespace(args=SimpleNamespace(api_key=None))) is None
