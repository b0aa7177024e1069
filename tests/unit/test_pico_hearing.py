"""pico.hearing: its sets hold every clip once, and its file keeps what another run measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from places import DATA

from bench import dataset
from bench.answers import Row
from pico import hearing, model


@pytest.fixture(scope="module")
def clips() -> list[dataset.Clip]:
    return dataset.select(dataset.load(DATA)[0], 60, seed=0)


def row(text: str, reference: str, error: str | None = None) -> Row:
    return Row("a", 1.0, 1, 0.0, 1.0, None, None, text, reference, error)


@pytest.mark.parametrize(("name", "longest_s"), [("joined", 600), ("pauses", 300)])
def test_recordings_hold_each_clip_once(clips: list[dataset.Clip], tmp_path: Path, name: str, longest_s: float) -> None:
    made = hearing.recordings_of(name, clips, tmp_path)
    assert len(made) > 1
    assert sorted(" ".join(clip.text for clip in made).split()) == sorted(" ".join(c.text for c in clips).split())
    assert all(clip.duration_s <= longest_s for clip in made)
    assert all(soundfile.info(clip.path).duration == pytest.approx(clip.duration_s, abs=1e-3) for clip in made)
    spoken, whole = sum(clip.duration_s for clip in clips), sum(clip.duration_s for clip in made)
    if name == "joined":
        assert whole == pytest.approx(spoken, abs=1)
    else:
        assert 2 * len(clips) < whole - spoken < 20 * len(clips)
        assert whole - spoken == pytest.approx(11 * len(clips), rel=0.2)


def test_no_speech_is_ten_minutes_of_more_than_silence(clips: list[dataset.Clip], tmp_path: Path) -> None:
    made = hearing.recordings_of("no-speech", clips, tmp_path)
    assert [clip.duration_s for clip in made] == [600] * 3 and not any(clip.text for clip in made)
    audio = soundfile.read(made[0].path)[0]
    assert np.mean(np.abs(audio) > 1e-4) > 0.5


def test_scores() -> None:
    scored = hearing.score("clips", 480, "vllm", [row("the cat sat down", "The cat sat."), row("a", "a b")])
    assert (scored["wer"], scored["words"], scored["inserted"]) == (pytest.approx(2 / 5), 5, 1)
    empty = hearing.score("no-speech", 480, "reference", [row("", ""), row(" the cat", "")])
    assert (empty["wer"], empty["words"], empty["inserted"]) == (None, 0, 2)
    with pytest.raises(RuntimeError, match="clips: a failed: HTTP 500"):
        hearing.score("clips", 480, "vllm", [row("", "a", "HTTP 500")])


def test_the_file_keeps_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "hearing.json"
    scored = {
        (ms, where): hearing.score("clips", ms, where, [row("a", "a b")])
        for ms in (480, 240)
        for where in ("vllm", "reference")
    }
    hearing.merge(path, list(scored.values()), [{"id": "a", "said": "a b", "text": "a"}])
    better = hearing.score("clips", 480, "reference", [row("a b", "a b")])
    hearing.merge(path, [better], None)
    content = json.loads(path.read_text())
    assert [(r["delay_ms"], r["where"], r["wer"]) for r in content["rows"]] == [
        (240, "reference", 0.5),
        (240, "vllm", 0.5),
        (480, "reference", 0.0),
        (480, "vllm", 0.5),
    ]
    assert content["texts"] == [{"id": "a", "said": "a b", "text": "a"}]


def test_delays_are_whole_tokens() -> None:
    assert all(ms % 80 == 0 for ms in hearing.DELAYS_MS)
    assert hearing.DELAY_MS // hearing.MS_PER_TOKEN == model.DELAY_TOKENS
