"""`voxtral-serve batch` on real Ray: killed in turn, a full disk, a store that is away. Two runs have real servers.

The disk and the store are tested with a server that answers at once (support/fakeserver.py): it is not what fails.
"""

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import batching
import boto3
import psutil
import pytest
from fakeserver import Answer, FakeServer
from moto.server import ThreadedMotoServer
from places import DATA, PICO, ROOT
from servers import EAGER, UNBOUND, short
from uploads import KEY, upload

from bench import dataset
from bench.measure import engine
from voxtral_serve.batch import places

pytestmark = pytest.mark.slow

ROWS, BROKEN, DISTINCT = 300, 3, 33
FLAGS = (*EAGER, "--dtype", "float32", "--api-server-count", "1", "--max-model-len", "512")
LIVE = ("--additional-config", json.dumps({"max_live_sessions": 0}))
GONE_S = 120  # until all processes of a killed driver have ended
VERBOSE = {
    "text": "alpha beta",
    "duration": 2.0,
    "segments": [{"id": 0, "text": "alpha beta", "start": 0.1, "end": 1.0}],
    "words": [{"word": "alpha", "start": 0.1, "end": 0.4}, {"word": "beta", "start": 0.5, "end": 1.0}],
}
ANSWER = Answer(body=json.dumps(VERBOSE).encode(), delay_s=0.2)


class Store:
    """An S3 server in this process, which keeps what is in it while it is stopped."""

    def __init__(self) -> None:
        self.port = engine.free_port()
        self.start()

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """With a bucket `archive`, in this process and in those that it starts."""
    made = Store()
    url = f"http://127.0.0.1:{made.port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name, value in {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    places._system.cache_clear()
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="archive")
    yield made
    made.stop()
    places._system.cache_clear()


def put(key: str, content: bytes) -> None:
    places.write(places.place(f"s3://archive/{key}"), content, patience_s=10)


def clips_of(count: int) -> list[dataset.Clip]:
    return sorted(dataset.load(DATA).clips, key=lambda clip: clip.duration_s)[:count]


