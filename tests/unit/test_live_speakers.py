"""Speakers at the end of a live session: when they come, what is kept until then, and what is left without them."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from livefakes import RATE, FakeEngine, MistralClient, Sentences, noise, service, with_sentences

from voxtral_serve.guard.labeller import FREE_S, LabelError, Labeller
from voxtral_serve.guard.live import service as services
from voxtral_serve.guard.live import speakers
from voxtral_serve.guard.live.endings import STOPPING
from voxtral_serve.speakers.windows import Span, Voices

pytestmark = pytest.mark.usefixtures("turned_clock")

AUDIO = "input_audio"
SEGMENT, DONE = "transcription.segment", "transcription.done"


class FakeLabeller(Labeller):
    """Another speaker from each whole second that is even. `begun` is set by an order, which waits for `free`."""

    def __init__(self, error: str | None = None) -> None:
        super().__init__(most=1)
        self.error = error
        self.samples: list[np.ndarray] = []
        self.found: Voices | None = None
        self.begun, self.free = asyncio.Event(), asyncio.Event()
        self.free.set()

    async def voices(self, clip: Any, speech: Sequence[Span]) -> Voices:
        self.begun.set()
        await self.free.wait()
        if self.error is not None:
            raise LabelError(self.error)
        self.samples.append(clip.samples)
        return Voices(np.array(speech), np.ones((len(speech), 192), np.float32))

    async def labels(self, found: Voices, words: Sequence[Span], number: int | None = None) -> list[int]:
        self.found = found
        return [int(start) // 2 % 2 for start, _ in words]


def diarizing(live: Any) -> MistralClient:
    client = MistralClient(live)
    client.update(diarize=True)
    return client


def test_segments_come_at_the_end_with_their_speakers() -> None:
    """Those of all texts; the last transcription.done has them, too. What the engine has is free before."""

    async def run() -> None:
        engine, labeller = Sentences(), FakeLabeller()
        labeller.free.clear()
        live = with_sentences(engine, labeller=labeller)
        client = diarizing(live)
        assert (await client.until("session.updated"))["session"]["diarize"] is True
        client.speak(noise(3))
        client.send(f"{AUDIO}.flush")
        first = await client.until(DONE)
        assert first["text"] and first["segments"] == []
        client.speak(noise(4, seed=1))
        client.send(f"{AUDIO}.end")
        await labeller.begun.wait()
        await asyncio.sleep(0.02)
        assert engine.closed == set(engine.opened) and client.socket.session is None
        assert client.socket.awaits_text
        live.sweep(client.socket.opened + 1000)  # it is not idle
        live.most = 1
        with pytest.raises(services.RefusedError):
            live.make_room()
        assert not client.of(SEGMENT) and len(client.of(DONE)) == 1
        labeller.free.set()
        assert await client.gone() == (1000, "the text is complete")
        segments, (_, done) = client.of(SEGMENT), client.of(DONE)
        assert [{**each, "type": "transcription_segment"} for each in segments] == done["segments"]
        assert " ".join(each["text"] for each in segments) == f"{first['text']} {done['text']}"
        assert {each["speaker_id"] for each in segments} == {"speaker_1", "speaker_2"}
        assert all(each["speaker_id"] == f"speaker_{int(each['start']) // 2 % 2 + 1}" for each in segments)
        assert "error" not in done and client.socket.reason == "done"
        assert np.array_equal(
            np.concatenate(labeller.samples) * 2**15, np.frombuffer(noise(3) + noise(4, seed=1), "<i2")
        )
        assert live.kept.size == 0

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [0, 2])
def test_an_end_right_after_a_flush(seconds: float) -> None:
    """A transcription.done without text has the segments of the session. Without audio there are none."""

    async def run() -> None:
        client = diarizing(service(FakeEngine(), labeller=FakeLabeller()))
        client.speak(noise(seconds))
        client.send(f"{AUDIO}.flush")
        if seconds:
            await client.until(DONE)
        client.send(f"{AUDIO}.end")
        assert await client.gone() == (1000, "the text is complete")
        *_, done = client.of(DONE)
        assert done["text"] == "" and len(client.of(DONE)) == (2 if seconds else 1)
        assert bool(done["segments"]) == bool(seconds)

    asyncio.run(run())


def test_without_labels_the_text_is_whole() -> None:
    async def run() -> None:
        labeller = FakeLabeller("the process that labels speakers ended with signal SIGKILL")
        client = diarizing(service(FakeEngine(), labeller=labeller))
        client.speak(noise(3))
        client.send(f"{AUDIO}.end")
        assert await client.gone() == (1000, "the text is complete")
        (done,) = client.of(DONE)
        assert done["error"] == {"message": f"no speaker labels: {labeller.error}", "code": 503}
        assert " ".join(each["text"] for each in client.of(SEGMENT)) == done["text"] != ""
        assert not any("speaker_id" in each for each in (*client.of(SEGMENT), *done["segments"]))

    asyncio.run(run())


@pytest.mark.parametrize("wait_s", [FREE_S - 1, FREE_S + 1])
def test_a_session_waits_for_a_place_among_those_that_ask_for_speakers(wait_s: int) -> None:
    async def run() -> None:
        labeller = FakeLabeller()
        async with labeller.place():
            client = diarizing(service(FakeEngine(), labeller=labeller))
            client.speak(noise(3))
            client.send(f"{AUDIO}.end")
            await client.until("text.delta")
            await asyncio.sleep(wait_s)
        await client.gone()
        (done,) = client.of(DONE)
        if wait_s < FREE_S:
            assert "error" not in done and all("speaker_id" in each for each in done["segments"])
        else:
            assert "as many as this server takes" in done["error"]["message"]

    asyncio.run(run())


def test_audio_after_a_sessions_end_is_not_kept() -> None:
    """A session that has used up its key's audio, or its time, labels what it had before."""

    async def run() -> None:
        labeller = FakeLabeller()
        labeller.free.clear()
        live = service(FakeEngine(), labeller=labeller)
        client = diarizing(live)
        client.speak(noise(2))
        await client.until("text.delta")
        client.socket.drain(STOPPING)
        await labeller.begun.wait()
        client.speak(noise(3, seed=1))
        await asyncio.sleep(0.1)
        assert client.inbox.empty() and not client.socket.waiting_bytes and live.kept.size == 0
        labeller.free.set()
        await client.gone()
        assert [len(each) for each in labeller.samples] == [2 * RATE]

    asyncio.run(run())


