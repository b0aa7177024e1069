"""OpenAI's Realtime transcription, with an engine that computes nothing and voices that are loud noise."""

import asyncio
import base64
import itertools
import time
from typing import Any

import numpy as np
import pytest
import soxr
from livefakes import (
    LOGPROB,
    RATE,
    SHAPE,
    FakeClient,
    FakeEngine,
    OpenAiClient,
    Sentences,
    chunks,
    noise,
    service,
    tokens_of,
    with_pauses,
    with_sentences,
)

from voxtral_serve.guard.live.cuts import SAMPLE_BYTES
from voxtral_serve.guard.live.handshake import UndecidedCodec
from voxtral_serve.guard.live.metrics import metrics
from voxtral_serve.guard.live.turn_audio import SLICE, TurnAudio

pytestmark = pytest.mark.usefixtures("turned_clock")

TEXT = "conversation.item.input_audio_transcription"
INPUT = "input_audio_buffer"


async def closed(client: FakeClient) -> None:
    client.leave()
    await client.gone()


def turns_of(client: OpenAiClient) -> list[tuple[str, str, float]]:
    """(item, transcript, seconds) of each turn, in order."""
    return [(each["item_id"], each["transcript"], each["usage"]["seconds"]) for each in client.of(f"{TEXT}.completed")]


def test_a_refused_client_leaves_nothing_and_is_refused_once() -> None:
    """The audio that waits behind its first append begins no other session."""

    async def run() -> None:
        engine = FakeEngine(most=0)
        live = service(engine)
        client = OpenAiClient(live)
        client.configure(turn_detection=None)
        client.speak(noise(1))
        client.send(f"{INPUT}.commit")
        assert await client.gone() == (1013, client.events[-1]["error"]["message"])
        assert client.types() == ["session.created", "session.updated", "error"]
        await live.link.delivered()
        opened = [message for call in engine.calls for message in call if message[0] == "open"]
        assert len(opened) == 1
        assert (live.link.sessions, live.link.on_refused) == (set(), {})

    asyncio.run(run())


def test_a_client_of_the_beta_form_begins_no_session() -> None:
    """Also with audio before its first update."""

    async def run() -> None:
        engine = FakeEngine()
        client = FakeClient(service(engine), lambda context: UndecidedCodec(context, is_beta=True))
        client.speak(noise(1))
        client.send("transcription_session.update", session={})
        assert (await client.gone() or (0, ""))[0] == 1008
        assert client.events[-1]["error"]["code"] == "beta_api_shape_disabled"
        assert engine.calls == []

    asyncio.run(run())


def test_a_client_that_commits() -> None:
    """Deltas come before the commit; each text is that of its audio, and no sample is in two."""

    async def run() -> None:
        engine = FakeEngine()
        client = OpenAiClient(service(engine))
        client.configure(turn_detection=None)
        await client.until("session.updated")
        lengths = [2.0, 3.0, 1.0]
        for number, seconds in enumerate(lengths):
            client.speak(noise(seconds, seed=number))
            if number == 0:
                early = await client.until(f"{TEXT}.delta")
                assert INPUT + ".committed" not in client.types()
            client.send(f"{INPUT}.commit", event_id=f"commit {number}")
            await client.until(f"{TEXT}.completed", number + 1)
        assert [bytes(engine.audio[name]) for name in engine.opened[:3]] == [
            noise(seconds, seed=number) for number, seconds in enumerate(lengths)
        ]
        turns = turns_of(client)
        assert [seconds for *_, seconds in turns] == lengths
        for (item, transcript, seconds), committed in zip(turns, client.of(f"{INPUT}.committed"), strict=True):
            expected = " ".join(f"w{n}" for n in range(tokens_of(round(seconds * RATE))) if n % 5 == 4)
            deltas = [each["delta"] for each in client.of(f"{TEXT}.delta") if each["item_id"] == item]
            assert transcript == expected == "".join(deltas)
            assert committed["item_id"] == item
        items = [item for item, *_ in turns]
        assert early["item_id"] == items[0]
        previous = [each["previous_item_id"] for each in client.of("conversation.item.added")]
        assert previous == [None, *items[:-1]]
        done = client.of("conversation.item.done")
        assert [each["item"]["content"][0]["transcript"] for each in done] == [text for _, text, _ in turns]
        assert "error" not in client.types()
        assert len({each["event_id"] for each in client.events}) == len(client.events)
        await closed(client)
        assert client.socket.reason == "done"
        assert client.socket.report().startswith("6.00 s of audio, ")
        assert " 3 texts, " in client.socket.report()

    asyncio.run(run())


