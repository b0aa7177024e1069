"""What the decoder's layers make of a delay, as tables for all delays: the values of pico's reference, row by row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import PICO
from torch import nn
from vllm.model_executor.models.voxtral_realtime import TimeEmbedding

from pico import model
from voxtral_serve.engine.encode_once import ByDelay, Known, VoxtralRealtimeEncodeOnce
from voxtral_serve.engine.session import DELAYS

RELATIVE = 1e-6
CPU = torch.device("cpu")


def settled(net: model.Voxtral, live: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Replace the reference's layers for the delay as the served model does its own. The delay's embedding."""
    served: Any = SimpleNamespace(
        n_delay_tokens=model.DELAY_TOKENS,
        has_delays=live,
        whisper_encoder=SimpleNamespace(dtype=dtype),
        time_embedding=TimeEmbedding(net.config.lm.dim),
        language_model=SimpleNamespace(model=net),
    )
    with torch.no_grad():
        return VoxtralRealtimeEncodeOnce.settle_delay(served, CPU)


class Whole(nn.Module):
    """The reference passes delays as numbers of its own type."""

    def forward(self, delays: torch.Tensor) -> torch.Tensor:
        return delays.long()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_is_what_the_layer_makes_of_its_delay(dtype: torch.dtype) -> None:
    net, embedded = model.load(PICO).to(dtype), TimeEmbedding(256)
    own = [layer.ada_rms_norm_t_cond for layer in net.layers]
    settled(net, live=True, dtype=dtype)
    for layer, module in zip(net.layers, own, strict=True):
        assert len(layer.ada_rms_norm_t_cond.table) == 1 + DELAYS[-1]
        for delay in DELAYS:
            alone = module(embedded(torch.full((1,), delay, dtype=dtype)))
            assert torch.equal(layer.ada_rms_norm_t_cond(torch.tensor([delay])), alone)


@torch.no_grad()
def test_rows_differ_and_are_the_references() -> None:
    net, stock = model.load(PICO), model.load(PICO)
    settled(net, live=True)
    delays = torch.tensor([30, 1, 12, 1, 3, 6])
    for layer, reference in zip(net.layers, stock.layers, strict=True):
        expected = reference.ada_rms_norm_t_cond(stock.t_cond(delays))[:, 0]
        got = layer.ada_rms_norm_t_cond(delays)
        assert got.shape == (len(delays), net.config.lm.dim)
        assert (got - expected).abs().max() <= RELATIVE * expected.abs().max()
        assert torch.equal(got[1], got[3]) and not torch.allclose(got[0], got[1])


@torch.no_grad()
def test_without_live_sessions_it_is_a_constant() -> None:
    net, live = model.load(PICO), model.load(PICO)
    delay = settled(net, live=False)
    assert torch.equal(settled(live, live=True), delay)
    for layer, other in zip(net.layers, live.layers, strict=True):
        constant = layer.ada_rms_norm_t_cond
        assert isinstance(constant, Known) and isinstance(other.ada_rms_norm_t_cond, ByDelay)
        assert torch.equal(constant(delay), other.ada_rms_norm_t_cond.table[model.DELAY_TOKENS :][:1])


@torch.no_grad()
def test_a_batch_of_several_delays_has_the_logits_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = torch.tensor([6, 1, 30, 3, 12])
    torch.manual_seed(0)
    net = model.load(PICO)
    rows, tokens = torch.randn(len(delays), 20, net.config.lm.dim), torch.randint(1000, 5000, (len(delays), 20))
    alone = [net.decode(rows[i : i + 1], tokens[i : i + 1], delay=int(delay)) for i, delay in enumerate(delays)]
    settled(net, live=True)
    for layer in net.layers:
        layer.ada_rms_norm_t_cond = nn.Sequential(Whole(), layer.ada_rms_norm_t_cond)
    monkeypatch.setattr(net, "t_cond", lambda delay: delay[:, None])
    got = net.decode(rows, tokens, delay=delays)
    expected = torch.cat(alone)
    assert (got - expected).abs().max() <= RELATIVE * expected.abs().max()
    swapped = net.decode(rows, tokens, delay=delays.flip(0))
    assert (swapped - expected).abs().max() > 1e-2 * expected.abs().max()


def test_it_can_be_compiled_for_any_number_of_tokens() -> None:
    table = ByDelay(torch.randn(31, 8))
    compiled = torch.compile(
        lambda x, delays: x * (1 + table(delays)), backend="aot_eager", dynamic=True, fullgraph=True
    )
    for n in (2, 7, 64):
        x, delays = torch.randn(n, 8), torch.randint(0, 31, (n,))
        assert torch.equal(compiled(x, delays), x * (1 + table.table[delays]))
