"""`voxtral-serve transcribe --live` against a /v1/realtime that says prepared words."""

import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from fakerealtime import RATE, FakeRealtime, FakeTurns, blocks
from fakeserver import FakeServer
from transcribing import environment, run, start, wait_for
from turnedclock import Clock

from voxtral_serve.client import live, sound
from voxtral_serve.client.jobs import LiveJob

# A word in every token of a minute: however late a signal is, no pause ends a turn before it.
MINUTE = [(0.08 * number, f" {number}") for number in range(1, 751)]
SAID = "".join(word for _, word in MINUTE).lstrip() + "\n"
COMMIT, APPEND = "input_audio_buffer.commit", "input_audio_buffer.append"
# A sounddevice that hears a ramp, a block every 10 ms.
MICROPHONE = """
import threading, time
import numpy as np
class PortAudioError(Exception): pass
class RawInputStream:
    def __init__(self, samplerate, blocksize, channels, dtype, callback):
        assert (samplerate, channels, dtype) == (16000, 1, "int16")
        self.blocksize, self.callback, self.ended = blocksize, callback, threading.Event()
        self.thread = threading.Thread(target=self.hear)
    def hear(self):
        while not self.ended.wait(0.01):
            self.callback(np.arange(self.blocksize, dtype="<i2").tobytes(), self.blocksize, None, None)
    def start(self): self.thread.start()
    def close(self): self.ended.set(); self.thread.join()
"""


def write_clip(directory: Path, seconds: float, rate: int = RATE, channels: int = 1) -> Path:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    path = directory / f"{seconds}-{rate}.wav"
    soundfile.write(path, np.stack([tone] * channels, axis=1), rate)
    return path


def fake_sounddevice(directory: Path, source: str) -> dict[str, str]:
    """The environment in which that is the module sounddevice."""
    directory.mkdir()
    (directory / "sounddevice.py").write_text(source)
    return {"PYTHONPATH": f"{directory}:{environment().get('PYTHONPATH', '')}"}


def test_words_come_while_the_file_is_spoken(tmp_path: Path) -> None:
    path = write_clip(tmp_path, 60)
    with FakeRealtime(MINUTE) as server, start("--live", path, "--url", server.url + "/v1") as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(len("1 2 3")) == "1 2 3"
        assert not server.sessions[0].final
        process.send_signal(signal.SIGINT)
        assert (process.stdout.read(), process.stderr.read(), process.wait(60)) == (SAID[len("1 2 3") :], "", 0)