def test_events_of_a_turn_come_in_order() -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure()
        client.speak(with_pauses(1.0, 1.0))
        await client.until("item.done")
        kinds = [kind for kind in client.types() if not kind.endswith(".delta")]
        assert kinds == [
            *("session.created", "session.updated", f"{INPUT}.speech_started", f"{INPUT}.speech_stopped"),
            *(f"{INPUT}.committed", "conversation.item.added", f"{TEXT}.segment", f"{TEXT}.completed"),
            "conversation.item.done",
        ]
        items = {each.get("item_id") or each["item"]["id"] for each in client.events[2:]}
        assert len(items) == 1
        await closed(client)

    asyncio.run(run())


@pytest.mark.parametrize("piece", [34, 320, 2560, 100_000])
def test_server_vad_finds_turns_and_loses_no_sample(piece: int) -> None:
    """The times and the texts do not depend on how the audio is cut into appends."""
    seconds = [0.5, 1.0, 2.0, 0.3, 1.0, 1.2, 1.0, 0.8]
    pcm = with_pauses(*seconds)

    async def run() -> None:
        engine = FakeEngine(most=1)
        client = OpenAiClient(service(engine))
        client.configure(turn_detection={"type": "server_vad", "prefix_padding_ms": 100, "silence_duration_ms": 500})
        client.speak(pcm, piece)
        await client.until(f"{TEXT}.completed", 3)
        started = [each["audio_start_ms"] for each in client.of(f"{INPUT}.speech_started")]
        stopped = [each["audio_end_ms"] for each in client.of(f"{INPUT}.speech_stopped")]
        starts, ends = [0.0, 1.5, 6.0], [0.5, 4.8, 7.0]
        for found, expected in zip(started, starts, strict=True):
            assert expected * 1000 - 132 <= found <= expected * 1000
        for found, expected in zip(stopped, ends, strict=True):
            assert expected * 1000 + 500 <= found <= expected * 1000 + 564
        await client.until("item.done", 3)
        async with asyncio.timeout(5):
            while len(b"".join(engine.audio.values())) < len(pcm):
                await asyncio.sleep(0.01)
        parts = [bytes(engine.audio[name]) for name in engine.opened]
        assert b"".join(parts) == pcm
        assert [len(part) // 32 for part in parts[:3]] == [
            end - begin for begin, end in itertools.pairwise([0, *stopped])
        ]
        await closed(client)

    asyncio.run(run())


def test_silence_of_a_client_is_a_turn_after_the_idle_timeout() -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure(turn_detection={"type": "server_vad", "idle_timeout_ms": 2000})
        client.speak(bytes(2 * 5 * RATE))
        await client.until(f"{TEXT}.completed", 2)
        found = [(each["audio_start_ms"], each["audio_end_ms"]) for each in client.of(f"{INPUT}.timeout_triggered")]
        assert found == [(0, 2016), (2016, 4032)]
        await closed(client)

    asyncio.run(run())


