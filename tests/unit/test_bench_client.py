"""What is sent to a server and how its answers are read and timed: streams, chats, fields, due times."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakeserver import MODEL, Answer, FakeServer, write_dataset
from turnedclock import turned

from bench import BenchError, dataset, results
from bench.__main__ import main
from bench.answers import Row
from bench.client import Client
from bench.dataset import Clip
from bench.measure import sse, upload

TEXTS = {f"c{number:02}": f"alpha beta gamma number {number}" for number in range(4)}


def chunk(text: str | None, **more: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"delta": {"content": text}, **more}]}).encode()


DONE = b"data: [DONE]\n\n"
VLLM = ((0.1, chunk("")), (0.1, chunk("alpha") + chunk(" be")), (0.4, chunk("ta", finish_reason="length")), (0.3, DONE))
OPENAI = (
    (0.1, b'event: transcript.text.delta\r\ndata: {"type": "transcript.text.delta", "delta": "alpha be"}\r\n\r\n'),
    (0.4, b': a comment\n\ndata: {"type": "transcript.text.delta",\ndata: "delta": "ta"}\n\n'),
    (0.1, b'data: {"type": "transcript.text.done", "text": "alpha beta"}\n\n'),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent again, after waits that tests have no time for."""
    monkeypatch.setattr(upload, "WAIT_S", 0.001)


@pytest.fixture
def clip(tmp_path: Path) -> Clip:
    return dataset.load(write_dataset(tmp_path / "data", TEXTS))[0][2]


def ask(clip: Clip, answer: Answer, due: float | None = None, **kind: Any) -> Row:
    with FakeServer(default=answer) as server:
        client = Client(server.url, 30, **kind)
        client.model = MODEL
        row = client.transcribe(clip, 1, "c1", due)
        again = client.transcribe(clip, 1)  # the connection is left fit for another request
        assert (again.text, again.status) == (row.text, row.status)
    return row


# ---- Streams


@pytest.mark.parametrize("chunked", [True, False])
def test_pieces_of_vllm_are_timed_as_they_arrive(clip: Clip, chunked: bool) -> None:
    row = ask(clip, Answer(events=VLLM, chunked=chunked), mode="stream")
    assert (row.text, row.status, row.error) == ("alpha beta", 200, None)
    assert row.deltas_ms and row.latency_ms
    assert 200 <= row.deltas_ms[0] == row.deltas_ms[1] == row.first_text_ms
    assert 600 <= row.deltas_ms[2] <= row.latency_ms
    assert row.latency_ms == pytest.approx((row.end - row.start) * 1000, abs=0.01)


@pytest.mark.parametrize("after", [b"", DONE])
def test_openais_events(clip: Clip, after: bytes) -> None:
    answer = Answer(events=(*OPENAI, (0.4, after or b": bye\n\n")))
    with FakeServer(default=answer) as server:
        row = Client(server.url, 30, mode="stream").transcribe(clip, 1)
    assert (row.text, row.error) == ("alpha beta", None)
    assert row.deltas_ms and 100 <= row.deltas_ms[0] <= row.deltas_ms[1]


@pytest.mark.parametrize(
    ("events", "times", "end"),
    [
        (VLLM, [0.2, 0.2, 0.6], 0.9),
        ((*OPENAI, (0.4, DONE)), [0.1, 0.5], 0.6),  # what follows the end mark does not count
    ],
)
def test_arrivals(
    monkeypatch: pytest.MonkeyPatch, events: tuple[tuple[float, bytes], ...], times: list[float], end: float
) -> None:
    """Each piece at the time of the bytes that completed its event."""
    waiting = [*events, (0.1, b"")]
    with turned(monkeypatch, sse) as clock:

        def receive(_: int) -> bytes:
            pause_s, piece = waiting.pop(0)
            clock.now += pause_s
            return piece

        text, pieces, ended = sse.read(receive)
    assert text == "alpha beta"
    assert [at for at, _ in pieces] == pytest.approx(times)
    assert ended == pytest.approx(end)


def test_bytes_may_be_cut_anywhere(clip: Clip) -> None:
    whole = b"".join(piece for _, piece in VLLM)
    whole = whole.replace(b"alpha", "älphа 中".encode())
    row = ask(clip, Answer(events=tuple((0.0, whole[at : at + 1]) for at in range(len(whole)))), mode="stream")
    assert row.text == "älphа 中 beta"


def test_an_empty_transcript_is_complete(clip: Clip) -> None:
    row = ask(clip, Answer(events=((0, chunk("", finish_reason="stop")), (0, DONE))), mode="stream")
    assert (row.text, row.error, row.first_text_ms, row.deltas_ms) == ("", None, None, [])


