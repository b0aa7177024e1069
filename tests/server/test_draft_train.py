"""`voxtral-serve draft train` on a CPU: pico transcribes some minutes, a small drafter is trained, and it is used."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import offline
import pytest
from places import DATA, PICO

from bench import dataset
from pico import model
from voxtral_serve.engine.draft_network import Head, chirp

pytestmark = pytest.mark.slow
CLIPS = 40
PATIENCE_S = 300.0
# With less audio, smaller shards and a smaller network than a user would have.
PROGRAM = """
import sys
from pathlib import Path
from voxtral_serve.draft import collect, run
from voxtral_serve.draft.job import Training, TrainJob
collect.SHARD_S, run.LEAST_S, run.MEASURED = 30, 60, 3
small = Training(width=64, blocks=1, passes=2, least_steps=60, batch_rows=1024, learning_rate=5e-3)
clips, out = map(Path, sys.argv[1:3])
options = ("--gpu-memory-utilization", "0.3")
sys.exit(run.run(TrainJob((clips,), Path(sys.argv[3]), out, arguments=options, training=small)))
"""


def shortest() -> list[dataset.Clip]:
    return sorted(dataset.load(DATA)[0], key=lambda clip: clip.duration_s)[:CLIPS]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """The shortest clips, with their texts, and a file that is none."""
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    lines = [{"audio_filepath": str(clip.path.resolve()), "text": clip.text} for clip in shortest()]
    path = tmp_path / "clips.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"audio_filepath": "broken.wav"}]))
    return path


def begun(manifest: Path, out: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(manifest), str(out), str(PICO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) == session and Path(f"/proc/{name}/stat").read_text().rpartition(")")[2][1] != "Z":
                found.append(int(name))
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_recordings_become_a_drafter(manifest: Path, tmp_path: Path) -> None:
    """A first run is killed once it has a shard; the second one goes on, and leaves a drafter that is right."""
    out, work = tmp_path / "draft" / "head.safetensors", tmp_path / "draft" / "work"
    killed = begun(manifest, out)
    wait_until(lambda: (work / "0000.json").exists() or killed.poll() is not None, "no shard")
    assert killed.poll() is None, killed.communicate()
    killed.send_signal(signal.SIGKILL)
    wait_until(lambda: not left(killed.pid), "the engine has not ended with the command")
    kept = json.loads((work / "0000.json").read_text())["clips"]
    assert kept and not out.exists()

    again = begun(manifest, out)
    told, errors = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, (told, errors[-3000:])
    assert f"left out: {tmp_path / 'broken.wav'}" in told and "1 files cannot be read" in told
    table = told[told.index("no drafts") :].splitlines()
    assert [line.split()[0] for line in table[:2]] == ["no", "pads"] and float(table[-2].split()[-1]) > 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["head.safetensors", "training.jsonl"]

    head = Head.read(out)
    assert (head.vocabulary, head.delay, head.prompt, head.shape["dim"]) == (5200, 6, 39, 256)
    assert offline.relative(head.chirp, offline.reference_rows(chirp(model.SAMPLE_RATE))) < 0.01  # stored as bfloat16
    lines = [json.loads(line) for line in (out.parent / "training.jsonl").read_text().splitlines()]
    scores = {line["name"]: line for line in lines if "name" in line}
    (trained,) = [name for name in scores if name.endswith(" h")][-1:]
    assert scores[trained]["right"] > 0.5  # [STREAMING_PAD] alone is as much
    assert scores[trained]["survival"] == list(head.survival)
    assert {line["alone"] for line in lines if "alone" in line} == {"without", "with"}
    assert all(clip.text not in path.read_text(errors="ignore") for path in out.parent.iterdir() for clip in shortest())

    refused = begun(manifest, out)
    assert refused.wait(PATIENCE_S) == 2
    assert "exists: pass --replace" in refused.communicate()[1]