def test_semantic_vad_ends_a_turn_with_a_sentence() -> None:
    class Sentences(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                output.outputs[0].text += "." if output.outputs[0].text else ""
                yield output

    async def run() -> None:
        client = OpenAiClient(service(Sentences()))
        client.configure(turn_detection={"type": "semantic_vad"})
        for piece in chunks(with_pauses(1.0, 2.0), itertools.repeat(1280)):
            client.speak(piece)
            await asyncio.sleep(0.005)
        (stopped,) = client.of(f"{INPUT}.speech_stopped")
        assert 1800 <= stopped["audio_end_ms"] <= 2400
        await closed(client)

    asyncio.run(run())


# ---- Formats

HEARD: dict[str, bytes] = {}  # by format: the same for appends of all sizes


def encoded(pcm: bytes, form: dict[str, Any]) -> bytes:
    """PCM of 16 kHz in another format of the protocol."""
    import audioop

    if form["type"] == "audio/pcm" and form.get("rate") == 16000:
        return pcm
    rate = 24000 if form["type"] == "audio/pcm" else 8000
    samples = soxr.resample(np.frombuffer(pcm, "<i2"), 16000, rate)
    pcm = samples.astype("<i2").tobytes()
    if form["type"] == "audio/pcmu":
        return audioop.lin2ulaw(pcm, 2)
    return audioop.lin2alaw(pcm, 2) if form["type"] == "audio/pcma" else pcm


@pytest.mark.parametrize(
    "form", [{"type": "audio/pcm", "rate": 24000}, {"type": "audio/pcmu"}, {"type": "audio/pcma"}], ids=str
)
@pytest.mark.parametrize("piece", [1, 33, 4800])
def test_formats(form: dict[str, Any], piece: int) -> None:
    """The audio that the engine gets does not depend on the appends, not even where they split samples."""
    pcm = noise(0.7, loud=6000)
    sent = encoded(pcm, form)

    async def run() -> bytes:
        engine = FakeEngine()
        client = OpenAiClient(service(engine))
        client.configure(format=form, turn_detection=None)
        client.speak(sent, piece)
        client.send(f"{INPUT}.commit")
        await client.until(f"{TEXT}.completed")
        assert "error" not in client.types()
        await closed(client)
        return bytes(engine.audio[engine.opened[0]])

    heard = asyncio.run(run())
    samples, expected = (np.frombuffer(each, "<i2").astype(float) for each in (heard, pcm))
    assert len(heard) == len(pcm)
    rate = form.get("rate", 8000)  # noise loses what is above half of it
    again = soxr.resample(soxr.resample(expected, 16000, rate), rate, 16000)
    assert np.corrcoef(samples, again)[0, 1] > 0.999
    assert HEARD.setdefault(str(form), heard) == heard


# ---- Settings


def test_logprobs() -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure(turn_detection=None)
        client.send("session.update", session={"include": ["item.input_audio_transcription.logprobs"]})
        client.speak(noise(2))
        client.send(f"{INPUT}.commit")
        completed = await client.until("completed")
        assert "".join(each["token"] for each in completed["logprobs"]) == completed["transcript"]
        assert {each["logprob"] for each in completed["logprobs"]} == {LOGPROB}
        for delta in client.of(f"{TEXT}.delta"):
            assert "".join(each["token"] for each in delta["logprobs"]) == delta["delta"]
        await closed(client)

    asyncio.run(run())


def test_words_have_times_of_the_session() -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure(turn_detection=None)
        for number in range(3):
            client.speak(noise(2.0, seed=number))
            client.send(f"{INPUT}.commit")
        await client.until("completed", 3)
        words = [word for each in client.of(f"{TEXT}.segment") for word in each["words"]]
        assert [word["word"] for word in words] == " ".join(text for _, text, _ in turns_of(client)).split()
        for one, other in itertools.pairwise(words):
            assert one["start"] < one["end"] <= other["start"]
        # Token 4 ends at 0.36 s of its turn.
        ends = [word["end"] for word in words if word["word"] == "w4"]
        assert ends == pytest.approx([0.36, 2.36, 4.36])
        for each in client.of(f"{TEXT}.segment"):
            assert each["start"] == each["words"][0]["start"] and each["end"] == each["words"][-1]["end"]
            assert "speaker" not in each
        await closed(client)

    asyncio.run(run())


def test_segments_come_within_a_turn() -> None:
    """Each sentence when it is complete, before the commit; each word in one segment, with times of the session."""

    async def run() -> None:
        client = OpenAiClient(with_sentences(Sentences()))
        client.configure(turn_detection=None)
        for number in range(2):
            before = len(client.of(f"{TEXT}.segment"))
            client.speak(noise(5.0, seed=number))
            early = await client.until(f"{TEXT}.segment", before + 3)
            assert early["text"] == "w34 w39 w44."
            assert len(client.of(f"{INPUT}.committed")) == number
            client.send(f"{INPUT}.commit")
            completed = await client.until("completed", number + 1)
            mine = [each for each in client.of(f"{TEXT}.segment") if each["item_id"] == completed["item_id"]]
            assert " ".join(each["text"] for each in mine) == completed["transcript"]
            assert [word["word"] for each in mine for word in each["words"]] == completed["transcript"].split()
            assert [each["text"] for each in mine[:3]] == ["w4 w9 w14.", "w19 w24 w29.", "w34 w39 w44."]
            # Token 14 ends at 1.16 s of its turn.
            assert mine[0]["end"] == pytest.approx(5 * number + 1.16)
            for one, other in itertools.pairwise(client.of(f"{TEXT}.segment")):
                assert one["start"] < one["end"] <= other["start"]
        kinds = [kind for kind in client.types() if kind.endswith((".segment", ".completed"))]
        assert kinds.index(f"{TEXT}.completed") >= 3
        await closed(client)

    asyncio.run(run())


# ---- What is wrong


def test_an_empty_commit_names_the_event() -> None:
    """As openai-agents ends: a commit, which may be empty, and a clear."""

    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure(turn_detection=None)
        for name in ("a", "b"):
            client.send(f"{INPUT}.commit", event_id=name)
            error = (await client.until("error", 1 + (name == "b")))["error"]
            assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", name)
            if name == "a":
                client.speak(noise(1))
                client.send(f"{INPUT}.commit")
                await client.until("completed")
        client.send(f"{INPUT}.clear")
        await client.until("cleared")
        await closed(client)

    asyncio.run(run())


def test_what_is_cleared_has_no_text() -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = OpenAiClient(service(engine))
        client.configure(turn_detection=None)
        client.send(f"{INPUT}.clear")
        client.speak(noise(3))
        client.send(f"{INPUT}.clear")
        client.speak(noise(1, seed=1))
        client.send(f"{INPUT}.commit")
        await client.until("completed")
        ((_, transcript, seconds),) = turns_of(client)
        assert (seconds, len(client.of(f"{INPUT}.cleared"))) == (1.0, 2)
        assert transcript == " ".join(f"w{n}" for n in range(tokens_of(RATE)) if n % 5 == 4)
        assert bytes(engine.audio[engine.opened[1]]) == noise(1, seed=1)
        await closed(client)

    asyncio.run(run())


APPEND = '{"type":"input_audio_buffer.append","event_id":"mine"'


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ("{", "invalid_json", None),
        (APPEND + ',"audio":"' + "A" * (15 * 2**20 + 4) + '"}', "invalid_audio", "audio"),  # read in a thread
    ],
    ids=["small", "large"],
)
def test_a_wrong_event_is_told_and_the_session_goes_on(event: str, code: str, param: str | None) -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure(turn_detection=None)
        client.speak(noise(1))
        client.raw(event)
        error = (await client.until("error"))["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
        assert error["event_id"] == ("mine" if "mine" in event else None)
        client.speak(noise(1))
        client.send(f"{INPUT}.commit")
        assert (await client.until("completed"))["usage"]["seconds"] == 2.0
        await closed(client)
        assert client.closed is None

    asyncio.run(run())


def test_harmless_events_have_no_error() -> None:
    """Empty and odd appends, the same settings again, fields of null, a clear of nothing."""

    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure(turn_detection=None, transcription={"model": "voxtral", "prompt": "x", "keywords": ["y"]})
        client.configure(turn_detection=None, transcription=None)
        client.configure(turn_detection=None, transcription={"language": None})
        client.send(f"{INPUT}.append", audio="")
        for odd in (1, 3, 5, 7):
            client.send(f"{INPUT}.append", audio=base64.b64encode(bytes(odd)).decode())
        client.speak(noise(1))
        client.configure(turn_detection=None)
        client.send(f"{INPUT}.clear")
        await client.until("cleared")
        assert "error" not in client.types()
        await closed(client)

    asyncio.run(run())


# ---- Which protocol


def test_a_nested_session_means_openais_protocol() -> None:
    """Audio before it is kept, and taken in the format that it names."""

    async def run() -> None:
        engine = FakeEngine()
        client = OpenAiClient(service(engine), UndecidedCodec)
        client.speak(noise(1))
        client.configure(turn_detection=None)
        client.send(f"{INPUT}.commit")
        assert (await client.until("completed"))["usage"]["seconds"] == 1.0
        await closed(client)

    asyncio.run(run())


def test_a_model_at_the_top_means_vllms_protocol() -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()), UndecidedCodec)
        client.begin()
        client.speak(noise(1))
        client.end()
        assert (await client.until("transcription.done"))["usage"]["completion_tokens"] == tokens_of(RATE)
        client.send("session.update", session={"type": "transcription"})
        assert (await client.until("error"))["code"] == "invalid_event"
        await closed(client)

    asyncio.run(run())


