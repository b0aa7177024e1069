"""Weights of Hugging Face's layout become Mistral's, bit for bit, and the encode-once model attends as the stock one.

That the written directory is right is shown by transformers: its own model, loaded from it, computes what pico's
reference computes from the Mistral layout.
"""

import re
from pathlib import Path

import pytest
import torch
from places import DATA, PICO
from safetensors.torch import load_file
from transformers import VoxtralRealtimeForConditionalGeneration
from transformers.models.voxtral_realtime import modeling_voxtral_realtime

from bench import dataset
from pico import evaluate, huggingface, model
from voxtral_serve.engine.encoder import BLOCK, windowed_attention
from voxtral_serve.engine.weights import to_mistral, to_pairs

Tensors = dict[str, torch.Tensor]
# The three ways in which transformers has named the LM's part of a file; that of the audio is the same in all.
LM = re.compile(r"^language_model\.(model\.)+")
NAMES = ("language_model.model.", "language_model.model.model.", "model.language_model.")
HEADS = {"text_head_dim": 64, "encoder_head_dim": 64}  # pico's


@pytest.fixture(scope="module")
def stored(hugging_face: Path) -> Tensors:
    return load_file(hugging_face / "model.safetensors")


@pytest.fixture(scope="module")
def mistral() -> Tensors:
    return load_file(PICO / "consolidated.safetensors")


def assert_identical(got: Tensors, expected: Tensors) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


# Rows of queries and keys


@pytest.mark.parametrize("head_dim", [2, 4, 32, 64])
@pytest.mark.parametrize("tail", [(), (5,)], ids=["bias", "weight"])
def test_pairs_and_halves_are_inverse(head_dim: int, tail: tuple[int, ...]) -> None:
    rows = torch.randn(3 * head_dim, *tail)
    assert torch.equal(to_pairs(huggingface.to_halves(rows, head_dim), head_dim), rows)
    assert torch.equal(huggingface.to_halves(to_pairs(rows, head_dim), head_dim), rows)


def test_each_head_keeps_its_rows() -> None:
    two_heads = torch.arange(12)
    assert to_pairs(two_heads, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_transformers_rotation_of_halves_is_mistrals_of_pairs() -> None:
    """Scores of rotated queries and keys, from the same input: by transformers' functions with the rows as they are
    stored, by pico's with the rows in pairs."""
    heads, head_dim, n, dim, theta = 3, 16, 50, 24, 1e6
    block = model.Block(dim, 1, heads, heads, head_dim, 1, n, theta, 1e-5)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, n, dim, generator=generator)
    wq, wk = torch.randn(2, heads * head_dim, dim, generator=generator)

    def rows(weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight.T).unflatten(-1, (heads, head_dim)).transpose(1, 2)

    def mistrals(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        table = model.rope_table(n, block, x.device)
        return model.rotate(q, table) @ model.rotate(k, table).transpose(2, 3)

    angles = torch.arange(n)[:, None] * theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    twice = torch.cat((angles, angles), -1)[None]
    q, k = modeling_voxtral_realtime.apply_rotary_pos_emb(rows(wq), rows(wk), twice.cos(), twice.sin())
    expected = q @ k.transpose(2, 3)
    got = mistrals(rows(to_pairs(wq, head_dim)), rows(to_pairs(wk, head_dim)))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)  # of scores with a deviation of 100
    assert not torch.allclose(mistrals(rows(wq), rows(wk)), expected, rtol=1e-4, atol=1)


# Whole files


@pytest.mark.parametrize("names", NAMES)
def test_every_naming_becomes_mistrals_file(stored: Tensors, mistral: Tensors, names: str) -> None:
    renamed = {LM.sub(names, name): tensor for name, tensor in stored.items()}
    assert f"{names}norm.weight" in renamed
    assert_identical(dict(to_mistral(renamed.items(), **HEADS, tied=True)), mistral)


def test_the_modules_own_names_become_mistrals_file(hugging_face: Path, mistral: Tensors, tmp_path: Path) -> None:
    net = VoxtralRealtimeForConditionalGeneration.from_pretrained(hugging_face, dtype=torch.bfloat16)
    net.save_pretrained(tmp_path, save_original_format=False)
    own = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.norm.weight" in own
    assert_identical(dict(to_mistral(own.items(), **HEADS, tied=True)), mistral)


