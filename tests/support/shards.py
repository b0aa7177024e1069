"""Recordings without speech, for tests of what trains pico."""

import numpy as np

RATE = 16_000  # Hz


def shard(n_clips: int, seed: int, seconds: tuple[float, float] = (2, 12)) -> dict[str, np.ndarray]:
    """Clips of noise with a word every half second, one in ten of them without words; token ids count the words."""
    rng = np.random.default_rng(seed)
    n_samples = (rng.uniform(*seconds, n_clips) * RATE).astype(int)
    voice = np.where(np.arange(n_clips) % 10 == 9, -1, np.arange(n_clips) % 7)
    n_words = np.where(voice < 0, 0, n_samples // (RATE // 2) - 1)
    start = np.concatenate([np.arange(n) * (RATE // 2) + 1000 for n in n_words])
    n_tokens = np.tile([1, 2], n_words.sum())[: n_words.sum()]
    return {
        "audio": rng.integers(-9000, 9000, n_samples.sum()).astype(np.int16),
        "n_samples": n_samples,
        "voice": voice,
        "level": np.full(n_clips, 0.1, np.float32),
        "n_words": n_words,
        "start": start.astype(np.int32),
        "end": (start + 6000).astype(np.int32),
        "ends_sentence": np.arange(n_words.sum()) % 6 == 5,
        "n_tokens": n_tokens,
        "tokens": (1000 + np.arange(n_tokens.sum()) % 4000).astype(np.int16),
    }
