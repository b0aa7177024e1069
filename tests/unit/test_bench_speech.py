"""`python -m bench speech`: the samples of a response, the figures, whole runs against a stand-in, and the reports."""

import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakeserver import MODEL, FakeServer, write_dataset
from fakeserver import Answer as Transcript
from places import ROOT
from runs import HOSTILE, Page, is_valid, valid
from speechserver import MODEL as STAND_IN
from speechserver import RATE_HZ, VOICE, Reply, SpeechServer, clip_files, header, pcm, plain, samples_of

from bench import BenchError, dataset, results
from bench.__main__ import main
from bench.loads import closed
from bench.plan import SpeechPlan
from bench.speech import metrics, report
from bench.speech.client import SpeechClient
from bench.speech.rows import SpeechRow, Text, joined, late_ms, rtf
from bench.speech.run import measure, select
from bench.speech.samples import Samples, SamplesError

TEXTS = {f"c{number:02}": f"alpha beta gamma number {number}" for number in range(6)}
SIZED = {"Content-Length": "1"}


def sound(seconds: float) -> bytes:
    return bytes(2 * round(seconds * RATE_HZ))


# ---- The samples of a response


@pytest.mark.parametrize("step", [1, 7, 44, 45, 10_000])
def test_a_wav_in_pieces_of_any_size_has_its_samples(step: int) -> None:
    samples = Samples("wav", {})
    body = header() + b"\1\2" * 500
    sizes = [samples.feed(body[place : place + step]) for place in range(0, len(body), step)]
    samples.end()
    assert samples.body == b"\1\2" * 500 and sum(sizes) == 1000
    assert (samples.rate_hz, samples.channels, samples.told) == (RATE_HZ, 1, True)
    assert next(size for size in sizes if size) <= step and sizes[: 43 // step] == [0] * (43 // step)


def test_other_chunks_of_a_wav_are_no_samples() -> None:
    body = header(4)
    more = body[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + body[12:] + b"\1\2\3\4" + b"LIST\1\0\0\0x\0"
    samples = Samples("wav", SIZED)
    assert samples.feed(more) == 4
    samples.end()
    assert samples.body == b"\1\2\3\4"


@pytest.mark.parametrize(
    ("headers", "rate", "channels", "told"),
    [
        ({}, 24_000, 1, False),
        ({"X-Audio-Sample-Rate": "44100"}, 44_100, 1, True),
        ({"X-Audio-Sample-Rate": "8000", "X-Audio-Channels": "2"}, 8000, 2, True),
    ],
)
def test_the_rate_of_pcm_is_what_the_server_says_or_openais(
    headers: dict[str, str], rate: int, channels: int, told: bool
) -> None:
    samples = Samples("pcm", headers)
    assert samples.feed(bytes(1000)) == 1000
    samples.end()
    assert (samples.rate_hz, samples.channels, samples.told) == (rate, channels, told)


FLOAT = header()[:20] + b"\3\0" + header()[22:]
EIGHT_BITS = header()[:34] + b"\x08\0" + header()[36:]
NO_FORMAT = b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd"
ENDLESS = b"RIFF\0\0\0\0WAVEjunk\xff\xff\xff\x7f" + bytes(70_000)


@pytest.mark.parametrize(
    ("form", "headers", "body", "message"),
    [
        ("pcm", {}, b"", "has no samples"),
        ("pcm", {}, b"abc", "3 bytes are no whole number of 16-bit samples"),
        ("pcm", {"X-Audio-Channels": "2"}, b"ab", "2 bytes are no whole number"),
        ("pcm", {"X-Audio-Sample-Rate": "fast"}, b"ab", "X-Audio-Sample-Rate must be a number, found 'fast'"),
        ("pcm", {"X-Audio-Channels": "0"}, b"ab", "X-Audio-Channels must be a number, found '0'"),
        ("wav", {}, header(), "has no samples"),
        ("wav", {}, header()[:30], "the WAV ends in its header, after 30 bytes"),
        ("wav", {}, b"ID3 and so on, an MP3", "is no WAV: it begins with b'ID3"),
        ("wav", {}, FLOAT + b"ab", "found format 3, 16 bits"),
        ("wav", {}, EIGHT_BITS + b"ab", "found format 1, 8 bits"),
        ("wav", {}, NO_FORMAT, "no 'fmt ' before its samples"),
        ("wav", {}, ENDLESS, "no samples in its first 65536 bytes"),
        ("wav", SIZED, header(100) + bytes(98), "has 98 bytes of samples, its header says 100"),
    ],
)
def test_what_is_not_whole_audio_says_why(form: str, headers: dict[str, str], body: bytes, message: str) -> None:
    def read() -> None:
        samples = Samples(form, headers)
        samples.feed(body)
        samples.end()

    with pytest.raises(SamplesError, match=message.replace("(", r"\(")):
        read()


# ---- Figures


def row(number: int = 0, *pieces: tuple[float, float], **changes: Any) -> SpeechRow:
    """Of 100 characters, one second after another, with these pieces."""
    found = SpeechRow(
        id=f"t{number}",
        load="c1",
        text="x" * 100,
        start=1000.0 + number,
        end=1001.0 + number,
        latency_ms=pieces[-1][0] if pieces else None,
        first_audio_ms=pieces[0][0] if pieces else None,
        audio_s=sum(seconds for _, seconds in pieces) or None,
        pieces=list(pieces) or None,
        rate_hz=RATE_HZ if pieces else None,
        rate_told=False if pieces else None,
        streamed=True if pieces else None,
        status=200,
        error=None if pieces else "HTTP 500: made to fail",
    )
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("pieces", "late"),
    [
        ([(100, 1.0)], 0),
        ([(100, 1.0), (1100, 1.0)], 0),  # just in time
        ([(100, 1.0), (1101, 1.0)], 1),
        ([(100, 0.4), (400, 0.4), (1000, 0.4)], 100),
        # The first gap is the larger one: with 500 ms of delay at the start there is none.
        ([(100, 0.1), (700, 2.0), (2000, 0.1)], 500),
        # The whole is faster than its playback, and there is a gap all the same.
        ([(0, 0.1), (900, 9.9)], 800),
    ],
)
def test_a_piece_is_late_when_all_before_it_is_played(pieces: list[tuple[float, float]], late: float) -> None:
    assert late_ms(row(0, *pieces)) == pytest.approx(late, abs=1e-6)


def test_what_was_not_streamed_is_neither_late_nor_in_time() -> None:
    assert late_ms(row(0, (100, 1.0), streamed=False)) is None
    assert late_ms(row(0)) is None and rtf(row(0)) is None


def test_the_figures_of_a_load() -> None:
    rows = [
        row(0, (100, 1.0), (500, 1.0)),  # RTF 0.25
        row(1, (200, 0.5), (1000, 1.5)),  # RTF 0.5, 300 ms late
        row(2, (300, 4.0), streamed=False),  # RTF 0.075
        row(3),
    ]
    found = metrics.of_load("c16", rows, 5, {"joules": 90.0, "joules_reason": None, "harness_cpu_s": 0.08})
    assert (found["completed"], found["failed"], found["missing"], found["streamed"]) == (3, 1, 1, 2)
    assert (found["concurrency"], found["wall_s"]) == (16, 4.0)  # of the failed one, too
    assert found["first_audio_ms"] == {"p50": 200, "p90": pytest.approx(280), "p95": pytest.approx(290), "max": 300}
    assert found["latency_ms"]["p50"] == 500
    assert (found["rtf"]["p50"], found["rtf"]["max"]) == (0.25, 0.5)
    assert found["rtf_total"] == pytest.approx(1.8 / 8)
    assert (found["characters_per_s"], found["audio_s_per_s"], found["requests_per_s"]) == (75, 2, 0.75)
    assert found["wait_rate"] == 0.5 and found["late_ms"]["max"] == pytest.approx(300)
    assert (found["joules_per_request"], found["joules_per_audio_second"]) == (30, 11.25)
    assert found["harness_ms_per_request"] == 20


def test_nothing_is_null_and_not_zero() -> None:
    for rows in ([], [row(0), row(1)]):
        found = metrics.of_load("c1", rows, 2, None)
        unknown = {name for name, value in found.items() if value is None}
        figures = ("first_audio_ms", "latency_ms", "rtf", "rtf_total", "audio_s", "characters_per_s", "wait_rate")
        assert {*figures, "late_ms", "pieces", "joules", "requests_per_s"} <= unknown
        assert (found["completed"], found["failed"], found["missing"]) == (0, len(rows), 2 - len(rows))


def test_texts_of_a_length() -> None:
    assert joined(["alpha beta", "gamma"], 100) == "alpha beta gamma"
    assert joined(["alpha beta", "gamma"], 16) == "alpha beta gamma"
    assert joined(["alpha beta", "gamma"], 15) == "alpha beta"
    assert joined(["alpha"], 4) == ""


# ---- Whole runs


def reply(body: dict[str, Any]) -> Reply:
    """Two pieces of a second, whatever is said."""
    front = header() if body["response_format"] == "wav" else b""
    return Reply([(0.02, front + sound(1)), (0.02, sound(1))], kind=f"audio/{body['response_format']}")


class Case:
    def __init__(self, directory: Path, server: SpeechServer) -> None:
        self.data, self.out, self.server = write_dataset(directory / "data", TEXTS), directory / "out", server

    def flags(self, *more: str) -> list[str]:
        return ["speech", "--url", self.server.url, "--dataset", str(self.data), "--out", str(self.out), *more]

    def run(self, *more: str) -> int:
        return main(self.flags(*more))

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / results.SUMMARY).read_text())
        return found

    @property
    def rows(self) -> list[SpeechRow]:
        return results.read_lines(self.out / results.ROWS, SpeechRow)

    def all_valid(self) -> None:
        for name in ("run", "summary"):
            valid(f"speech-{name}", json.loads((self.out / f"{name}.json").read_text()))
        for line in (self.out / results.ROWS).read_text().splitlines():
            valid("speech-requests", json.loads(line))


