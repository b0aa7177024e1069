"""The network of the drafter, and its file: what is written is read, and nothing else is."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from voxtral_serve.engine.draft_network import FORMAT, Head, HeadError, HeadNetwork, chirp, read_facts

SHAPE = {"dim": 8, "width": 16, "blocks": 2, "kernel": 5}
TOKENS = torch.tensor([3, 32, 33, 99])


@pytest.fixture
def head() -> Head:
    torch.manual_seed(0)
    network = HeadNetwork(**SHAPE, tokens=len(TOKENS))
    return Head(network, TOKENS, 100, 6, "ab" * 32, 39, [0.9, 0.8], 1.5, torch.randn(5, 8), SHAPE)


@torch.no_grad()
def test_rows_of_other_clips_and_padding_have_no_effect(head: Head) -> None:
    rows, embeddings = torch.randn(2, 40, 8), torch.randn(4, 8)
    rows[0, 25:] = 1e3
    together = head.network(rows, torch.tensor([25, 40]), embeddings)
    assert torch.allclose(together[0, :25], head.network(rows[:1, :25], torch.tensor([25]), embeddings)[0], atol=1e-5)
    assert torch.allclose(together[1], head.network(rows[1:], torch.tensor([40]), embeddings)[0], atol=1e-5)


@torch.no_grad()
def test_a_guess_depends_on_rows_on_both_sides(head: Head) -> None:
    rows = torch.randn(1, 40, 8)
    changed = rows.clone()
    changed[0, 20] += torch.randn(8)
    outputs = [head.network(each, torch.tensor([40]), torch.eye(8)[:4]) for each in (rows, changed)]
    differs = (outputs[0] != outputs[1]).any(-1)[0].nonzero().flatten()
    assert (int(differs.min()), int(differs.max())) == (20 - head.network.reach, 20 + head.network.reach)


def test_a_file_is_what_was_written(head: Head, tmp_path: Path) -> None:
    path = tmp_path / "draft" / "head.safetensors"
    head.write(path)
    read = Head.read(path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask  # a server of another user may read it
    for name in ("vocabulary", "delay", "tokenizer", "prompt", "survival", "hours", "shape"):
        assert getattr(read, name) == getattr(head, name) == read_facts(path)[name]
    assert torch.equal(read.tokens, TOKENS)
    assert torch.allclose(read.chirp, head.chirp, rtol=1e-2)
    rows, embeddings = torch.randn(1, 30, 8), torch.randn(4, 8)
    with torch.no_grad():
        outputs = [each.network(rows, torch.tensor([30]), embeddings) for each in (head, read)]
    assert torch.allclose(*outputs, atol=1e-2)


def changed(path: Path, out: Path, facts: dict[str, Any] | str, tensors: dict[str, torch.Tensor | None]) -> None:
    """A drafter's file with other facts and tensors; None removes one."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        held = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
    if isinstance(facts, dict):
        known = json.loads(metadata["facts"])
        known["shape"] |= facts.pop("shape", {})
        facts = json.dumps({name: value for name, value in (known | facts).items() if value != "absent"})
    kept = {name: value for name, value in held.items() if value is not None}
    out.write_bytes(save(kept, {"format": FORMAT, "facts": facts}))


@pytest.mark.parametrize(
    ("facts", "tensors", "words"),
    [
        ("{", {}, "JSONDecodeError"),
        ("[]", {}, "TypeError"),
        ({"delay": "absent"}, {}, "KeyError: 'delay'"),
        ({"delay": "6"}, {}, "delay is '6'"),
        ({"delay": True}, {}, "delay is True"),
        ({"prompt": 0}, {}, "prompt is 0"),
        ({"hours": None}, {}, "hours None"),
        ({"tokenizer": 5}, {}, "tokenizer is 5"),
        ({"survival": "0.5"}, {}, "survival is '0.5'"),
        ({"survival": [2.0]}, {}, r"survival is \[2.0\]"),
        ({"survival": [float("nan")]}, {}, r"survival is \[nan\]"),
        ({"vocabulary": 50}, {}, "not ascending ids below its vocabulary of 50"),
        ({"shape": {"blocks": 10**9}}, {}, "blocks is 1000000000"),
        ({"shape": {"width": 10**9}}, {}, "width is 1000000000"),
        ({"shape": {"width": 32}}, {}, "size mismatch"),
        ({"shape": {"blocks": 3}}, {}, "Missing key"),
        ({"shape": {"blocks": 1}}, {}, "Unexpected key"),
        ({"shape": {"kernel": 4}}, {}, "kernel is 4, not odd"),
        ({}, {"tokens": None}, "KeyError: 'tokens'"),
        ({}, {"tokens": torch.tensor([3, 3, 33, 99])}, "not ascending"),
        ({}, {"tokens": torch.tensor([-1, 3, 33, 99])}, "not ascending"),
        ({}, {"tokens": torch.zeros(0)}, "size mismatch"),
        ({}, {"tokens": torch.tensor([[3, 32, 33, 99]])}, "not ascending"),
        ({}, {"chirp": torch.zeros(5, 9)}, r"chirp has the shape \(5, 9\), not \[rows, 8\]"),
        ({}, {"chirp": torch.full((5, 8), float("inf"))}, "not finite"),
        ({}, {"network.bias": torch.full((4,), float("nan"))}, "not finite"),
        ({}, {"network.bias": None}, "Missing key"),
    ],
)
def test_a_file_that_is_refused(
    head: Head, tmp_path: Path, facts: dict[str, Any] | str, tensors: dict[str, torch.Tensor | None], words: str
) -> None:
    head.write(tmp_path / "good")
    changed(tmp_path / "good", tmp_path / "bad", facts, tensors)
    with pytest.raises(HeadError, match=f"bad cannot be read as a drafter .*{words}.*Train it again"):
        Head.read(tmp_path / "bad")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, 1000, -1])
def test_a_truncated_file(head: Head, tmp_path: Path, size: int) -> None:
    path = tmp_path / "head"
    head.write(path)
    path.write_bytes(path.read_bytes()[:size])
    for read in (Head.read, read_facts):
        with pytest.raises(HeadError, match="head cannot be read as a drafter"):
            read(path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "head"
    with pytest.raises(HeadError, match="No such file"):
        Head.read(path)
    path.write_bytes(save({"a": torch.zeros(1)}))
    with pytest.raises(HeadError, match="has format None: expected 'voxtral-serve draft 1'"):
        Head.read(path)
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(HeadError, match="cannot be read as a drafter"):
        Head.read(path)


def test_the_chirp_is_the_same_on_every_machine() -> None:
    samples = chirp(16000)
    assert samples.dtype == np.float32 and len(samples) == 32000 and np.abs(samples).max() <= 0.5001
    assert np.array_equal(samples * 32768, np.rint(samples * 32768))  # a WAV file of 16 bits has exactly these
