"""Live audio: what is sent when, what comes back when, and the delay of each word."""

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from fakerealtime import RATE, FakeRealtime
from fakeserver import FakeServer, write_dataset

from bench import BenchError, sound
from bench.__main__ import main
from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.measure import lag, live

WORDS = [["Alpha,", 0.05, 0.3], ["beta", 0.35, 0.62]]
SAID = ((0.4, "al"), (0.48, "pha "), (0.72, "Beta."))


def write_clip(directory: Path, seconds: float = 1.0, rate: int = RATE, channels: int = 1) -> Clip:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    path = directory / f"{seconds}-{rate}.wav"
    soundfile.write(path, np.stack([tone] * channels, axis=1), rate)
    return Clip("a", path, "Alpha, beta", seconds, {"words": WORDS})


def hold(
    clip: Clip, server: FakeRealtime, due: float | None = None, key: str | None = None, timeout_s: int = 30
) -> Row:
    with server:
        client = Client(server.url, timeout_s, key, mode="realtime")
        client.model = "mine"
        return client.transcribe(clip, 1, "c1", due)


def test_a_session(tmp_path: Path) -> None:
    server = FakeRealtime(SAID, late_s=0.25)
    row = hold(write_clip(tmp_path), server, key="s3cret")
    assert (row.text, row.status, row.error) == ("alpha Beta.", 101, None)
    (session,) = server.sessions
    assert session.headers["Authorization"] == "Bearer s3cret"
    assert session.model == "mine"
    commit, append = "input_audio_buffer.commit", "input_audio_buffer.append"
    assert session.kinds == ["session.update", commit, *[append] * 13, commit]
    assert session.sizes == [1280] * 12 + [640]
    sine = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE) * 32767
    assert np.abs(np.frombuffer(session.audio, "<i2") - sine).max() <= 2
    # The end of the audio is sent 0.92 s after its beginning, which took 0.08 s to say. No time is shorter than due.
    assert row.latency_ms and row.deltas_ms and row.words_ms
    assert row.end - row.start - row.latency_ms / 1000 >= 0.92
    assert row.latency_ms >= 250
    assert len(row.deltas_ms) == 3  # empty pieces are none
    assert all(ms >= due for ms, due in zip(row.deltas_ms, (320, 400, 640), strict=True))
    assert row.first_text_ms == row.deltas_ms[0]
    # "Alpha" is whole with the second piece, and ends 0.3 s after the speech began, 0.22 s after its first piece.
    assert row.words_ms == pytest.approx([row.deltas_ms[1] - 220, row.deltas_ms[2] - 540], abs=0.01)


def test_a_session_starts_when_it_is_due(tmp_path: Path) -> None:
    server = FakeRealtime()
    due = time.perf_counter() + 0.4
    row = hold(write_clip(tmp_path, 0.1), server, due)
    assert server.sessions[0].arrivals[0] >= due
    assert row.due is not None
    assert row.start >= row.due
    assert row.deltas_ms == []
    assert row.first_text_ms is None


@pytest.mark.parametrize(("rate", "channels"), [(48000, 2), (8000, 1)])
def test_any_audio_is_sent_as_16_khz_mono(tmp_path: Path, rate: int, channels: int) -> None:
    server = FakeRealtime()
    assert hold(write_clip(tmp_path, 0.25, rate, channels), server).error is None
    sound = np.frombuffer(server.sessions[0].audio, "<i2")
    assert len(sound) == 4000
    assert np.abs(np.fft.rfft(sound)).argmax() == 110  # of 440 Hz in 0.25 s


FAILURES = {
    "whole clips only": FakeRealtime(refuses="whole clips only"),
    "closed before transcription.done": FakeRealtime(dies=0.3),
    "TimeoutError": FakeRealtime(late_s=3),
}


@pytest.mark.parametrize("error", FAILURES)
def test_what_is_no_transcript_is_a_failure(tmp_path: Path, error: str) -> None:
    row = hold(write_clip(tmp_path, 0.5), FAILURES[error], timeout_s=1 if error == "TimeoutError" else 30)
    assert error in (row.error or "")
    assert (row.status, row.text, row.latency_ms, row.deltas_ms, row.words_ms) == (101, None, None, None, None)


