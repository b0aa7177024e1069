"""Live sessions of an API process, with an engine that computes nothing: rows, cuts, limits, and ends of all kinds."""

import asyncio
import base64
import itertools
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from livefakes import RATE, SHAPE, FakeClient, FakeEngine, chunks, noise, service, speech, tokens_of

from voxtral_serve.engine.session import NAME, SessionShape, least_positions
from voxtral_serve.guard.live import cuts
from voxtral_serve.guard.live import link as links
from voxtral_serve.guard.live import service as services
from voxtral_serve.guard.live.items import TurnEnd
from voxtral_serve.guard.live.link import LinkError
from voxtral_serve.guard.live.metrics import metrics
from voxtral_serve.guard.live.session import MOST_PARTS, LiveSession

pytestmark = pytest.mark.usefixtures("turned_clock")

SHORT = 256  # positions of a context: cuts from 15.5 to 20 s


class Run:
    """What became of one session: the audio of each request, its text, its tokens."""

    def __init__(self) -> None:
        self.text, self.tokens = "", 0
        self.parts: list[bytes] = []
        self.session: LiveSession
        self.detector: Any


async def transcribed(
    engine: FakeEngine, pieces: Any, silent_s: float = 1.0, backlog_s: float = 60, delay_ms: int | None = None
) -> Run:
    live, run = service(engine, silent_s, backlog_s=backlog_s), Run()
    session = run.session = live.session(lambda why: pytest.fail(why), delay_ms=delay_ms)
    run.detector = live.detector

    async def read() -> None:
        async for text, count in session.deltas():
            run.text += text
            run.tokens += count

    await session.begin()
    reader = asyncio.ensure_future(read())
    for piece in pieces:
        await session.feed(piece)
        await asyncio.sleep(0)
    session.end()
    async with asyncio.timeout(20):
        await reader
    session.close()
    await asyncio.sleep(0.01)
    assert not live.link.on_refused and not live.link._audio
    run.parts = [bytes(engine.audio[name]) for name in engine.opened]
    assert engine.closed == set(engine.opened)
    return run


# ---- Rows and tokens


@pytest.mark.parametrize("samples", [1, 39, 1280, 1281, 8999, 9000, 9001, 16000, 100_001])
@pytest.mark.parametrize("piece", [1, 160, 1280, 16000, 10**6])
def test_a_session_has_the_tokens_of_an_upload(samples: int, piece: int) -> None:
    if samples // piece > 10_000:
        pytest.skip("the same as less of it")
    engine, pcm = FakeEngine(), noise(samples / RATE)
    run = asyncio.run(transcribed(engine, chunks(pcm, itertools.repeat(piece))))
    assert run.parts == [pcm]
    assert run.tokens == run.session.tokens == tokens_of(samples)
    assert run.text == "".join(f" w{n}" for n in range(tokens_of(samples)) if n % 5 == 4)
    assert (run.session.rollovers, engine.aborted) == (0, [])


def test_an_empty_session_needs_no_request() -> None:
    engine = FakeEngine()
    run = asyncio.run(transcribed(engine, []))
    assert (run.text, run.tokens, engine.requests) == ("", 0, [])
    assert engine.ended == set(engine.opened) == engine.closed


def test_a_request_begins_when_its_prompt_is_there() -> None:
    async def run() -> None:
        engine = FakeEngine()
        session = service(engine).session(lambda why: pytest.fail(why))
        await session.begin()
        deltas = session.deltas()
        first = asyncio.ensure_future(anext(deltas))
        await session.feed(bytes(2 * (SHAPE.ready_samples - 1)))
        await asyncio.sleep(0.02)
        assert engine.requests == []
        await session.feed(bytes(2))
        assert await asyncio.wait_for(first, 1) == ("", 1)
        await deltas.aclose()
        session.close()

    asyncio.run(run())


def test_audio_of_many_sessions_goes_in_one_call() -> None:
    async def run() -> None:
        engine = FakeEngine(most=100)
        live = service(engine)
        live.link._tick_s = 0.02
        sessions = [live.session(lambda why: pytest.fail(why)) for _ in range(50)]
        await asyncio.gather(*(session.begin() for session in sessions))
        assert len(engine.calls) == 1
        for _ in range(3):
            for session in sessions:
                await session.feed(bytes(200))
        await asyncio.sleep(0.05)
        assert len(engine.calls) == 2
        assert [(what, len(pcm)) for what, _, pcm in engine.calls[1]] == [("audio", 600)] * 50
        for session in sessions:
            session.close()

    asyncio.run(run())