# ---- Ends


def test_a_server_that_is_full_says_so() -> None:
    async def run() -> None:
        live = service(FakeEngine(most=1))
        clients = [OpenAiClient(live) for _ in range(2)]
        for client in clients:
            client.configure(turn_detection=None)
            client.speak(noise(1))
            await client.until("updated")
            await asyncio.sleep(0.02)
        error = (await clients[1].until("error"))["error"]
        assert error["code"] == "too_many_sessions" and "max_live_sessions is 1" in error["message"]
        assert await clients[1].gone() == (1013, error["message"])
        clients[0].send(f"{INPUT}.commit")
        await clients[0].until("completed")
        await closed(clients[0])

    asyncio.run(run())


def test_an_engine_that_fails_fails_the_items() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.breaks = {0: (3, RuntimeError("NaN in row 7"))}
        engine.paused = True
        client = OpenAiClient(service(engine))
        client.configure(turn_detection=None)
        client.speak(noise(2))
        client.send(f"{INPUT}.commit")
        await client.until("added")
        engine.paused = False
        engine.step()
        assert await client.gone() == (1011, "the session failed: NaN in row 7")
        (failed,) = client.of(f"{TEXT}.failed")
        assert failed["error"]["code"] == "processing_error"
        assert client.events[-1]["error"]["type"] == "server_error"

    asyncio.run(run())


