"""Mistral's realtime protocol, with an engine that computes nothing and voices that are loud noise."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from livefakes import (
    RATE,
    SHAPE,
    FakeEngine,
    MistralClient,
    Sentences,
    noise,
    service,
    tokens_of,
    with_pauses,
    with_sentences,
)

from voxtral_serve.guard.live import conversation

pytestmark = pytest.mark.usefixtures("turned_clock")

AUDIO = "input_audio"


def words_of(seconds: float) -> str:
    return " ".join(f"w{n}" for n in range(tokens_of(round(seconds * RATE))) if n % 5 == 4)


def test_a_stream_as_the_client_of_mistral_sends_it() -> None:
    """Settings, audio, flush and end: one text, and the server closes."""

    async def run() -> None:
        engine = FakeEngine()
        client = MistralClient(service(engine))
        created = (await client.until("session.created"))["session"]
        assert created["model"] == "voxtral" and created["request_id"]
        assert created["audio_format"] == {"encoding": "pcm_s16le", "sample_rate": 16000}
        assert created["target_streaming_delay_ms"] == 480
        client.update(audio_format={"encoding": "pcm_s16le", "sample_rate": 16000}, target_streaming_delay_ms=480)
        client.speak(noise(2))
        await client.until("text.delta")
        client.send(f"{AUDIO}.flush")
        client.send(f"{AUDIO}.end")
        assert await client.gone() == (1000, "the text is complete")
        (done,) = client.of("transcription.done")
        assert done["text"] == words_of(2.0) == "".join(each["text"] for each in client.of("transcription.text.delta"))
        assert (done["model"], done["language"]) == ("voxtral", None)
        tokens = tokens_of(2 * RATE)
        assert done["usage"] == {
            **{"prompt_tokens": SHAPE.prompt, "completion_tokens": tokens, "total_tokens": SHAPE.prompt + tokens},
            "prompt_audio_seconds": 2,
        }
        segments = client.of("transcription.segment")
        assert [{**each, "type": "transcription_segment"} for each in segments] == done["segments"]
        assert " ".join(each["text"] for each in segments) == done["text"]
        assert bytes(engine.audio[engine.opened[0]]) == noise(2)
        assert client.socket.reason == "done"

    asyncio.run(run())


def test_segments_come_within_a_text() -> None:
    """Each sentence when it is complete; transcription.done has the same ones."""

    async def run() -> None:
        client = MistralClient(with_sentences(Sentences()))
        client.speak(noise(5))
        await client.until("transcription.segment", 3)
        assert not client.of("transcription.done")
        client.send(f"{AUDIO}.end")
        assert await client.gone() == (1000, "the text is complete")
        segments, (done,) = client.of("transcription.segment"), client.of("transcription.done")
        assert [{**each, "type": "transcription_segment"} for each in segments] == done["segments"]
        assert " ".join(each["text"] for each in segments) == done["text"]
        assert segments[0]["text"] == "w4 w9 w14." and segments[0]["end"] == pytest.approx(1.16)

    asyncio.run(run())


def test_the_language_is_that_of_the_texts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments have it if the codec's options say so."""
    texts: list[str] = []

    async def recognised(text: str) -> str:
        texts.append(text)
        return f"of {text}"

    monkeypatch.setattr(conversation, "MOST", 6)
    monkeypatch.setattr(conversation, "recognised_later", recognised)

    async def run(told: bool) -> None:
        client = MistralClient(with_sentences(Sentences()))
        turns = client.socket.conversation
        assert isinstance(turns, conversation.Turns) and turns.options.segment_languages
        turns.options = replace(turns.options, segment_languages=told)
        client.speak(noise(5))
        await client.until("transcription.segment", 3)
        client.send(f"{AUDIO}.end")
        await client.gone()
        (done,) = client.of("transcription.done")
        assert done["language"] == f"of {done['text'][-6:]}"
        assert all(len(text) == 6 for text in texts) and (len({*texts}) > 2 if told else len(texts) == 1)

    asyncio.run(run(told=True))
    texts.clear()
    asyncio.run(run(told=False))


def test_a_session_that_is_too_long_is_ended_with_its_text() -> None:
    async def run() -> None:
        live = service(FakeEngine(), session_s=20)
        client = MistralClient(live)
        client.speak(noise(2))
        await client.until("text.delta")
        live.sweep(client.socket.opened + 21)
        code, reason = await client.gone() or (0, "")
        assert code == 1008 and reason.startswith("the session has had its 20 s")
        assert client.events[-1] == {"type": "error", "error": {"message": reason, "code": 408}}
        assert client.of("transcription.done")[0]["text"]
        assert client.socket.reason == "expired"

    asyncio.run(run())