def test_eos_before_the_audios_end_is_a_pause_and_after_it_the_end() -> None:
    engine, pcm = FakeEngine(), noise(3)
    engine.eos = {4, 33}
    # Rows of 3 s: 32 + 38. The token that has all of them is number 70 - 39 = 31.
    run = asyncio.run(transcribed(engine, [pcm]))
    assert run.tokens == 34 < tokens_of(3 * RATE)
    assert engine.aborted == engine.opened


# ---- Cuts


def check_parts(run: Run, pcm: bytes, positions: int, shape: SessionShape = SHAPE) -> None:
    assert b"".join(run.parts) == pcm
    assert len(run.parts) == run.session.rollovers + 1
    assert run.session.tokens == sum(tokens_of(len(part) // 2, shape) for part in run.parts)
    # As many as without cuts, which are not at whole tokens. The last request's first is that of the audio it is in.
    assert abs(run.tokens - tokens_of(len(pcm) // 2, shape)) <= 1
    last = len(run.parts[-1]) // 2
    assert run.tokens == (len(pcm) // 2 - last) // shape.samples + tokens_of(last, shape)
    for part in run.parts:
        assert shape.total_rows(len(part) // 2) < positions  # its last token has a position, too


@pytest.mark.parametrize("seed", range(6))
def test_a_long_session_loses_and_doubles_nothing(seed: int) -> None:
    """Pauses at random, of random lengths, in chunks of random sizes."""
    rng = random.Random(seed)
    seconds = 90.0
    pauses = list(
        itertools.takewhile(lambda at: at < seconds, itertools.accumulate(rng.uniform(1, 9) for _ in range(99)))
    )
    pcm = speech(seconds, pauses, rng.choice([0.12, 0.35, 0.8]))
    engine = FakeEngine(positions=SHORT, most=1)  # it never has two places
    sizes = (rng.choice([1, 100, 1280, 1600, 4001, 50_000]) for _ in itertools.count())
    run = asyncio.run(transcribed(engine, chunks(pcm, sizes)))
    assert run.session.rollovers >= 4
    check_parts(run, pcm, SHORT)
    texts = ["".join(f" w{n}" for n in range(tokens_of(len(part) // 2)) if n % 5 == 4) for part in run.parts]
    assert run.text == "".join(texts)
    assert engine.requests == engine.opened  # A's text before B's


def test_a_cut_lies_in_a_pause() -> None:
    points = cuts.CutPoints.of(SHAPE, SHORT)
    late = points.soft / RATE
    pcm = speech(40, [5, late - 1, late + 0.7], 0.5)
    run = asyncio.run(transcribed(FakeEngine(positions=SHORT), chunks(pcm, itertools.repeat(1600))))
    cut = len(run.parts[0]) / 2 / RATE
    assert late + 0.7 + 0.28 <= cut <= late + 1.2
    check_parts(run, pcm, SHORT)


@pytest.mark.parametrize("piece", [37, 1280, 16000, 10**6])
def test_cuts_do_not_depend_on_the_chunks(piece: int) -> None:
    pcm = speech(70, [17, 17.5, 36, 55], 0.4)
    expected = asyncio.run(transcribed(FakeEngine(positions=SHORT), [pcm])).parts
    run = asyncio.run(transcribed(FakeEngine(positions=SHORT), chunks(pcm, itertools.repeat(piece))))
    assert [len(part) for part in run.parts] == [len(part) for part in expected]


def test_a_pause_that_is_none_is_not_cut() -> None:
    """The levels say so, and the detector of speech does not."""
    points = cuts.CutPoints.of(SHAPE, SHORT)
    pcm = speech(30, [points.soft / RATE + 0.5], 0.6)
    run = asyncio.run(transcribed(FakeEngine(positions=SHORT), [pcm], silent_s=0.0))
    assert run.detector.asked >= 2
    assert len(run.parts[0]) / 2 > points.tight
    check_parts(run, pcm, SHORT)


def test_without_a_pause_the_cut_is_where_it_is_quietest() -> None:
    points = cuts.CutPoints.of(SHAPE, SHORT)
    samples = np.frombuffer(noise(30), "<i2").astype(np.float64).reshape(-1, cuts.FRAME)
    samples[(np.arange(len(samples)) // 2) % 2 == 1] *= 0.5  # never quiet for 100 ms
    end = points.most // cuts.FRAME
    samples[end - 6 : end - 4] *= 0.1
    pcm = samples.astype("<i2").tobytes()
    engine = FakeEngine(positions=SHORT)
    run = asyncio.run(transcribed(engine, chunks(pcm, itertools.repeat(1600))))
    cut = len(run.parts[0]) // 2
    assert points.most - 3200 <= cut <= points.most - 1280
    check_parts(run, pcm, SHORT)


def test_audio_is_held_back_near_the_end_only() -> None:
    """What the engine has, after each 80 ms, of what has arrived."""

    async def run() -> None:
        points = cuts.CutPoints.of(SHAPE, SHORT)
        engine = FakeEngine(positions=SHORT)
        session = service(engine).session(lambda why: pytest.fail(why))
        await session.begin()
        pcm, sent = noise(points.most / RATE), 0
        for piece in chunks(pcm, itertools.repeat(1280)):
            await session.feed(piece)
            sent += len(piece) // 2
            held = sent - session.samples
            assert held == (0 if sent <= points.tight else min(6400, sent - points.tight)) or session.rollovers
        assert session.rollovers == 1  # at the very last position
        session.close()

    asyncio.run(run())


def test_texts_of_two_requests_are_two_words() -> None:
    pcm = speech(30, [17], 0.5)

    class Unspaced(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                output.outputs[0].text = output.outputs[0].text.strip()
                yield output

    run = asyncio.run(transcribed(Unspaced(positions=SHORT, spoken=1000), [pcm]))
    assert run.text == ""
    run = asyncio.run(transcribed(Unspaced(positions=SHORT, spoken=150), [pcm, noise(20)]))
    assert run.text == "w149 w149 w149"


def test_a_context_that_is_too_short_says_so() -> None:
    least = least_positions(SHAPE)
    points = cuts.CutPoints.of(SHAPE, least)
    assert SHAPE.ready_samples <= points.watch < points.soft < points.tight < points.most
    with pytest.raises(
        cuts.ContextError, match=f"gives a request {least - 1} positions, and live sessions need at least {least}"
    ):
        cuts.CutPoints.of(SHAPE, least - 1)


# ---- The delay


@pytest.mark.parametrize(("delay_ms", "delay"), [(None, 6), (80, 1), (240, 3), (480, 6), (960, 12), (2400, 30)])
def test_a_session_has_its_delay_in_each_of_its_requests(delay_ms: int | None, delay: int) -> None:
    engine, pcm, shape = FakeEngine(positions=SHORT), noise(45), SHAPE.with_delay(delay)
    run = asyncio.run(transcribed(engine, chunks(pcm, itertools.repeat(1600)), delay_ms=delay_ms))
    assert run.session.rollovers >= 2
    check_parts(run, pcm, SHORT, shape)
    assert [engine.shapes[name] for name in engine.opened] == [shape] * len(run.parts)
    assert {engine.params[name].max_tokens for name in engine.opened} == {SHORT - shape.prompt}


@pytest.mark.parametrize("delay_ms", [80, 2400])
def test_a_request_begins_and_eos_ends_it_by_its_own_delay(delay_ms: int) -> None:
    engine, pcm, shape = FakeEngine(), noise(3), SHAPE.with_delay_ms(delay_ms)
    first = shape.rows(3 * RATE) - shape.prompt  # of the tokens that have heard all whole rows of the audio
    engine.eos = {0, first + 2}
    run = asyncio.run(transcribed(engine, chunks(pcm, itertools.repeat(100)), delay_ms=delay_ms))
    assert run.tokens == first + 3 < tokens_of(3 * RATE, shape)


def test_sessions_of_several_delays_at_a_time() -> None:
    async def run() -> None:
        engine, pcm = FakeEngine(), noise(4)
        live = service(engine)
        delays = [80, None, 2400]
        sessions = [live.session(lambda why: pytest.fail(why), delay_ms=delay_ms) for delay_ms in delays]
        await asyncio.gather(*(session.begin() for session in sessions))

        async def tokens(session: LiveSession) -> int:
            return sum([count async for _, count in session.deltas()])

        readers = [asyncio.ensure_future(tokens(session)) for session in sessions]
        for piece in chunks(pcm, itertools.repeat(1280)):
            for session in sessions:
                await session.feed(piece)
        for session in sessions:
            session.end()
        shapes = [SHAPE.with_delay_ms(delay_ms) for delay_ms in delays]
        assert await asyncio.gather(*readers) == [tokens_of(4 * RATE, shape) for shape in shapes]
        for session in sessions:
            session.close()

    asyncio.run(run())


@pytest.mark.parametrize("delay_ms", [0, -80, 79, 81, 500, 2480, 480.0, "480", True])
def test_a_delay_that_is_not_valid(delay_ms: Any) -> None:
    live = service(FakeEngine())
    with pytest.raises(ValueError, match=rf"^a delay of {delay_ms!r} ms: expected a multiple of 80 from 80 to 2400$"):
        live.session(lambda why: pytest.fail(why), delay_ms=delay_ms)
    assert not live.link.sessions


def test_a_delay_that_the_context_is_too_short_for() -> None:
    live = service(FakeEngine(positions=least_positions(SHAPE)))
    live.session(lambda why: pytest.fail(why))
    least = least_positions(SHAPE.with_delay_ms(2400))
    with pytest.raises(cuts.ContextError, match=f"live sessions need at least {least} with a delay of 2400 ms$"):
        live.session(lambda why: pytest.fail(why), delay_ms=2400)


# ---- The backlog, the lag


def test_a_full_backlog_is_not_added_to() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.paused = True
        client = FakeClient(service(engine, backlog_s=2))
        client.begin()
        client.speak(noise(6))
        await asyncio.sleep(0.1)
        (name,) = engine.opened
        assert len(engine.audio[name]) / 2 == 2 * RATE
        assert client.read == 3 + 75  # the handshake, two events and all appends: the socket is always read
        engine.paused = False
        engine.step()
        client.end()
        done = await client.until("done")
        assert done["usage"]["completion_tokens"] == tokens_of(6 * RATE)
        assert bytes(engine.audio[name]) == noise(6)
        client.leave()
        await client.gone()

    asyncio.run(run())


def test_lag_is_counted_from_the_arrival_of_the_last_sample_that_a_token_needs() -> None:
    async def run() -> None:
        engine = FakeEngine()
        session = service(engine).session(lambda why: pytest.fail(why))
        await session.begin()
        reader = asyncio.ensure_future(anext(deltas := session.deltas()))
        await session.feed(bytes(2 * (SHAPE.ready_samples - 10)))
        await asyncio.sleep(0.5)
        await session.feed(bytes(20))
        await reader
        assert session.worst_lag_s == 0  # of the last ten samples, and not of the first
        engine.paused = True
        await session.feed(bytes(2 * SHAPE.samples))
        reader = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0.15)
        engine.paused = False
        engine.step()
        await reader
        assert session.worst_lag_s == pytest.approx(0.15)
        await deltas.aclose()
        session.close()

    asyncio.run(run())


# ---- The socket


def test_a_text_after_the_other() -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = FakeClient(service(engine))
        client.begin()
        client.speak(noise(2))
        client.end()
        first = await client.until("done")
        assert list(client.events[0]) == ["type", "id", "created"]
        client.speak(noise(3))  # before its commit
        client.send("input_audio_buffer.commit")
        client.end()
        second = await client.until("done", 2)
        for done, seconds in ((first, 2), (second, 3)):
            tokens = tokens_of(seconds * RATE)
            assert done["usage"] == {
                "prompt_tokens": 39,
                "total_tokens": 39 + tokens,
                "completion_tokens": tokens,
                "prompt_tokens_details": None,
            }
        deltas = [event["delta"] for event in client.events if event["type"] == "transcription.delta"]
        assert len(deltas) == tokens_of(2 * RATE) + tokens_of(3 * RATE)
        assert "".join(deltas) == first["text"] + second["text"] != ""
        client.leave()
        await client.gone()
        assert client.socket.report().startswith(f"5.00 s of audio, {len(deltas)} tokens, 2 texts, worst lag ")
        assert client.socket.report().endswith(" 0 rollovers, ended: done")

    asyncio.run(run())


def test_a_final_commit_without_audio_has_an_empty_text() -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = FakeClient(service(engine))
        client.begin()
        client.end()
        done = await client.until("done")
        assert (done["text"], done["usage"]["total_tokens"], engine.requests) == ("", 0, [])
        client.leave()
        await client.gone()

    asyncio.run(run())


PCM = base64.b64encode(bytes(2)).decode()
APPEND = '{"type":"input_audio_buffer.append"'


@pytest.mark.parametrize(
    ("event", "code"),
    [("{", "invalid_json"), (APPEND + ',"audio":"' + "A" * (15 * 2**20 + 4) + '"}', "invalid_audio")],
    ids=["small", "large"],
)
def test_a_wrong_event_is_told_and_the_session_goes_on(event: str, code: str) -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = FakeClient(service(engine))
        client.begin()
        client.speak(noise(1))
        client.raw(event)
        assert (await client.until("error"))["code"] == code
        client.speak(noise(1))
        client.end()
        assert (await client.until("done"))["usage"]["completion_tokens"] == tokens_of(2 * RATE)
        client.leave()
        await client.gone()
        assert client.closed is None

    asyncio.run(run())


def test_a_large_append_is_as_good_as_small_ones() -> None:
    async def run() -> None:
        engine, pcm = FakeEngine(), noise(20)
        client = FakeClient(service(engine))
        client.begin()
        client.speak(pcm, len(pcm))
        client.end()
        await client.until("done")
        assert bytes(engine.audio[engine.opened[0]]) == pcm
        client.leave()
        await client.gone()

    asyncio.run(run())


def test_audio_before_the_commit_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voxtral_serve.guard.live.conversation.MOST_EARLY", 64000)

    async def run() -> None:
        client = FakeClient(service(FakeEngine()))
        client.speak(noise(2), 32000)
        client.speak(noise(1), 32000)
        assert "wait for input_audio_buffer.commit" in (await client.until("error"))["error"]
        client.begin()
        client.end()
        assert (await client.until("done"))["usage"]["completion_tokens"] == tokens_of(2 * RATE)
        client.leave()
        await client.gone()

    asyncio.run(run())


# ---- Ends of all kinds


def ended(reason: str) -> float:
    value: float = metrics().ended.labels(reason)._value.get()
    return value


def test_a_refused_client_is_told_how_often_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("voxtral_serve.guard.live.link.time", SimpleNamespace(monotonic=lambda: now))

    async def run() -> None:
        nonlocal now
        link = FakeEngine().link()
        assert link.retry_s() == 10  # none has ended
        for _ in range(3):
            link.left()
            now += 4
        for later_s, retry_s in ((0, 4), (1, 5), (1000, 60)):
            now += later_s
            assert link.retry_s() == retry_s
        for _ in range(20):
            link.left()
        assert link.retry_s() == 1

    asyncio.run(run())


def test_too_many_sessions_are_told_at_once_and_others_stay() -> None:
    async def run() -> None:
        engine, before = FakeEngine(most=2), ended("refused")
        live = service(engine)
        clients = [FakeClient(live) for _ in range(3)]
        for client in clients:
            client.begin()
            await client.until("created")
            await asyncio.sleep(0.01)
        assert await clients[2].gone() == (1013, clients[2].events[-1]["error"])
        error = clients[2].events[-1]
        assert error["code"] == "too_many_sessions"
        assert error["error"] == "max_live_sessions is 2: no place for another live session, try again in 10 s"
        assert error["retry_after"] == 10
        assert ended("refused") == before + 1
        for client in clients[:2]:
            client.speak(noise(1))
            client.end()
            await client.until("done")
            client.leave()
            await client.gone()
        again = FakeClient(live)
        again.begin()
        again.end()
        await again.until("done")
        again.leave()
        await again.gone()

    asyncio.run(run())


@pytest.mark.parametrize("begun", [False, True])
def test_an_idle_client_is_told(begun: bool) -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine, idle_s=5)
        client = FakeClient(live)
        if begun:
            client.begin()
            client.speak(noise(1))
            await client.until("delta")
        await client.until("created")
        await asyncio.sleep(0.02)
        live.sweep(time.monotonic() + 4.5)
        assert live.sockets
        live.sweep(time.monotonic() + 5.5)
        assert await client.gone() == (1008, "no audio and no event for 5 s")
        assert client.events[-1]["code"] == "idle_timeout"
        await asyncio.sleep(0.02)
        assert not live.sockets and engine.closed == set(engine.opened)
        assert engine.aborted == engine.opened

    asyncio.run(run())


@pytest.mark.parametrize("state", ["speaking", "between"])
def test_a_session_that_is_too_long_is_ended_with_its_text(state: str) -> None:
    async def run() -> None:
        live = service(FakeEngine(), session_s=20)
        client = FakeClient(live)
        client.begin()
        client.speak(noise(2))
        await client.until("delta", 5)
        if state == "between":
            client.end()
            await client.until("done")
        live.sweep(client.socket.opened + 19)
        await asyncio.sleep(0.01)
        assert client.closed is None
        live.sweep(client.socket.opened + 21)
        live.sweep(client.socket.opened + 22)
        words = "the session has had its 20 s (VOXTRAL_SERVE_LIVE_SESSION_S): connect again"
        assert await client.gone() == (1008, words)
        assert client.kinds()[-2:] == ["done", "error"]
        assert client.events[-1] == {"type": "error", "error": words, "code": "session_expired"}
        assert client.events[-2]["usage"]["completion_tokens"] == tokens_of(client.socket.conversation.samples)
        assert client.socket.reason == "expired"

    asyncio.run(run())


def test_a_client_that_waits_for_its_text_is_not_idle() -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine, idle_s=5)
        client = FakeClient(live)
        engine.paused = True
        client.begin()
        client.speak(noise(1))
        client.end()
        await asyncio.sleep(0.05)
        live.sweep(time.monotonic() + 6)
        await asyncio.sleep(0.01)
        assert client.closed is None
        live.sweep(time.monotonic() + services.STALLED_S + 1)
        assert await client.gone() == (1011, "the engine has not answered for 60 s")

    asyncio.run(run())


def test_a_client_that_does_not_read_is_ended() -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine)
        client, other = FakeClient(live), FakeClient(live)
        for each in (client, other):
            each.begin()
            await each.until("created")
        client.blocked = True
        client.speak(noise(2))
        await asyncio.sleep(0.05)
        live.sweep(time.monotonic() + services.UNREAD_S + 1)
        await client.gone()
        assert client.socket.reason == "unread"
        assert len(engine.closed) == 1
        other.speak(noise(1))
        other.end()
        await other.until("done")
        other.leave()
        await other.gone()

    asyncio.run(run())


@pytest.mark.parametrize("state", ["connected", "begun", "speaking", "waiting", "ended", "full"])
def test_a_client_that_leaves_frees_its_session_at_once(state: str) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.paused = state == "waiting"
        live = service(engine, backlog_s=60 if state != "full" else 2)
        sessions = metrics().sessions._value.get()
        client = FakeClient(live)
        if state != "connected":
            client.begin()
        if state in ("speaking", "waiting", "ended"):
            client.speak(noise(2))
        if state == "ended":
            client.end()
            await client.until("done")
        if state == "full":
            engine.paused = True
            client.speak(noise(3))
        await client.until("created")
        await asyncio.sleep(0.02)
        client.leave()
        await client.gone()
        await asyncio.sleep(0.02)
        assert not live.sockets and engine.closed == set(engine.opened)
        assert metrics().sessions._value.get() == sessions
        assert client.socket.reason == ("done" if state in ("connected", "ended") else "client")
        assert not live.link.on_refused and not live.link._opening

    asyncio.run(run())


def test_a_client_that_leaves_between_two_requests_leaves_nothing() -> None:
    async def run() -> None:
        engine = FakeEngine(positions=SHORT)
        live = service(engine)
        client = FakeClient(live)
        client.begin()
        client.speak(noise(15))
        await client.until("delta")
        engine.paused = True
        client.speak(noise(10))
        while not (client.socket.session and client.socket.session.rollovers):
            await asyncio.sleep(0.001)
        client.leave()
        await client.gone()
        await asyncio.sleep(0.02)
        assert len(engine.opened) == 1 and engine.closed == set(engine.opened)
        assert engine.aborted == engine.opened
        assert not live.link.on_refused

    asyncio.run(run())


def test_a_session_that_fails_ends_alone() -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine)
        clients = [FakeClient(live) for _ in range(3)]
        engine.breaks = {1: (3, RuntimeError("NaN in row 7"))}
        for client in clients:
            client.begin()
            client.speak(noise(2))
            await client.until("delta")
        assert await clients[1].gone() == (1011, "the session failed: NaN in row 7")
        assert clients[1].events[-1]["code"] == "processing_error"
        for client in (clients[0], clients[2]):
            client.end()
            assert (await client.until("done"))["usage"]["completion_tokens"] == tokens_of(2 * RATE)
            client.leave()
            await client.gone()
        assert engine.closed == set(engine.opened)

    asyncio.run(run())


def test_audio_that_the_engine_refuses_ends_the_session() -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = FakeClient(service(engine))
        client.begin()
        await client.until("created")
        await asyncio.sleep(0.02)
        engine.refuses_audio.update(engine.opened)
        client.speak(noise(1))
        assert await client.gone() == (1011, "the session failed: bad audio")

    asyncio.run(run())


def test_a_request_that_ends_too_early_is_an_error() -> None:
    async def run() -> None:
        engine = FakeEngine(positions=1024)
        client = FakeClient(service(engine))
        engine.positions = 50
        client.socket.service.link.engine = engine.engine
        client.begin()
        client.speak(noise(3))
        assert (await client.gone() or (0, ""))[0] == 1011
        assert "ended the request before its audio's end" in client.events[-1]["error"]

    asyncio.run(run())


@pytest.mark.parametrize("audio_ended", [False, True])
def test_a_request_that_the_engine_ends_with_an_error(audio_ended: bool) -> None:
    """Also where its audio has ended: a text that is cut short is no text."""

    async def run() -> None:
        engine = FakeEngine()
        engine.faults = {5: "the session has no slot of the encoder"}
        client = FakeClient(service(engine))
        client.begin()
        client.speak(noise(3))
        if audio_ended:
            client.end()
        assert (await client.gone() or (0, ""))[0] == 1011
        assert client.events[-1]["error"].endswith(
            "the engine has ended the request: the session has no slot of the encoder"
        )
        assert "done" not in client.kinds()
        assert engine.closed == set(engine.opened)

    asyncio.run(run())


def test_the_engine_takes_the_names_of_sessions() -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = FakeClient(service(engine))
        client.begin()
        await client.until("created")
        await asyncio.sleep(0.02)
        assert [bool(NAME.fullmatch(name)) for name in engine.opened] == [True]
        client.leave()
        await client.gone()

    asyncio.run(run())


@pytest.mark.parametrize("state", ["connected", "opening", "speaking"])
def test_a_dead_engine_is_told(state: str) -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine)
        engine.silent = state == "opening"
        client = FakeClient(live)
        if state != "connected":
            client.begin()
            client.speak(noise(1))
        await client.until("created")
        await asyncio.sleep(0.02)
        engine.is_dead = engine.silent = True
        live.sweep(time.monotonic())
        assert await client.gone() == (1011, "the engine has died")
        assert client.events[-1]["code"] == "engine_dead"

    asyncio.run(run())


def test_a_call_to_an_engine_that_has_died_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves it unanswered."""
    monkeypatch.setattr(links, "POLL_S", 0.01)

    async def run() -> None:
        engine = FakeEngine()
        engine.silent = True
        opening = asyncio.ensure_future(engine.link().open("a"))
        await asyncio.sleep(0.05)
        assert not opening.done()
        engine.is_dead = True
        with pytest.raises(links.EngineGoneError, match="has died"):
            await asyncio.wait_for(opening, 1)

    asyncio.run(run())


def test_an_engine_that_fails_a_call_fails_its_sessions_only() -> None:
    async def run() -> None:
        engine = FakeEngine()
        link = engine.link()
        stock, broken = engine.call, True

        async def call(method: str, messages: Any) -> Any:
            if broken:
                raise RuntimeError("rejected")
            return await stock(method, messages)

        link.engine = link.engine._replace(call=call)
        with pytest.raises(LinkError, match="rejected"):
            await link.open("a")
        broken = False
        await link.open("b")
        assert engine.opened == ["b"]

    asyncio.run(run())


# ---- SIGTERM


def test_a_drain_ends_sessions_with_their_text() -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine)
        idle, speaking, between = clients = [FakeClient(live) for _ in range(3)]
        speaking.begin()
        speaking.speak(noise(2))
        between.begin()
        between.end()
        await between.until("done")
        await asyncio.sleep(0.05)
        speaking.speak(noise(2))  # arrives, and may or may not be in time
        await asyncio.wait_for(live.drain(10), 5)
        for client in clients:
            assert await client.gone() == (1012, "the server is stopping")
            assert client.socket.reason == "stopping"
        assert speaking.kinds()[-1] == "done"
        heard = len(engine.audio[engine.opened[0]]) // 2
        assert speaking.events[-1]["usage"]["completion_tokens"] == tokens_of(heard)
        assert heard >= 2 * RATE
        assert idle.kinds() == ["created"]

    asyncio.run(run())


def test_a_drain_that_takes_too_long_is_over() -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine)
        client = FakeClient(live)
        client.begin()
        client.speak(noise(2))
        await client.until("delta")
        engine.paused = True
        client.speak(noise(1))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await live.drain(2.2)
        assert time.monotonic() - start < 2.2
        assert await client.gone() == (1012, "the server is stopping")
        assert client.events[-1]["code"] == "stopping"

    asyncio.run(run())


def test_a_socket_that_comes_while_the_server_stops_is_told() -> None:
    async def run() -> None:
        live = service(FakeEngine())
        await live.drain(1)
        client = FakeClient(live)
        assert await client.gone() == (1012, "the server is stopping")

    asyncio.run(run())


# ---- What /metrics says


def test_metrics() -> None:
    from prometheus_client import generate_latest

    def value(name: str) -> float:
        lines = generate_latest().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"voxtral_serve_live_{name}"))

    before = {
        name: value(name) for name in ("lag_seconds_count", "rollovers_total", 'sessions_ended_total{reason="done"}')
    }
    run = asyncio.run(transcribed(FakeEngine(positions=SHORT), [noise(30)]))
    assert value("lag_seconds_count") == before["lag_seconds_count"] + run.session.tokens
    assert value("rollovers_total") == before["rollovers_total"] + 1
    assert value("sessions ") == 0
    assert metrics() is metrics()


def test_turns_of_a_sample_wait_for_their_text() -> None:
    async def run() -> None:
        session = service(FakeEngine()).session(lambda why: pytest.fail(why))
        await session.begin()

        async def speak() -> None:
            for _ in range(3 * MOST_PARTS):
                await session.feed(bytes(2))
                session.cut()
            session.end()

        speaking = asyncio.create_task(speak())
        await asyncio.sleep(0.05)
        assert (session.turn, speaking.done()) == (MOST_PARTS, False)
        ends = [output.turn async for output in session.outputs() if isinstance(output, TurnEnd)]
        await speaking
        assert ends == list(range(3 * MOST_PARTS + 1))
        session.close()

    asyncio.run(run())


# The times of calls to the engine


def test_sessions_go_to_the_engine_at_common_times() -> None:
    async def run() -> None:
        count, tick = links.MANY + 1, links.MANY_TICK_S
        link = links.EngineLink(FakeEngine(most=count).engine, SHAPE)
        await asyncio.gather(*(link.open(f"session {number}") for number in range(count)))
        assert link.wait_s(7 * tick + 0.004) == pytest.approx(tick - 0.004)
        assert link.wait_s(1000.5 * tick) == pytest.approx(tick / 2)
        link.close("session 0")
        link.close("session 0")
        assert len(link.sessions) == links.MANY
        assert link.wait_s(7 * links.TICK_S + 0.004) == pytest.approx(links.TICK_S - 0.004)

    asyncio.run(run())


def test_the_end_of_the_audio_does_not_wait_for_a_tick() -> None:
    async def run() -> None:
        engine = FakeEngine()
        link = links.EngineLink(engine.engine, SHAPE, tick_s=0.5)
        await link.open("session")
        begun = time.monotonic()
        link.audio("session", bytes(2 * SHAPE.samples))
        await link.delivered()
        assert time.monotonic() - begun <= 0.5
        begun = 0.5 * (time.monotonic() // 0.5 + 1)  # just behind a tick
        await asyncio.sleep(begun - time.monotonic() + 0.01)
        link.audio("session", bytes(2 * SHAPE.samples))
        link.end("session")
        await link.delivered()
        assert time.monotonic() - begun < 0.2

    asyncio.run(run())
