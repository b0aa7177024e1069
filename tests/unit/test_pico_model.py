"""The reference model: its front end against transformers', its layers against their definitions."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from places import PICO

from mistral_layout.audio import prompt_tokens
from pico import layers, model


@pytest.fixture(scope="module")
def net() -> model.Voxtral:
    return model.load(PICO)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, int(seconds * model.SAMPLE_RATE)).astype(np.float32)


def test_mel_filters_are_slaneys() -> None:
    from transformers.audio_utils import mel_filter_bank

    theirs = mel_filter_bank(201, 128, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(model.mel_filters().numpy(), theirs, atol=1e-7)


def test_padding_is_mistral_commons() -> None:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    encoder = MistralTokenizer.from_file(PICO / "tekken.json").instruct_tokenizer.audio_encoder
    for samples in (1, 1279, 1280, 1281, 50_000):
        audio = noise(samples / model.SAMPLE_RATE)[:samples]
        np.testing.assert_array_equal(model.pad_audio(audio), encoder.pad(audio, model.SAMPLE_RATE))
    assert encoder.encode_streaming_tokens() == [model.STREAMING_PAD] * (model.PROMPT_TOKENS - 1)


@pytest.mark.parametrize("delay", [2, 12, 30])
def test_padding_at_other_delays_is_mistral_commons(delay: int, tmp_path: Path) -> None:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    content = json.loads((PICO / "tekken.json").read_text())
    content["audio"]["transcription_delay_ms"] = 80 * delay
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    encoder = MistralTokenizer.from_file(tmp_path / "tekken.json").instruct_tokenizer.audio_encoder
    audio = noise(1)
    np.testing.assert_array_equal(model.pad_audio(audio, delay), encoder.pad(audio, model.SAMPLE_RATE))
    assert len(encoder.encode_streaming_tokens()) + 1 == prompt_tokens(delay)


def test_log_mel_of_silence_is_the_floor() -> None:
    assert model.log_mel(torch.zeros(1600)).unique().tolist() == [pytest.approx((1.5 - 8 + 4) / 4)]


@torch.no_grad()
def test_no_row_hears_the_future(net: model.Voxtral) -> None:
    """But for the window of the mel, which reaches 200 samples ahead, a row depends on its own audio and the past."""
    audio = torch.from_numpy(model.pad_audio(noise(1)))[None]
    changed = audio.clone()
    row = 38
    changed[:, row * model.SAMPLES_PER_TOKEN + 200 :] += 0.1
    rows, rows_changed = (net.embed_audio(model.log_mel(a)) for a in (audio, changed))
    torch.testing.assert_close(rows[:, :row], rows_changed[:, :row])
    assert not torch.allclose(rows[:, row], rows_changed[:, row])


@torch.no_grad()
def test_attention_window(net: model.Voxtral) -> None:
    """One layer with a window of w frames is deaf to the frame w back and hears the one w - 1 back."""
    block = dataclasses.replace(net.config.encoder, window=10)
    layer, x = net.encoder.layers[0], torch.randn(1, 40, block.dim)
    rope, mask = model.rope_table(40, block, x.device), model.causal_mask(40, 40, 10, x.device)
    for back, heard in ((9, True), (10, False)):
        changed = x.clone()
        changed[:, 30 - back] += 1
        assert torch.equal(layer(x, rope, mask)[:, 30], layer(changed, rope, mask)[:, 30]) is not heard


@torch.no_grad()
@pytest.mark.parametrize("n_heads", [4, 2])
def test_windowed_attention_is_attention_with_a_mask(n_heads: int) -> None:
    """In chunks, as long sequences have it, against the whole mask; each at several windows and with fewer KV heads."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 2048, 16, generator=generator)
    k, v = (torch.randn(2, n_heads, 2048, 16, generator=generator) for _ in range(2))
    for window in (750, 768, 16):
        windows = layers.causal_mask(2048, 2048, window, q.device)
        assert isinstance(windows, layers.Windows)
        positions = torch.arange(2048)
        back = positions[:, None] - positions
        whole = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(back >= 0) & (back < window), enable_gqa=True
        )
        torch.testing.assert_close(layers.windowed_attention(q, k, v, windows), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention runs on a GPU")
def test_flash_attention_is_windowed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients, in bfloat16."""
    device = torch.device("cuda")
    q, k, v = (torch.randn(2, 4, 2048, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    windows = layers.causal_mask(2048, 2048, 750, device)
    assert isinstance(windows, layers.Windows)
    results = []
    for flash in (True, False):
        monkeypatch.setattr(layers, "FLASH", flash)
        y = layers.windowed_attention(q, k, v, windows)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=3e-2, rtol=3e-2)


@torch.no_grad()
def test_a_long_recording_is_encoded_as_short_ones_are(net: model.Voxtral) -> None:
    """More frames than one window, in chunks and padded to them, against one mask of all frames."""
    log_mel = model.log_mel(torch.from_numpy(model.pad_audio(noise(26)))[None])
    rows = net.embed_audio(log_mel)
    n = rows.shape[1] * 4
    assert n % layers.CHUNK and n > 4 * layers.CHUNK
    back = torch.arange(n)[:, None] - torch.arange(n)
    x = torch.nn.functional.gelu(net.encoder.conv_layers[0](torch.nn.functional.pad(log_mel, (2, 0))))
    x = torch.nn.functional.gelu(net.encoder.conv_layers[1](torch.nn.functional.pad(x, (1, 0)))).transpose(1, 2)
    rope = model.rope_table(n, net.config.encoder, x.device)
    for layer in net.encoder.layers:
        x = layer(x, rope, (back >= 0) & (back < 750))
    whole = net.audio_language_projection(net.encoder.norm(x).unflatten(1, (-1, 4)).flatten(2))
    torch.testing.assert_close(rows, whole, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def test_cached_decoding_equals_one_pass(net: model.Voxtral) -> None:
    rows = net.embed_audio(model.log_mel(torch.from_numpy(model.pad_audio(noise(0.5)))[None]))
    tokens = torch.randint(0, net.config.vocab_size, rows.shape[:2], generator=torch.Generator().manual_seed(0))
    whole = net.decode(rows, tokens)
    caches = [model.Cache(rows.shape[1]) for _ in net.layers]
    steps = [net.decode(rows[:, :39], tokens[:, :39], caches)]
    steps += [net.decode(rows[:, i : i + 1], tokens[:, i : i + 1], caches) for i in range(39, rows.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_clip_says_the_same_alone_and_in_a_batch(net: model.Voxtral) -> None:
    clips = [noise(0.3), noise(2.0, 1), noise(1.1, 2)]
    assert net.transcribe(clips) == [net.transcribe([clip])[0] for clip in clips]


def test_checkpoint_survives_a_round_trip(net: model.Voxtral, tmp_path) -> None:
    (tmp_path / "params.json").write_text((PICO / "params.json").read_text())
    model.save(net, tmp_path / "consolidated.safetensors")
    assert (tmp_path / "consolidated.safetensors").read_bytes() == (PICO / "consolidated.safetensors").read_bytes()


def test_a_tensor_too_many_is_named(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "params.json").write_text((PICO / "params.json").read_text())
    save_file(
        load_file(PICO / "consolidated.safetensors") | {"odd": torch.zeros(1)}, tmp_path / "consolidated.safetensors"
    )
    with pytest.raises(ValueError, match="odd"):
        model.load(tmp_path)


def test_size_of_the_checkpoint() -> None:
    parameters = sum(p.numel() for p in model.load(PICO).parameters())
    assert 8e6 < parameters < 10e6
    assert (PICO / "consolidated.safetensors").stat().st_size < 20e6
    assert json.loads((PICO / "params.json").read_text())["vocab_size"] == 5200