@pytest.fixture
def case(tmp_path: Path) -> Any:
    with SpeechServer(reply) as server:
        yield Case(tmp_path, server)


@pytest.mark.parametrize("form", ["pcm", "wav"])
def test_a_whole_run(case: Case, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert case.run("--format", form) == 0
    sent = {"model": STAND_IN, "voice": VOICE, "response_format": form, "stream": True, "stream_format": "audio"}
    texts = list(TEXTS.values())
    assert case.server.received == [{**sent, "input": text} for text in [*texts[:2], *texts]]  # 2 warm-ups
    case.all_valid()
    for found, text in zip(case.rows, texts, strict=True):
        assert (found.text, found.status, found.error, found.audio_s, found.streamed) == (text, 200, None, 2.0, True)
        assert found.rate_told == (form == "wav") and found.sends == 1
        assert found.pieces is not None and sum(seconds for _, seconds in found.pieces) == pytest.approx(2)
        assert found.first_audio_ms is not None and found.latency_ms is not None
        assert 20 <= found.first_audio_ms < found.latency_ms >= 40
        assert found.latency_ms == pytest.approx((found.end - found.start) * 1000, abs=0.01)
    summary = case.summary
    assert (summary["samples"], summary["completed"], summary["failed"], summary["kind"]) == (6, 6, 0, "speech")
    (load,) = summary["loads"]
    assert load["rtf"]["p50"] == pytest.approx(load["latency_ms"]["p50"] / 2000, rel=0.3)
    assert load["characters_per_s"] == pytest.approx(sum(map(len, texts)) / load["wall_s"])
    assert summary["memory"]["source"] == "rss_process_tree"
    assert summary["round_trip"] is None and "--transcribe" in summary["round_trip_reason"]
    assert summary["environment"]["server_version"] == "0.0.stand-in"
    printed = capsys.readouterr().out
    assert "6/6 completed, 0 failed" in printed and "first audio P95" in printed and "wait rate" in printed
    told = "The server does not say the rate of its PCM"
    assert (told in Page(case.out / results.PAGE).text) == (form == "pcm")


def test_several_loads_and_the_key(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "secret")
    assert case.run("--concurrency", "1,4", "--warmup", "0", "--voice", "anna", "--api-key-env", "KEY_OF_A_TEST") == 0
    assert set(case.server.keys) == {"Bearer secret"} and "secret" not in (case.out / results.RUN).read_text()
    assert {body["voice"] for body in case.server.received} == {"anna"}
    assert 1 < case.server.max_in_flight <= 4
    case.all_valid()
    assert [load["load"] for load in case.summary["loads"]] == ["c1", "c4"]
    page = Page(case.out / results.PAGE)
    assert "RTF against concurrency" in page.text and page.count("svg") == 6


def test_the_library_has_the_summary(case: Case) -> None:
    loads = tuple(closed("2"))
    summary = measure(SpeechPlan(case.server.url, case.out, loads, dataset=str(case.data), samples=3, warmup=0))
    assert summary == case.summary and summary["completed"] == 3
    assert summary["loads"][0]["first_audio_ms"]["p95"] > 0


def test_a_response_of_known_length_is_no_stream(case: Case) -> None:
    case.server.reply = lambda _: Reply([(0, header(48_000) + sound(1))], kind="audio/wav", sized=True)
    assert case.run("--whole", "--format", "wav") == 0
    assert not {"stream", "stream_format"} & set(case.server.received[0])
    case.all_valid()
    (load,) = case.summary["loads"]
    assert (load["streamed"], load["wait_rate"], load["late_ms"], load["completed"]) == (0, None, None, 6)
    assert "Responses had a known length" in Page(case.out / results.PAGE).text


def test_a_late_piece_is_a_wait(case: Case) -> None:
    def slow(body: dict[str, Any]) -> Reply:
        late = body["input"] in (TEXTS["c01"], TEXTS["c04"], TEXTS["c05"])
        return Reply([(0, sound(0.1)), (0.4, sound(0.1))] if late else [(0, sound(60)), (0.05, sound(1))])

    case.server.reply = slow
    assert case.run() == 0
    (load,) = case.summary["loads"]
    assert load["wait_rate"] == 0.5 and load["late_ms"]["max"] >= 295


FAILURES = {
    "c00": (Reply([(0, b'{"error": "no"}')], 500, "application/json", sized=True), "HTTP 500: {"),
    "c01": (Reply([(0, sound(1))], drop=True), "ConnectionReset"),
    "c02": (Reply([(0, b'{"error": "late"}')], 200, "application/json", sized=True), "instead of audio: '{"),
    "c03": (Reply([(0, b"data: {}\n\n")], 200, "text/event-stream"), "the Content-Type is text/event-stream"),
    "c04": (Reply([(0, b"abc")]), "3 bytes are no whole number"),
}


def test_failed_requests_stay_as_failed(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.measure.upload.dropped", lambda _: False)  # or it is sent again for two minutes
    by_text = {TEXTS[clip]: answer for clip, (answer, _) in FAILURES.items()}
    case.server.reply = lambda body: by_text.get(body["input"]) or reply(body)
    assert case.run("--warmup", "0") == 1
    case.all_valid()
    for found in case.rows:
        expected = FAILURES.get(found.id, (None, ""))[1]
        assert (found.error is None) == (not expected) and expected in (found.error or ""), found.error
    (load,) = case.summary["loads"]
    assert (load["completed"], load["failed"], load["audio_s"]) == (1, 5, 2.0)
    text = (case.out / results.REPORT).read_text()
    assert "Failures: 5" in text and "ConnectionReset" in text
    assert "1/6 completed, 5 failed" in capsys.readouterr().out


OK = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\n"


@pytest.mark.parametrize(
    "response",
    [
        OK + b"Content-Length: 100\r\n\r\n" + bytes(50),
        OK + b"Transfer-Encoding: chunked\r\n\r\n10\r\n" + bytes(16) + b"\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n10\r\n" + bytes(8),
    ],
    ids=["length", "between chunks", "inside a chunk"],
)
def test_a_response_that_ends_early_is_no_speech(response: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.upload.dropped", lambda _: False)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as request:
            length = next(int(line.split(b":")[1]) for line in request if line.lower().startswith(b"content-length:"))
            while request.readline() != b"\r\n":
                pass
            request.read(length)  # the kernel resets a connection that is closed with unread bytes
            connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        client = SpeechClient(f"http://127.0.0.1:{listener.getsockname()[1]}", 30, None, "pcm", True)
        found = client.speak(Text("c00", "alpha"), "c1")
    assert found.error is not None and "IncompleteRead" in found.error
    assert (found.audio_s, found.pieces, found.first_audio_ms) == (None, None, None)


def test_a_run_in_which_all_fail_has_a_report_without_figures(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.reply = lambda _: Reply([(0, b"no")], 500, "text/plain", sized=True)
    assert case.run() == 1
    case.all_valid()
    assert "RTF                     not measured" in capsys.readouterr().out
    assert Page(case.out / results.PAGE).count("svg") == 0


def test_a_request_is_sent_again_and_its_times_include_the_wait(case: Case) -> None:
    calls: list[str] = []

    def busy(body: dict[str, Any]) -> Reply:
        calls.append(body["input"])
        headers = (("Retry-After", "1"),)
        return reply(body) if len(calls) > 1 else Reply([(0, b"busy")], 429, "text/plain", sized=True, headers=headers)

    case.server.reply = busy
    assert case.run("--warmup", "0", "--samples", "1") == 0
    (found,) = case.rows
    assert found.sends == 2 and found.first_audio_ms is not None and found.first_audio_ms > 1000


def test_a_server_without_voices_needs_a_name(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.server.voices = None
    assert case.run() == 2
    assert "/v1/audio/voices lists no voice: name one with --voice" in capsys.readouterr().err
    assert case.run("--voice", "anna") == 0


def test_a_server_that_is_not_there(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    with SpeechServer(reply) as gone:
        pass
    assert case.run("--url", gone.url) == 2
    assert f"cannot synthesize speech with {gone.url}" in capsys.readouterr().err


def test_another_run_is_not_overwritten(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run() == 0
    assert case.run() == 2
    assert "choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--characters", "5"), "--characters 5: must be at least 20"),
        (("--samples", "0"), "--samples 0: must be at least 1"),
        (("--format", "mp3"), "invalid choice: 'mp3'"),
        (("--transcribe", "http://a", "--random-weights"), "such speech has no words"),
        (("--transcribe", "http://a", "--characters", "500"), "no clip of these texts"),
        (("--transcribe-key-env", "KEY"), "only with --transcribe"),
    ],
)
def test_flags_that_do_not_fit(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["speech", "--url", "http://127.0.0.1:1", "--out", str(tmp_path), *flags])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--api-key-env", "--transcribe-key-env"])
def test_a_key_that_is_not_set(case: Case, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert case.run(flag, "NO_SUCH_VARIABLE", "--transcribe", case.server.url) == 2
    assert f"{flag}: the environment variable NO_SUCH_VARIABLE is empty or not set" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(case: Case) -> None:
    case.server.reply = lambda body: Reply([(0.3, sound(1))])
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "runpy.run_module('bench', run_name='__main__')"
    command = [sys.executable, "-c", code, *case.flags("--warmup", "0")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (case.out / results.ROWS).exists() or len(case.rows) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "not sent" in printed
    case.all_valid()
    assert 0 < case.summary["missing"] < 6


def test_ctrl_c_during_the_round_trip_keeps_the_figures_of_the_speech(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.speech.roundtrip.hear", interrupted)
    with heard() as transcriber:
        assert case.run("--transcribe", transcriber.url) == 130
    case.all_valid()
    assert case.summary["completed"] == 6 and case.summary["round_trip"] is None
    assert "ended before its speech was transcribed" in case.summary["round_trip_reason"]


# ---- Texts


def test_texts_are_references_or_of_a_length(tmp_path: Path) -> None:
    plan = SpeechPlan("http://a", tmp_path, samples=5, seed=3)
    clips = dataset.select(dataset.load(plan.dataset).clips, 5, 3)
    assert [tuple(text) for text in select(plan).texts] == [(clip.id, clip.text) for clip in clips]
    long = select(replace(plan, characters=500)).texts
    assert [text.id for text in long] == [f"text-{number:04}" for number in range(1, 6)]
    assert all(450 < len(text.text) <= 500 for text in long) and len(set(long)) == 5
    assert long == select(replace(plan, characters=500)).texts
    assert long != select(replace(plan, characters=500, seed=4)).texts


def test_a_length_that_fits_no_word(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", {"c00": "x" * 50})
    with pytest.raises(BenchError, match="--characters 20: the first word of clip c00 is longer"):
        select(SpeechPlan("http://a", tmp_path, dataset=str(data), characters=20))


# ---- The round trip. With a real transcriber: tests/server/test_speech_loops.py


def heard(**wrong: str) -> FakeServer:
    """It hears each text from its speech (.wav) and its clip (.wav too), but what `wrong` says of the speech."""
    answers = {f"{clip}.wav": Transcript(text) for clip, text in TEXTS.items()}
    return FakeServer(answers | {f"{clip}.wav": Transcript(text) for clip, text in wrong.items()})


def test_the_round_trip_has_the_errors_of_both(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    answers: dict[str, Any] = {f"{clip}.wav": Transcript(text) for clip, text in TEXTS.items()}
    answers["c02.wav"] = [Transcript("alpha number 2"), Transcript(TEXTS["c02"])]  # its speech is sent first
    answers["c03.wav"] = [Transcript(TEXTS["c03"]), Transcript("alpha beta gamma delta 3")]
    unspoken = TEXTS["c05"]
    case.server.reply = lambda body: (
        Reply([(0, b"no")], 500, "text/plain") if body["input"] == unspoken else reply(body)
    )
    with FakeServer(answers) as transcriber:
        assert case.run("--transcribe", transcriber.url, "--concurrency", "2,1") == 1
        assert sorted(transcriber.sent()) == sorted(
            [f"{clip}.wav" for clip in TEXTS if clip != "c05"] + [f"{clip}.wav" for clip in TEXTS]
        )
        sizes = [each.size for each in transcriber.received[:5]]
        assert sizes == [44 + 96_000] * 5  # a second file of each would be of the other load
    case.all_valid()
    trip = case.summary["round_trip"]
    # Of 30 words: two of c02 and all five of c05.
    assert trip["speech"]["wer"]["value"] == pytest.approx(7 / 30) and trip["speech"]["wer"]["deletions"] == 7
    assert trip["clips"]["wer"]["value"] == pytest.approx(1 / 30)
    assert (trip["failed"], trip["transcriber"]["model"]) == (1, MODEL)
    lines = [json.loads(line) for line in (case.out / "transcripts.jsonl").read_text().splitlines()]
    assert all(is_valid("requests", line) for line in lines) and len(lines) == 6
    assert lines[5]["error"].startswith("not spoken: HTTP 500")
    printed = capsys.readouterr().out
    assert "WER of the round trip   23.33% (95 % interval" in printed
    assert "transcriber's own WER   3.33% (95 % interval" in printed
    page = Page(case.out / results.PAGE)
    assert "the dataset's clips" in page.text and "The 1 worst clips" in page.text


def test_a_transcription_that_fails_counts_in_the_exit_status(case: Case) -> None:
    with heard() as transcriber:
        transcriber.answers = {**transcriber.answers, "c01.wav": Transcript(status=500)}
        assert case.run("--transcribe", transcriber.url) == 1
    assert case.summary["completed"] == 6 and case.summary["round_trip"]["failed"] == 2
    text = (case.out / results.REPORT).read_text()
    assert "HTTP 500" in text and "Failures: 2" in text


def test_a_transcriber_that_is_not_there_ends_the_run_before_it_begins(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    with heard() as gone:
        pass
    assert case.run("--transcribe", gone.url) == 2
    assert f"cannot transcribe with {gone.url}" in capsys.readouterr().err and case.server.received == []
    assert case.run("--transcribe", "nonsense") == 2
    assert "--transcribe 'nonsense' must look like" in capsys.readouterr().err


def test_random_weights_have_no_words(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run("--random-weights") == 0
    case.all_valid()
    assert case.summary["round_trip"] is None and "random" in case.summary["round_trip_reason"]
    assert "WER                     none (random weights have no words)" in capsys.readouterr().out
    for text in (Page(case.out / results.PAGE).text, (case.out / results.REPORT).read_text()):
        assert "no word error rate can be had" in text and "Characters per second" in text


# ---- Reports


def test_scoring_again_gives_the_same(case: Case) -> None:
    with heard() as transcriber:
        assert case.run("--transcribe", transcriber.url, "--note", "a note") == 0
    names = (results.SUMMARY, results.REPORT, results.PAGE)
    before = {name: (case.out / name).read_text() for name in names}
    for name in names:
        (case.out / name).unlink()
    assert main(["report", str(case.out)]) == 0
    assert {name: (case.out / name).read_text() for name in names} == before


def test_hostile_texts_do_not_leave_their_place(case: Case) -> None:
    case.server.reply = lambda _: Reply([(0, HOSTILE.encode("utf-8", "replace"))], 500, "text/plain", sized=True)
    assert case.run("--note", HOSTILE.replace("\ud800", "")) == 1
    page = Page(case.out / results.PAGE)
    assert (page.count("script"), page.count("img")) == (0, 0) and "<script>alert(1)" in page.text
    text = (case.out / results.REPORT).read_text()
    assert "<script" not in text and "\x1b" not in text


@pytest.mark.parametrize("changed", [{"load": "c7"}, {"id": "other"}])
def test_a_row_of_another_run(case: Case, capsys: pytest.CaptureFixture[str], changed: dict[str, Any]) -> None:
    assert case.run() == 0
    with (case.out / results.ROWS).open("a") as file:
        file.write(results.row_line(replace(case.rows[0], **changed)))
    assert main(["report", str(case.out)]) == 2
    assert "line 7: text" in capsys.readouterr().err


def test_a_row_that_a_kill_cut_off_is_missing_and_a_damaged_one_an_error(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert case.run() == 0
    path = case.out / results.ROWS
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert main(["report", str(case.out)]) == 1 and case.summary["missing"] == 1
    path.write_text(whole.replace('"id"', '"name"', 1))
    assert main(["report", str(case.out)]) == 2
    assert "line 1 is damaged" in capsys.readouterr().err


def test_another_schema_version(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.run() == 0
    record = json.loads((case.out / results.RUN).read_text())
    results.write_json(case.out / results.RUN, record | {"schema_version": 9})
    assert main(["report", str(case.out)]) == 2
    assert "schema_version 9; this bench reads 1" in capsys.readouterr().err


def test_the_schemas_refuse_what_is_not_measured_as_zero_and_what_failed_with_figures() -> None:
    done, failed = (json.loads(results.row_line(each)) for each in (row(0, (100, 1.0)), row(1)))
    assert is_valid("speech-requests", done) and is_valid("speech-requests", failed)
    assert not is_valid("speech-requests", failed | {"latency_ms": 0.0})
    assert not is_valid("speech-requests", done | {"audio_s": 0.0})
    assert not is_valid("speech-requests", done | {"first_audio_ms": None})
    assert not is_valid("speech-requests", done | {"more": 1})


# ---- The stand-in


def test_the_stand_in_answers_with_the_recording_of_a_text(tmp_path: Path) -> None:
    clip = dataset.load(ROOT / "bench/data").clips[0]
    with SpeechServer() as server:
        found = measure(SpeechPlan(server.url, tmp_path / "out", samples=2, warmup=0, transcriber=None))
    assert found["completed"] == 2 and len(clip_files()) == 500
    samples = pcm(clip_files()[plain(clip.text)])
    assert len(samples) / 2 / RATE_HZ == pytest.approx(clip.duration_s, abs=0.05)
    assert samples_of(header(len(samples)) + samples).any()
    assert report.is_one(tmp_path / "out")


# ---- The committed round trip


COMMITTED = ROOT / "bench/results/speech-roundtrip-standin"


def test_the_committed_round_trip_is_a_stand_ins_and_says_so(tmp_path: Path) -> None:
    """Scored again it is the same."""
    out = Path(shutil.copytree(COMMITTED, tmp_path / COMMITTED.name))
    summary = report.score(out)
    for name in (results.SUMMARY, results.REPORT, results.PAGE):
        assert (out / name).read_text() == (COMMITTED / name).read_text()
    assert summary["run"]["model"] == STAND_IN and summary["run"]["note"].startswith("Stand-in: no speech model ran.")
    for name in (results.REPORT, results.PAGE):
        assert (COMMITTED / name).read_text().index("Stand-in: no speech model ran.") < 6000
    for name in ("run", "summary"):
        valid(f"speech-{name}", json.loads((COMMITTED / f"{name}.json").read_text()))
    for line in (COMMITTED / results.ROWS).read_text().splitlines():
        valid("speech-requests", json.loads(line))
