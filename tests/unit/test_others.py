"""The tiny checkpoints of the other two models have the tensors of the real ones, and are the same each time."""

import copy
import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import WhisperConfig, WhisperForConditionalGeneration

from pico import others

# Of Voxtral-Mini-3B-2507
SIZES = {"dim": 3072, "n_layers": 30, "head_dim": 128, "hidden_dim": 8192, "n_heads": 32, "n_kv_heads": 8}
ENCODER_SIZES = {"dim": 1280, "n_layers": 32, "hidden_dim": 5120, "n_heads": 20}


def test_tensors_of_the_published_voxtral_3b() -> None:
    """761 of them, and the 8.7 GiB in bfloat16 that vLLM is reported to load."""
    params = copy.deepcopy(others.PARAMS) | SIZES | {"vocab_size": 131072}
    params["multimodal"]["whisper_model_args"]["encoder_args"] |= ENCODER_SIZES
    shapes = others.voxtral_3b_shapes(params)
    assert len(shapes) == 761
    assert round(2 * sum(map(math.prod, shapes.values())) / 2**30, 1) == 8.7


def test_tensors_of_whisper_are_those_of_transformers() -> None:
    """But for the output, which is the embedding and is not stored twice."""
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(WhisperConfig(**others.WHISPER))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    del shapes["proj_out.weight"]
    assert others.whisper_shapes(others.WHISPER) == shapes


@pytest.mark.parametrize("write", [others.write_voxtral_3b, others.write_whisper])
def test_the_same_files_each_time(tmp_path: Path, write: Callable[[Path], None]) -> None:
    hashes = []
    for number in range(2):
        directory = tmp_path / str(number)
        write(directory)
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()})
        assert sum(path.stat().st_size for path in directory.iterdir()) < 6 << 20
    assert hashes[0] == hashes[1]


def test_what_may_come_out_is_text(tmp_path: Path) -> None:
    """The rows of the output that are larger than others are those of letters."""
    others.write_whisper(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        norms = file.get_tensor("model.decoder.embed_tokens.weight").norm(dim=1)
    loud = sorted(others.VOCABULARY[index] for index in norms.topk(52).indices)
    assert "".join(loud) == "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
