"""Generate clips of synthetic speech, each of one voice, with the times and tokens of their words.

    python -m pico.data OUT_DIR --hours 100 --seed 0      # shards of 30 minutes, one process per core
    python -m pico.data OUT_DIR --hours 36 --wav          # the same clips as WAV files, for `voxtral-serve draft train`

Existing shards are kept, so an interrupted run can be continued. pico.recordings joins clips to recordings and defines
the target tokens.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import soundfile

from mistral_layout.audio import SAMPLE_RATE, SAMPLES_PER_TOKEN
from pico import sounds, speech, text
from pico.recordings import shard_path
from pico.tokenizer import TextTokenizer

SHORTEST_S, LONGEST_S = 1.0, 36.0
NOT_SPEECH_SHARE = 0.05  # share of clips without speech, which are used for pauses and background
NOT_SPEECH_S = (5.0, 32.0)
# White noise with a lower RMS is below the floor of the log-mel (8 decades under LOG_MEL_MAX). The model cannot
# distinguish it from the silence that pads a clip.
AUDIBLE_RMS = 3e-4


@dataclass
class Clip:
    audio: np.ndarray  # float32 [n], 16 kHz
    words: list[tuple[str, float, float]]  # as written, start s, end s
    voice: str

    @property
    def text(self) -> str:
        return " ".join(word for word, _, _ in self.words)


def settle_end(audio: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Make the end of a clip detectable.

    Either a quiet tail is cut off, or the whole clip gets an audible noise floor. A clip with a pause that is so long
    and quiet that it looks like the end always gets a noise floor. pico.recordings adds long silence later.
    """
    n = len(audio) // SAMPLES_PER_TOKEN
    frames = audio[: n * SAMPLES_PER_TOKEN].reshape(n, -1)
    audible = np.flatnonzero(np.sqrt(np.mean(frames**2, axis=1)) > AUDIBLE_RMS)
    if not len(audible):
        return audio[: int(rng.integers(SAMPLES_PER_TOKEN))]
    longest_pause = np.diff(np.concatenate(([-1], audible))).max() - 1
    tail = n - 1 - audible[-1]
    if longest_pause > 13 or (tail > 1 and rng.random() < 0.5):
        floor = AUDIBLE_RMS * 10 ** rng.uniform(0.3, 1.0)
        return np.clip(audio + rng.normal(0, floor, len(audio)), -1, 1).astype(np.float32)
    if tail > 1:
        return audio[: (audible[-1] + 1) * SAMPLES_PER_TOKEN + int(rng.integers(SAMPLES_PER_TOKEN))]
    return audio


def clip(
    rng: np.random.Generator,
    voices: list[str],
    *,
    held_out: bool = False,
    strength: float = 1.0,
    longest_s: float = LONGEST_S,
) -> Clip:
    """One clip of 1 to `longest_s` seconds. About half of the clips have one or two sentences."""
    while True:
        n_sentences = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8], p=[0.34, 0.24, 0.14, 0.09, 0.07, 0.05, 0.04, 0.03]))
        sentences = text.passage(Random(int(rng.integers(2**62))), n_sentences, held_out=held_out)
        voice = voices[int(rng.integers(len(voices)))]
        said = speech.speak(sentences, rng, voice)
        audio = settle_end(sounds.augment(said.audio, rng, strength), rng)
        end = said.words[-1][2]
        if SHORTEST_S <= len(audio) / SAMPLE_RATE <= longest_s and end * SAMPLE_RATE <= len(audio) + 320:
            return Clip(audio, said.words, voice)


def not_speech(rng: np.random.Generator) -> Clip:
    kind = str(rng.choice([kind for kind in sounds.NOT_SPEECH if kind != "silence"]))
    return Clip(sounds.not_speech(rng, float(rng.uniform(*NOT_SPEECH_S)), kind), [], "")


def training_clips(rng: np.random.Generator, hours: float) -> list[Clip]:
    """The clips of one shard."""
    clips: list[Clip] = []
    while sum(len(c.audio) for c in clips) < hours * 3600 * SAMPLE_RATE:
        clips.append(not_speech(rng) if rng.random() < NOT_SPEECH_SHARE else clip(rng, speech.TRAIN_VOICES))
    return clips


def shard(clips: list[Clip], tokenizer: TextTokenizer) -> dict[str, np.ndarray]:
    """The arrays of one shard: audio and words of all clips, concatenated. Times are in samples of the clip."""
    words = [word for c in clips for word in c.words]
    tokens = [tokenizer.encode(" " + word) for word, _, _ in words]
    return {
        "audio": np.concatenate([(c.audio * 32767).astype(np.int16) for c in clips]),
        "n_samples": np.array([len(c.audio) for c in clips]),
        "voice": np.array([speech.TRAIN_VOICES.index(c.voice) if c.voice else -1 for c in clips]),
        "level": np.array([sounds.speech_rms(c.audio) for c in clips], np.float32),
        "n_words": np.array([len(c.words) for c in clips]),
        "start": np.array([int(start * SAMPLE_RATE) for _, start, _ in words], np.int32),
        # some samples of the last word's echo may be cut off
        "end": np.array([min(int(end * SAMPLE_RATE), len(c.audio)) for c in clips for _, _, end in c.words], np.int32),
        "ends_sentence": np.array([word[-1] in ".?" for word, _, _ in words]),
        "n_tokens": np.array([len(ids) for ids in tokens]),
        "tokens": np.array([i for ids in tokens for i in ids], np.int16),
    }


def write_shard(args: tuple[Path, int, int, float, Path | None]) -> float:
    """Write a shard (directory, number, seed, hours, tekken.json): a file, or a folder of WAV files without the last.

    Returns its hours. One that exists is kept.
    """
    out, index, seed, hours, tekken = args
    path = shard_path(out, index) if tekken else shard_path(out, index).with_suffix("")
    if not path.exists():
        clips = training_clips(np.random.default_rng([seed, index]), hours)
        partial = path.with_suffix(".partial.npz" if tekken else ".partial")
        if tekken:
            arrays: dict[str, Any] = shard(clips, TextTokenizer.from_file(tekken))
            np.savez(partial, **arrays)
        else:
            partial.mkdir(exist_ok=True)
            for number, each in enumerate(clips):
                soundfile.write(partial / f"{number:03d}.wav", each.audio, SAMPLE_RATE, subtype="PCM_16")
        partial.rename(path)
    return hours


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the speech that pico is trained on.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--hours", type=float, default=100)
    parser.add_argument("--shard-hours", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--tekken", type=Path, default=Path(__file__).parent / "checkpoint" / "tekken.json")
    parser.add_argument("--wav", action="store_true", help="write each clip as a WAV file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    n = max(1, round(args.hours / args.shard_hours))
    jobs = [(args.out, i, args.seed, args.shard_hours, None if args.wav else args.tekken) for i in range(n)]
    with ProcessPoolExecutor(args.workers) as pool:
        hours = sum(pool.map(write_shard, jobs))
    print(json.dumps({"hours": round(hours, 2), "shards": n}))


if __name__ == "__main__":
    main()