def test_a_drain_completes_the_turn_that_goes_on() -> None:
    async def run() -> None:
        live = service(FakeEngine())
        speaking, idle = OpenAiClient(live), OpenAiClient(live)
        speaking.configure()
        speaking.speak(noise(2))
        await speaking.until("delta")
        await asyncio.wait_for(live.drain(10), 5)
        for client in (speaking, idle):
            assert await client.gone() == (1012, "the server is stopping")
        ((_, transcript, seconds),) = turns_of(speaking)
        assert transcript and 0 < seconds <= 2.0

    asyncio.run(run())


@pytest.mark.parametrize("speaks", [False, True])
def test_a_session_that_is_too_long_is_ended_with_its_text(speaks: bool) -> None:
    """What comes after its end is dropped; session.created says when that is."""

    async def run() -> None:
        live = service(FakeEngine(), session_s=20)
        client = OpenAiClient(live)
        created = await client.until("created")
        assert time.time() + 10 < created["session"]["expires_at"] <= time.time() + 20
        client.configure()
        if speaks:
            client.speak(noise(2))
            await client.until("delta")
        await client.until("updated")
        live.sweep(client.socket.opened + 21)
        client.speak(with_pauses(1.0, 1.0))
        code, reason = await client.gone() or (0, "")
        assert (code, reason.startswith("the session has had its 20 s")) == (1008, True)
        error = client.events[-1]["error"]
        assert (error["code"], error["message"], error["type"]) == ("session_expired", reason, "invalid_request_error")
        assert len(turns_of(client)) == speaks
        if speaks:
            assert 0 < turns_of(client)[0][2] <= 2.0
        assert client.socket.reason == "expired"

    asyncio.run(run())


