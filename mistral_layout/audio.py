"""Numbers of the model's audio: rates, spectrogram, and the silence that mistral-common pads a clip with.

Sources: params.json and tekken.json of Voxtral-Mini-4B-Realtime-2602; the padding is that of mistral-common's offline
streaming mode (mistral_common/tokens/tokenizers/audio.py). "Tokens" are positions of the text, 80 ms each.
"""

import math

SAMPLE_RATE = 16000  # Hz
FRAME_RATE = 12.5  # tokens a second
SAMPLES_PER_TOKEN = 1280  # 80 ms
SPECTROGRAM = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}  # bins, samples, samples

LEFT_PAD_TOKENS = 32
DELAY_TOKENS = 6
DELAY_MS = 480
# mistral-common pads the right by the delay, one for BOS, and ten for the longest word
RIGHT_PAD_TOKENS = DELAY_TOKENS + 1 + 10
PROMPT_TOKENS = 1 + LEFT_PAD_TOKENS + DELAY_TOKENS  # BOS, the left padding and the delay


def n_tokens(n_samples: int) -> int:
    """Audio rows, and so the most text tokens, of a clip of `n_samples` at 16 kHz, padding included."""
    return LEFT_PAD_TOKENS + math.ceil(n_samples / SAMPLES_PER_TOKEN) + RIGHT_PAD_TOKENS