def test_mistrals_file_passes_through(mistral: Tensors) -> None:
    assert_identical(dict(to_mistral(mistral.items(), **HEADS, tied=True)), mistral)


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.lm_head.weight"])
def test_a_tied_head_is_dropped_and_one_of_its_own_kept(stored: Tensors, mistral: Tensors, name: str) -> None:
    head = torch.randn(2, 3)
    with_head = stored | {name: head}
    assert_identical(dict(to_mistral(with_head.items(), **HEADS, tied=True)), mistral)
    assert_identical(
        dict(to_mistral(with_head.items(), **HEADS, tied=False)),
        mistral | {"output.weight": head},
    )


def test_each_tower_has_a_head_size_of_its_own() -> None:
    """Pico's two are equal; the published model's are 128 and 64."""
    rows = torch.arange(12)[:, None]
    stored = {
        "language_model.model.layers.0.self_attn.q_proj.weight": rows,
        "audio_tower.layers.0.self_attn.k_proj.weight": rows,
        "audio_tower.layers.0.self_attn.q_proj.bias": rows[:, 0],
        "audio_tower.layers.0.self_attn.v_proj.weight": rows,
    }
    layer = "mm_streams_embeddings.embedding_module.whisper_encoder.transformer.layers.0.attention."
    expected = {
        "layers.0.attention.wq.weight": to_pairs(rows, 12),
        f"{layer}wk.weight": to_pairs(rows, 4),
        f"{layer}wq.bias": to_pairs(rows[:, 0], 4),
        f"{layer}wv.weight": rows,
    }
    assert_identical(dict(to_mistral(stored.items(), text_head_dim=12, encoder_head_dim=4, tied=True)), expected)


# transformers' own model of the written directory


@pytest.fixture(scope="module")
def theirs(hugging_face: Path) -> VoxtralRealtimeForConditionalGeneration:
    net, report = VoxtralRealtimeForConditionalGeneration.from_pretrained(
        hugging_face, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report  # no tensor missing, unexpected or of another shape
    return net


@torch.no_grad()
def test_transformers_computes_the_reference_from_the_written_directory(
    theirs: VoxtralRealtimeForConditionalGeneration,
) -> None:
    """Audio rows of the longest clip, which at 29 s goes beyond the encoder's window of 15 s, and logits after it."""
    clip = max(dataset.load(DATA)[0], key=lambda clip: clip.duration_s)
    reference = model.load(PICO)
    mel = model.log_mel(torch.from_numpy(model.pad_audio(evaluate.read_audio(clip.path)))[None])
    rows = reference.embed_audio(mel)
    assert rows.shape[1] * model.FRAMES_PER_TOKEN > 2 * reference.config.encoder.window
    torch.testing.assert_close(theirs.get_audio_features(mel).pooler_output, rows, rtol=1e-4, atol=1e-4)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, reference.config.vocab_size, rows.shape[:2], generator=generator)
    logits = theirs(input_ids=tokens, input_features=mel, num_delay_tokens=model.DELAY_TOKENS).logits
    torch.testing.assert_close(logits, reference.decode(rows, tokens), rtol=1e-4, atol=1e-3)


# The encoder's attention, over a whole clip


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    n = q.shape[1]
    back = torch.arange(n)[:, None] - torch.arange(n)
    scores = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).masked_fill((back < 0) | (back >= window), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("window", [1, 2, 10, 750])
@pytest.mark.parametrize("n", [1, 9, 10, 11, 749, 750, 751, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 552])
def test_windowed_attention_is_masked_softmax_attention(n: int, window: int) -> None:
    q, k, v = torch.randn(3, 2, n, 16, generator=torch.Generator().manual_seed(n))
    expected = plain_attention(q, k, v, window)
    torch.testing.assert_close(windowed_attention(q, k, v, window), expected, rtol=1e-5, atol=1e-5)


def test_a_window_beyond_a_block_reaches_into_several(window: int = 2 * BLOCK + 100) -> None:
    q, k, v = torch.randn(3, 1, 3 * BLOCK + 1, 8, generator=torch.Generator().manual_seed(0))
    expected = plain_attention(q, k, v, window)
    torch.testing.assert_close(windowed_attention(q, k, v, window), expected, rtol=1e-5, atol=1e-5)
