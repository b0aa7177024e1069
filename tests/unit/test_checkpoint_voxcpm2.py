"""Checkpoints of VoxCPM2: what is complete and what is missing, by its name. tests/speech has the package voxcpm."""

import json
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from places import ROOT

from bench.gpu.speech_checkpoint import write_weights
from voxtral_serve.check import check_all, voxcpm2
from voxtral_serve.checkpoint import CheckpointError, read_voxcpm2

FILES = ("model.safetensors", "audiovae.pth", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """All files of one, with one tensor."""
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "voxcpm2"}))
    write_weights(tmp_path / "model.safetensors", {"base_lm.norm.weight": (64,)})
    with zipfile.ZipFile(tmp_path / "audiovae.pth", "w") as file:
        file.writestr("data.pkl", b"")
    for name in FILES[2:]:
        (tmp_path / name).write_text("{}")
    return tmp_path


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_voxcpm2(directory)
    return str(refused.value)


def test_whole(directory: Path) -> None:
    held = read_voxcpm2(directory)
    assert held is not None
    assert held.shapes == {"base_lm.norm.weight": (64,)}
    assert held.weight_bytes == sum((directory / name).stat().st_size for name in FILES[:2])


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(directory: Path, name: str) -> None:
    (directory / name).unlink()
    assert refusal(directory) == f"{directory / name} is missing, but config.json is that of VoxCPM2: download it"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("audiovae.pth", "is not a complete file of torch.save"),
        ("audiovae.safetensors", "is not a complete safetensors file"),
        ("model.safetensors", "is not a complete safetensors file"),
    ],
)
def test_a_file_that_is_cut_off(directory: Path, name: str, message: str) -> None:
    (directory / name).write_bytes(b"PK\x03\x04")
    assert f"{directory / name} {message}" in refusal(directory)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_pointer_of_git_lfs(directory: Path, name: str) -> None:
    (directory / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert f"{directory / name} is a Git LFS pointer" in refusal(directory)


def test_other_models_are_left_to_others(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"architecture": "voxcpm"}))
    assert read_voxcpm2(directory) is None
    (directory / "config.json").unlink()
    assert read_voxcpm2(directory) is None


def test_check_without_the_package_and_without_omni(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voxcpm2, "version", lambda library: (_ for _ in ()).throw(PackageNotFoundError))
    first, second = check_all(None, directory).problems
    assert first.startswith("voxcpm is not installed, and vLLM-Omni needs it for VoxCPM2: docs/pages/")
    assert second == "VoxCPM2 is served by vLLM-Omni: add --omni to the command line"
    assert (ROOT / "docs/pages/speech-synthesis.md").read_text().count("voxcpm==2.0.3")
