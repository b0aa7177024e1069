"""`voxtral-serve draft train` without an engine: recordings, shards, training, scores, and what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from places import PICO
from safetensors.torch import load_file, save_file
from vllm.config import CUDAGraphMode
from vllm.utils.import_utils import resolve_obj_by_qualname

from voxtral_serve import cli
from voxtral_serve.draft import engine, recordings, run
from voxtral_serve.draft.job import DraftError, Training, TrainJob
from voxtral_serve.draft.model import Model
from voxtral_serve.draft.recordings import Ending, Piece, Reader, Recording
from voxtral_serve.draft.report import Line, duration, table
from voxtral_serve.draft.scoring import DRAFTS, score, walk
from voxtral_serve.draft.shards import Entry, Shards, check_space
from voxtral_serve.draft.training import IGNORED, Corpus, Trainer, batches, rate, right, seen_tokens
from voxtral_serve.draft.worker import KeptRows, RowsExtension
from voxtral_serve.engine.draft_network import Head, HeadNetwork

RATE = recordings.RATE_HZ
PROMPT = 3
WORDS = 6  # tokens of the small language that is learned here


# ---- Scores


@pytest.mark.parametrize(
    ("right", "drafts", "accepted"),
    [
        ("", 3, []),
        ("1", 3, []),  # the first token is the prompt's
        ("0111111", 3, [3, 2]),  # 3 drafts and a token, then the last two
        ("0111111", 1, [1, 1, 1]),
        ("0000", 3, [0, 0, 0]),
        ("01101111", 3, [2, 3]),
        ("011011111", 15, [2, 5]),
    ],
)
def test_steps_of_a_clip(right: str, drafts: int, accepted: list[int]) -> None:
    found = walk(np.array([each == "1" for each in right], bool), drafts)
    assert found.accepted == accepted
    assert found.tokens == max(0, len(right) - 1)


def test_a_walk_is_what_verification_does() -> None:
    """Against a loop that verifies tokens one by one."""
    rng = np.random.default_rng(0)
    for drafts in DRAFTS:
        hits = rng.random(200) < 0.8
        position, steps = 1, 0
        while position < len(hits):
            ahead = 0
            while ahead < drafts and position < len(hits) and hits[position]:
                position, ahead = position + 1, ahead + 1
            position, steps = position + 1, steps + 1  # the model's own token
        assert len(walk(hits, drafts).accepted) == steps


def test_scores() -> None:
    perfect, none = np.ones(33, bool), np.zeros(33, bool)
    best, worst = score([perfect]), score([none])
    assert best.right == 1 and best.a_step == {1: 2, 3: 4, 7: 8, 15: 16} and best.survival == [1.0] * 15
    assert worst.right == 0 and set(worst.a_step.values()) == {1.0} and worst.survival == [0.0] * 15
    both = score([perfect, none])
    assert both.right == 0.5
    assert both.a_step[15] == 64 / (2 + 32)
    assert both.survival == sorted(both.survival, reverse=True)


def test_the_table() -> None:
    a_step = dict.fromkeys(DRAFTS, 2.5)
    lines = [
        Line("no drafts", None, dict.fromkeys(DRAFTS, 1.0), 318.0, True),
        Line("4.50 h", 0.831, a_step, 99.6, False),
    ]
    made = table(lines, "H").splitlines()
    assert made[-2].split() == ["no", "drafts", "1.00", "1.00", "1.00", "1.00", "318"]
    assert made[-1].split() == ["4.50", "h", "83.1", "%", "2.50", "2.50", "2.50", "2.50", "100", "computed"]
    assert made[1].split() == ["trained", "on", "tokens", "1", "3", "7", "15", "ms"]


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- Recordings


def wav(path: Path, seconds: float, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.sin(np.arange(round(seconds * rate)) / 9), rate)
    return path


def test_recordings_are_found_and_measured(tmp_path: Path) -> None:
    wav(tmp_path / "a.wav", 2)
    wav(tmp_path / "below/b.flac", 3.5, 44100)
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    (tmp_path / "notes.txt").touch()
    found, failed = recordings.find([tmp_path])
    assert {each.path.name: each.seconds for each in found} == {"a.wav": 2.0, "b.flac": 3.5}
    assert [path.name for path, _ in failed] == ["broken.wav"]
    assert found == sorted(found) and found == recordings.find([tmp_path / "below", tmp_path])[0]


def test_a_manifest_names_recordings(tmp_path: Path) -> None:
    wav(tmp_path / "a.wav", 2)
    wav(tmp_path / "b.wav", 2)
    manifest = tmp_path / "list.jsonl"
    manifest.write_text('{"audio_filepath": "a.wav", "text": "x"}\n\n{"path": "b.wav"}\n')
    assert {each.path.name for each in recordings.find([manifest])[0]} == {"a.wav", "b.wav"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"audio_filepath": "a.wav"}\n[]\n', "line 2 names no recording"),
        ("nonsense", "line 1 names no recording"),
        ('{"path": 5}', "line 1 names no recording"),
        ('{"path": "absent.wav"}', "absent.wav does not exist"),
        ("", "has no lines"),
        ("\xff", "cannot be read"),
    ],
)
def test_a_manifest_that_is_refused(tmp_path: Path, content: str, words: str) -> None:
    manifest = tmp_path / "list.jsonl"
    manifest.write_bytes(content.encode("latin-1"))
    with pytest.raises(DraftError, match=words):
        recordings.find([manifest])


def test_as_many_recordings_as_hours() -> None:
    every = [Recording(f"{number}", Path(), 1800.0) for number in range(5)]
    assert len(recordings.take(every, 1)) == 2
    assert len(recordings.take(every, 1.2)) == 3
    assert recordings.take(every, None) == recordings.take(every, 99) == every


def test_a_long_recording_is_cut(tmp_path: Path) -> None:
    long = Recording("k", wav(tmp_path / "a.wav", 95), 95)
    made = list(recordings.pieces(long, 37.0, None))
    assert [len(piece.samples) / RATE for piece in made] == [30, 30, 30, 5]
    assert [piece.key for piece in made] == ["k-0", "k-1", "k-2", "k-3"]
    (whole,) = recordings.pieces(Recording("k", wav(tmp_path / "b.wav", 36), 36), 37.0, None)
    assert len(whole.samples) == 36 * RATE


def test_a_recording_longer_than_a_section_is_cut_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "SECTION_S", 60)
    made = list(recordings.pieces(Recording("k", wav(tmp_path / "a.wav", 180), 180), 37.0, None))
    assert [len(piece.samples) / RATE for piece in made] == [30] * 6
    expected, _ = soundfile.read(tmp_path / "a.wav", dtype="float32")
    assert np.array_equal(np.concatenate([piece.samples for piece in made]), expected)


def test_recordings_are_read_ahead(tmp_path: Path) -> None:
    good = [Recording(f"{number}", wav(tmp_path / f"{number}.wav", 1), 1) for number in range(3)]
    cut = wav(tmp_path / "cut.flac", 30)
    cut.write_bytes(cut.read_bytes()[:20000])
    reader = Reader([*good, Recording("cut", cut, 30), Recording("gone", tmp_path / "x.wav", 1)], 37.0, None)
    items = []
    while reader.left:
        items.append(reader.take(wait=True))
    assert reader.take(wait=True) is None
    endings = {item.recording.key: item for item in items if isinstance(item, Ending)}
    assert {item.key for item in items if isinstance(item, Piece)} == {"0-0", "1-0", "2-0"}
    assert all(endings[each.key][1:] == (1, None) for each in good)
    assert "No such file" in str(endings["gone"].error) and endings["cut"].error


def test_recordings_are_held_out() -> None:
    def every(count: int, seconds: float = 10.0) -> list[Recording]:
        return [Recording(f"{number:04d}", Path(), seconds) for number in range(count)]

    assert run.hold_out(every(24)) == []
    assert len(run.hold_out(every(30))) == 6
    assert len(run.hold_out(every(1000))) == 36
    assert len(run.hold_out(every(5000))) == 100
    assert len(run.hold_out(every(1000, 3600.0))) == 3  # two hours, and the one that exceeds them


# ---- Shards


def entry(key: str, tokens: list[int], number: int = 0, first: int = 0, held_out: bool = False) -> Entry:
    return Entry(key, held_out, 1.0, tokens, number, first, PROMPT - 1 + len(tokens))


def filled(folder: Path, clips: int = 12, seed: int = 0) -> Shards:
    """Clips whose rows say their tokens, in two shards."""
    rng = np.random.default_rng(seed)
    code = torch.from_numpy(np.random.default_rng(7).normal(size=(WORDS, 8))).bfloat16()
    shards = Shards(folder, {"delay": 6})
    for _ in range(2):
        rows, made = [], []
        for number in range(clips // 2):
            tokens = [int(token) for token in rng.integers(0, WORDS, 20 + number)]
            rows.append(torch.cat([torch.zeros(PROMPT - 1, 8).bfloat16(), code[tokens]]))
            made.append((f"{shards.number}{number:02d}-0", number == 0, 1.0, len(rows[-1]), [10 * t for t in tokens]))
        save_file({"rows": torch.cat(rows)}, shards.path())
        shards.add(made, {key.partition("-")[0]: 1 for key, *_ in made})
    return shards


def test_shards_are_read_again(tmp_path: Path) -> None:
    first = filled(tmp_path)
    first.close()
    again = Shards(tmp_path, {"delay": 6})
    assert again.entries == first.entries and again.number == 2 and len(again.entries) == 12
    assert again.complete("000") and not again.complete("zzz")
    assert again.rows(1).shape == (sum(each.rows for each in again.entries if each.shard == 1), 8)


def test_rows_without_their_clips_do_not_count(tmp_path: Path) -> None:
    """A kill between both files, and one within the first."""
    first = filled(tmp_path)
    first.close()
    (tmp_path / "0001.json").unlink()
    (tmp_path / "0002.partial").write_bytes(b"half")
    again = Shards(tmp_path, {"delay": 6})
    assert again.number == 1 and not again.complete("100")
    assert not (tmp_path / "0002.partial").exists()


def test_a_work_folder_of_another_delay(tmp_path: Path) -> None:
    Shards(tmp_path, {"delay": 6}).close()
    with pytest.raises(DraftError, match=r"has rows of another delay \(6, not 12\)"):
        Shards(tmp_path, {"delay": 12})


def test_a_work_folder_in_use(tmp_path: Path) -> None:
    first = Shards(tmp_path, {"delay": 6})
    with pytest.raises(DraftError, match="in use by another"):
        Shards(tmp_path, {"delay": 6})
    first.remove()
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("0000.json", b"{"),
        ("0000.json", b"[]"),
        ("0000.json", b'{"clips": [["a"]], "counts": {}}'),
        ("0000.json", b'{"clips": []}'),
        ("job.json", b"\xff\xfe"),
    ],
)
def test_damaged_files_of_clips(tmp_path: Path, name: str, content: bytes) -> None:
    filled(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DraftError, match=f"{name} is damaged .*remove the folder"):
        Shards(tmp_path, {"delay": 6})


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_damaged_files_of_rows(tmp_path: Path, size: int) -> None:
    shards = filled(tmp_path)
    path = tmp_path / "0000.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DraftError, match=r"0000\.safetensors is damaged"):
        shards.rows(0)


def test_rows_of_other_clips(tmp_path: Path) -> None:
    shards = filled(tmp_path)
    save_file({"rows": torch.zeros(5, 8)}, tmp_path / "0000.safetensors")
    with pytest.raises(DraftError, match="expected bfloat16 and"):
        shards.rows(0)


def test_too_little_space(tmp_path: Path) -> None:
    check_space(tmp_path / "not/yet", 1)
    with pytest.raises(DraftError, match=r"GB free and the audio rows need 1000000\.0 GB"):
        check_space(tmp_path / "not/yet", 10**15)


# ---- Rows of clips, in the worker


def test_rows_are_kept_and_written_in_the_order_of_their_clips(tmp_path: Path) -> None:
    def rows(value: float, length: int) -> torch.Tensor:
        return (value + torch.arange(length)[:, None] / 100).expand(length, 4).contiguous()

    kept, encoded = KeptRows(), rows(5, 10)
    kept.add("a", encoded)
    encoded.zero_()  # as the encoder does with the next clip
    kept.add("b", rows(7, 4))
    kept.add("c", rows(8, 12))
    assert kept.write(tmp_path / "x.safetensors", ["c", "a"]) == [12, 10]
    written = load_file(tmp_path / "x.safetensors")["rows"]
    assert torch.equal(written, torch.cat([rows(8, 12), rows(5, 10)]).bfloat16())
    assert [*kept.rows] == ["b"] and [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    with pytest.raises(KeyError, match="early"):
        kept.write(tmp_path / "y.safetensors", ["b", "early"])
    assert [*kept.rows] == ["b"] and not (tmp_path / "y.safetensors").exists()


@pytest.mark.parametrize("worker", ["worker.GpuWorker", "cpu_worker.CpuWorker"])
def test_the_worker_has_none_of_the_names_of_its_extension(worker: str) -> None:
    """vLLM asserts it."""
    names = {name for name in dir(RowsExtension) if not name.startswith("__")}
    assert names and names.isdisjoint(dir(resolve_obj_by_qualname(f"voxtral_serve.engine.{worker}")))


# ---- Training


def test_targets_are_the_tokens_after_the_prompt(tmp_path: Path) -> None:
    shards = filled(tmp_path)
    tokens = seen_tokens([each for each in shards.entries if each.tokens != shards.entries[0].tokens])
    corpus = Corpus(shards, tokens, PROMPT, torch.device("cpu"))
    some = shards.entries[:3]
    rows, lengths, targets = corpus.batch(some)
    assert lengths.tolist() == [each.rows for each in some]
    assert rows.shape == (3, max(each.rows for each in some), 8)
    for each, row in zip(some, targets.tolist(), strict=True):
        assert row[: PROMPT - 1] == [IGNORED] * (PROMPT - 1)
        assert [int(tokens[number]) for number in row[PROMPT - 1 : each.rows]] == each.tokens
        assert set(row[each.rows :]) <= {IGNORED}


@pytest.mark.parametrize("rows", [10, 100, 10**6])
def test_a_pass_has_each_clip_once(tmp_path: Path, rows: int) -> None:
    every = filled(tmp_path, 40).entries
    made = list(batches(every, rows, 3))
    assert sorted(each for batch in made for each in batch) == sorted(every)
    assert all(len(batch) == 1 or len(batch) * max(each.rows for each in batch) <= rows for batch in made)
    assert made == list(batches(every, rows, 3))
    assert made != list(batches(every, rows, 4)) or len(made) == 1


def test_the_learning_rate() -> None:
    rates = [rate(step, 1000) for step in range(1000)]
    assert max(rates) == 1 and rates.index(1) == 49 and rates[0] < 0.05 and rates[-1] < 0.02
    assert rates[49:] == sorted(rates[49:], reverse=True)


SMALL = Training(width=16, blocks=1, kernel=3, passes=37.5, batch_rows=100, learning_rate=1e-2)

QUICK = replace(SMALL, passes=12, batch_rows=500)


def trainer(shards: Shards, state: Path, training: Training = SMALL) -> tuple[Trainer, Corpus, torch.Tensor]:
    tokens = torch.arange(WORDS) * 10
    embeddings = torch.from_numpy(np.random.default_rng(1).normal(size=(WORDS, 8))).float()
    corpus = Corpus(shards, tokens, PROMPT, torch.device("cpu"))
    return Trainer(corpus, shards.entries, embeddings, training, state), corpus, embeddings


def test_it_learns_tokens_from_rows(tmp_path: Path) -> None:
    shards = filled(tmp_path / "a")
    made, corpus, embeddings = trainer(shards, tmp_path / "state.pt")
    told: list[tuple[int, int, float]] = []
    network = made.run(lambda *at: told.append(at))
    assert told[-1][:2] == (150, 150)
    hits = right(network, corpus, shards.entries, embeddings, PROMPT, 100)
    assert [len(each) for each in hits] == [len(each.tokens) for each in shards.entries]
    assert np.concatenate(hits).mean() > 0.95
    before = HeadNetwork(8, 16, 1, 3, WORDS)
    assert np.concatenate(right(before, corpus, shards.entries, embeddings, PROMPT, 100)).mean() < 0.6


class StoppedError(Exception):
    pass


def test_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights of a run that was not interrupted."""
    shards = filled(tmp_path / "a")
    whole = trainer(shards, tmp_path / "whole.pt")[0].run(lambda *_: None)
    monkeypatch.setattr("voxtral_serve.draft.training.SAVE_S", -1.0)
    monkeypatch.setattr("voxtral_serve.draft.training.REPORT_S", -1.0)

    def stop(step: int, *_: object) -> None:
        if step == 90:
            raise StoppedError

    with pytest.raises(StoppedError):
        trainer(shards, tmp_path / "state.pt")[0].run(stop)
    steps: list[int] = []
    resumed = trainer(shards, tmp_path / "state.pt")[0].run(lambda step, *_: steps.append(step))
    assert steps[0] == 90 and steps[-1] == 150
    for name, value in whole.state_dict().items():
        assert torch.allclose(value, resumed.state_dict()[name], atol=1e-6), name


