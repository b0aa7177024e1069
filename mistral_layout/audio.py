"""Numbers of the model's audio: rates, spectrogram, and the silence that mistral-common pads a clip with.

Sources: params.json and tekken.json of Voxtral-Mini-4B-Realtime-2602; the padding is that of mistral-common's offline
streaming mode (mistral_common/tokens/tokenizers/audio.py). "Tokens" are positions of the text, 80 ms each.
"""

import math

SAMPLE_RATE = 16000  # Hz
FRAME_RATE = 12.5  # tokens a second
SAMPLES_PER_TOKEN, MS_PER_TOKEN = 1280, 80
SPECTROGRAM = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}  # bins, samples, samples

LEFT_PAD_TOKENS = 32
DELAY_TOKENS = 6  # a word's text follows its end by so much, if tekken.json does not say otherwise
DELAY_MS = DELAY_TOKENS * MS_PER_TOKEN


def prompt_tokens(delay: int = DELAY_TOKENS) -> int:
    """BOS, the left padding and the delay."""
    return 1 + LEFT_PAD_TOKENS + delay


def right_pad_tokens(delay: int = DELAY_TOKENS) -> int:
    """mistral-common pads the right by the delay, one for BOS, and ten for the longest word."""
    return delay + 1 + 10


PROMPT_TOKENS = prompt_tokens()


def n_tokens(n_samples: int, delay: int = DELAY_TOKENS) -> int:
    """Audio rows, and so the most text tokens, of a clip of `n_samples` at 16 kHz, padding included."""
    return LEFT_PAD_TOKENS + math.ceil(n_samples / SAMPLES_PER_TOKEN) + right_pad_tokens(delay)
