"""Make the benchmark sets from sentences and voices that are not in the training data, in Ogg/Opus with a manifest.

    python -m pico.make_benchmark --out DIR             # clips/ and manifest.jsonl in the new directory DIR
    python -m pico.make_benchmark --live --out DIR      # live/ and live.jsonl in DIR

bench/data was made with these commands. The first makes 500 clips of 2 to 30 s, half of them under about 8 s. Noise,
rooms and microphones are as in training but milder (`STRENGTH`), so that the word error rate of the undamaged model is
between 1 and 2 %. At this rate, errors of a serving stack are visible. Very quiet clips are amplified: under about
-30 dBFS, the result depends on the floor of the log-mel, not on the model.

The second makes recordings of 1 to 5 minutes that resemble live speech: one to four voices with different levels,
joined with pauses of up to 30 s of a named kind or without pauses. Some recordings start or end inside a word, which is
then not in the text.
"""

import argparse
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

from pico import data, model, sounds, speech

N_CLIPS, SEED = 500, 20_260_101
STRENGTH = 0.5
SHORTEST_S, LONGEST_S = 2.0, 30.0
SHORT_S, SHORT_SHARE = 5.0, 0.5  # half of the clips under 5 s are dropped, so that the median is about 8 s
QUIETEST_DBFS, RAISED_DBFS = (
    -28.0,
    (-28.0, -10.0),
)  # peak; quieter clips are raised to a random level in the range
OPUS_LEVEL = 0.935  # libsndfile's 0 (best) to 1 (smallest): about 22 kbit/s


LIVE_SEED = 20_260_102
LIVE_S = (62, 75, 90, 105, 120, 135, 150, 180, 210, 240, 270, 300)
LIVE_PAUSES = ("silence", "pink", "brown", "hum", "music", "murmur")
LIVE_CLIP_S = 15.0  # the longest clip, so that voices alternate
LONGEST_LEAD_S = 50.0  # the most that is cut from the beginning: a pause and some words
CUT_SHARE = 0.3  # share of starts inside a word, and of ends inside a word that are not moved


def opus(path: Path, audio: np.ndarray) -> str:
    """Write the file; returns its sha256."""
    with path.open("wb") as file:
        soundfile.write(file, audio, model.SAMPLE_RATE, format="OGG", subtype="OPUS", compression_level=OPUS_LEVEL)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def entry(path: str, sha256: str, audio: np.ndarray, words: list[tuple[str, float, float]], **more: object) -> str:
    """A line of the manifest."""
    line = {
        "path": path,
        "text": " ".join(word for word, _, _ in words),
        "duration": round(len(audio) / model.SAMPLE_RATE, 3),
        "sha256": sha256,
        **more,
        "words": [[word, round(start, 3), round(end, 3)] for word, start, end in words],
    }
    return json.dumps(line) + "\n"


def raise_quiet(audio: np.ndarray, rng: np.random.Generator) -> None:
    peak = float(np.abs(audio).max())
    if peak < 10 ** (QUIETEST_DBFS / 20):
        audio *= np.float32(10 ** (rng.uniform(*RAISED_DBFS) / 20) / peak)


def clips(out: Path, strength: float) -> None:
    (out / "clips").mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    texts: set[str] = set()
    lines: list[str] = []
    while len(lines) < N_CLIPS:
        clip = data.clip(rng, speech.BENCH_VOICES, held_out=True, strength=strength, longest_s=LONGEST_S)
        seconds = len(clip.audio) / model.SAMPLE_RATE
        if seconds < SHORTEST_S or clip.text in texts or (seconds < SHORT_S and rng.random() > SHORT_SHARE):
            continue
        texts.add(clip.text)
        raise_quiet(clip.audio, rng)
        path = f"clips/{len(lines):03d}.opus"
        lines.append(entry(path, opus(out / path, clip.audio), clip.audio, clip.words, voice=clip.voice))
    (out / "manifest.jsonl").write_text("".join(lines))