def test_the_segments_of_a_session_are_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 35 min would stop the event loop for 100 ms."""
    threads, grouped = set[int](), speakers.grouped

    def noted(words: Any) -> Any:
        threads.add(threading.get_ident())
        return grouped(words)

    monkeypatch.setattr(speakers, "grouped", noted)

    async def run() -> None:
        client = diarizing(service(FakeEngine(), labeller=FakeLabeller()))
        client.speak(noise(3))
        client.send(f"{AUDIO}.end")
        await client.gone()
        assert client.of(SEGMENT) and threads and threading.get_ident() not in threads

    asyncio.run(run())


@pytest.mark.parametrize(("seconds", "share"), [(6, 1), (16, 4)], ids=["of all sessions", "of one"])
def test_more_audio_than_is_kept(seconds: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session that exceeds it gets no labels: its segments come as they are complete. Another one keeps its own."""
    monkeypatch.setattr(speakers, "KEPT_BYTES", 2 * RATE * seconds)
    monkeypatch.setattr(speakers, "SHARE", share)

    async def run() -> None:
        labeller = FakeLabeller()
        live = with_sentences(Sentences(), labeller=labeller)
        other, client = diarizing(live), diarizing(live)
        other.speak(noise(1))
        await other.until("text.delta")
        client.speak(noise(2))
        await client.until("text.delta")
        assert not client.of(SEGMENT) and live.kept.size == 2 * RATE * 3
        client.speak(noise(4, seed=1))
        await client.until(SEGMENT, 3)
        assert live.kept.size == 2 * RATE
        client.send(f"{AUDIO}.end")
        await client.gone()
        (done,) = client.of(DONE)
        assert " ".join(each["text"] for each in client.of(SEGMENT)) == done["text"]
        assert len(client.of(SEGMENT)) == len(done["segments"])
        assert not any("speaker_id" in each for each in done["segments"])
        assert f"no speaker labels: this server keeps {2 * RATE * seconds} bytes of audio" in done["error"]["message"]
        other.send(f"{AUDIO}.end")
        await other.gone()
        assert all("speaker_id" in each for each in other.of(SEGMENT))

    asyncio.run(run())


def test_a_long_session_is_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speakers, "PART_BYTES", 2 * RATE)

    async def run() -> None:
        labeller = FakeLabeller()
        client = diarizing(service(FakeEngine(), labeller=labeller))
        client.speak(noise(2.5), 2 * 25_000)
        client.send(f"{AUDIO}.end")
        await client.gone()
        assert [len(each) for each in labeller.samples] == [RATE, RATE, RATE // 2]
        assert labeller.found is not None and labeller.found.spans.tolist() == [[0, 1], [1, 2], [2, 2.5]]

    asyncio.run(run())


@pytest.mark.parametrize("when", ["speaking", "labelling"])
def test_a_client_that_leaves_frees_what_is_kept(when: str) -> None:
    async def run() -> None:
        labeller = FakeLabeller()
        labeller.free.clear()
        live = service(FakeEngine(), labeller=labeller)
        client = diarizing(live)
        client.speak(noise(2))
        await client.until("text.delta")
        assert live.kept is not None and live.kept.size == 2 * RATE * 2
        if when == "labelling":
            client.send(f"{AUDIO}.end")
            await labeller.begun.wait()
        client.leave()
        await client.gone()
        assert live.kept.size == 0
        async with labeller.place():  # which is free
            pass

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["the client", "the server"])
def test_a_server_that_stops_waits_for_labels(ends: str) -> None:
    async def run() -> None:
        labeller = FakeLabeller()
        labeller.free.clear()
        live = service(FakeEngine(), labeller=labeller)
        client = diarizing(live)
        client.speak(noise(2))
        await client.until("text.delta")
        if ends == "the client":
            client.send(f"{AUDIO}.end")
            await labeller.begun.wait()
        stopping = asyncio.create_task(live.drain(10))
        await labeller.begun.wait()
        if ends == "the server":
            client.send(f"{AUDIO}.end")  # the session has no place in the engine any more
            await asyncio.sleep(0.1)
        labeller.free.set()
        await stopping
        code, _ = await client.gone() or (0, "")
        assert code == (1000 if ends == "the client" else 1012)
        (done,) = client.of(DONE)
        assert done["text"] and all("speaker_id" in each for each in done["segments"])

    asyncio.run(run())