def test_a_state_of_another_network_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = filled(tmp_path / "a")
    monkeypatch.setattr("voxtral_serve.draft.training.SAVE_S", -1.0)
    trainer(shards, tmp_path / "state.pt")[0].run(lambda *_: None)
    wider = replace(SMALL, width=24, passes=5)
    made = trainer(shards, tmp_path / "state.pt", wider)[0]
    made.run(lambda *_: None)
    assert made.step == 20 == made.steps


# ---- The job


def test_a_checkpoint_is_read_without_an_engine() -> None:
    model = Model.read(PICO)
    assert (model.dim, model.vocabulary, model.pad, model.shape.delay, model.shape.prompt) == (256, 5200, 32, 6, 39)
    assert model.rows_bytes(10.0, 1) == (125 + 50) * 256 * 2
    assert model.embeddings(torch.tensor([32, 33])).shape == (2, 256)


def ten_minutes(folder: Path) -> Path:
    soundfile.write(wav(folder / "a.wav", 1), np.zeros(8000 * 700), 8000)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint": Path("absent")}, "--checkpoint absent: absent is not a directory"),
        ({"clips": (Path("absent"),)}, "absent does not exist"),
        ({"hours": 0.1}, None),
        ({"clips": (Path("short"),)}, "1 recordings have 0.0 minutes of audio: expected 10 minutes at least"),
        ({"out": Path("there.safetensors")}, "there.safetensors exists: pass --replace"),
        ({"arguments": ("--max-model-len", "many")}, None),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    words: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    ten_minutes(tmp_path / "clips")
    wav(tmp_path / "short/a.wav", 1)
    (tmp_path / "there.safetensors").touch()
    values = {"clips": (Path("clips"),), "checkpoint": PICO, "out": Path("out/head.safetensors"), **change}
    monkeypatch.setattr(run.Job, "run", lambda _: None)
    if "arguments" in change:
        with pytest.raises(SystemExit):
            run.run(TrainJob(**values))  # type: ignore[arg-type]
        assert "invalid" in capsys.readouterr().err
        return
    assert run.run(TrainJob(**values)) == (2 if words else 0)  # type: ignore[arg-type]
    if words:
        assert words in capsys.readouterr().err


