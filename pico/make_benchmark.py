"""Make the benchmark set: 500 clips of sentences and voices that training never had, in Ogg/Opus with a manifest.

    python -m pico.make_benchmark --out DIR      # a new directory; bench/data was made so

The clips are 2 to 30 s long, half of them under about 8 s. Noise, rooms and microphones are as in training but
milder (`STRENGTH`), so that the word error rate of an undamaged model is between 1 and 2 %: low enough that nothing
hides in it, high enough that damage shows. Very quiet clips are made louder: under about -30 dBFS the log-mel's
floor, not the model, decides what is heard.
"""

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import soundfile

from pico import data, model, speech

N_CLIPS, SEED = 500, 20_260_101
STRENGTH = 0.5
SHORTEST_S, LONGEST_S = 2.0, 30.0
SHORT_S, SHORT_SHARE = 5.0, 0.5  # of the clips under 5 s only every other is kept, for a median of about 8 s
QUIETEST_DBFS, RAISED_DBFS = (
    -28.0,
    (-28.0, -10.0),
)  # peak; quieter clips are raised to some level in the range
OPUS_LEVEL = 0.935  # libsndfile's 0 (best) to 1 (smallest): about 22 kbit/s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strength", type=float, default=STRENGTH, help="of noise, rooms and microphones, 0 to 1.5")
    out = (args := parser.parse_args()).out
    (out / "clips").mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    texts: set[str] = set()
    lines: list[str] = []
    while len(lines) < N_CLIPS:
        clip = data.clip(rng, speech.BENCH_VOICES, held_out=True, strength=args.strength, longest_s=LONGEST_S)
        seconds = len(clip.audio) / model.SAMPLE_RATE
        if seconds < SHORTEST_S or clip.text in texts or (seconds < SHORT_S and rng.random() > SHORT_SHARE):
            continue
        texts.add(clip.text)
        peak = float(np.abs(clip.audio).max())
        if peak < 10 ** (QUIETEST_DBFS / 20):
            clip.audio *= np.float32(10 ** (rng.uniform(*RAISED_DBFS) / 20) / peak)
        path = out / "clips" / f"{len(lines):03d}.opus"
        with path.open("wb") as file:
            soundfile.write(
                file,
                clip.audio,
                model.SAMPLE_RATE,
                format="OGG",
                subtype="OPUS",
                compression_level=OPUS_LEVEL,
            )
        entry = {
            "path": str(path.relative_to(out)),
            "text": clip.text,
            "duration": round(seconds, 3),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "voice": clip.voice,
            "words": [[word, round(start, 3), round(end, 3)] for word, start, end in clip.words],
        }
        lines.append(json.dumps(entry) + "\n")
    (out / "manifest.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
