"""Where packed clips are in the buffers of the encoder's CUDA graphs: as the host counts it, and as a GPU does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from voxtral_serve.engine.encoder import CLIPS, WINDOWS_BEFORE, PackedClips
from voxtral_serve.engine.experiments import VARIABLE

HOP, WINDOW, LEFT = 160, 400, 124
FRAMES = 100


def packed(monkeypatch: pytest.MonkeyPatch, experiment: str, lengths: list[int]) -> Any:
    """Clips of so many frames behind the left padding, after others that were longer."""
    monkeypatch.setenv(VARIABLE, experiment)
    encoder: Any = SimpleNamespace(
        config=SimpleNamespace(hop_length=HOP, window_size=WINDOW),
        mel_filters=torch.zeros(0),
        samples=2 * HOP,
        reflected=lambda audio: torch.nn.functional.pad(audio, (WINDOW // 2, WINDOW // 2)),
    )
    clips = PackedClips(encoder, SimpleNamespace(frames=LEFT), torch.clone, FRAMES)  # type: ignore[arg-type]
    for each in ([FRAMES // CLIPS] * CLIPS, lengths):
        assert clips.put([torch.rand((LEFT + n) * 2 * HOP) for n in each]) == each
    return clips


@pytest.mark.parametrize("lengths", [[1], [FRAMES], [7, 1, 30], [12] * CLIPS, [4, 40, 4, 4, 4, 4, 4, 4]])
def test_places_counted_on_the_gpu_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    host = packed(monkeypatch, "", lengths)
    gpu = packed(monkeypatch, "plan-on-gpu", lengths)
    total = sum(lengths)
    assert torch.equal(host.starts, gpu.starts)
    assert not gpu.places.any()
    gpu.plan(FRAMES)
    assert torch.equal(host.places[:total], gpu.places[:total])
    assert torch.equal(host.positions[:total], gpu.positions[:total])
    # Those of no clip, which a graph computes too: within the spectrogram, and the positions of a clip of FRAMES
    most = host._windows(FRAMES) - WINDOWS_BEFORE - 2
    assert gpu.places.min() >= 0 and gpu.places.max() <= most
    assert gpu.positions.min() >= LEFT and gpu.positions.max() < LEFT + FRAMES
