"""`voxtral-serve transcribe` against a server that misbehaves on demand."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from fakeserver import MODEL, Answer, FakeServer
from transcribing import environment, run, start, wait_for

from voxtral_serve import cli
from voxtral_serve.client import files
from voxtral_serve.client.jobs import FORMATS
from voxtral_serve.measure import upload
from voxtral_serve.measure.upload import RETRIES

KEY = "s3cret-key"


def write(*paths: Path, size: int = 1000) -> tuple[Path, ...]:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return paths


def below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- Files


def test_one_file_goes_to_stdout(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav", size=200_001)
    with FakeServer(default=Answer(" alpha beta")) as server:
        done = run(path, "--url", server.url + "/v1/", "--language", "en")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alpha beta\n", "")
    (received,) = server.received
    assert (received.name, received.size) == ("a.wav", 200_001)
    assert received.fields == {"model": MODEL, "response_format": "json", "language": "en"}
    assert received.authorization is None


def test_several_go_there_with_their_names_in_the_order_that_was_given(tmp_path: Path) -> None:
    paths = write(tmp_path / "slow.wav", tmp_path / "b.wav", tmp_path / "c.wav")
    answers = {"slow.wav": Answer("one", delay_s=0.5), "b.wav": Answer("two"), "c.wav": Answer(status=500)}
    with FakeServer(answers) as server:
        done = run(*paths, "--url", server.url, "--model", "mine")
    assert done.stdout == f"{paths[0]}: one\n{paths[1]}: two\n"
    assert done.stderr == f'failed: {paths[2]}: 500: {{"error": "made to fail"}}\n3 files: 2 transcribed, 1 failed\n'
    assert done.returncode == 1
    assert {received.fields["model"] for received in server.received} == {"mine"}


def test_a_folder(tmp_path: Path) -> None:
    """Folders in it, but nothing hidden, and nothing else; then once more, and --again."""
    folder, out = tmp_path / "in", tmp_path / "out"
    write(folder / "a.wav", folder / "b/ä.OPUS", folder / "b/c.d/e.mp3")
    write(folder / ".hidden.wav", folder / ".git/x.wav", folder / "notes.txt")
    command = (folder, "--out", out, "--format", "srt", "--url")
    subtitles = Answer(body=b"1\n", headers=(("Content-Type", "application/x-subrip"),))
    with FakeServer(default=subtitles) as server:
        done = run(*command, server.url)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "3 files: 3 transcribed\n")
        assert below(out) == dict.fromkeys(["a.srt", "b/c.d/e.srt", "b/ä.srt"], "1\n")
        assert {received.fields["response_format"] for received in server.received} == {"srt"}
        done = run(*command, server.url)
        assert (done.returncode, done.stderr) == (0, "3 files: 3 already transcribed (--again repeats them)\n")
        assert len(server.sent()) == 3
        assert run(*command, server.url, "--again").stderr == "3 files: 3 transcribed\n"
        assert sorted(server.sent()) == sorted(2 * ["a.wav", "e.mp3", "ä.OPUS"])


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["a/x.wav", "b/x.wav", "b/y.wav"], ["a/x", "b/x", "y"]),
        (["a", "b"], ["a/x", "b/x", "y"]),
        (["a", "a/x.wav", "./a/../a/x.wav"], ["x"]),
        (["."], ["a/x", "b/x", "b/y", "c/a/x", "m/x.mp3", "m/x.ogg", "m/y"]),
        (["m"], ["x.mp3", "x.ogg", "y"]),
        (["c", "a", "b/x.wav"], ["c/a/x", "a/x", "b/x"]),
        (["a/x.wav", "B/X.wav"], ["a/x", "B/X"]),
    ],
)
def test_names_that_would_be_the_same(
    tmp_path: Path, given: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(*map(Path, ["a/x.wav", "b/x.wav", "b/y.wav", "c/a/x.wav", "m/x.mp3", "m/x.ogg", "m/y.ogg"]))
    if "B/X.wav" in given:
        write(Path("B/X.wav"))
    found = files.find([Path(each) for each in given])
    assert [str(path) for path in files.targets(found, Path("out"), ".txt")] == [f"out/{each}.txt" for each in names]


def test_what_cannot_be_used_sends_nothing(tmp_path: Path) -> None:
    good, empty, pipe = tmp_path / "a.wav", tmp_path / "empty", tmp_path / "pipe"
    write(good, tmp_path / "b.wav", empty / "notes.txt")
    os.mkfifo(pipe)
    cases = {
        (good, tmp_path / "gone.wav"): f"{tmp_path}/gone.wav does not exist",
        (good, empty): f"{empty} has no audio files (.aac .aif",
        (good, pipe): f"{pipe} is not a regular file",
        (tmp_path, "--format", "srt"): "2 files: --format srt needs --out DIR for them",
        (good, "--out", tmp_path / "b.wav"): f"--out {tmp_path}/b.wav: File exists",
        (good, "--url", "127.0.0.1:8000"): "must look like http://127.0.0.1:8000",
        (good, "--url", "http://me:pass@127.0.0.1"): "--url must not contain a password",
        (): "name a FILE",
        (good, "--jobs", "0"): "--jobs 0: must be at least 1",
        (good, "--again"): "--again: only with --out",
        (good, "--outt", "x"): "unrecognized arguments: --outt x",
        ("--live", good, "--format", "vtt"): "--format vtt is not for --live, which has text and srt",
        ("--live", good, "--jobs", "2"): "--jobs is not for --live",
        ("--live", good, "--speakers"): "--speakers is not for --live",
        ("--speakers", good): f"{str(good)!r} is not a number of speakers: expected 1 to 20, or files before",
        (good, "--speakers", "21"): "'21' is not a number of speakers",
        (good, "--speakers", "0"): "'0' is not a number of speakers",
        (good, tmp_path / "b.wav", "--speakers"): "2 files: --speakers needs --out DIR for them",
    }
    with FakeServer() as server:
        for arguments, message in cases.items():
            done = run("--url", server.url, *arguments)
            assert (done.returncode, done.stdout) == (2, ""), arguments
            assert message in done.stderr and "Traceback" not in done.stderr
        assert server.sent() == []


def test_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b.wav")
    write(Path(path))
    with FakeServer(default=Answer(status=400)) as server:
        done = run(path, "--url", server.url)
    assert done.returncode == 1
    assert "/��.wav: 400" in done.stderr


def test_an_upload_is_read_as_it_is_sent(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav", size=300_000)
    server = upload.Server("http://127.0.0.1:1", None, 1)
    with path.open("rb") as file:
        body = server.transcription("ä.wav", file, [("model", "mine")]).data
        blocks = list(body)
    assert len(body) == sum(map(len, blocks))
    assert max(map(len, blocks)) <= 1 << 16
    assert path.read_bytes() in b"".join(blocks)
    with path.open("rb") as file:
        body = server.transcription("a.wav", file, []).data
        os.truncate(path, 100)
        with pytest.raises(OSError, match="became shorter"):
            list(body)


# ---- Answers


@pytest.mark.parametrize(
    ("form", "kind", "body", "output"),
    [
        ("text", "application/json", b'{"text": " \xc3\xa4 "}', b"\xc3\xa4\n"),
        ("json", "application/json", b'{"text":"a", "usage": 1}', b'{"text":"a", "usage": 1}'),
        ("verbose_json", "application/json", b'{"text":"a","words":[]}', b'{"text":"a","words":[]}'),
        ("vtt", "text/vtt", b"WEBVTT\n\n", b"WEBVTT\n\n"),
    ],
)
def test_forms(
    tmp_path: Path, form: str, kind: str, body: bytes, output: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(default=Answer(body=body, headers=(("Content-Type", kind),))) as server:
        command = ["transcribe", str(path), "--url", server.url, "--format", form]
        assert cli.run(command) == 0
        assert cli.run([*command, "--out", str(tmp_path / "out")]) == 0
    suffix = {"text": "txt", "vtt": "vtt"}.get(form, "json")
    assert (tmp_path / f"out/a.{suffix}").read_bytes() == output
    assert capsys.readouterr().out == output.decode().rstrip("\n") + "\n" * (1 + (form == "vtt"))


TURNS = b"SPEAKER_1: a\nSPEAKER_2: b\n"
MISTRALS = b'{"text":"a","segments":[{"text":"a","speaker_id":"speaker_1"}]}'
OPENAIS = b'{"text":"a","segments":[{"text":"a","speaker":"A"}]}'


@pytest.mark.parametrize(
    ("form", "words", "kind", "body", "sent"),
    [
        ("text", [], "text/plain; charset=utf-8", TURNS, {"diarize": "true"}),
        ("srt", ["3"], "application/x-subrip", b"1\n", {"diarize": "true", "num_speakers": "3"}),
        ("json", ["20"], "application/json", MISTRALS, {"diarize": "true", "num_speakers": "20"}),
        ("diarized_json", [], "application/json", OPENAIS, {"diarize": "true"}),
        ("verbose_json", [], "application/json", b'{"text":" ","segments":[]}', {"diarize": "true"}),  # silence
    ],
)
def test_speakers(tmp_path: Path, form: str, words: list[str], kind: str, body: bytes, sent: dict[str, str]) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(default=Answer(body=body, headers=(("Content-Type", kind),))) as server:
        command = ["transcribe", str(path), "--url", server.url, "--format", form, "--out", str(tmp_path / "out")]
        assert cli.run([*command, "--speakers", *words]) == 0
    assert server.received[0].fields == {"model": MODEL, "response_format": form} | sent
    assert (tmp_path / f"out/a{FORMATS[form]}").read_bytes() == body


def test_a_delay(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(default=Answer("alpha")) as server:
        assert cli.run(["transcribe", str(path), "--url", server.url, "--delay", "2400"]) == 0
        sent = {"model": MODEL, "response_format": "json", "target_streaming_delay_ms": "2400"}
        assert server.received[0].fields == sent
        server.default = Answer("alpha", headers=(("x-voxtral-ignored", "target_streaming_delay_ms"),))
        done = run(path, "--url", server.url, "--delay", "960")
    assert done.returncode == 1 and f"{path}: 200, but with the server's delay" in done.stderr
    with FakeServer(is_guarded=False) as server:  # as vLLM without the guard, which takes any field
        done = run(path, "--url", server.url, "--delay", "960")
        assert (done.returncode, done.stdout, server.received) == (1, "", [])
    assert f"{path}: the delay needs a server with the guard" in done.stderr


def test_keywords(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav")
    words = ("--keyword", "Hazel", "--keyword", "New York")
    with FakeServer(default=Answer("alpha")) as server:
        assert run(path, "--url", server.url, *words).returncode == 0
        assert server.received[0].fields["keywords[]"] == "New York"  # the last of a name
        server.default = Answer("alpha", headers=(("x-voxtral-ignored", "keywords"),))
        done = run(path, "--url", server.url, *words)
    assert done.returncode == 1 and f"{path}: 200, but without keywords" in done.stderr


@pytest.mark.parametrize(
    ("form", "headers", "body", "problem"),
    [
        ("srt", {"x-voxtral-ignored": "prompt, diarize"}, b"1\n", "200, but without speakers: this server"),
        ("text", {"Content-Type": "application/json"}, b'{"text":"a"}', "200, but JSON instead of text"),
        ("json", {}, b'{"text":"a"}', "200, but without speakers: "),
        ("verbose_json", {}, b'{"text":"a","segments":[{"text":"a"}]}', "200, but without speakers: "),
        ("json", {}, b'{"text":"a","segments":[1]}', "200, but without speakers: "),
        ("json", {}, b'{"text":"a","segments":1}', "200, but without speakers: "),
    ],
)
def test_a_server_that_does_not_label_is_an_error(
    tmp_path: Path, form: str, headers: dict[str, str], body: bytes, problem: str
) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(default=Answer(body=body, headers=tuple(headers.items()))) as server:
        done = run(path, "--url", server.url, "--format", form, "--speakers", "2")
    assert (done.returncode, done.stdout) == (1, "") and f"{path}: {problem}" in done.stderr


def test_failures_are_listed_and_the_rest_goes_on(tmp_path: Path) -> None:
    paths = write(*(tmp_path / f"in/{name}.wav" for name in "abcdefg"))
    error = json.dumps({"error": {"message": "the clip is 48 s long:\n37 at most", "code": "too_long"}}).encode()
    answers = {
        "b.wav": Answer(status=400, body=error),
        "c.wav": Answer(status=408),
        "d.wav": Answer(body=b"<html>"),
        "e.wav": Answer(status=500),
        "f.wav": Answer(status=302, body=b"", headers=(("Location", "http://127.0.0.1:9/"),)),
    }
    out = tmp_path / "out"
    with FakeServer(answers, default=Answer("fine")) as server:
        done = run(tmp_path / "in", "--out", out, "--url", server.url)
        assert done.returncode == 1
        *failed, summary = done.stderr.splitlines()
        assert summary == "7 files: 2 transcribed, 5 failed"
        for line, path, problem in zip(
            failed,
            paths[1:6],
            (
                "400: the clip is 48 s long: 37 at most",
                "408: ",
                "200, but not a JSON object",
                "500: ",
                "302: ",
            ),
            strict=True,
        ):
            assert line.startswith(f"failed: {path}: {problem}")
        assert below(out) == {"a.txt": "fine\n", "g.txt": "fine\n"}
        assert len(server.sent()) == 7
        server.answers = {}
        assert run(tmp_path / "in", "--out", out, "--url", server.url).stderr == (
            "7 files: 5 transcribed, 2 already transcribed (--again repeats them)\n"
        )
        assert sorted(server.sent()[7:]) == ["b.wav", "c.wav", "d.wav", "e.wav", "f.wav"]
    assert len(below(out)) == 7


def test_json_is_no_subtitles(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(default=Answer("alpha")) as server:
        done = run(path, "--url", server.url, "--format", "srt")
    assert (done.returncode, done.stdout) == (1, "")
    assert "200, but JSON instead of srt" in done.stderr


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.wav", tmp_path / "b.wav")
    body = b'{"error": {"message": "16 requests are in flight"}}'

    def busy(after: str) -> Answer:
        return Answer(status=429, body=body, headers=(("Retry-After", after),))

    with FakeServer({"a.wav": [busy("0"), busy("1"), Answer("alpha")], "b.wav": busy("0")}) as server:
        done = run(*paths, "--url", server.url)
    assert done.stdout == f"{paths[0]}: alpha\n"
    assert f"failed: {paths[1]}: 429: 16 requests are in flight" in done.stderr
    assert server.sent().count("b.wav") == 1 + RETRIES
    starts = [received.start for received in server.received if received.name == "a.wav"]
    assert len(starts) == 3
    assert starts[2] - starts[1] >= 2  # what it asked for, doubled as it was the second time
    assert {received.size for received in server.received} == {1000}


def test_what_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The statuses of a server that may answer later, and dropped connections, whatever had arrived; no other 4xx."""
    monkeypatch.setattr(upload, "WAIT_S", 0.01)
    passing = {f"{status}.wav": Answer(status=status) for status in (429, 502, 503, 504)}
    passing |= {"before.wav": Answer(drop="before"), "inside.wav": Answer("fine", drop="inside")}
    lasting = {f"{status}.wav": Answer(status=status) for status in (400, 401, 404, 408, 413, 500)}
    paths = write(*(tmp_path / name for name in passing | lasting))
    answers = {name: [each, Answer("fine")] for name, each in passing.items()}
    with FakeServer({**answers, **lasting}) as server:
        assert cli.run(["transcribe", *map(str, paths), "--url", server.url, "--out", str(tmp_path / "out")]) == 1
        assert {name: server.sent().count(name) for name in passing} == dict.fromkeys(passing, 2)
        assert {name: server.sent().count(name) for name in lasting} == dict.fromkeys(lasting, 1)
        assert "12 files: 6 transcribed, 6 failed" in capsys.readouterr().err
        server.answers = {paths[0].name: Answer(drop="before")}
        assert cli.run(["transcribe", str(paths[0]), "--url", server.url]) == 1
        assert server.sent().count(paths[0].name) == 2 + 1 + RETRIES
        assert "no response: " in capsys.readouterr().err


