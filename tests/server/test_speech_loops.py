"""What is spoken and heard again, with a real transcriber. The speech is that of the stand-in: recordings."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import DATA, ROOT
from runs import valid
from speechserver import Reply, SpeechServer, clip_files, pcm, plain, recordings
from transcribing import environment
from uploads import KEY, upload

from bench import dataset
from bench.__main__ import main
from bench.dataset import Clip
from bench.measure import scoring


def test_the_round_trip_of_recordings(fast_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transcriber hears the recordings at 24 kHz as it hears the clips, within a few words."""
    monkeypatch.setenv("KEY_OF_THE_TRANSCRIBER", KEY)
    out = tmp_path / "out"
    with SpeechServer(recordings()) as server:
        flags = ("--url", server.url, "--out", str(out), "--samples", "3", "--note", "Stand-in.")
        heard = ("--transcribe", fast_url, "--transcribe-key-env", "KEY_OF_THE_TRANSCRIBER")
        assert main(["speech", *flags, *heard]) == 0
        assert set(server.keys) == {None}  # the key is the transcriber's
    for name in ("run", "summary"):
        valid(f"speech-{name}", json.loads((out / f"{name}.json").read_text()))
    trip = json.loads((out / "summary.json").read_text())["round_trip"]
    assert trip["failed"] == 0 and trip["speech"]["empty"] == [] == trip["clips"]["empty"]
    assert trip["speech"]["wer"]["words"] == trip["clips"]["wer"]["words"] > 30
    for name in ("speech", "clips"):
        assert trip[name]["wer"]["value"] < 0.2 and len(trip[name]["wer"]["ci95"]) == 2


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs curl and jq")
def test_the_voice_loop_of_the_documentation(fast_url: str, tmp_path: Path) -> None:
    """The command of docs/pages/transcribe.md, with other addresses: live text, a text command, speech in a file."""
    page = (ROOT / "docs/pages/transcribe.md").read_text().partition("## Voice loop")[2]
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)
    assert block
    clip = heard_right(fast_url)
    shutil.copy(clip.path, tmp_path / "question.wav")  # libsndfile looks at the content
    command = tmp_path / "bin/voxtral-serve"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m voxtral_serve.cli "$@"\n')
    command.chmod(0o755)
    replies = recordings(pace=0.05)

    def reply(body: dict[str, Any]) -> Reply:
        prefix, said, text = body["input"].partition("You said: ")
        assert (prefix, said) == ("", "You said: ")
        return replies(body | {"input": text})

    with SpeechServer(reply) as server:
        script = block[1].replace("http://gpu-box:8000", fast_url).replace("http://gpu-box:8001", server.url)
        path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environment(OPENAI_API_KEY=KEY, PATH=path),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (body,) = server.received
    assert plain(body.pop("input").removeprefix("You said: ")) == plain(clip.text)
    form = {"response_format": "pcm", "stream": True, "stream_format": "audio"}
    assert body == {"model": "voxtral-tts", "voice": "neutral_female", **form}
    spoken = np.fromfile(tmp_path / "answer.pcm", dtype="<i2")
    assert np.array_equal(spoken, np.frombuffer(pcm(clip_files()[plain(clip.text)]), dtype="<i2"))


def heard_right(url: str) -> Clip:
    """A short clip of one sentence whose words the model hears without an error."""
    for clip in sorted(dataset.load(DATA).clips, key=lambda clip: clip.duration_s):
        if len(re.findall(r"[.?!]", clip.text)) == 1:
            text = upload(url, clip.path).json()["text"]
            if plain(text) == plain(clip.text) and scoring.word_errors(clip.text, text).total == 0:
                return clip
    raise AssertionError("no clip is heard without an error")
