"""Where packed clips are in the buffers of the encoder's CUDA graphs."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from voxtral_serve.engine.encoder import CLIPS, WINDOWS_BEFORE, PackedClips

HOP, WINDOW, LEFT = 160, 400, 124
FRAMES = 100


@pytest.mark.parametrize("lengths", [[1], [FRAMES], [7, 1, 30], [12] * CLIPS, [4, 40, 4, 4, 4, 4, 4, 4]])
def test_places_of_frames(lengths: list[int]) -> None:
    """Behind the left padding, after other clips that were longer."""
    encoder: Any = SimpleNamespace(
        config=SimpleNamespace(hop_length=HOP, window_size=WINDOW),
        mel_filters=torch.zeros(0),
        samples=2 * HOP,
        reflected=lambda audio: torch.nn.functional.pad(audio, (WINDOW // 2, WINDOW // 2)),
    )
    clips = PackedClips(encoder, SimpleNamespace(frames=LEFT), torch.clone, FRAMES)  # type: ignore[arg-type]
    for each in ([FRAMES // CLIPS] * CLIPS, lengths):
        assert clips.put([torch.rand((LEFT + n) * 2 * HOP) for n in each]) == each
    clips.plan(FRAMES)
    total = sum(lengths)
    begins = [0, *accumulate(2 * n + clips.more for n in lengths)]
    assert clips.places[:total].tolist() == [
        at + 2 * i for at, n in zip(begins, lengths, strict=False) for i in range(n)
    ]
    assert clips.positions[:total].tolist() == [LEFT + i for n in lengths for i in range(n)]
    # Those of no clip, which a graph computes too: within the spectrogram, and the positions of a clip of FRAMES
    most = clips._windows(FRAMES) - WINDOWS_BEFORE - 2
    assert clips.places.min() >= 0 and clips.places.max() <= most
    assert clips.positions.min() >= LEFT and clips.positions.max() < LEFT + FRAMES