def test_nobody_there(tmp_path: Path) -> None:
    paths = write(*(tmp_path / f"{name}.wav" for name in "abcd"))
    with FakeServer() as server:
        pass
    done = run(*paths, "--url", server.url)
    assert done.returncode == 1
    assert done.stderr == f"voxtral-serve: cannot connect to {server.url}: Connection refused\n"
    # And where the server ends in the middle: the files that are left are no failures of their own.
    done = run(*paths, "--url", server.url, "--model", "mine", "--jobs", 1, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"failed: {paths[0]}: cannot connect to {server.url}: Connection refused",
        "4 files: 1 failed, 3 not sent or without a response",
        "Run the same command again for the rest.",
    ]


def test_no_model(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(models=()) as server:
        done = run(path, "--url", server.url)
    assert done.returncode == 1
    assert done.stderr == f"voxtral-serve: {server.url}/v1/models lists no model: '{{\"data\": []}}': use --model\n"


def test_requests_at_a_time(tmp_path: Path) -> None:
    write(*(tmp_path / f"{number}.wav" for number in range(9)))
    with FakeServer(default=Answer("alpha", together=threading.Barrier(3))) as server:
        assert run(tmp_path, "--out", tmp_path / "out", "--url", server.url, "--jobs", 3).returncode == 0
    assert server.max_in_flight == 3
    assert len(server.sent()) == 9


# ---- The key


def test_the_key_is_sent_and_not_shown(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav")
    with FakeServer(default=Answer(status=401, body=b'{"error": {"message": "no"}}')) as server:
        done = run(path, "--url", server.url, OPENAI_API_KEY=f" {KEY}\n")
        assert server.received[0].authorization == f"Bearer {KEY}"
        assert done.stderr == f"failed: {path}: 401: no\n"
        bad = run(path, "--url", server.url, OPENAI_API_KEY=f"{KEY}\nX-Other: 1")
        assert bad.returncode == 2
        assert bad.stderr.startswith("voxtral-serve: OPENAI_API_KEY contains a space")
        assert len(server.received) == 1
    assert KEY not in done.stdout + done.stderr + bad.stdout + bad.stderr


# ---- Ends


def test_a_run_that_was_killed_is_continued(tmp_path: Path) -> None:
    write(*(tmp_path / f"in/{number}.wav" for number in range(8)))
    out = tmp_path / "out"
    command = (tmp_path / "in", "--out", out, "--jobs", 2, "--url")
    slow = {f"{number}.wav": Answer("alpha", delay_s=60) for number in range(4, 8)}
    with FakeServer(slow, default=Answer("alpha")) as server:
        with start(*command, server.url) as process:
            wait_for(lambda: len(list(out.glob("*.txt"))) == 4)
            process.kill()
        there = set(below(out))
        assert len(there) == 4
        server.answers = {}
        done = run(*command, server.url)
    assert done.returncode == 0
    assert done.stderr.startswith(f"8 files: {8 - len(there)} transcribed, {len(there)} already transcribed")
    sent = [each.name for each in server.received]
    assert all(sent.count(name.replace(".txt", ".wav")) == 1 for name in there)
    assert below(out) == {f"{number}.txt": "alpha\n" for number in range(8)}


def test_ctrl_c(tmp_path: Path) -> None:
    write(*(tmp_path / f"in/{name}.wav" for name in "abc"))
    out = tmp_path / "out"
    answers = {"b.wav": Answer("beta", delay_s=30)}
    with (
        FakeServer(answers, default=Answer("alpha")) as server,
        start(tmp_path / "in", "--out", out, "--jobs", 1, "--url", server.url) as process,
    ):
        wait_for(lambda: "b.wav" in server.sent())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert (
        stderr == "3 files: 1 transcribed, 2 not sent or without a response\nRun the same command again for the rest.\n"
    )
    assert below(out) == {"a.txt": "alpha\n"}


def test_the_bar_is_for_terminals(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.wav", tmp_path / "b.wav")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with FakeServer(default=Answer("alpha")) as server, start(*paths, "--url", server.url, stderr=theirs) as process:
        os.close(theirs)
        stdout, _ = process.communicate(timeout=60)
    assert stdout == f"{paths[0]}: alpha\n{paths[1]}: alpha\n"
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # which is how a terminal ends
        os.close(ours)
    assert b"2/2" in shown


def test_a_reader_that_has_had_enough(tmp_path: Path) -> None:
    write(*(tmp_path / f"{number}.wav" for number in range(20)))
    with (
        FakeServer(default=Answer("alpha " * 20000)) as server,
        start(tmp_path, "--url", server.url) as process,
    ):
        assert process.stdout and process.stderr
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1


# ---- What it needs


def test_it_imports_no_vllm(tmp_path: Path) -> None:
    (path,) = write(tmp_path / "a.wav")
    code = (
        "import sys; from voxtral_serve import cli; from voxtral_serve.client import live; cli.run(sys.argv[1:]);"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'vllm', 'torch', 'transformers', 'bench'}))"
    )
    with FakeServer(default=Answer("alpha")) as server:
        command = [sys.executable, "-c", code, "transcribe", str(path), "--url", server.url]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("alpha\n[]\n", "")


def test_the_command_line_alone_imports_no_client_and_no_vllm() -> None:
    code = (
        "import sys; from voxtral_serve import cli;"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'requests', 'tqdm', 'numpy', 'vllm'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(("missing", "flags"), [("requests", ()), ("tqdm", ()), ("soxr", ("--live",))])
def test_a_missing_package_is_named(tmp_path: Path, missing: str, flags: tuple[str, ...]) -> None:
    (path,) = write(tmp_path / "a.wav")
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from voxtral_serve import cli; sys.exit(cli.run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "transcribe", str(path), *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    expected = f"voxtral-serve: transcribe needs the package {missing}: pip install 'voxtral-serve[client]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
