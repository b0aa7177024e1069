"""Attention against rings of keys and values: the same as windowed attention over whole sequences."""

import pytest
import torch
import torch.nn.functional as F

from voxtral_serve.engine.ring_attention import gathered_attention, ring_attention

HEADS, HEAD_DIM, SLOTS = 3, 8, 5


def windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """[frames, heads, head_dim] each of one whole sequence -> the same; a frame sees itself and window - 1 before."""
    frames = torch.arange(len(q))
    seen = (frames <= frames[:, None]) & (frames > frames[:, None] - window)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out.transpose(0, 1)


@pytest.mark.parametrize("attention", [gathered_attention, ring_attention])
@pytest.mark.parametrize(
    ("window", "ring", "new"),
    [
        (1, 1, 1),
        (4, 4, 1),
        (4, 7, 4),
        (6, 16, 3),  # a ring that is longer than it has to be
        (9, 12, 4),
        (40, 44, 4),  # a window that is never full
    ],
)
def test_it_is_windowed_attention(attention: object, window: int, ring: int, new: int) -> None:
    """Sessions of different ages, in slots that held others before."""
    torch.manual_seed(window)
    keys, values = (torch.full((SLOTS, HEADS, ring, HEAD_DIM), 1e3) for _ in range(2))
    slots, starts = torch.tensor([4, 0, 2]), [0, 5, 17]
    frames = 30
    sequences = [tuple(torch.randn(frames, HEADS, HEAD_DIM) for _ in range(3)) for _ in starts]
    expected = [windowed(q, k, v, window) for q, k, v in sequences]

    def hold(slot: int, k: torch.Tensor, v: torch.Tensor, frame: int) -> None:
        keys[slot, :, frame % ring], values[slot, :, frame % ring] = k[frame], v[frame]

    for slot, (_, k, v), start in zip(slots.tolist(), sequences, starts, strict=True):
        for frame in range(start):
            hold(slot, k, v, frame)
    for turn in range((frames - max(starts)) // new):
        first = torch.tensor(starts) + turn * new
        for slot, (_, k, v), begin in zip(slots.tolist(), sequences, first.tolist(), strict=True):
            for frame in range(begin, begin + new):
                hold(slot, k, v, frame)
        q = torch.stack([q[begin : begin + new] for (q, _, _), begin in zip(sequences, first.tolist(), strict=True)])
        got = attention(q, keys, values, slots, first, window)  # type: ignore[operator]
        whole = torch.stack([x[begin : begin + new] for x, begin in zip(expected, first.tolist(), strict=True)])
        torch.testing.assert_close(got, whole)
