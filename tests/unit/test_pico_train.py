"""Training: what the decoder reads, what the loss counts, and a run that goes on where it was ended."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from places import PICO
from shards import shard

from pico import mel, model, recordings, train
from pico.pool import Loaded, Plans, Pool
from pico.recordings import UNTRAINED

PAD = model.STREAMING_PAD


@pytest.fixture(scope="module")
def params() -> dict:
    """pico's, but two thin layers of each kind."""
    small = {"dim": 32, "n_layers": 2, "head_dim": 16, "hidden_dim": 64, "n_heads": 2}
    params = json.loads((PICO / "params.json").read_text()) | small | {"n_kv_heads": 1}
    params["multimodal"]["whisper_model_args"]["encoder_args"] |= small | {"n_kv_heads": 2}
    return params


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    np.savez(recordings.shard_path(tmp_path, 0), **shard(20, 0))
    return tmp_path


def loaded(rows: int = 2, length: int = 80, seed: int = 0) -> Loaded:
    generator = torch.Generator().manual_seed(seed)
    audio = torch.randn(rows, length * 1280, generator=generator) * 0.05
    targets = torch.full((rows, length), PAD)
    targets[:, :38] = UNTRAINED
    targets[:, 45::5] = 2000
    return Loaded(audio, targets, torch.full((rows,), 6), torch.full((rows,), (length - 50) * 1280))


def test_what_the_decoder_reads_in_training() -> None:
    """BOS and 38 pads, then each target one position later; about a tenth of the text is dropped, no target is."""
    targets = torch.arange(100, 5100).repeat(3, 1)
    targets[:, :38] = UNTRAINED
    tokens = train.inputs_of(targets, torch.Generator().manual_seed(0))
    assert tokens[:, 0].tolist() == [model.BOS] * 3
    assert (tokens[:, 1:39] == PAD).all()
    kept = tokens[:, 39:] == targets[:, 38:-1]
    assert ((tokens[:, 39:] == PAD) | kept).all()
    assert kept.float().mean().item() == pytest.approx(0.9, abs=0.01)