def test_parts_are_trained_and_the_drafter_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All after the engine, on rows that say their tokens."""
    job = run.Job(TrainJob((ten_minutes(tmp_path / "clips"),), PICO, tmp_path / "d/head.safetensors", training=QUICK))
    monkeypatch.setattr(run, "LEAST_S", 3.0)
    job.shards = Shards(tmp_path / "d/work", {})
    rng, code = np.random.default_rng(0), torch.randn(40, 256).bfloat16()
    made, rows = [], []
    for number in range(24):
        tokens = rng.integers(32, 40, 30).tolist()
        rows.append(torch.cat([torch.zeros(38, 256).bfloat16(), code[tokens]]))
        made.append((f"{number:03d}-0", number % 6 == 0, 1.0, 68, tokens))
    save_file({"rows": torch.cat(rows)}, job.shards.path())
    job.shards.add(made, {})
    save_file({"rows": torch.ones(74, 256)}, tmp_path / "d/work/chirp.rows")
    job._train(["000-0", "006-0"])

    head = Head.read(tmp_path / "d/head.safetensors")
    assert head.tokens.tolist() == list(range(32, 40)) and head.hours == pytest.approx(20 / 3600, abs=1e-3)
    assert (head.vocabulary, head.delay, head.prompt, head.tokenizer) == (5200, 6, 39, job.model.tokenizer)
    assert torch.equal(head.chirp, torch.ones(74, 256))
    lines = json.loads((tmp_path / "d/work/scores.json").read_text())["lines"]
    assert [line["name"] for line in lines] == ["pads", *(f"{count / 3600:.2f} h" for count in (3, 5, 10, 20))]
    assert lines[0]["right"] < 0.3 < 0.9 < lines[-1]["right"] and lines[-1]["survival"] == list(head.survival)
    assert lines[0]["steps"] > 20 > lines[-1]["steps"]

    for name, step_ms in (("without", 9.0), ("with", 10.0)):
        times = {"clip_ms": 300.0, "begin_ms": 40.0, "step_ms": step_ms, "steps": 60, "clips": 2}
        (tmp_path / f"d/work/{name}.json").write_text(json.dumps(times))
    capsys.readouterr()
    job._end()
    told = capsys.readouterr().out.splitlines()
    assert told[2].split()[-1] == told[-2].split()[-1] == "300"
    assert told[3].split()[-2:] == [f"{40 + 10 * lines[0]['steps']:.0f}", "computed"]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["head.safetensors", "training.jsonl"]
    logged = [json.loads(line) for line in (tmp_path / "d/training.jsonl").read_text().splitlines()]
    assert [line["name"] for line in logged if "name" in line] == [line["name"] for line in lines]
    assert {line["alone"] for line in logged if "alone" in line} == {"without", "with"}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_options_of_the_engine(on_gpu: bool) -> None:
    """As vLLM's own parser reads them; those of the command line precede."""
    made = engine.options(PICO, ("--max-num-seqs", "8", "--gpu-memory-utilization", "0.5"), on_gpu)
    assert made["model"] == str(PICO) and made["hf_overrides"] == {"architectures": ["VoxtralRealtimeEncodeOnce"]}
    assert (made["max_num_seqs"], made["gpu_memory_utilization"], made["max_model_len"]) == (8, 0.5, engine.POSITIONS)
    assert (made["attention_backend"] == "CUSTOM") is on_gpu
    assert (made["compilation_config"].cudagraph_mode == CUDAGraphMode.FULL) is on_gpu
    assert made["enforce_eager"] is not on_gpu
    assert resolve_obj_by_qualname(made["worker_extension_cls"]) is RowsExtension
    drafted = engine.with_drafts(made, Path("head"))
    assert drafted["additional_config"] == {"draft_head": str(Path("head").absolute())}
    assert drafted["speculative_config"] == {
        "model": "voxtral_serve.drafter.Drafter",
        "num_speculative_tokens": 15,
    }


