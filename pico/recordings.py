"""Plan random recordings that resemble live speech for each batch, with the target token of each position.

A recording is a sequence of pieces: whole clips, some of their sentences, sounds without speech, silence. It has one to
four voices with different levels, joined with and without pauses, and may start or end inside a word. A plan has the
place of each piece and the targets. pico.pool makes the audio on the GPU.

`[STREAMING_WORD]` and the tokens of a word are due from the first position that has received `delay` tokens of audio
after the frame in which the word ended. If words follow each other quickly, their tokens are queued. The target of all
other positions is `[STREAMING_PAD]`, for any length of silence: the model cannot distinguish a pause of zeros from the
padding at the end of a clip. EOS is due at the position after the last one of the padded clip.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mistral_layout.audio import (
    DELAY_TOKENS,
    LEFT_PAD_TOKENS,
    SAMPLE_RATE,
    SAMPLES_PER_TOKEN,
    n_tokens,
    prompt_tokens,
    right_pad_tokens,
)
from mistral_layout.tekken import EOS, STREAMING_PAD, STREAMING_WORD

UNTRAINED = -1  # target of a position that is not in the loss

# Tokens of a batch, about 1,230 s. Then lengths of rows in tokens -> probability. The encoder frames of a row, four per
# token, fit into one window or are a multiple of the chunks of the attention. The longest row is ten minutes, because
# rotary positions beyond the trained ones may not work.
BATCH_TOKENS = 15_360
LENGTHS = {184: 0.32, 448: 0.32, 1024: 0.16, 2560: 0.12, 7680: 0.08}
ONE_CLIP_SHARE = 0.6  # share of rows of up to ONE_CLIP_TOKENS that are a single whole clip, as in the benchmark
ONE_CLIP_TOKENS = 448
SHORTEST = SAMPLE_RATE // 2  # shortest piece in samples
LONGEST_DELAY = 30
# The delay of tekken.json (480 ms), then the other delays that are measured. All delays share the rest evenly.
DELAY_SHARES = {DELAY_TOKENS: 0.4, 2: 0.06, 3: 0.06, 12: 0.06, 30: 0.06}


# The arrays of a shard of pico.data without the audio
WORDS = ("n_samples", "voice", "level", "n_words", "start", "end", "ends_sentence", "n_tokens", "tokens")


def shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:04d}.npz"


def read_words(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as shard:
        return {name: shard[name] for name in WORDS}


@dataclass
class Clips:
    """Lengths and words of all clips, in the order of the shards. Audio positions are counted over all shards."""

    n_samples: np.ndarray
    audio_at: np.ndarray
    voice: np.ndarray  # -1: no speech
    level: np.ndarray  # RMS without pauses
    words_at: np.ndarray  # [clips + 1]
    start: np.ndarray  # of words, in samples of the clip
    end: np.ndarray
    ends_sentence: np.ndarray
    tokens_at: np.ndarray  # [words + 1]
    tokens: np.ndarray

    @classmethod
    def of(cls, shards: list[dict[str, np.ndarray]]) -> "Clips":
        """From the results of `read_words` for each shard."""
        joined = {name: np.concatenate([shard[name] for shard in shards]) for name in WORDS}
        first = {name: np.concatenate(([0], np.cumsum(joined[name]))) for name in ("n_samples", "n_words", "n_tokens")}
        return cls(
            n_samples=joined["n_samples"],
            audio_at=first["n_samples"][:-1],
            voice=joined["voice"],
            level=joined["level"],
            words_at=first["n_words"],
            start=joined["start"].astype(np.int64),
            end=joined["end"].astype(np.int64),
            ends_sentence=joined["ends_sentence"],
            tokens_at=first["n_tokens"],
            tokens=joined["tokens"],
        )

    def __post_init__(self) -> None:
        self.speech = np.flatnonzero(self.voice >= 0)
        self.sounds = np.flatnonzero(self.voice < 0)
        self.of_voice = [np.flatnonzero(self.voice == v) for v in range(self.voice.max() + 1)]
        self.of_voice = [clips for clips in self.of_voice if len(clips)]
        self.by_length = self.speech[np.argsort(self.n_samples[self.speech], kind="stable")]
        self.lengths = self.n_samples[self.by_length]


@dataclass
class Recording:
    """A recording while it is assembled.

    pieces  (first sample in the recording, first sample in the pool or -1 for silence, samples, gain)
    words   indices into Clips
    ends    the sample of the recording at which each word ends
    """

    n_samples: int = 0
    pieces: list[tuple[int, int, int, float]] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    loudest_noise: float = 1.0  # RMS of the quietest piece: a background must be quieter
    background: tuple[int, int, float] = (0, 1, 0.0)  # first sample in the pool, samples, gain

    def add(self, source: int, n: int, gain: float) -> None:
        self.pieces.append((self.n_samples, source, n, gain))
        self.n_samples += n


@dataclass
class Batch:
    """The plan of one batch: rows of `length` tokens.

    `pieces`: int64 [pieces, 4] with row, first sample in the row, first sample in the pool (-1: silence) and samples.
    They are in order and cover the audio of a row without gaps. `background`: int64 [rows, 2] with first sample in the
    pool and samples. `n_samples`, `delays`: [rows]. `targets`: int16 [rows, length]; the target at p is token p + 1.
    """

    length: int
    pieces: np.ndarray
    gains: np.ndarray
    background: np.ndarray
    background_gain: np.ndarray
    n_samples: np.ndarray
    delays: np.ndarray
    targets: np.ndarray


def targets(
    ends: np.ndarray, counts: np.ndarray, tokens: np.ndarray, *, n_samples: int, delay: int, length: int
) -> np.ndarray:
    """Target tokens, int16 [length].

    `ends` has the last sample of each word, `counts` its number of tokens, `tokens` the tokens of all words. Tokens
    that do not fit before the end of the right padding are cut off, as in the output of the model.
    """
    n = n_tokens(n_samples, delay)
    out = np.full(max(length, n) + 1, UNTRAINED, np.int16)
    out[prompt_tokens(delay) - 1 : n] = STREAMING_PAD
    out[n] = EOS
    if len(ends):
        due = LEFT_PAD_TOKENS + ends // SAMPLES_PER_TOKEN + delay
        before = np.cumsum(counts + 1) - (counts + 1)  # tokens of all words before this one
        first = before + np.maximum.accumulate(due - before)
        starts_word = np.zeros(len(tokens) + len(ends), bool)
        starts_word[before] = True
        said = np.full(len(starts_word), STREAMING_WORD, np.int16)
        said[~starts_word] = tokens
        at = np.arange(len(said)) + np.repeat(first - before, counts + 1)
        out[at[at < n]] = said[at < n]
    return out[:length]


def draw_delay(rng: np.random.Generator) -> int:
    if rng.random() < sum(DELAY_SHARES.values()):
        shares = np.array(list(DELAY_SHARES.values()))
        return int(rng.choice(list(DELAY_SHARES), p=shares / shares.sum()))
    return int(rng.integers(1, LONGEST_DELAY + 1))


def _part(rng: np.random.Generator, clips: Clips, clip: int, inside: bool) -> tuple[int, int]:
    """(first, last) sample of a random part: the whole clip or some sentences. `inside`: it starts inside a word."""
    a, b = clips.words_at[clip : clip + 2]
    start, end = clips.start[a:b], clips.end[a:b]
    if inside and b > a:
        word = int(rng.integers(b - a))
        return int(start[word] + (end[word] - start[word]) * rng.uniform(0.2, 0.8)), int(clips.n_samples[clip])
    if rng.random() < 0.6 or b - a < 2:
        return 0, int(clips.n_samples[clip])
    breaks = np.flatnonzero(clips.ends_sentence[a : b - 1]) if rng.random() < 0.75 else np.arange(b - a - 1)
    edges = [0, *((end[breaks] + start[breaks + 1]) // 2).tolist(), int(clips.n_samples[clip])]
    first = int(rng.integers(len(edges) - 1))
    return edges[first], edges[int(rng.integers(first + 1, len(edges)))]


def _end_before(clips: Clips, clip: int, first: int, longest: int) -> int | None:
    """The latest sample between two words at which the piece has at most `longest` samples; None if there is none."""
    a, b = clips.words_at[clip : clip + 2]
    edges = (clips.end[a : b - 1] + clips.start[a + 1 : b]) // 2
    fitting = edges[(edges >= first + SHORTEST) & (edges <= first + longest)]
    return int(fitting[-1]) if len(fitting) else None


def _say(recording: Recording, clips: Clips, clip: int, first: int, last: int, gain: float) -> None:
    """Add samples `first` to `last` of a clip. Words that are cut have no target."""
    a, b = clips.words_at[clip : clip + 2]
    whole = np.flatnonzero((clips.start[a:b] >= first) & (clips.end[a:b] <= last)) + a
    recording.words.append(whole)
    recording.ends.append(clips.end[whole] - first + recording.n_samples)
    recording.loudest_noise = min(recording.loudest_noise, float(clips.level[clip]) * gain)
    recording.add(int(clips.audio_at[clip]) + first, last - first, gain)


def _pause(rng: np.random.Generator, recording: Recording, clips: Clips, n: int, room: int) -> None:
    """Add `n` samples without words: silence, a random sound, or `room`, the background sound of the recording."""
    kind = rng.random()
    while n > 0:
        if kind < 0.4 or not len(clips.sounds):
            recording.add(-1, n, 0.0)
            return
        sound = room if kind < 0.6 else int(rng.choice(clips.sounds))
        piece = min(n, int(clips.n_samples[sound]))
        offset = int(rng.integers(clips.n_samples[sound] - piece + 1))
        gain = 0.1 if kind < 0.6 else float(10 ** rng.uniform(-1.2, 0))
        recording.add(int(clips.audio_at[sound]) + offset, piece, gain)
        n -= piece


def _pause_samples(rng: np.random.Generator, long_share: float) -> int:
    """A random length of up to 2 s. A share of `long_share` has 2 to 30 s, rarely up to 100 s."""
    seconds = rng.uniform(0, 2)
    if rng.random() < long_share:
        seconds = 10 ** rng.uniform(0.3, 2.0 if rng.random() < 0.05 else 1.48)
    return int(seconds * SAMPLE_RATE)


def _turns(rng: np.random.Generator, clips: Clips, longest: int) -> Recording:
    """A recording of one to four alternating voices."""
    recording = Recording()
    n_voices = int(rng.choice([1, 2, 3, 4], p=[0.4, 0.25, 0.2, 0.15]))
    voices = [clips.of_voice[i] for i in rng.integers(len(clips.of_voice), size=n_voices)]
    gains = 10 ** (rng.uniform(-8, 4, n_voices) / 20)
    room = int(rng.choice(clips.sounds)) if len(clips.sounds) else 0
    paused, long_share = float(rng.choice([0, 0.3, 0.6, 1.0], p=[0.3, 0.3, 0.25, 0.15])), rng.choice([0, 0.2, 0.5])
    if rng.random() < 0.4:
        _pause(rng, recording, clips, min(_pause_samples(rng, 0.3), longest - SHORTEST), room)
    inside = rng.random() < 0.15
    speaker = 0
    while (left := longest - recording.n_samples) >= SHORTEST:
        speaker = int(rng.integers(n_voices)) if rng.random() < 0.7 else speaker
        clip = int(rng.choice(voices[speaker]))
        first, last = _part(rng, clips, clip, inside)
        inside = False
        if last - first > left:
            fitting = _end_before(clips, clip, first, left)
            cut = fitting is None or rng.random() < 0.2
            _say(recording, clips, clip, first, first + left if cut or fitting is None else fitting, gains[speaker])
            return recording
        if last - first >= SHORTEST:
            _say(recording, clips, clip, first, last, gains[speaker])
        if rng.random() < paused:
            n = _pause_samples(rng, long_share)
            _pause(rng, recording, clips, min(n, longest - recording.n_samples), room)
    return recording


def _one_clip(rng: np.random.Generator, clips: Clips, longest: int) -> Recording:
    """A recording of one whole clip, mostly longer than half of `longest`."""
    recording = Recording()
    low, high = np.searchsorted(clips.lengths, [longest // 2 if rng.random() < 0.8 else 0, longest + 1])
    if low < high:
        clip = int(clips.by_length[rng.integers(low, high)])
        _say(recording, clips, clip, 0, int(clips.n_samples[clip]), 1.0)
    else:
        _pause(rng, recording, clips, longest, int(rng.choice(clips.sounds)))
    return recording


def _no_speech(rng: np.random.Generator, clips: Clips, longest: int) -> Recording:
    recording = Recording()
    while (left := longest - recording.n_samples) > 0:
        _pause(rng, recording, clips, min(left, _pause_samples(rng, 0.7) + 1), int(rng.choice(clips.sounds)))
    return recording


def recording(rng: np.random.Generator, clips: Clips, longest: int, tokens: int) -> Recording:
    """A random recording of at most `longest` samples, for a row of `tokens` tokens."""
    if rng.random() < 0.03 and len(clips.sounds):
        made = _no_speech(rng, clips, longest)
    elif tokens <= ONE_CLIP_TOKENS and rng.random() < ONE_CLIP_SHARE:
        made = _one_clip(rng, clips, longest)
    else:
        made = _turns(rng, clips, longest)
    if rng.random() < 0.2 and len(clips.sounds):
        sound = int(rng.choice(clips.sounds))
        gain = made.loudest_noise * 10 ** (-rng.uniform(15, 40) / 20) / max(float(clips.level[sound]), 1e-4)
        made.background = (int(clips.audio_at[sound]), int(clips.n_samples[sound]), min(gain, 1.0))
    return made


def batch(rng: np.random.Generator, clips: Clips, tokens: int = BATCH_TOKENS) -> Batch:
    """The plan of a batch of at most `tokens` tokens. All rows have the same length."""
    shares = {length: share for length, share in LENGTHS.items() if length <= tokens}
    length = int(rng.choice(list(shares), p=np.array(list(shares.values())) / sum(shares.values())))
    delays = np.array([draw_delay(rng) for _ in range(tokens // length)])
    pieces, gains, rows, planned = [], [], [], []
    for row, delay in enumerate(delays.tolist()):
        longest = (length - LEFT_PAD_TOKENS - right_pad_tokens(delay)) * SAMPLES_PER_TOKEN
        made = recording(rng, clips, longest - int(rng.integers(SAMPLES_PER_TOKEN)), length)
        words = np.concatenate([*made.words, np.zeros(0, np.int64)]).astype(np.int64)
        counts = clips.tokens_at[words + 1] - clips.tokens_at[words]
        at = np.repeat(clips.tokens_at[words] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        ends = np.concatenate([*made.ends, np.zeros(0, np.int64)])
        planned.append(targets(ends, counts, clips.tokens[at], n_samples=made.n_samples, delay=delay, length=length))
        pieces += [(row, *piece[:3]) for piece in made.pieces]
        gains += [piece[3] for piece in made.pieces]
        rows.append(made)
    return Batch(
        length,
        np.array(pieces, np.int64).reshape(-1, 4),
        np.array(gains, np.float32),
        np.array([made.background[:2] for made in rows], np.int64),
        np.array([made.background[2] for made in rows], np.float32),
        np.array([made.n_samples for made in rows]),
        delays,
        np.stack(planned),
    )
