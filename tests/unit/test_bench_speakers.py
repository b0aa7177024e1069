"""`python -m bench speakers`: recordings with known speakers, and the words with the wrong one."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from places import DATA

from bench import BenchError
from bench.speakers import command, known, live, recordings, score
from bench.speakers.recordings import RATE_HZ, Mix, Turn
from voxtral_serve.speakers.windows import Voices

SPOKEN = [Turn(0.0, 4.0, "ann"), Turn(4.0, 8.0, "bob"), Turn(7.0, 8.0, "ann")]
WORDS = [(start, start + 1.0) for start in map(float, range(9))]  # the last while nobody speaks


@pytest.mark.parametrize(
    ("labels", "wrong"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1, 1], 0),
        ([1, 1, 1, 1, 0, 0, 0, 1, 0], 0),  # names do not count, and in overlap both are right
        ([0, 0, 0, 1, 1, 1, 1, 1, 0], 1),
        ([0] * 9, 3),
        ([0, 0, 0, 2, 1, 1, 1, 1, 2], 1),  # a third label is nobody's
    ],
)
def test_wrong_words(labels: list[int], wrong: int) -> None:
    assert score.wrong_words(labels, WORDS, SPOKEN) == (wrong, 8)


def test_the_diarization_error_rate_is_that_of_turns() -> None:
    spoken = [Turn(0.0, 4.0, "ann"), Turn(4.0, 8.0, "bob")]
    assert score.error_rate([0] * 4 + [1] * 4, WORDS[:8], spoken, 8.0) == 0
    # One of eight seconds is confused; collars of 0.25 s around 0, 4 and 8 s do not count.
    assert score.error_rate([0] * 5 + [1] * 3, WORDS[:8], spoken, 8.0) == pytest.approx(0.75 / 7, abs=1e-3)
    assert score.error_rate([0] * 4, WORDS[:4], spoken, 8.0) == pytest.approx(0.5)  # what no word covers is missed


def test_files_of_nist(tmp_path: Path) -> None:
    rttm, ctm = tmp_path / "a.rttm", tmp_path / "a.ctm"
    rttm.write_text("SPEAKER a 1 2.5 1.0 <NA> <NA> bob <NA> <NA>\nSPEAKER a 1 0 2 <NA> <NA> ann <NA> <NA>\n")
    ctm.write_text("a 1 0.50 0.25 hello\n")
    assert recordings.turns(rttm) == [Turn(0.0, 2.0, "ann"), Turn(2.5, 3.5, "bob")]
    assert recordings.words(ctm) == [(0.5, 0.75)]
    for path, read in ((rttm, recordings.turns), (ctm, recordings.words)):
        path.write_text("a 1\n")
        with pytest.raises(BenchError, match=f"{path.name} is no"):
            read(path)


def reader(folder: Path, pitch: float) -> Path:
    """An utterance of four tones of 0.8 s with pauses of 0.5 s: phrases."""
    folder.mkdir(parents=True)
    tone = 0.2 * np.sin(2 * np.pi * pitch * np.arange(int(0.8 * RATE_HZ)) / RATE_HZ)
    pause = 0.001 * np.random.default_rng(0).normal(size=RATE_HZ // 2)
    soundfile.write(folder / "1.flac", np.concatenate([part for _ in range(4) for part in (pause, tone)]), RATE_HZ)
    return folder


def test_a_mix_takes_turns_of_whole_phrases(tmp_path: Path) -> None:
    readers = {name: reader(tmp_path / name, pitch) for name, pitch in (("low", 200.0), ("high", 400.0))}
    samples, turns = recordings._mixed(readers, Mix(("low", "high"), 60, 1))
    again, _ = recordings._mixed(readers, Mix(("low", "high"), 60, 1))
    assert np.array_equal(samples, again)
    assert len(turns) == 8 and {turn.speaker for turn in turns} == {"low", "high"}
    for turn in turns:
        phrase = samples[round(turn.start * RATE_HZ) : round(turn.end * RATE_HZ)]
        pitch = np.abs(np.fft.rfft(phrase)).argmax() / (turn.end - turn.start)
        assert pitch == pytest.approx(200 if turn.speaker == "low" else 400, abs=2)
        assert 0.75 < turn.end - turn.start < 0.95


def unit(*values: float) -> np.ndarray:
    vectors = np.array(values, np.float32)
    return vectors / np.linalg.norm(vectors)


def test_references_are_judged_in_their_recording_and_in_others() -> None:
    """Ann and Bob, whose labels are theirs; Eve, who sounds as Ann; and Ann once more, where Bob's label is hers."""
    ann, bob = unit(1, 0, 0), unit(0, 1, 0)
    first = known.Labelled(True, np.stack([ann, bob]), ["ann", "bob"], {"ann": ann, "bob": bob})
    eve = known.Labelled(False, unit(1, 0.1, 0)[None], ["eve"], {"eve": unit(1, 0.1, 0.1)})
    wrong = known.Labelled(False, ann[None], ["bob"], {"ann": ann})
    assert known.figures([first, eve, wrong]) == {
        "chosen_on": {"clips": 2, "right": 2, "wrong": 0, "strangers": 1, "taken": 1},  # eve's; ann's is no stranger's
        "held_out": {"clips": 2, "right": 1, "wrong": 1, "strangers": 4, "taken": 3},
    }


