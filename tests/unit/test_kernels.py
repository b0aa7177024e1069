"""bench gpu kernels without a GPU: which matrices it times, and what it says."""

from pathlib import Path

import pytest
import torch

from bench.gpu import kernels
from bench.gpu.checkpoint import PARAMS


def test_the_matrices_are_those_of_a_layer() -> None:
    products, layers = kernels.matrices(PARAMS)
    assert products == [(3072, 6144), (4096, 3072), (3072, 18432), (9216, 3072)]
    assert layers == 26
    assert kernels.matrices(kernels.ENCODER) == (
        [(1280, 6144), (2048, 1280), (1280, 10240), (5120, 1280)],
        32,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--out", str(tmp_path / "kernels.json")]) == 2
    assert capsys.readouterr().err == "error: PyTorch finds no GPU: expected one with CUDA\n"