@pytest.mark.slow
def test_loss_falls_and_does_not_see_what_is_untrained(params: dict) -> None:
    trainer = train.Trainer(params, 0, "cpu")
    batch = loaded()
    losses = [trainer.step(batch, 2e-3).item() for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    other = batch.targets.clone()
    other[0, 70:] = UNTRAINED
    with torch.no_grad():
        one = trainer.loss(trainer.net, batch, generators[0], None)
        two = trainer.loss(trainer.net, batch._replace(targets=other), generators[1], None)
    assert one != two


@torch.no_grad()
def test_the_delay_changes_what_is_said(params: dict) -> None:
    net = train.Trainer(params, 0, "cpu").net
    rows, tokens = torch.randn(2, 20, 32), torch.full((2, 20), PAD)
    both = net.decode(rows, tokens, delay=torch.tensor([6, 12]))
    torch.testing.assert_close(both[0], net.decode(rows, tokens)[0])
    torch.testing.assert_close(both[1], net.decode(rows, tokens, delay=12)[1])
    assert not torch.allclose(both[1], net.decode(rows, tokens, delay=6)[1])


@torch.no_grad()
def test_the_end_is_where_there_are_no_rows(params: dict) -> None:
    """From the first row without audio on, the encoder's layers get zeros, as vLLM gives them; before, all is equal."""
    net = train.Trainer(params, 0, "cpu").net
    log_mel = mel.log_mel(torch.randn(1, 40 * 1280) * 0.05)
    whole, ended = net.embed_audio(log_mel), net.embed_audio(log_mel, torch.tensor([30]))
    torch.testing.assert_close(ended[:, :30], whole[:, :30])
    assert not torch.allclose(ended[:, 30], whole[:, 30])
    stem: list[torch.Tensor] = []
    net.encoder.layers[0].register_forward_pre_hook(lambda _, inputs: stem.append(inputs[0]))
    net.embed_audio(log_mel, torch.tensor([30]))
    assert not stem[0][:, 120:].any() and stem[0][:, 119].any()


def test_warped_filters_move_a_tone() -> None:
    torch.testing.assert_close(mel.warped_filters(1.0), mel.mel_filters())
    tone = torch.sin(2 * torch.pi * 2000 * torch.arange(16000) / 16000)
    higher = torch.sin(2 * torch.pi * 2160 * torch.arange(16000) / 16000)
    peaks = [mel.log_mel(tone, mel.warped_filters(warp)).mean(-1).argmax() for warp in (1.0, 1.08)]
    assert peaks[1] == mel.log_mel(higher).mean(-1).argmax() > peaks[0]


def test_the_decoders_window_is_short_in_a_share_of_the_long_batches(params: dict) -> None:
    trainer = train.Trainer(params, 0, "cpu")
    windows = []
    for trainer.steps in range(400):
        assert trainer.window(1024) is None
        windows.append(trainer.window(7680))
    assert windows.count(train.SHORT_WINDOW) == pytest.approx(100, abs=30)
    assert set(windows) == {None, train.SHORT_WINDOW}


@pytest.mark.slow
def test_a_resumed_run_is_the_run(params: dict, tmp_path: Path) -> None:
    """Ten steps at once, and five, saved, five more by another trainer: weights, average and log are the same."""
    batches = [loaded(seed=seed) for seed in range(10)]
    whole, first, second = (train.Trainer(params, seed, "cpu") for seed in (0, 0, 1))
    second.seed = 0
    for batch in batches:
        whole.step(batch, 1e-3)
    for batch in batches[:5]:
        first.step(batch, 1e-3)
    first.elapsed_s, first.heard_s = 12.5, 99.0
    first.save(tmp_path / "state.pt")
    second.resume(tmp_path / "state.pt")
    assert (second.steps, second.elapsed_s, second.heard_s) == (5, 12.5, 99.0)
    for batch in batches[5:]:
        second.step(batch, 1e-3)
    for one, two in zip([*whole.weights, *whole.average], [*second.weights, *second.average], strict=True):
        torch.testing.assert_close(one, two)
    assert not torch.equal(whole.weights[0], whole.average[0])


def test_a_run_that_was_stopped_goes_on_and_writes_the_checkpoint(params: dict, directory: Path) -> None:
    (directory / "training.jsonl").write_text("")
    plans = Plans(directory, seed=0, tokens=200, workers=1)
    audio = Pool(directory, 0.1, "cpu")
    assert audio.take_in()
    try:
        trainer = train.Trainer(params, 0, "cpu")
        what = {"pool": audio, "plans": plans, "out": directory}
        assert not train.train(trainer, **what, minutes=60, until=0.0)  # no time: not a step
        assert trainer.steps == 0
        trainer.elapsed_s = 3599.999
        assert train.train(trainer, **what, minutes=60, until=float("inf"))
    finally:
        plans.close()
    again = train.Trainer(params, 0, "cpu")
    again.resume(directory / "state.pt")
    assert again.steps == trainer.steps >= 1
    (directory / "params.json").write_text(json.dumps(params))
    for p, average in zip(model.load(directory).parameters(), trainer.average, strict=True):
        torch.testing.assert_close(p, average.to(torch.bfloat16).float())


def test_the_log_drops_what_was_after_the_state(tmp_path: Path, params: dict) -> None:
    path = tmp_path / "training.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (100, 200, 300)))
    log, trainer = train.Log(path, 250), train.Trainer(params, 0, "cpu")
    for trainer.steps in range(251, 301):
        log.add(trainer, torch.tensor(0.5), 1e-3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [100, 200, 300]
    assert rows[-1]["loss"] == 0.5
    train.Log(path, 0)
    assert path.read_text() == ""


def test_learning_rate() -> None:
    assert train.schedule(0, 0) == pytest.approx(1 / train.WARMUP)
    assert train.schedule(0.5, 10_000) == pytest.approx(0.505)
    assert train.schedule(1.0, 10_000) == pytest.approx(0.01)
