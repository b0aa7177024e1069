"""Recordings like live speech, put together anew for every batch, and what the model should write at each position.

A recording is a row of pieces of clips: whole clips, some of their sentences, sounds without speech, silence. It has
one to four voices at their own levels, joined with and without pauses, and may begin or end inside a word. What comes
out of here is a plan (where each piece lies, and the targets); pico.pool makes the audio, on the GPU.

A word's tokens, led by `[STREAMING_WORD]`, are due from the first position that has heard `delay` tokens past the
frame in which the word ended. Crowded words queue up. Every other position says `[STREAMING_PAD]`, however long the
silence: a pause of zeros cannot be told from the padding of a clip's end. EOS is due only where there is no audio any
more, at the position after the clip's last.
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

UNTRAINED = -1  # target of a position that the loss leaves out

# Tokens of a batch, about 1,230 s; tokens of its rows, and how often each length is drawn. A row's encoder frames, four
# a token, fit into one window or are a multiple of the chunks of its attention. The longest row is ten minutes, since
# a rotation by more positions than were trained does not have to work.
BATCH_TOKENS = 15_360
LENGTHS = {184: 0.32, 448: 0.32, 1024: 0.16, 2560: 0.12, 7680: 0.08}
ONE_CLIP_SHARE = 0.6  # of the rows of up to ONE_CLIP_TOKENS: a single whole clip, as the benchmark's are
ONE_CLIP_TOKENS = 448
SHORTEST = SAMPLE_RATE // 2  # of a piece, in samples
LONGEST_DELAY = 30
# 480 ms is what tekken.json states; the next are the ones that are measured; the rest of the weight is spread evenly.
DELAY_SHARES = {DELAY_TOKENS: 0.4, 2: 0.06, 3: 0.06, 12: 0.06, 30: 0.06}


# Of the arrays of a shard of pico.data, all but the audio.
WORDS = ("n_samples", "voice", "level", "n_words", "start", "end", "ends_sentence", "n_tokens", "tokens")


def shard_path(directory: Path, index: int) -> Path:
    return directory / f"shard-{index:04d}.npz"


def read_words(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as shard:
        return {name: shard[name] for name in WORDS}


@dataclass
class Clips:
    """Lengths and words of all clips of the shards, in the shards' order; audio positions count through all shards."""

    n_samples: np.ndarray
    audio_at: np.ndarray
    voice: np.ndarray  # -1: no speech
    level: np.ndarray  # RMS of what sounds
    words_at: np.ndarray  # [clips + 1]
    start: np.ndarray  # of words, in samples of the clip
    end: np.ndarray
    ends_sentence: np.ndarray
    tokens_at: np.ndarray  # [words + 1]
    tokens: np.ndarray

    @classmethod
    def of(cls, shards: list[dict[str, np.ndarray]]) -> "Clips":
        """From what `read_words` gives for each shard."""
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
    """Pieces as (first sample in the recording, in the pool or -1 for silence, samples, gain); words as indices into
    Clips with the sample of the recording at which each ends."""

    n_samples: int = 0
    pieces: list[tuple[int, int, int, float]] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    loudest_noise: float = 1.0  # RMS that a background may have so that the quietest piece stays clear of it
    background: tuple[int, int, float] = (0, 1, 0.0)  # first sample in the pool, samples, gain

    def add(self, source: int, n: int, gain: float) -> None:
        self.pieces.append((self.n_samples, source, n, gain))
        self.n_samples += n


@dataclass
class Batch:
    """The plan of one batch: rows of `length` tokens.

    `pieces`: int64 [pieces, 4] of row, first sample in the row, in the pool (-1: silence) and samples, in order and
    without gap from a row's first sample of audio to its last. `background`: int64 [rows, 2], first sample in the pool
    and samples. `n_samples`, `delays`: [rows]. `targets`: int16 [rows, length], at p what follows position p.
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
    """int16 [length] from each word's last sample, its number of tokens, and all their tokens in a row.

    Words that do not fit before the end of the right padding are cut off, as they are when the model says them.
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
    """First and last sample of the clip to take: all, some sentences, or from inside a word where `inside`."""
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
    """The last sample between two words with which the piece is at most `longest` long."""
    a, b = clips.words_at[clip : clip + 2]
    edges = (clips.end[a : b - 1] + clips.start[a + 1 : b]) // 2
    fitting = edges[(edges >= first + SHORTEST) & (edges <= first + longest)]
    return int(fitting[-1]) if len(fitting) else None


def _say(recording: Recording, clips: Clips, clip: int, first: int, last: int, gain: float) -> None:
    """Add samples `first` to `last` of a clip; a word that is cut has no target."""
    a, b = clips.words_at[clip : clip + 2]
    whole = np.flatnonzero((clips.start[a:b] >= first) & (clips.end[a:b] <= last)) + a
    recording.words.append(whole)
    recording.ends.append(clips.end[whole] - first + recording.n_samples)
    recording.loudest_noise = min(recording.loudest_noise, float(clips.level[clip]) * gain)
    recording.add(int(clips.audio_at[clip]) + first, last - first, gain)


def _pause(rng: np.random.Generator, recording: Recording, clips: Clips, n: int, room: int) -> None:
    """`n` samples of silence, of some sound, or of the sound of the recording's own room, all without words."""
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
    """Up to 2 s; with `long_share` 2 to 30 s, seldom 100 s."""
    seconds = rng.uniform(0, 2)
    if rng.random() < long_share:
        seconds = 10 ** rng.uniform(0.3, 2.0 if rng.random() < 0.05 else 1.48)
    return int(seconds * SAMPLE_RATE)


def _turns(rng: np.random.Generator, clips: Clips, longest: int) -> Recording:
    """One to four voices by turns."""
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
    """A whole clip, mostly of more than half of the length."""
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
    """A recording of at most `longest` samples, for a row of so many tokens."""
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
    """The plan of a batch of at most `tokens` tokens, all rows of one length."""
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