@pytest.mark.slow
def test_a_server_that_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes of audio, at once, are more than the sockets between the two hold."""

    async def at_once(self: object, due: float | None) -> None:
        pass

    monkeypatch.setattr(live.Session, "_until", at_once)
    begun = time.perf_counter()
    row = hold(write_clip(tmp_path, 600), FakeRealtime(deaf=True), timeout_s=1)
    assert (row.status, row.text) == (101, None)
    assert row.error
    assert time.perf_counter() - begun < 30


def test_no_websocket_there(tmp_path: Path) -> None:
    with FakeServer() as server:
        row = Client(server.url, 5, mode="realtime").transcribe(write_clip(tmp_path), 1)
    assert (row.status, row.text) == (404, None)
    assert "HTTP 404 instead of a WebSocket" in (row.error or "")
    gone = Client(server.url, 5, mode="realtime").transcribe(write_clip(tmp_path), 1)
    assert gone.status is None
    assert "ConnectionRefusedError" in (gone.error or "")


def test_audio_that_cannot_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF, or not")
    with pytest.raises(BenchError, match=r"cannot decode a\.wav of clip a"):
        sound.pcm16(Clip("a", path, "a", 1.0, {}))


@pytest.mark.parametrize(
    ("words", "pieces", "delays"),
    [
        ([["Don't", 0, 1.0], ["stop!", 1, 2.0]], [(1.5, "don"), (1.75, "'t s"), (2.5, "top")], [750, 500]),
        ([["one", 0, 1.0], ["two", 1, 2.0], ["three", 2, 3.0]], [(1.5, "one too three.")], [500, -1500]),
        ([["one", 0, 1.0]], [(1.5, "one"), (2.5, "...")], [500]),  # the full stop came later, and completes no word
        ([["a", 0, 1.0], ["b", 1, 2.0]], [(3.0, " - b")], [1000]),
        ([["a", 0, 1.0]], [], []),
        ([["...", 0, 1.0]], [(1.0, "a")], []),
        ([["well known", 0, 1.0]], [(1.25, "well "), (1.5, "known")], [250, 500]),
        ([["a", 0, 1.0]], [(2.0, "b")], []),
    ],
)
def test_word_delays(words: Any, pieces: Sequence[tuple[float, str]], delays: list[float]) -> None:
    assert [delay for _, delay in lag.word_delays(words, pieces)] == pytest.approx(delays)


@pytest.mark.parametrize("words", [["alpha"], "alpha", [["alpha", 1.0]], [[1.0, 2.0, "alpha"]]])
def test_words_of_another_form_send_nothing(tmp_path: Path, words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "data", {"c0": "alpha"})
    manifest = data / "manifest.jsonl"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"words": words}))
    with FakeRealtime() as server:
        flags = ["run", "--url", server.url, "--dataset", str(data), "--out", str(tmp_path / "out"), "--realtime"]
        assert main(flags) == 2
        assert server.sessions == []
    assert "clip c0: 'words' must list [word, start_s, end_s], found" in capsys.readouterr().err


def test_a_whole_run(tmp_path: Path) -> None:
    texts = {f"c{number}": "alpha beta" for number in range(3)}
    data = write_dataset(tmp_path / "data", texts, seconds=0.2)
    with FakeRealtime(((0.1, "alpha "), (5.0, "beta"))) as server:
        flags = ["run", "--url", server.url, "--dataset", str(data), "--out", str(tmp_path / "out"), "--realtime"]
        assert main([*flags, "--concurrency", "2,1", "--warmup", "1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out/requests.jsonl").read_text().splitlines()]
    assert [(row["load"], row["text"], row["words_ms"]) for row in rows] == [
        (load, "alpha beta", None) for load, _ in itertools.product(("c2", "c1"), range(3))
    ]
    assert len(server.sessions) == 2 * (1 + 3)
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert run["run"]["mode"] == "realtime"
    assert run["run"]["loads"] == list(run["loads"]) == ["c2", "c1"]
