"""`voxtral-serve transcribe` against a real server of pico, with the guard and a key. Live audio: test_realtime.py."""

import shutil
from pathlib import Path

import pytest
import soundfile
from places import DATA
from servers import short
from transcribing import run
from uploads import KEY, upload

from bench import dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips, one of them in a folder of its own, and a file that is no audio."""
    folder = tmp_path_factory.mktemp("clips")
    (folder / "more").mkdir()
    for place, clip in zip((".", ".", "more"), short(dataset.load(DATA).clips, 3), strict=True):
        shutil.copy(clip.path, folder / place)
    (folder / "broken.wav").write_bytes(b"RIFF, and nothing that follows from it")
    return folder


def test_a_folder_has_what_requests_gets(fast_url: str, folder: Path, tmp_path: Path) -> None:
    clips = sorted(folder.rglob("*.opus"))
    refused = upload(fast_url, folder / "broken.wav")
    assert refused.status_code == 400
    for form, suffix in (("text", ".txt"), ("srt", ".srt")):
        done = run(folder, "--url", fast_url, "--format", form, "--out", tmp_path, OPENAI_API_KEY=KEY)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == [
            f"failed: {folder}/broken.wav: 400: {refused.json()['error']['message']}",
            "4 files: 3 transcribed, 1 failed",
        ]
        written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob(f"*{suffix}")}
        assert written == {
            path.relative_to(folder).with_suffix(suffix): upload(fast_url, path, response_format=form).content
            for path in clips
        }
    done = run(folder, "--url", fast_url, "--out", tmp_path, OPENAI_API_KEY=KEY)
    assert done.stderr.splitlines()[-1] == "4 files: 3 already transcribed (--again repeats them), 1 failed"


def test_speakers_are_those_of_the_upload(fast_url: str, tmp_path: Path) -> None:
    samples, rate = soundfile.read(DATA / "live/06.opus", dtype="int16")
    clip = tmp_path / "two.wav"
    soundfile.write(clip, samples[4 * rate : 21 * rate], rate)  # two voices
    for form in ("text", "json", "diarized_json", "srt"):
        out = tmp_path / form
        words = ("--speakers", 2, "--format", form, "--out", out)
        done = run(clip, "--url", fast_url, *words, OPENAI_API_KEY=KEY)
        assert (done.returncode, done.stderr) == (0, "1 file: 1 transcribed\n")
        (written,) = out.iterdir()
        answer = upload(fast_url, clip, response_format=form, diarize="true", num_speakers="2")
        assert written.read_bytes() == answer.content
    assert {line.partition(":")[0] for line in (tmp_path / "text/two.txt").read_text().splitlines()} == {
        *("SPEAKER_1", "SPEAKER_2"),
    }


def test_a_delay_of_an_upload(fast_url: str, pico_url: str, folder: Path) -> None:
    """vLLM alone would answer with its own delay, and not say so."""
    clip = next(folder.glob("*.opus"))
    for url, status in ((fast_url, 0), (pico_url, 1)):
        done = run(clip, "--url", url, "--delay", 960, OPENAI_API_KEY=KEY)
        assert done.returncode == status and bool(done.stdout) == (status == 0)
    assert f"{clip}: the delay needs a server with the guard, and {pico_url} has no /v1/server" in done.stderr


def test_live_has_the_text_of_the_upload(fast_url: str, folder: Path) -> None:
    clip = next(folder.glob("*.opus"))
    done = run("--live", clip, "--url", fast_url, OPENAI_API_KEY=KEY)
    assert (done.returncode, done.stderr) == (0, "")
    # Each turn that the server finds is a line.
    assert done.stdout.split() == upload(fast_url, clip).json()["text"].split()