CUT = b'data: {"choices": [{"delta": {"content": "alpha"}}]}\n\n'
BROKEN = {
    "ended without [DONE]": Answer(events=((0, CUT),)),
    "the stream ended without": Answer(events=((0, CUT + DONE[:-1]),)),
    "ChunkedEncodingError|ProtocolError|InvalidChunkLength": Answer(events=((0, CUT),), drop="inside"),
    'the stream has an error event: {"error": {"message": "no memory"': Answer(
        events=((0, CUT + b'data: {"error": {"message": "no memory", "code": 500}}\n\n' + DONE),)
    ),
    'the stream has an error event: {"type": "error"': Answer(
        events=((0, b'data: {"type": "error", "message": "x"}\n\n'),)
    ),
    "of the stream is not JSON": Answer(events=((0, b"data: alpha\n\n" + DONE),)),
    "neither choices nor transcript.text": Answer(events=((0, b'data: {"text": "alpha"}\n\n' + DONE),)),
    "has no string 'delta'": Answer(events=((0, b'data: {"type": "transcript.text.delta"}\n\n' + DONE),)),
    "the content of an event is not a string": Answer(events=((0, chunk(7) + DONE),)),  # type: ignore[arg-type]
    "have no delta": Answer(events=((0, b'data: {"choices": [{}]}\n\n' + DONE),)),
    "the Content-Type is application/json": Answer("alpha beta"),
    "HTTP 500": Answer(status=500),
}


@pytest.mark.parametrize("error", BROKEN)
def test_a_broken_stream_is_a_failure(clip: Clip, error: str) -> None:
    row = ask(clip, BROKEN[error], mode="stream")
    assert row.error is not None
    assert any(each in row.error for each in error.split("|"))
    assert (row.text, row.latency_ms, row.first_text_ms, row.deltas_ms) == (None, None, None, None)
    assert row.status == BROKEN[error].status


def test_silence_inside_a_stream_is_a_failure(clip: Clip) -> None:
    with FakeServer(default=Answer(events=((0, chunk("alpha")), (3, DONE)))) as server:
        row = Client(server.url, 1, mode="stream").transcribe(clip, 1)
    assert row.error is not None
    assert "ReadTimeout" in row.error


def test_a_stream_is_read_to_its_end() -> None:
    parts = [chunk("alpha") + DONE, b": more\n\n", b""]
    text, pieces, _ = sse.read(lambda most: parts.pop(0))
    assert (text, len(pieces), parts) == ("alpha", 1, [])


@pytest.mark.parametrize(
    ("header", "stages"),
    [
        ("decode;dur=2.5, speech;desc=beside;dur=3, text ; dur=0", {"decode": 2.5, "speech": 3.0, "text": 0.0}),
        ('cache;desc="hit", miss, db;dur=53', {"db": 53.0}),
        ("a;dur=-1, b;dur=nan, c;dur=1e9, ;;,=", None),
        ("", None),
    ],
)
def test_the_stages_of_the_server_are_kept(clip: Clip, header: str, stages: dict[str, float] | None) -> None:
    row = ask(clip, Answer("alpha", headers=(("Server-Timing", header),)))
    assert (row.text, row.server_ms) == ("alpha", stages)


# ---- What is sent again


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize(
    "first", [Answer(status=status) for status in (429, 502, 503, 504)] + [Answer(drop="before"), Answer(drop="inside")]
)
def test_a_request_that_may_succeed_later_is_sent_again(clip: Clip, first: Answer, mode: Any) -> None:
    last = Answer("alpha beta") if mode == "whole" else Answer(events=VLLM)
    with FakeServer({clip.path.name: [first, first, last]}) as server:
        row = Client(server.url, 30, mode=mode).transcribe(clip, 1)
    assert (row.text, row.status, row.error, row.sends) == ("alpha beta", 200, None, 3)
    assert json.loads(results.row_line(row))["sends"] == 3


def test_its_latency_includes_the_waits(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "WAIT_S", 60)
    busy = Answer(status=429, headers=(("Retry-After", "1"),))
    with FakeServer({clip.path.name: [busy, Answer(events=VLLM)]}) as server:
        due = time.perf_counter() + 0.1
        row = Client(server.url, 30, mode="stream").transcribe(clip, 1, due=due)
    assert row.sends == 2 and row.latency_ms and row.first_text_ms
    assert row.latency_ms > row.first_text_ms > 1000
    assert row.end - row.start > 1


@pytest.mark.parametrize("status", [400, 404, 408, 413, 500])
def test_another_status_is_a_failure_at_once(clip: Clip, status: int) -> None:
    row = ask(clip, Answer(status=status))
    assert (row.status, row.sends, row.text) == (status, 1, None)


def test_in_the_end_it_is_a_failure(clip: Clip) -> None:
    row = ask(clip, Answer(status=429))
    assert (row.status, row.sends, row.text, row.latency_ms) == (429, 1 + upload.RETRIES, None, None)


def test_nothing_is_sent_again_where_nobody_listens(clip: Clip) -> None:
    with FakeServer() as server:
        pass
    row = Client(server.url, 30).transcribe(clip, 1)
    assert row.sends == 1 and row.error and "refused" in row.error


# ---- What is sent


def sent(clip: Clip, **kind: Any) -> Any:
    with FakeServer(default=Answer("alpha")) as server:
        client = Client(server.url, 30, **kind)
        client.model = MODEL
        client.transcribe(clip, 1)
        return server.received[0]


