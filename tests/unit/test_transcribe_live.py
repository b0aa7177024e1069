"""`voxtral-serve transcribe --live` against a /v1/realtime that says prepared words."""

import itertools
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from fakerealtime import RATE, FakeRealtime
from fakeserver import FakeServer
from transcribing import environment, run, start, wait_for

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
    path = write_clip(tmp_path, 1.5)
    said = [(0.4, " alpha"), (0.8, " be"), (0.88, "ta")]
    with FakeRealtime(said, late_s=0.2) as server, start("--live", path, "--url", server.url + "/v1") as process:
        assert process.stdout and process.stderr
        first = process.stdout.read(5)
        early = time.perf_counter()
        rest = process.stdout.read()
        assert (first + rest, process.stderr.read(), process.wait(5)) == ("alpha beta\n", "", 0)
    (session,) = server.sessions
    assert early < session.final - 0.5
    assert session.model == "fake-voxtral"
    assert session.kinds == ["session.update", COMMIT, *[APPEND] * 19, COMMIT]
    samples, _ = soundfile.read(path)
    assert np.abs(np.frombuffer(session.audio, "<i2") - samples * 32767).max() <= 1
    late = [at - session.arrivals[0] - 0.08 * number for number, at in enumerate(session.arrivals[:-1])]
    assert min(late[-5:]) < 0.05
    assert session.arrivals[-1] - session.arrivals[0] > 1.3


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


def test_a_session_that_breaks(tmp_path: Path) -> None:
    with FakeRealtime([(0.1, "alpha")], dies=0.3) as server:
        done = run("--live", write_clip(tmp_path, 1), "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "alpha\n")
    assert done.stderr.startswith("voxtral-serve: the connection was closed before the text's end: ")
    assert done.stderr.count("\n") == 1
    with FakeRealtime([(0.1, "alpha")], ends=0.3) as server:
        done = run("--live", write_clip(tmp_path, 1), "--url", server.url)
    assert (done.returncode, done.stdout) == (1, "alpha\n")
    assert done.stderr.startswith("voxtral-serve: the server ended the session before the audio's end")


def test_ctrl_c_ends_the_audio_and_waits_for_the_text(tmp_path: Path) -> None:
    path = write_clip(tmp_path, 60)
    said = [(0.2, "alpha"), (30.0, " beta")]
    with FakeRealtime(said, late_s=0.3) as server, start("--live", path, "--url", server.url) as process:
        wait_for(lambda: bool(server.sessions) and len(server.sessions[0].sizes) > 5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=5) == ("alpha beta\n", "")
        assert process.returncode == 0
    assert server.sessions[0].kinds[-1] == COMMIT
    with FakeRealtime(late_s=4) as server, start("--live", path, "--url", server.url) as process:
        wait_for(lambda: bool(server.sessions) and len(server.sessions[0].sizes) > 5)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: bool(server.sessions[0].final))
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=2) == ("", "voxtral-serve: stopped\n")
        assert process.returncode == 130


def test_a_microphone(tmp_path: Path) -> None:
    settings = environment() | fake_sounddevice(tmp_path / "fake", MICROPHONE)
    with FakeRealtime([(0.2, "alpha")]) as server, start("--live", "--url", server.url, env=settings) as process:
        wait_for(lambda: bool(server.sessions) and len(server.sessions[0].sizes) > 5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=5) == ("alpha\n", "Listening. Ctrl-C ends.\n")
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