@pytest.fixture
def archive(store: Store) -> dict[str, str]:
    """s3://archive has a manifest of ROWS rows, BROKEN of them without a transcript. Returns each row's clip."""
    clips = clips_of(DISTINCT)
    for clip in clips:
        put(f"audio/{clip.path.name}", clip.path.read_bytes())
    put("audio/broken.wav", b"RIFF, and nothing that follows from it")
    put("audio/text.mp3", b"no audio")
    of_row = {f"row-{number:03}": clips[number % DISTINCT].path.name for number in range(ROWS - BROKEN)}
    files = of_row | {"b-1": "broken.wav", "b-2": "text.mp3", "b-3": "missing.wav"}
    rows = [{"id": key, "audio_filepath": f"audio/{name}", "speaker": key[-1]} for key, name in files.items()]
    # The broken ones are not all in the last part.
    rows.sort(key=lambda row: row["id"][-1])
    put("manifest.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return of_row


@pytest.fixture
def online(tmp_path: Path) -> dict[str, str]:
    """The text of each clip by a server, one upload after the other."""
    port = engine.free_port()
    config = ROOT / "profiles/fast.yaml"
    with engine.served(config, PICO, port, tmp_path / "online.log", *FLAGS, *LIVE, environment=UNBOUND):
        url = f"http://127.0.0.1:{port}"
        return {clip.path.name: upload(url, clip.path).json()["text"] for clip in clips_of(DISTINCT)}


@pytest.fixture
def folder() -> Iterator[Path]:
    """For TMPDIR, with a short name: vLLM has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="vb") as name:
        yield Path(name)


def core(folder: Path) -> list[psutil.Process]:
    """The engine's processes behind its API."""
    return [each for each in batching.engines(folder) if "EngineCore" in each.name()]


def kill_driver(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """SIGKILL; all that it started has to end by itself."""
    assert core(folder)
    below = batching.descendants(process) + batching.engines(folder)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(below, GONE_S)
    assert [each.name() for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


def test_killed_in_turn(archive: dict[str, str], online: dict[str, str], tmp_path: Path, folder: Path) -> None:
    """The driver, then the actor, then the engine: each row is there once, with the text of the online server."""
    out = "s3://archive/out"
    options = ("--config", ROOT / "profiles/fast.yaml", "--dir", PICO, "--engines", 1, "--in-flight", 16)
    words = ("s3://archive/manifest.jsonl", "--out", out, *options, "--rows-per-file", 8, "--", *FLAGS, *LIVE)

    environment = {**UNBOUND, "TMPDIR": str(folder)}
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    first = batching.start(logs[0], *words, **environment)
    batching.wait_for(lambda: batching.done(out) >= 3, first, logs[0])
    kill_driver(first, folder)
    there = batching.done(out)

    second = batching.start(logs[1], *words, **environment)
    batching.wait_for(lambda: batching.done(out) >= there + 3, second, logs[1])
    (actor,) = batching.descendants(second, "MapWorker(MapBatches(Worker))")
    below = batching.engines(folder)
    assert core(folder)
    actor.kill()
    _, left = psutil.wait_procs(below, GONE_S)
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []
    there = batching.done(out)
    batching.wait_for(lambda: batching.done(out) >= there + 3, second, logs[1])
    killed = core(folder)
    assert killed
    for each in killed:
        each.kill()
    assert second.wait(3600) == 1, logs[1].read_text()

    rows = batching.rows(out)
    assert sorted(row["id"] for row in rows) == sorted([*archive, "b-1", "b-2", "b-3"])
    errors = {row["id"]: row["error"] for row in rows if row["error"]}
    assert set(errors) == {"b-1", "b-2", "b-3"}
    assert errors["b-1"].startswith("400: ") and errors["b-3"].startswith("cannot be read: ")
    assert {row["id"]: row["text"] for row in rows if not row["error"]} == {
        key: online[name] for key, name in archive.items()
    }
    for row in rows:
        assert row["manifest"]["speaker"] == row["id"][-1]
        if not row["error"]:
            assert " ".join(word["word"] for word in row["words"]) == row["text"]
            assert row["seconds"] > 0 and row["model"] == "voxtral"
    log = logs[1].read_text()
    assert "300 rows: 3 failed" in log and "RTFx" in log

    # Nothing is left to do, and nothing is done; another configuration is refused by name.
    parts = batching.done(out)
    again = batching.run(*words)
    assert (again.returncode, batching.done(out)) == (1, parts)
    assert len(again.stderr.splitlines()) == 1 and again.stderr.startswith("300 rows: 3 failed, ")
    other = batching.run(*words[:-1], json.dumps({"max_live_sessions": 1}))
    assert other.returncode == 2
    assert "config.additional_config was" in other.stderr


@pytest.mark.parametrize("speakers", [False, True])
def test_a_server_that_is_up(fast_url: str, clips: list[dataset.Clip], tmp_path: Path, speakers: bool) -> None:
    more = {"diarize": "true", "num_speakers": "1"} if speakers else {}
    folder = tmp_path / "in"
    folder.mkdir()
    for clip in short(clips, 3):
        (folder / clip.path.name).symlink_to(clip.path)
    (folder / "broken.wav").write_bytes(b"RIFF, and nothing that follows from it")
    out = str(tmp_path / "out")
    words = ("--out", out, "--url", fast_url, "--subtitles", "srt,vtt", *(("--speakers", 1) if speakers else ()))
    done = batching.run(folder, *words, OPENAI_API_KEY=KEY)
    assert done.returncode == 1, done.stderr
    rows = {row["id"]: row for row in batching.rows(out)}
    assert rows["broken.wav"]["text"] is None
    assert rows["broken.wav"]["error"] == f"400: {upload(fast_url, folder / 'broken.wav').json()['error']['message']}"
    for clip in short(clips, 3):
        name = clip.path.name
        for form in ("srt", "vtt"):
            written = Path(out, "subtitles", f"{name}.{form}").read_bytes()
            assert written == upload(fast_url, clip.path, response_format=form, **more).content
        fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"], **more}
        answer = upload(fast_url, clip.path, **fields).json()
        assert (rows[name]["text"], rows[name]["seconds"]) == (answer["text"], answer["duration"])
        assert rows[name]["words"] == answer["words"]
        keys = ("text", "start", "end", *(["speaker"] if speakers else []))
        timed = [{key: each[key] for key in keys} for each in answer["segments"]]
        assert rows[name]["segments"] == timed


# ---- Full disk, and no network


def many(folder: Path, count: int, **fields: Any) -> Path:
    """A manifest of `count` files."""
    for number in range(count):
        (folder / f"{number}.wav").write_bytes(b"0")
    return batching.write_manifest(
        folder / "m.jsonl", [{"audio_filepath": f"{number}.wav", **fields} for number in range(count)]
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"not run: a small disk needs root and mount: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_the_job_and_the_next_run_goes_on(tmp_path: Path, small_disk: Path) -> None:
    manifest = many(tmp_path, 60, note="x" * 2000)
    out = str(small_disk / "out")
    with FakeServer(default=ANSWER) as server:
        words = (manifest, "--out", out, "--url", server.url, "--rows-per-file", 4)
        full = batching.run(*words)
        assert full.returncode == 1
        assert "the job stops" in full.stderr and "No space left on device" in full.stderr
        assert "Traceback" not in full.stderr
        before = batching.done(out)
        subprocess.run(["mount", "-o", "remount,size=20M", str(small_disk)], check=True)
        sent = len(server.sent())
        rest = batching.run(*words)
        assert (rest.returncode, rest.stderr.splitlines()[-2][:18]) == (0, "60 rows: 0 failed,")
        assert len(server.sent()) - sent == 60 - 4 * before + 1  # and the clip that asks for the times
    assert sorted(int(row["id"].removesuffix(".wav")) for row in batching.rows(out)) == list(range(60))


def test_a_store_that_is_away_for_a_while(tmp_path: Path, store: Store) -> None:
    for number in range(60):
        put(f"audio/{number}.wav", b"0")
    out = "s3://archive/out"
    with FakeServer(default=ANSWER) as server:
        words = ("s3://archive/audio", "--out", out, "--url", server.url, "--rows-per-file", 4, "--in-flight", 4)
        process = batching.start(tmp_path / "log", *words)
        batching.wait_for(lambda: batching.done(out) >= 2, process, tmp_path / "log")
        store.stop()
        away = threading.Timer(20, store.start)
        away.start()
        try:
            status = process.wait(1800)
        finally:
            away.join()
        if status:  # Ray gives up some of its own requests at once
            assert "Run the same command again" in (tmp_path / "log").read_text()
            assert batching.run(*words).returncode == 0
    rows = batching.rows(out)
    assert sorted(int(row["id"].removesuffix(".wav")) for row in rows) == list(range(60))
    assert [row["error"] for row in rows if row["error"]] == []