@dataclass
class Live:
    """A recording while it is assembled. Times are in seconds."""

    pieces: list[np.ndarray] = field(default_factory=list)
    seconds: float = 0.0
    words: list[tuple[str, float, float]] = field(default_factory=list)
    turns: list[tuple[str, float, float]] = field(default_factory=list)  # voice, start and end of its clip
    pauses: list[tuple[str, float, float]] = field(default_factory=list)  # kind, start, end

    def add(self, audio: np.ndarray) -> None:
        self.pieces.append(audio)
        self.seconds += len(audio) / model.SAMPLE_RATE

    def cut(self, start: float, end: float) -> np.ndarray:
        """Cut the audio to `start` to `end`. Incomplete words are dropped; turns and pauses are shortened."""
        inside = [w for w in self.words if w[1] >= start and w[2] <= end]
        self.words = [(word, a - start, b - start) for word, a, b in inside]
        shortened = [(name, max(a, start), min(b, end)) for name, a, b in self.turns]
        self.turns = [(name, a - start, b - start) for name, a, b in shortened if b > a]
        shortened = [(kind, max(a, start), min(b, end)) for kind, a, b in self.pauses]
        self.pauses = [(kind, a - start, b - start) for kind, a, b in shortened if b > a]
        first, last = (int(t * model.SAMPLE_RATE) for t in (start, end))
        return np.concatenate(self.pieces)[first:last]


def live_recording(rng: np.random.Generator, seconds: float, strength: float) -> tuple[np.ndarray, Live]:
    live = Live()
    voices = [str(v) for v in rng.choice(speech.BENCH_VOICES, int(rng.integers(1, 5)), replace=False)]
    gains = 10 ** (rng.uniform(-8, 0, len(voices)) / 20)
    joined_share = rng.uniform(0.2, 0.7)
    while live.seconds < seconds + LONGEST_LEAD_S:
        if rng.random() > joined_share:
            length = 10 ** rng.uniform(-0.5, 1.48)
            kind = str(rng.choice(LIVE_PAUSES))
            gain = np.float32(10 ** rng.uniform(-1, 0))
            live.pauses.append((kind, live.seconds, live.seconds + length))
            live.add(sounds.not_speech(rng, length, kind) * gain)
        speaker = int(rng.integers(len(voices)))
        clip = data.clip(rng, [voices[speaker]], held_out=True, strength=strength, longest_s=LIVE_CLIP_S)
        raise_quiet(clip.audio, rng)
        live.turns.append((voices[speaker], live.seconds, live.seconds + len(clip.audio) / model.SAMPLE_RATE))
        live.words += [(word, live.seconds + a, live.seconds + b) for word, a, b in clip.words]
        live.add(clip.audio * np.float32(max(gains[speaker], 10 ** (QUIETEST_DBFS / 20) / np.abs(clip.audio).max())))
    start = 0.0
    if rng.random() < CUT_SHARE:
        _, a, b = live.words[int(rng.integers(1, 4))]
        start = (a + b) / 2
    end = start + seconds
    cut = next((word for word in live.words if word[1] < end < word[2]), None)
    if cut is not None and rng.random() > CUT_SHARE:
        end = cut[1]
    return live.cut(start, end), live


def live_set(out: Path, strength: float) -> None:
    (out / "live").mkdir(parents=True)
    rng = np.random.default_rng(LIVE_SEED)
    lines: list[str] = []
    for seconds in LIVE_S:
        audio, live = live_recording(rng, seconds, strength)
        path = f"live/{len(lines):02d}.opus"
        rounded = {
            name: [[what, round(a, 3), round(b, 3)] for what, a, b in spans]
            for name, spans in (("voices", live.turns), ("pauses", live.pauses))
        }
        lines.append(entry(path, opus(out / path, audio), audio, live.words, **rounded))
    (out / "live.jsonl").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--live", action="store_true", help="make the recordings in place of the clips")
    parser.add_argument("--strength", type=float, default=STRENGTH, help="of noise, rooms and microphones, 0 to 1.5")
    args = parser.parse_args()
    (live_set if args.live else clips)(args.out, args.strength)


if __name__ == "__main__":
    main()
