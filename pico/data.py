"""Training examples: generated speech, and for every 80 ms the token that Voxtral Realtime would write there.

    python -m pico.data OUT_DIR --hours 100 --seed 0      # shards of int16 audio and targets, one process a core

A word's tokens, led by `[STREAMING_WORD]`, are due from the first position that has heard 480 ms past the frame in
which the word ended. Crowded words queue up. Every other position says `[STREAMING_PAD]`; the last one says EOS.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from pico import model, speech, text
from pico.tokenizer import TextTokenizer

SHORTEST_S, LONGEST_S = 1.0, 36.0
NOT_SPEECH_SHARE = 0.04
# White noise weaker than this lies below the floor of the log-mel (8 decades under LOG_MEL_MAX), where the model
# cannot tell it from the silence that pads a clip.
AUDIBLE_RMS = 3e-4


@dataclass
class Clip:
    audio: np.ndarray  # float32 [n], 16 kHz
    words: list[tuple[str, float, float]]  # as written, start s, end s
    voice: str

    @property
    def text(self) -> str:
        return " ".join(word for word, _, _ in self.words)


def targets(words: list[tuple[str, float, float]], n_samples: int, tokenizer: TextTokenizer) -> np.ndarray | None:
    """uint16 [n_tokens(n_samples)]: at p what follows position p. None when the words do not fit before the EOS."""
    n = model.n_tokens(n_samples)
    out = np.full(n, model.STREAMING_PAD, np.uint16)
    out[-1] = model.EOS
    position = 0
    for word, _, end in words:
        frame = model.LEFT_PAD_TOKENS + int(end * model.SAMPLE_RATE) // model.SAMPLES_PER_TOKEN
        position = max(position, frame + model.DELAY_TOKENS)
        tokens = [model.STREAMING_WORD, *tokenizer.encode(" " + word)]
        if position + len(tokens) >= n:
            return None
        out[position : position + len(tokens)] = tokens
        position += len(tokens)
    return out


def settle_end(audio: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Make the end of a clip audible as such: the model learns to say EOS after 17 tokens of silence.

    A quiet tail is cut off, or the whole clip gets a noise floor that can be heard; the latter always where a pause
    inside the clip is so long and quiet that it would pass for the end.
    """
    n = len(audio) // model.SAMPLES_PER_TOKEN
    frames = audio[: n * model.SAMPLES_PER_TOKEN].reshape(n, -1)
    audible = np.flatnonzero(np.sqrt(np.mean(frames**2, axis=1)) > AUDIBLE_RMS)
    if not len(audible):
        return audio[: int(rng.integers(model.SAMPLES_PER_TOKEN))]
    longest_pause = np.diff(np.concatenate(([-1], audible))).max() - 1
    tail = n - 1 - audible[-1]
    if longest_pause > 13 or (tail > 1 and rng.random() < 0.5):
        floor = AUDIBLE_RMS * 10 ** rng.uniform(0.3, 1.0)
        return np.clip(audio + rng.normal(0, floor, len(audio)), -1, 1).astype(np.float32)
    if tail > 1:
        return audio[: (audible[-1] + 1) * model.SAMPLES_PER_TOKEN + int(rng.integers(model.SAMPLES_PER_TOKEN))]
    return audio


def clip(
    rng: np.random.Generator,
    voices: list[str],
    *,
    held_out: bool = False,
    strength: float = 1.0,
    longest_s: float = LONGEST_S,
) -> Clip:
    """One clip of 1 to `longest_s` seconds: about half of them have one or two sentences."""
    while True:
        if not held_out and rng.random() < NOT_SPEECH_SHARE:
            seconds = float(rng.uniform(SHORTEST_S, 12))
            return Clip(settle_end(speech.not_speech(rng, seconds), rng), [], "")
        n_sentences = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8], p=[0.34, 0.24, 0.14, 0.09, 0.07, 0.05, 0.04, 0.03]))
        sentences = text.passage(Random(int(rng.integers(2**62))), n_sentences, held_out=held_out)
        voice = voices[int(rng.integers(len(voices)))]
        said = speech.speak(sentences, rng, voice)
        audio = settle_end(speech.augment(said.audio, rng, strength), rng)
        end = said.words[-1][2]
        if SHORTEST_S <= len(audio) / model.SAMPLE_RATE <= longest_s and end * model.SAMPLE_RATE <= len(audio) + 320:
            return Clip(audio, said.words, voice)


def _shard(args: tuple[Path, int, float, Path]) -> float:
    out, seed, hours, tekken = args
    rng, tokenizer = np.random.default_rng(seed), TextTokenizer.from_file(tekken)
    audio, tokens, seconds = [], [], 0.0
    while seconds < hours * 3600:
        c = clip(rng, speech.TRAIN_VOICES)
        target = targets(c.words, len(c.audio), tokenizer)
        if target is not None:
            audio.append((c.audio * 32767).astype(np.int16))
            tokens.append(target)
            seconds += len(c.audio) / model.SAMPLE_RATE
    partial = out / f"shard-{seed}.partial.npz"
    np.savez(partial, audio=np.concatenate(audio), n_samples=[len(a) for a in audio], tokens=np.concatenate(tokens))
    partial.rename(out / f"shard-{seed}.npz")
    return seconds / 3600


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate speech and targets to train pico on.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--hours", type=float, default=100)
    parser.add_argument("--shard-hours", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first shard; the next ones count up")
    parser.add_argument("--tekken", type=Path, default=Path(__file__).parent / "checkpoint" / "tekken.json")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    n = max(1, round(args.hours / args.shard_hours))
    jobs = [(args.out, args.seed + i, args.shard_hours, args.tekken) for i in range(n)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        hours = sum(pool.map(_shard, jobs))
    print(json.dumps({"clips_hours": round(hours, 2), "shards": n}))


if __name__ == "__main__":
    main()