def test_a_file_is_sent_in_tokens_of_80_ms(tmp_path: Path) -> None:
    path = write_clip(tmp_path, 1.5)
    with FakeRealtime([(0.4, " alpha"), (0.8, " be"), (0.88, "ta")]) as server:
        done = run("--live", path, "--url", server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alpha beta\n", "")
    (session,) = server.sessions
    assert session.model == "fake-voxtral"
    assert session.kinds == ["session.update", COMMIT, *[APPEND] * 19, COMMIT]
    samples, _ = soundfile.read(path)
    assert np.abs(np.frombuffer(session.audio, "<i2") - samples * 32767).max() <= 1


def test_each_piece_comes_at_the_time_of_its_last_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is taken late makes no later one late."""
    clock = Clock()
    monkeypatch.setattr(sound, "time", clock)

    class Ending:
        def wait(self, seconds: float) -> bool:
            clock.now += seconds
            return False

    times = []
    ending: Any = Ending()
    for number, _ in enumerate(sound.spoken(write_clip(tmp_path, 1.5), ending)):
        times.append(clock.now)
        clock.now += 0.2 if number == 5 else 0
    due = [0.08 * number for number in range(1, 19)] + [1.5]
    due[6:8] = [due[5] + 0.2, due[5] + 0.2]
    assert times == pytest.approx(due)


@pytest.mark.parametrize(("rate", "channels"), [(48000, 2), (8000, 1), (11025, 1)])
def test_any_audio_is_sent_as_16_khz_mono(tmp_path: Path, rate: int, channels: int) -> None:
    with FakeRealtime([(0.1, "alpha")]) as server:
        done = run("--live", write_clip(tmp_path, 0.25, rate, channels), "--url", server.url, OPENAI_API_KEY="s3cret")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alpha\n", "")
    (session,) = server.sessions
    assert session.headers["Authorization"] == "Bearer s3cret"
    sound = np.frombuffer(session.audio, "<i2")
    assert len(sound) == pytest.approx(4000, abs=1)
    assert np.abs(np.fft.rfft(sound)).argmax() == 110  # of 440 Hz in 0.25 s


def test_a_server_of_whole_clips_says_so_in_one_line(tmp_path: Path) -> None:
    path = write_clip(tmp_path, 0.5)
    with FakeRealtime(refuses="whole clips only") as server:
        done = run("--live", path, "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "voxtral-serve: the server says: whole clips only\n"
    with FakeServer() as other:
        done = run("--live", path, "--url", other.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("voxtral-serve: 404 instead of a WebSocket: ")
    done = run("--live", path, "--url", other.url, "--model", "mine")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Connection refused" in done.stderr


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    path = write_clip(tmp_path, 0.5)
    with FakeRealtime([(0.2, "alpha")], busy=2) as server:
        done = run("--live", path, "--url", server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alpha\n", "")
    assert server.busy == 0


def test_a_server_that_ends_the_session(tmp_path: Path) -> None:
    with FakeRealtime([(0.1, "alpha")], ends=0.3) as server:
        done = run("--live", write_clip(tmp_path, 1), "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "alpha\n")
    assert done.stderr.startswith("voxtral-serve: the server ended the session before the audio's end")


def test_a_connection_that_is_never_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "wait_s", lambda told, attempt: 0.01)
    path = write_clip(tmp_path, 1)
    with FakeRealtime([(0.1, "alpha")], dies=0.3) as server:
        assert live.run(LiveJob(path, server.url, "text", None, False, None, None, ())) == 1
    out, err = capsys.readouterr()
    *lines, last = err.splitlines()
    assert out == "alpha\n"
    assert last.startswith("voxtral-serve: the connection was closed before the text's end: ")
    assert len(lines) == 2 * 7 and len(server.sessions) == 8
    for lost, again in zip(lines[::2], lines[1::2], strict=True):
        assert lost.startswith(last) and lost.endswith("; connecting again in 0 s")
        assert again.startswith("voxtral-serve: connected again, with ")


# ---- Turns, files, and audio that is sent again

WORDS = {1: "Alpha", 2: " beta.", 3: "Gamma", 4: " delta.", 5: "Last", 6: " words."}
# 80 ms each; 7 is noise in which nothing is said
NUMBERS = [0, 0, 1, 7, 2, 0, 0, 0, 7, 3, 7, 7, 4, 0, 0, 7, 5, 6]
TEXT = "Alpha beta.\nGamma delta.\nLast words.\n"
SRT = """1
00:00:00,160 --> 00:00:00,400
Alpha beta.

2
00:00:00,720 --> 00:00:01,040
Gamma delta.

3
00:00:01,280 --> 00:00:01,440
Last words.

"""


@pytest.fixture
def speech(tmp_path: Path) -> Path:
    path = tmp_path / "speech.wav"
    soundfile.write(path, blocks(NUMBERS), RATE, subtype="FLOAT")
    return path


def test_turns_are_lines_and_subtitles(tmp_path: Path, speech: Path) -> None:
    with FakeTurns(WORDS) as server:
        done = run(
            "--live",
            speech,
            "--url",
            server.url,
            "--out",
            tmp_path / "out",
            "--format",
            "srt",
            "--delay",
            960,
            "--keyword",
            "Alpha",
            "--keyword",
            "New York",
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, TEXT, "")
        (session,) = server.sessions
        assert session.settings == {
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 16000},
                    "transcription": {"model": "fake-voxtral", "keywords": ["Alpha", "New York"], "delay": "high"},
                    "turn_detection": {"type": "server_vad"},
                }
            },
        }
        assert session.kinds[-2:] == [COMMIT, "input_audio_buffer.clear"]
        assert (tmp_path / "out/speech.txt").read_text() == TEXT
        assert (tmp_path / "out/speech.srt").read_text() == SRT
        # A second run does not write over it, and asks for nothing.
        done = run("--live", speech, "--url", server.url, "--out", tmp_path / "out")
        assert (done.returncode, done.stdout, len(server.sessions)) == (2, "", 1)
        assert done.stderr == f"voxtral-serve: {tmp_path}/out/speech.txt exists: --again replaces it\n"
        done = run("--live", speech, "--url", server.url, "--format", "srt")
        assert (done.returncode, done.stdout, done.stderr) == (0, SRT, "")
    with FakeTurns({**WORDS, 6: " other."}, segments=False) as server:
        options = ("--out", tmp_path / "out", "--format", "srt", "--again", "--model", "mine")
        assert run("--live", speech, "--url", server.url, *options).returncode == 0
    assert server.sessions[0].settings["audio"]["input"]["transcription"] == {"model": "mine"}
    # The times of its turns, which end with the pause that ended them
    assert (tmp_path / "out/speech.srt").read_text().startswith("1\n00:00:00,160 --> 00:00:00,480\nAlpha beta.\n")
    assert (tmp_path / "out/speech.txt").read_text() == TEXT.replace("words", "other")


def test_words_that_a_server_cannot_prefer(speech: Path) -> None:
    with FakeTurns(WORDS, prefers_words=False) as server:
        done = run("--live", speech, "--url", server.url, "--keyword", "Alpha")
    assert (done.returncode, done.stdout, server.sessions[0].audio) == (2, "", b"")
    assert done.stderr == "voxtral-serve: --keyword has no effect: this server's model does not prefer words\n"


def test_files_grow_while_the_file_is_spoken(tmp_path: Path, speech: Path) -> None:
    """And a microphone's are named by the time at which it begins."""
    soundfile.write(speech, blocks([*NUMBERS, *[7] * 100]), RATE, subtype="FLOAT")
    with FakeTurns(WORDS) as server, start("--live", speech, "--url", server.url, "--out", tmp_path) as process:
        written = tmp_path / "speech.txt"
        wait_for(lambda: written.exists() and written.read_text() == TEXT[: len("Alpha beta.\nGamma delta.\n")])
        wait_for(lambda: len(server.sessions[0].audio) >= len(NUMBERS) * 1280 * 2)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == TEXT
        assert written.read_text() == TEXT
    settings = environment() | fake_sounddevice(tmp_path / "fake", MICROPHONE)
    with FakeTurns({640: "word"}) as server:
        with start("--live", "--url", server.url, "--out", tmp_path / "live", env=settings) as process:
            wait_for(lambda: bool(server.sessions and server.sessions[0].audio))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        (path,) = (tmp_path / "live").iterdir()
        assert re.fullmatch(r"live-\d{8}-\d{6}\.txt", path.name)
        assert "word" in path.read_text()


@pytest.mark.parametrize(
    ("cut_s", "code"),
    [
        *((cut_s, "too_many_sessions") for cut_s in (0.1, 0.3, 0.45, 0.5, 0.9, 1.2, 1.44)),
        *((0.3, code) for code in ("idle_timeout", "session_expired", "engine_dead")),
    ],
)
def test_a_connection_that_is_cut(
    cut_s: float,
    code: str,
    tmp_path: Path,
    speech: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wherever that happens, nothing is lost and nothing doubled, on the screen or in a file, and times stay."""
    monkeypatch.setattr(live, "wait_s", lambda told, attempt: 0.01)
    with FakeTurns(WORDS, cuts={0: cut_s, 1: 0.2}, refuses={2: code}) as server:
        assert live.run(LiveJob(speech, server.url, "srt", tmp_path / "out", False, None, None, ())) == 0
    out, err = capsys.readouterr()
    assert (out, (tmp_path / "out/speech.txt").read_text()) == (TEXT, TEXT)
    assert (tmp_path / "out/speech.srt").read_text() == SRT
    assert len(server.sessions) == 4
    assert err.count("connecting again") == 3 and err.count("connected again") == 2
    assert "the server says: not now; connecting again" in err


def test_a_turn_that_fails_is_sent_again(
    tmp_path: Path, speech: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "wait_s", lambda told, attempt: 0.01)
    with FakeTurns(WORDS, fails={0: 2, 1: 1}) as server:
        assert live.run(LiveJob(speech, server.url, "srt", tmp_path / "out", False, None, None, ())) == 0
    out, err = capsys.readouterr()
    assert (out, (tmp_path / "out/speech.srt").read_text()) == (TEXT, SRT)
    assert (len(server.sessions), err.count("the server says: it failed; connecting again")) == (3, 2)


def test_other_words_than_before_are_on_another_line(
    tmp_path: Path, speech: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "wait_s", lambda told, attempt: 0.01)
    words = dict(WORDS)
    with FakeTurns(words, cuts={0: 0.3}) as server:
        monkeypatch.setattr(live._Live, "_begin", change(live._Live._begin, words))
        assert live.run(LiveJob(speech, server.url, "text", tmp_path, False, None, None, ())) == 0
    assert capsys.readouterr().out == "Alpha\n" + TEXT.replace("Alpha", "Omega")
    assert (tmp_path / "speech.txt").read_text() == TEXT.replace("Alpha", "Omega")


def change(begin: Callable[..., None], words: dict[int, str]) -> Callable[..., None]:
    """On the second connection, the server hears another word."""

    def changed(self: live._Live) -> None:
        if self.recorder:
            words[1] = "Omega"
        begin(self)

    return changed


def test_vllms_own_server_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Audio before a pause in its text is not sent again."""
    path = write_clip(tmp_path, 2)
    with FakeRealtime([(0.2, " alpha"), (1.5, " beta")], dies=1.8) as server:

        def later(told: str, attempt: int) -> float:
            server.dies, server.words = None, [(0.7, " beta")]
            return 0.01

        monkeypatch.setattr(live, "wait_s", later)
        assert live.run(LiveJob(path, server.url, "text", tmp_path / "out", False, None, None, ())) == 0
    assert capsys.readouterr().out == "alpha\nbeta\n"
    assert (tmp_path / "out" / f"{path.stem}.txt").read_text() == "alpha\nbeta\n"
    first, second = (session.audio for session in server.sessions)
    # The fake server says " alpha" in its fourth delta; twelve without text end with the 16th.
    size = 10 * 1280 * 2
    assert len(second) == 2 * 2 * RATE - size
    assert first[size:] == second[: len(first) - size]


@pytest.mark.parametrize("option", [("--format", "srt"), ("--delay", "480"), ("--keyword", "a")])
def test_vllms_own_server_has_no_times_and_no_settings(tmp_path: Path, option: tuple[str, str]) -> None:
    with FakeRealtime([(0.1, "alpha")]) as server:
        out = tmp_path / "out"
        done = run("--live", write_clip(tmp_path, 0.5), "--url", server.url, *option, "--out", out)
    assert (done.returncode, done.stdout, done.stderr.count("\n"), out.exists()) == (2, "", 1, False)
    assert f"{option[0]}" in done.stderr and "needs OpenAI's protocol" in done.stderr


def test_arguments(tmp_path: Path) -> None:
    for words, problem in (
        (("--live", "--format", "json"), "--format json is not for --live, which has text and srt"),
        (("--live", "--jobs", "2"), "--jobs is not for --live"),
        (("--live", "--delay", "100"), "argument --delay: invalid choice: 100"),
        (("--live", "--again"), "--again: only with --out"),
    ):
        done = run(*words)
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr


# ---- Audio


def test_ctrl_c_ends_the_audio_and_waits_for_the_text(tmp_path: Path) -> None:
    path = write_clip(tmp_path, 60)
    with FakeRealtime(MINUTE, late_s=0.3) as server, start("--live", path, "--url", server.url) as process:
        wait_for(lambda: bool(server.sessions) and len(server.sessions[0].sizes) > 5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (SAID, "")
        assert process.returncode == 0
    assert server.sessions[0].kinds[-1] == COMMIT
    with FakeRealtime(late_s=60) as server, start("--live", path, "--url", server.url) as process:
        wait_for(lambda: bool(server.sessions) and len(server.sessions[0].sizes) > 5)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: bool(server.sessions[0].final))
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "voxtral-serve: stopped\n")
        assert process.returncode == 130


def test_a_microphone(tmp_path: Path) -> None:
    settings = environment() | fake_sounddevice(tmp_path / "fake", MICROPHONE)
    with FakeRealtime([(0.2, "alpha")]) as server, start("--live", "--url", server.url, env=settings) as process:
        wait_for(lambda: bool(server.sessions) and len(server.sessions[0].sizes) > 5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("alpha\n", "Listening. Ctrl-C ends.\n")
        assert process.returncode == 0
    assert server.sessions[0].kinds[-1] == COMMIT
    sound = np.frombuffer(server.sessions[0].audio, "<i2")
    assert (sound.reshape(-1, 1280) == np.arange(1280)).all()


NO_MICROPHONE = {
    "raise ModuleNotFoundError": "the microphone needs the package sounddevice: pip install 'voxtral-serve[live]'",
    "raise OSError('PortAudio library not found')": "the microphone needs PortAudio (PortAudio library not found)",
    "class PortAudioError(Exception): pass\ndef RawInputStream(**_): raise PortAudioError('no device')": (
        "no microphone: no device"
    ),
    MICROPHONE.replace("def start(self): ", "def start(self): raise PortAudioError('busy')\n    def begin(self): "): (
        "no microphone: busy"
    ),
}


@pytest.mark.parametrize("source", NO_MICROPHONE, ids=NO_MICROPHONE.values())
def test_no_microphone(tmp_path: Path, source: str) -> None:
    with FakeRealtime() as server:
        done = run("--live", "--url", server.url, **fake_sounddevice(tmp_path / "fake", source))
    assert (done.returncode, done.stdout, server.sessions) == (2, "", [])
    assert done.stderr.startswith(f"voxtral-serve: {NO_MICROPHONE[source]}")
    assert done.stderr.count("\n") == 1


def test_audio_that_cannot_be_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with FakeRealtime() as server:
        for content, problem in ((b"RIFF, or not", "cannot be decoded"), (None, "cannot be decoded")):
            path.unlink() if content is None else path.write_bytes(content)
            done = run("--live", path, "--url", server.url)
            assert (done.returncode, done.stdout, server.sessions) == (2, "", [])
            assert problem in done.stderr and done.stderr.count("\n") == 1


def test_audio_that_is_damaged_is_heard_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, RATE), RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with FakeRealtime([(0.1, "alpha")]) as server:
        done = run("--live", path, "--url", server.url)
    assert (done.returncode, done.stdout) == (2, "alpha\n")
    assert done.stderr.startswith("voxtral-serve: the audio is damaged: ")
    assert server.sessions[0].kinds[-1] == COMMIT


def test_a_file_without_a_sound_is_not_heard(tmp_path: Path) -> None:
    with FakeRealtime() as server:
        done = run("--live", write_clip(tmp_path, 0), "--url", server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(itertools.chain(*(session.sizes for session in server.sessions)))
