"""The front end: padding, and the log-mel spectrogram of transformers and mistral-common."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mistral_layout.audio import (
    DELAY_TOKENS,
    LEFT_PAD_TOKENS,
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    SPECTROGRAM,
    n_tokens,
)

MEL_BINS, HOP, N_FFT = SPECTROGRAM["num_mel_bins"], SPECTROGRAM["hop_length"], SPECTROGRAM["window_size"]
LOG_MEL_MAX = 1.5  # log10; the floor is 8 below
LOG_MEL_FLOOR = (LOG_MEL_MAX - 8 + 4) / 4  # in the output of log_mel


def pad_audio(audio: np.ndarray, delay: int = DELAY_TOKENS) -> np.ndarray:
    """float [n] -> float32 [n_tokens(n, delay) * 1280], padded as in mistral-common's offline streaming mode."""
    out = np.zeros(n_tokens(len(audio), delay) * SAMPLES_PER_TOKEN, np.float32)
    out[LEFT_PAD_TOKENS * SAMPLES_PER_TOKEN :][: len(audio)] = audio
    return out


@lru_cache
def mel_filters() -> Tensor:
    """[201, 128] triangular filters on Slaney's mel scale, area-normalised (the default of librosa.filters.mel)."""

    def to_mel(f: np.ndarray) -> np.ndarray:
        return np.where(f < 1000, f * 3 / 200, 15 + np.log(np.maximum(f, 1) / 1000) * 27 / np.log(6.4))

    def to_hz(m: np.ndarray) -> np.ndarray:
        return np.where(m < 15, m * 200 / 3, 1000 * np.exp((m - 15) * np.log(6.4) / 27))

    edges = to_hz(np.linspace(to_mel(np.array(0.0)), to_mel(np.array(8000.0)), MEL_BINS + 2))
    freqs = np.linspace(0, SAMPLE_RATE / 2, N_FFT // 2 + 1)
    slopes = edges[None, :] - freqs[:, None]
    rise = -slopes[:, :-2] / np.diff(edges)[:-1]
    fall = slopes[:, 2:] / np.diff(edges)[1:]
    filters = np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))
    return torch.from_numpy(filters).float()


def warped_filters(warp: float) -> Tensor:
    """Mel filters [201, 128] for a spectrum whose frequencies are multiplied by `warp`.

    A voice then has a shorter (above 1) or longer vocal tract at the same speed (Jaitly and Hinton 2013).
    """
    n = N_FFT // 2 + 1
    source = np.arange(n) / warp
    below, part = np.floor(source).astype(int), source % 1
    spread = np.zeros((n, n), np.float32)
    for bins, share in ((below, 1 - part), (below + 1, part)):
        inside = bins < n
        spread[bins[inside], np.flatnonzero(inside)] += share[inside]
    return torch.from_numpy(spread) @ mel_filters()


def log_mel(audio: Tensor, filters: Tensor | None = None) -> Tensor:
    """float32 [..., n] -> [..., 128, n / 160], about -0.6 (floor) to 1.4. `filters`: [..., 201, 128]."""
    filters = mel_filters().to(audio.device) if filters is None else filters
    window = torch.hann_window(N_FFT, device=audio.device)
    power = torch.stft(audio, N_FFT, HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    mel = (filters.mT @ power).clamp_min(1e-10).log10()
    return (mel.clamp_min(LOG_MEL_MAX - 8) + 4) / 4