def test_a_reference_is_of_the_first_half_of_windows_in_which_a_speaker_is_alone() -> None:
    spans = np.array([(start, start + 1.5) for start in (0.0, 0.75, 1.5, 2.25, 3.0, 6.0, 6.75)])
    vectors = np.eye(7, dtype=np.float32)
    found = known.labelled(True, Voices(spans, vectors), [0] * 4 + [1] * 4, WORDS[:8], SPOKEN)
    assert found.speakers == ["ann", "bob"]
    assert set(found.references) == {"ann"}  # bob is alone in one window, of which nothing is half
    np.testing.assert_allclose(found.references["ann"], unit(1, 1, 0, 0, 0, 0, 0))


def test_words_with_another_label_later() -> None:
    assert live.different([0, 0, 1, 1], [1, 1, 0, 0]) == []  # names do not count
    assert live.different([0, 0, 0, 1], [0, 1, 1, 0]) == [0]
    assert live.different([0, 0, 0], [0, 0, 1]) == [2]
    assert live.different([], []) == []


def test_relabelling_while_two_speak() -> None:
    """Two voices that are alike at first: 10 s are one speaker until the second one is heard for longer."""
    spans = np.array([(start, start + 1.5) for start in np.arange(0, 38.5, 0.75)])
    ann, bob = unit(1, 0, 0, 0), unit(0, 1, 0, 0)
    rng = np.random.default_rng(0)
    vectors = np.stack([ann if start < 9 or start > 24 else bob for start, _ in spans])
    vectors = vectors + rng.normal(0, 0.02, vectors.shape)
    found = Voices(spans, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    words = [(start, start + 0.9) for start in np.arange(0.0, 39.0)]
    figures = live.relabelled(found, words, 40.0)
    assert figures["words"] > 0 and 0 < figures["oldest_s"] <= 40
    assert live.relabelled(found._replace(vectors=np.tile(ann, (len(spans), 1))), words, 40.0) == {
        "words": 0,
        "oldest_s": 0.0,
    }


def test_score_writes_the_figures_of_each_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real process on one voice."""
    monkeypatch.setattr(score, "MINUTES", (0.05, 0.2))
    samples = soundfile.read(DATA / "live/06.opus")[0][6 * RATE_HZ : 10 * RATE_HZ]
    soundfile.write(tmp_path / "voice.wav", samples, RATE_HZ)
    (tmp_path / "voice.rttm").write_text("SPEAKER voice 1 0 4 <NA> <NA> ann <NA> <NA>\n")
    (tmp_path / "voice.ctm").write_text("".join(f"voice 1 {at} 0.9 la\n" for at in range(4)))
    entry = {"name": "voice", "source": "a test", "chosen_on": False}
    (tmp_path / recordings.MANIFEST).write_text(json.dumps([entry]))
    assert command.main(["score", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 0
    content = json.loads((tmp_path / "out.json").read_bytes())
    (row,) = content["recordings"]
    assert row["unknown"] == row["given"] == {"speakers": 1, "wrong_words": 0, "der": row["given"]["der"]}
    assert content["held_out"]["right_number"] == 1 and content["chosen_on"]["recordings"] == 0
    short, long = content["costs"]
    assert (short["minutes"], long["minutes"]) == (0.05, 0.2) and 0 < short["cpu_s"] < long["cpu_s"]
    assert 1e8 < short["peak_bytes"] <= long["peak_bytes"]
    assert row["relabelled"] == {"words": 0, "oldest_s": 0.0}
    assert content["known"]["held_out"] == {"clips": 1, "right": 1, "wrong": 0, "strangers": 0, "taken": 0}
    printed = capsys.readouterr().out
    assert "\n|voice\\*|4|1, 1|0.0|0.0|" in printed and "\n|**others\\***|4|right in 1 of 1|0.0|0.0|-|\n" in printed


def test_a_folder_without_sources_or_recordings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["make", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "librispeech_test-other has no readers" in capsys.readouterr().err
    assert command.main(["score", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 2
    assert "recordings.json: [Errno 2]" in capsys.readouterr().err