def test_audio_after_a_session_s_end_is_in_no_turn() -> None:
    """Of one append, whose first slice is the session's last."""

    class Session:
        ended, shape = False, SHAPE

        async def feed(self, pcm: bytes) -> None:
            self.ended = True

    async def run() -> None:
        audio: Any = TurnAudio(Session(), None)  # type: ignore[arg-type]
        assert [event async for event in audio.feed(bytes(3 * SLICE))] == []
        assert audio.fed * SAMPLE_BYTES == SLICE

    asyncio.run(run())


def test_a_client_that_waits_for_its_text_is_not_idle() -> None:
    async def run() -> None:
        engine = FakeEngine()
        live = service(engine, idle_s=5)
        engine.paused = True
        client = OpenAiClient(live)
        client.configure(turn_detection=None)
        client.speak(noise(1))
        client.send(f"{INPUT}.commit")
        await client.until("added")
        live.sweep(time.monotonic() + 6)
        await asyncio.sleep(0.01)
        assert client.closed is None
        engine.paused = False
        engine.step()
        await client.until("completed")
        await asyncio.sleep(0.01)
        live.sweep(time.monotonic() + 6)
        assert await client.gone() == (1008, "no audio and no event for 5 s")
        assert "error" not in client.types()  # which LiveKit takes as fatal

    asyncio.run(run())


def test_a_turn_over_several_requests_is_one_item() -> None:
    async def run() -> None:
        engine = FakeEngine(positions=256)
        client = OpenAiClient(service(engine))
        client.configure(turn_detection=None)
        client.speak(noise(40), 32000)
        client.send(f"{INPUT}.commit")
        await client.until("item.done")
        ((_, transcript, seconds),) = turns_of(client)
        assert seconds == 40.0 and len(engine.opened) >= 3
        assert "".join(each["delta"] for each in client.of(f"{TEXT}.delta")) == transcript
        words = [word["word"] for each in client.of(f"{TEXT}.segment") for word in each["words"]]
        assert words == transcript.split()
        await closed(client)
        assert client.socket.conversation.rollovers >= 2

    asyncio.run(run())


def test_a_commit_within_speech_starts_a_new_turn() -> None:
    async def run() -> None:
        client = OpenAiClient(service(FakeEngine()))
        client.configure()
        client.speak(noise(1))
        client.send(f"{INPUT}.commit")
        client.speak(with_pauses(1.0, 1.0))
        await client.until("completed", 2)
        started = [each["audio_start_ms"] for each in client.of(f"{INPUT}.speech_started")]
        assert started == [0, 1000] and len(client.of(f"{INPUT}.speech_stopped")) == 1
        assert len({each["item_id"] for each in client.of(f"{INPUT}.speech_started")}) == 2
        await closed(client)

    asyncio.run(run())


def test_turns_and_errors_are_counted() -> None:
    def counted() -> tuple[float, ...]:
        found = metrics()
        by = [found.turns.labels(by)._value.get() for by in ("silence", "client")]
        return (*by, found.errors.labels("input_audio_buffer_commit_empty")._value.get())

    async def run() -> None:
        before = counted()
        client = OpenAiClient(service(FakeEngine()))
        client.configure()
        client.send(f"{INPUT}.commit")
        client.speak(with_pauses(1.0, 1.0))
        client.send(f"{INPUT}.commit")
        await client.until("completed", 2)
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 1, 1]
        await closed(client)

    asyncio.run(run())