def test_each_flush_has_its_own_text() -> None:
    """As pipecat and LiveKit end what a speaker has said."""

    async def run() -> None:
        engine = FakeEngine()
        client = MistralClient(service(engine))
        client.send(f"{AUDIO}.flush")  # of nothing: no answer
        for number, seconds in enumerate((1.0, 2.0)):
            client.speak(noise(seconds, seed=number))
            client.send(f"{AUDIO}.flush")
            done = await client.until("transcription.done", number + 1)
            assert done["text"] == words_of(seconds)
            assert [each["start"] >= number for each in done["segments"]]
        assert [bytes(engine.audio[name]) for name in engine.opened[:2]] == [noise(1), noise(2, seed=1)]
        client.leave()
        await client.gone()
        assert client.socket.reason == "done"

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0, 1.5])
def test_an_end_without_a_flush(seconds: float) -> None:
    async def run() -> None:
        client = MistralClient(service(FakeEngine()))
        client.speak(noise(seconds))
        client.send(f"{AUDIO}.end")
        assert await client.gone() == (1000, "the text is complete")
        (done,) = client.of("transcription.done")
        assert done["text"] == (words_of(seconds) if seconds else "")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("encoding", "kind"), [("pcm_s32le", "<i4"), ("pcm_f16le", "<f2"), ("pcm_f32le", "<f4"), ("pcm_s16le", "<i2")]
)
def test_encodings(encoding: str, kind: str) -> None:
    async def run() -> None:
        engine, pcm = FakeEngine(), noise(1)
        samples = np.frombuffer(pcm, "<i2").astype(np.float64)
        scaled = samples * 2**16 if kind == "<i4" else samples if kind == "<i2" else samples / 2**15
        client = MistralClient(service(engine))
        client.update(audio_format={"encoding": encoding, "sample_rate": 16000})
        client.speak(scaled.astype(kind).tobytes(), 999)
        client.send(f"{AUDIO}.end")
        await client.gone()
        heard = np.frombuffer(bytes(engine.audio[engine.opened[0]]), "<i2").astype(float)
        assert len(heard) == RATE
        assert np.abs(heard - samples).max() <= (8 if kind == "<f2" else 0)

    asyncio.run(run())


def test_turns_are_told() -> None:
    async def run() -> None:
        client = MistralClient(service(FakeEngine()))
        client.update(turn_detection={"min_silence_ms": 400})
        client.speak(with_pauses(1.0, 0.3, 1.0, 1.0))
        client.send(f"{AUDIO}.end")
        await client.gone()
        found = [(each["type"], each["time_s"]) for each in client.events if each["type"].startswith("turn.")]
        assert [kind.partition(".")[2] for kind, _ in found] == ["start", "eager_end", "resume", "eager_end", "end"]
        times = [time for _, time in found]
        assert times == pytest.approx([0.0, 1.2, 1.3, 2.5, 2.7], abs=0.07)
        assert client.of("turn.end")[0]["end_reason"] == "threshold"
        (done,) = client.of("transcription.done")
        assert done["text"] == words_of(3.3)

    asyncio.run(run())


@pytest.mark.parametrize(
    "event",
    ["{", '{"type":"input_audio.append"}', '{"type":"session.update","session":{"audio_format":{"sample_rate":8000}}}'],
)
def test_a_wrong_event_is_told_and_the_session_goes_on(event: str) -> None:
    async def run() -> None:
        client = MistralClient(service(FakeEngine()))
        client.speak(noise(1))
        client.raw(event)
        error = (await client.until("error"))["error"]
        assert error["code"] == 400 and error["message"]
        client.send(f"{AUDIO}.end")
        assert await client.gone() == (1000, "the text is complete")
        assert client.of("transcription.done")[0]["text"] == words_of(1.0)

    asyncio.run(run())


def test_audio_after_the_end_is_told() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.paused = True
        client = MistralClient(service(engine))
        client.speak(noise(1))
        client.send(f"{AUDIO}.end")
        client.speak(noise(0.1), 3200)
        client.send(f"{AUDIO}.flush")
        error = (await client.until("error"))["error"]
        assert error["code"] == 400 and "input_audio.append after input_audio.end" in error["message"]
        engine.paused = False
        engine.step()
        assert await client.gone() == (1000, "the text is complete")
        assert [each["text"] for each in client.of("transcription.done")] == [words_of(1.0)]
        assert len(client.of("error")) == 1

    asyncio.run(run())


def test_ends_have_the_status_of_an_answer() -> None:
    async def run() -> None:
        live = service(FakeEngine(most=1))
        first, second, wrong = MistralClient(live), MistralClient(live), MistralClient(live, "whisper-9")
        assert (await wrong.until("error"))["error"]["code"] == 404
        assert (await wrong.gone() or (0, ""))[0] == 1008
        for client in (first, second):
            client.speak(noise(1))
            await asyncio.sleep(0.05)
        assert (await second.until("error"))["error"]["code"] == 429
        assert (await second.gone() or (0, ""))[0] == 1013
        await asyncio.wait_for(live.drain(10), 5)
        assert await first.gone() == (1012, "the server is stopping")
        assert first.of("transcription.done")[0]["text"]

    asyncio.run(run())