def test_a_worker_extension_of_the_user_is_refused() -> None:
    with pytest.raises(DraftError, match=r"--worker-extension-cls my\.Own: the training has its own; remove it"):
        engine.options(PICO, ("--worker-extension-cls", "my.Own"), False)


def test_too_little_space_is_found_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips = ten_minutes(tmp_path / "clips")
    job = run.Job(TrainJob((clips,), PICO, tmp_path / "head.safetensors"))
    job.train = [each._replace(seconds=1e12) for each in job.train]
    with pytest.raises(DraftError, match="GB free and the audio rows need"):
        job.run()
    assert not (tmp_path / "work").exists()


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[TrainJob] = []
    monkeypatch.setattr(run, "run", lambda job: jobs.append(job) or 0)
    words = ["draft", "train", "--clips", "a", "b", "--checkpoint", "c", "--hours", "2", "--", "--max-num-seqs", "8"]
    assert cli.run(words) == 0
    assert jobs == [TrainJob((Path("a"), Path("b")), Path("c"), hours=2.0, arguments=("--max-num-seqs", "8"))]
    for wrong in (["--hours", "0"], ["--hours", "nan"], ["--unknown"]):
        with pytest.raises(SystemExit):
            cli.run([*words[:7], *wrong])


def test_a_vllm_without_drafters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "V1", True)
    assert run.run(TrainJob((Path("clips"),), PICO)) == 2
    assert "vLLM 0.20.0 is installed, which uses no drafter" in capsys.readouterr().err


def test_without_vllm(tmp_path: Path) -> None:
    """A process in which vllm cannot be imported."""
    hidden = "import sys; sys.modules['vllm'] = None; from voxtral_serve import cli; sys.exit(cli.run(sys.argv[1:]))"
    words = ["draft", "train", "--clips", str(tmp_path), "--checkpoint", str(PICO)]
    ended = subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "draft needs the package vllm" in ended.stderr and "pip install 'voxtral-serve[gpu]'" in ended.stderr
