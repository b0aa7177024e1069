"""The dataset reader: every problem is named with its line, all at once, before any request."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fakeserver import write_dataset

from bench import BenchError, dataset


def manifest(directory: Path, *entries: Any) -> Path:
    """Write a manifest: dicts become JSON, strings stay as they are."""
    directory.mkdir(exist_ok=True)
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (directory / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def entry(directory: Path, name: str = "a.wav", **changes: Any) -> dict[str, Any]:
    """A sound manifest entry with its file, but for `changes`; a change to None removes the key."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(name.encode())
    whole = {
        "path": name,
        "text": "hello",
        "duration": 1.5,
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not None}


def test_a_sound_dataset_keeps_manifest_order_and_extra_keys(tmp_path: Path) -> None:
    words = [["hello", 0.0, 0.4]]
    second = entry(tmp_path, "a.flac", text=" Hi\u2028there ", duration=2, words=words, voice="en-us")
    second["sha256"] = second["sha256"].upper()
    manifest(tmp_path, entry(tmp_path, "b.wav"), "", second)
    clips, digest = dataset.load(tmp_path)
    assert [clip.id for clip in clips] == ["b", "a"]
    assert clips[1].path.read_bytes() == b"a.flac"
    assert clips[1].text == " Hi\u2028there "
    assert clips[1].duration_s == 2.0
    assert clips[1].extra == {"words": words, "voice": "en-us"}
    assert digest == hashlib.sha256((tmp_path / "manifest.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text": None}, "the key 'text' is missing"),
        ({"path": None}, "the key 'path' is missing"),
        ({"duration": None}, "the key 'duration' is missing"),
        ({"sha256": None}, "the key 'sha256' is missing"),
        ({"text": "  "}, "'text' is empty"),
        ({"text": 3}, "'text' must be a string, found 3"),
        ({"duration": "1.5"}, "'duration' must be a number, found '1.5'"),
        ({"duration": True}, "'duration' must be a number, found True"),
        ({"duration": 0}, "'duration' must be more than 0 seconds, found 0"),
        ({"duration": float("nan")}, "'duration' must be more than 0 seconds, found nan"),
        ({"duration": float("inf")}, "'duration' must be more than 0 seconds, found inf"),
        ({"path": "gone.wav"}, "cannot read 'gone.wav' (No such file or directory)"),
        ({"path": "."}, "'path' must name a file below the dataset's directory, found '.'"),
        ({"path": "../a.wav"}, "'path' must name a file below the dataset's directory, found '../a.wav'"),
        (
            {"path": "/etc/passwd"},
            "'path' must name a file below the dataset's directory, found '/etc/passwd'",
        ),
        ({"sha256": "00"}, "not '00'"),
    ],
)
def test_one_fault(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    manifest(tmp_path, entry(tmp_path, "fine.wav"), entry(tmp_path, **changes))
    with pytest.raises(BenchError) as caught:
        dataset.load(tmp_path)
    assert "1 problem(s)" in str(caught.value)
    assert "line 2: " in str(caught.value)
    assert problem in str(caught.value)


def test_all_faults_of_all_lines_are_named_at_once(tmp_path: Path) -> None:
    manifest(
        tmp_path,
        entry(tmp_path, "a.wav"),
        "{oops",
        "[1]",
        entry(tmp_path, "a.flac", text="", duration=-1),
        {"path": "gone.wav"},
    )
    with pytest.raises(BenchError) as caught:
        dataset.load(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"9 problem(s) in {tmp_path / 'manifest.jsonl'}:"
    assert [line.strip()[:6] for line in lines[1:]] == ["line 2", "line 3"] + ["line 4"] * 3 + ["line 5"] * 4
    assert "  line 3: expected a JSON object, found list" in lines
    assert "  line 4: the id 'a' is already that of line 1" in lines


def test_bytes_that_are_no_utf8_are_a_named_problem(tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_bytes(b'{"path": "\xff"}\n')
    with pytest.raises(BenchError, match="line 1: not valid JSON"):
        dataset.load(tmp_path)


def test_no_manifest_and_no_clips(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read .*manifest\.jsonl \(No such file or directory\)"):
        dataset.load(tmp_path)
    with pytest.raises(BenchError, match="it names no clip"):
        dataset.load(manifest(tmp_path))


def test_selection_is_seeded_and_in_manifest_order(tmp_path: Path) -> None:
    clips, _ = dataset.load(write_dataset(tmp_path, {f"c{number:02}": "hello" for number in range(20)}))
    ids = [clip.id for clip in clips]
    picked = [clip.id for clip in dataset.select(clips, 5, seed=0)]
    # random.Random(0).sample(range(20), 5) == [12, 13, 1, 8, 15]
    assert picked == ["c01", "c08", "c12", "c13", "c15"]
    assert [clip.id for clip in dataset.select(clips, 5, seed=1)] != picked
    assert [clip.id for clip in dataset.select(clips, 20, seed=0)] == ids
    assert [clip.id for clip in dataset.select(clips, None, seed=0)] == ids
    with pytest.raises(BenchError, match="--samples 21 asks for more than the 20 clips"):
        dataset.select(clips, 21, seed=0)
