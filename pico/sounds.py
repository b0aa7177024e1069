"""Audio augmentation (rooms, microphones, noise, loudness), and sounds without speech.

All audio is 16 kHz mono float32. All results are determined by the `numpy.random.Generator` argument.
"""

import numpy as np

SAMPLE_RATE = 16_000  # Hz

NOT_SPEECH = ("silence", "faint", "white", "pink", "brown", "hum", "tone", "sweep", "clicks", "music", "murmur")
LOUDNESS_DBFS = (-40.0, -3.0)  # peak
_NOISE_SLOPE = {"white": 0.0, "pink": 0.5, "brown": 1.0}  # amplitude falls as frequency ** -slope


def fast_size(n: int) -> int:
    """The smallest product of 2s, 3s and 5s that is at least n."""
    odd = (3**a * 5**b for a in range(13) for b in range(9))
    return min(p << max(0, (-(-n // p) - 1).bit_length()) for p in odd)


def augment(audio: np.ndarray, rng: np.random.Generator, strength: float = 1.0) -> np.ndarray:
    """Apply a room, a microphone, noise, clipping and loudness, each at random: float32 [n], 16 kHz -> the same.

    Word times do not change: the room adds only later copies, and the filter is zero-phase. `strength` (0 to 1.5)
    multiplies the probabilities and the intensities. With 0, and for silence, the result is a copy. Peak <= 1.
    """
    n, y = len(audio), np.array(audio, np.float32)
    if strength <= 0 or not y.any():
        return y
    impulse = _room(rng, strength) if rng.random() < 0.5 * strength else np.ones(1, np.float32)
    filtered = rng.random() < 0.6 * strength
    if filtered or len(impulse) > 1:
        size = fast_size(n + len(impulse) + 1024)
        spectrum = np.fft.rfft(y, size) * np.fft.rfft(impulse, size)
        if filtered:
            spectrum *= _microphone(rng, len(spectrum), strength)
        y = np.fft.irfft(spectrum, size)[:n].astype(np.float32)
    if rng.random() < 0.7 * strength:
        snr_db = rng.uniform(40 - 30 * min(strength, 1.3), 40)
        noise = _noise(rng, n, str(rng.choice(["white", "pink", "brown", "hum"])))
        y += noise * (speech_rms(y) * 10 ** (-snr_db / 20))
    if rng.random() < 0.1 * strength:
        y = np.tanh(y * (rng.uniform(1, 1 + 2 * strength) / np.abs(y).max()))
    if rng.random() < strength:
        return to_peak(y, rng.uniform(*LOUDNESS_DBFS))
    return y / max(1.0, float(np.abs(y).max()))


def _room(rng: np.random.Generator, strength: float) -> np.ndarray:
    """Impulse response, float32 [rt60 * 16000]: direct sound (1, at 0), six early echoes, a decaying tail."""
    rt60 = rng.uniform(0.1, 0.5)  # s
    t = np.arange(int(rt60 * SAMPLE_RATE)) / SAMPLE_RATE
    tail = rng.standard_normal(len(t)) * (t > 0.005)
    early = rng.integers(16, 640, 6)  # 1-40 ms
    tail[early] += rng.uniform(4, 12, 6) * rng.choice([-1, 1], 6)
    tail *= np.exp(-6.91 * t / rt60)
    direct_to_reverb_db = rng.uniform(18 - 15 * strength, 18)
    tail *= 10 ** (-direct_to_reverb_db / 20) / np.linalg.norm(tail)
    tail[0] = 1
    return tail.astype(np.float32)


def _microphone(rng: np.random.Generator, bins: int, strength: float) -> np.ndarray:
    """Gain, float32 [bins] from 0 to 8 kHz: a tilt, three peaks, sometimes a band limit, as of a telephone."""
    octaves = np.linspace(-5, 3, 65)  # around 1 kHz
    db = rng.uniform(-2, 2) * strength * octaves
    for centre, height in zip(rng.uniform(-3, 3, 3), rng.uniform(-5, 5, 3) * strength, strict=True):
        db += height * np.exp(-(((octaves - centre) / 0.7) ** 2))
    kind = rng.random()
    low, high, slope = (300, 3400, 48) if kind < 0.2 else (rng.uniform(50, 150), rng.uniform(4000, 8000), 24)
    if kind < 0.6:
        below, above = np.log2(low / 1000) - octaves, octaves - np.log2(high / 1000)
        db -= slope * np.maximum(0, np.maximum(below, above))
    hertz = np.linspace(0, SAMPLE_RATE / 2, bins)
    return np.interp(hertz, 1000 * 2.0**octaves, 10 ** (np.maximum(db, -60) / 20)).astype(np.float32)


def _noise(rng: np.random.Generator, n: int, kind: str) -> np.ndarray:
    """float32 [n] of RMS 1: white, pink or brown noise (flat below 20 Hz), or mains hum with overtones."""
    if kind == "hum":
        phase = (2 * np.pi * rng.choice([50, 60]) / SAMPLE_RATE) * np.arange(n, dtype=np.float32)
        y = sum(rng.uniform(0.2, 1) / k * np.sin(k * phase + rng.uniform(0, 6.3)) for k in range(1, 7))
    elif kind == "white":
        y = rng.standard_normal(n, np.float32)
    else:
        size = fast_size(n)
        spectrum = np.fft.rfft(rng.standard_normal(size, np.float32))
        hertz = np.maximum(np.arange(len(spectrum), dtype=np.float32) * (SAMPLE_RATE / size), 20)
        y = np.fft.irfft(spectrum * hertz ** -_NOISE_SLOPE[kind], size)[:n]
    return (y / np.sqrt(np.mean(np.square(y)))).astype(np.float32)


def speech_rms(x: np.ndarray) -> float:
    """RMS of the 20 ms frames within 30 dB of the loudest one, which excludes pauses."""
    frames = x[: len(x) // 320 * 320].reshape(-1, 320) if len(x) >= 320 else x[None]
    power = np.mean(np.square(frames), axis=1)
    return float(np.sqrt(power[power >= 1e-3 * power.max()].mean()))


def to_peak(y: np.ndarray, dbfs: float) -> np.ndarray:
    return (y * (10 ** (dbfs / 20) / np.abs(y).max())).astype(np.float32)


def not_speech(rng: np.random.Generator, seconds: float, kind: str | None = None) -> np.ndarray:
    """Sound without words, float32 [seconds * 16000]. `kind` is one of NOT_SPEECH, by default a random one.

    The peak is -40 to -3 dBFS. "silence" is zeros, "faint" is noise at -85 to -50 dBFS. Raises ValueError for another
    kind.
    """
    n = round(seconds * SAMPLE_RATE)
    kind = kind or str(rng.choice(NOT_SPEECH))
    if kind not in NOT_SPEECH:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(NOT_SPEECH)}")
    if n <= 0 or kind == "silence":
        return np.zeros(max(n, 0), np.float32)
    t = np.arange(n) / SAMPLE_RATE
    if kind == "faint":
        return to_peak(_noise(rng, n, str(rng.choice(list(_NOISE_SLOPE)))), rng.uniform(-85, -50))
    if kind == "tone":
        hertz = 440.0 if rng.random() < 0.3 else 2 ** rng.uniform(6.3, 12)  # 80-4000 Hz
        y = np.sin(2 * np.pi * hertz * t + rng.uniform(0.1, 3))
    elif kind == "sweep":
        first, last = 2 ** rng.uniform(6.3, 12.6, 2)  # 80-6200 Hz
        y = np.sin(2 * np.pi * (first + (last - first) / 2 * t / seconds) * t + 0.1)
    elif kind == "clicks":
        impulses = np.zeros(n)
        at = rng.integers(0, n, max(1, round(seconds * rng.uniform(0.5, 8))))
        impulses[at] = rng.uniform(0.3, 1, len(at)) * rng.choice([-1, 1], len(at))
        decay = rng.standard_normal(64) * np.exp(-np.arange(64) / rng.uniform(2, 20))  # 4 ms
        decay[0] = 2
        y = np.convolve(impulses, decay)[:n]
    elif kind == "music":
        y = _music(rng, n)
    elif kind == "murmur":
        y = _murmur(rng, n)
    else:
        y = _noise(rng, n, kind)
    return to_peak(y, rng.uniform(*LOUDNESS_DBFS))


def _music(rng: np.random.Generator, n: int) -> np.ndarray:
    """Music, [n]: chords of one to three notes of a scale with decaying overtones, sometimes with drums."""
    y = np.zeros(n + SAMPLE_RATE)
    beat_s, root_hz = rng.uniform(0.15, 0.6), 110 * 2 ** rng.uniform(0, 1.5)
    overtones = rng.uniform(0.1, 1, rng.integers(1, 7))
    scale = np.array([0, 2, 4, 5, 7, 9, 11, 12, 14, 16])
    drums = rng.random() < 0.4
    for start in np.arange(0, n / SAMPLE_RATE, beat_s):
        t = np.arange(int(min(1.0, beat_s * rng.uniform(0.8, 2)) * SAMPLE_RATE)) / SAMPLE_RATE
        note = np.zeros(len(t))
        for semitones in rng.choice(scale, rng.integers(1, 4)):
            hertz = root_hz * 2 ** (semitones / 12)
            for k, strength in enumerate(overtones, 1):
                if k * hertz < 7000:
                    note += strength * np.sin(2 * np.pi * k * hertz * t)
        note *= np.minimum(1, t / 0.01) * np.exp(-t * rng.uniform(1, 8))
        if drums:
            note += rng.standard_normal(len(t)) * np.exp(-t * 60)
        at = int(start * SAMPLE_RATE)
        y[at : at + len(t)] += note[: len(y) - at]
    return y[:n]


def _murmur(rng: np.random.Generator, n: int) -> np.ndarray:
    """Distant, unintelligible speech, [n]: noise with the long-term spectrum and the syllables of speech."""
    size = fast_size(n)
    spectrum = np.fft.rfft(rng.standard_normal(size, np.float32))
    hertz = np.arange(len(spectrum)) * (SAMPLE_RATE / size)
    # Byrne et al. 1994: about flat from 100 to 500 Hz, then 9 dB less for each octave
    spectrum *= np.minimum(1, hertz / 100) * np.maximum(hertz / 500, 1) ** -1.5
    syllables = np.repeat(rng.uniform(0, 1, n // 2000 + 2) ** 2, 2000)[:n]  # 125 ms each
    envelope = np.convolve(syllables, np.hanning(1600) / 800, "same")[:n]
    return np.fft.irfft(spectrum, size)[:n] * (0.05 + envelope)