def test_form_fields_are_the_standard_ones(clip: Clip) -> None:
    usual = {"model": MODEL, "response_format": "json", "temperature": "0"}
    assert sent(clip).fields == usual
    assert sent(clip, language="de").fields == {**usual, "language": "de"}
    assert sent(clip, mode="stream").fields == {**usual, "stream": "true"}


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_a_chat(clip: Clip, mode: Any) -> None:
    answer = Answer("alpha beta", events=None if mode == "whole" else VLLM[:2] + VLLM[3:])
    with FakeServer(default=answer) as server:
        client = Client(server.url, 30, api="chat", mode=mode, prompt="Write it down.")
        client.model = MODEL
        row = client.transcribe(clip, 1)
        received = server.received[0]
    assert (row.text, row.error) == ("alpha beta" if mode == "whole" else "alpha be", None)
    assert (received.name, received.size) == ("data:audio/wav;base64", clip.path.stat().st_size)
    content = received.fields["messages"][0]["content"]
    assert [part["type"] for part in content] == ["audio_url", "text"]
    assert content[1]["text"] == "Write it down."
    assert (received.fields["model"], received.fields["temperature"]) == (MODEL, 0)
    assert received.fields["max_tokens"] >= 128
    assert received.fields.get("stream") == (True if mode == "stream" else None)
    assert received.fields.keys() <= {"model", "messages", "temperature", "max_tokens", "stream"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(body=b'{"choices": [{"message": {"content": "alph"}, "finish_reason": "length"}]}'), "at max_tokens"),
        (Answer(body=b'{"choices": []}'), "not a JSON object with 'choices[0].message.content'"),
        (Answer(body=b'{"choices": [{"message": {"content": null}}]}'), "is not a string"),
        (Answer(body=b'{"text": "alpha"}'), "not a JSON object with 'choices[0].message.content'"),
    ],
)
def test_a_chat_that_is_no_transcript(clip: Clip, answer: Answer, error: str) -> None:
    row = ask(clip, answer, api="chat")
    assert error in (row.error or "")
    assert row.text is None
    if b"length" in (answer.body or b""):
        cut = Answer(events=((0, chunk("alph", finish_reason="length") + DONE),))
        assert error in (ask(clip, cut, api="chat", mode="stream").error or "")


def test_a_kind_of_audio_without_a_mime_type_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "data", TEXTS)
    (data / "c01.wav").rename(data / "c01.xyz")
    manifest = data / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("c01.wav", "c01.xyz"))
    with FakeServer() as server:
        flags = ["run", "--url", server.url, "--dataset", str(data), "--out", str(tmp_path / "out"), "--api", "chat"]
        assert main(flags) == 2
        assert server.sent() == []
    assert "'c01.xyz' has an unknown format" in capsys.readouterr().err


def test_a_whole_chat_run(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", TEXTS)
    with FakeServer(default=Answer("alpha beta"), version=None, models=None) as server:
        flags = ["run", "--url", server.url, "--dataset", str(data), "--out", str(tmp_path / "out"), "--api", "chat"]
        assert main(flags) == 2  # no model is named anywhere
        assert main([*flags, "--model", "mine", "--language", "en", "--stream"]) == 1  # answers, but no streams
        assert main([*flags, "--model", "mine", "--language", "en", "--out", str(tmp_path / "whole")]) == 0
        assert "language" not in server.received[-1].fields
    run = json.loads((tmp_path / "whole/run.json").read_text())
    assert run["run"].items() >= {"api": "chat", "mode": "whole", "language": "en", "model": "mine"}.items()
    assert run["run"]["prompt"] == "Transcribe this audio."
    assert run["environment"]["server_version"] is None
    assert run["environment"]["server"] == dict.fromkeys(("startup_s", "patches", "versions", "config"))
    assert run["loads"]["c1"]["queued"] is None


# ---- Times


def test_latency_counts_from_when_it_was_due(clip: Clip) -> None:
    row = ask(clip, Answer(events=VLLM), due=time.perf_counter() - 2, mode="stream")
    assert row.due is not None
    assert row.start - row.due >= 2
    assert row.latency_ms == pytest.approx((row.end - row.due) * 1000, abs=0.01)
    assert row.first_text_ms and row.first_text_ms >= 2200


def test_it_waits_until_it_is_due(clip: Clip) -> None:
    row = ask(clip, Answer("alpha", delay_s=0.1), due=time.perf_counter() + 0.5)
    assert row.due is not None
    assert row.start >= row.due
    assert row.latency_ms == pytest.approx((row.end - row.due) * 1000, abs=0.01)
    assert row.latency_ms >= 100


def test_mime_types() -> None:
    def named(name: str) -> Clip:
        return Clip("a", Path(name), "a", 1.0, {})

    from bench.client import mime

    assert [mime(named(f"a.{kind}")) for kind in ("WAV", "opus", "flac")] == ["audio/wav", "audio/ogg", "audio/flac"]
    with pytest.raises(BenchError, match=r"expected \.wav, \.flac"):
        mime(named("a"))


def test_live_audio_costs_nothing_where_it_is_not_asked_for() -> None:
    code = "import sys, bench.__main__; print({'websockets', 'soxr'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip() == "set()"
