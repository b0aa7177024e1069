"""Measure pico's word error rate on clips, long recordings and sound without speech, at any delay.

    python -m pico.hearing                                       # the reference model, on a GPU if there is one
    python -m pico.hearing --url http://127.0.0.1:8000 --delay-ms 480      # a server, with its configured delay

Updates bench/results/pico-hearing.json. `rows` have set, delay_ms, where (reference or vllm), wer, words, and inserted
(words in the transcript that were not spoken). A new row replaces the row with the same set, delay and where. `texts`
has ten transcripts of the live set with their references.

clips      the 500 clips of the benchmark
joined     the same clips, joined without pauses to recordings of up to ten minutes
pauses     the same clips, joined with 2 to 20 s of silence, noise, hum, music or murmur to recordings of 5 minutes
no-speech  three recordings of ten minutes of such sounds
live       bench/data/live.jsonl
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from bench import dataset, metrics, results
from bench.answers import Row
from bench.client import Client
from mistral_layout.audio import DELAY_MS, MS_PER_TOKEN, SAMPLE_RATE
from pico import evaluate, model, sounds
from pico.tokenizer import TextTokenizer

OUT = Path("bench/results/pico-hearing.json")
DELAYS_MS = (160, 240, DELAY_MS, 960, 2400)
SETS = ("clips", "joined", "pauses", "no-speech", "live")
JOINED_S, PAUSED_S, PAUSE_S, NO_SPEECH_S = 600, 300, (2, 20), 600
PAUSES = ("silence", "pink", "brown", "hum", "music", "murmur")
TEXTS = 10
TIMEOUT_S = 600
REQUESTS = 16  # to a server, at the same time


def joined(clips: list[dataset.Clip], longest_s: float, rng: np.random.Generator | None) -> Iterator[list[Any]]:
    """Yield recordings of at most `longest_s` seconds, as lists of pauses (arrays) and clips in random order.

    Each clip has a pause before it, which is empty without `rng`.
    """
    order = random.Random(0).sample(clips, len(clips))
    pieces: list[Any] = []
    seconds = 0.0
    for clip in order:
        pause = np.zeros(0, np.float32)
        if rng is not None:
            pause = sounds.not_speech(rng, float(rng.uniform(*PAUSE_S)), str(rng.choice(PAUSES)))
            pause *= np.float32(10 ** rng.uniform(-1, 0))
        more_s = clip.duration_s + len(pause) / SAMPLE_RATE
        if pieces and seconds + more_s > longest_s:
            yield pieces
            pieces, seconds = [], 0.0
        pieces += [pause, clip]
        seconds += more_s
    yield pieces


def no_speech(rng: np.random.Generator) -> np.ndarray:
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < NO_SPEECH_S * SAMPLE_RATE:
        kind = str(rng.choice(sounds.NOT_SPEECH))
        pieces.append(sounds.not_speech(rng, float(rng.uniform(2, 60)), kind))
    return np.concatenate(pieces)[: NO_SPEECH_S * SAMPLE_RATE]


def recordings_of(name: str, clips: list[dataset.Clip], folder: Path) -> list[dataset.Clip]:
    """The recordings of a set, made from the clips and written to `folder`."""
    rng = np.random.default_rng(0)
    made: list[tuple[np.ndarray, str]] = []
    if name == "no-speech":
        made = [(no_speech(rng), "") for _ in range(3)]
    else:
        longest_s, pauses = (JOINED_S, None) if name == "joined" else (PAUSED_S, rng)
        for pieces in joined(clips, longest_s, pauses):
            audio = [evaluate.read_audio(p.path) if isinstance(p, dataset.Clip) else p for p in pieces]
            made.append((np.concatenate(audio), " ".join(p.text for p in pieces if isinstance(p, dataset.Clip))))
    written = []
    for i, (samples, text) in enumerate(made):
        path = folder / f"{name}-{i:02d}.wav"
        soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")
        written.append(dataset.Clip(path.stem, path, text, len(samples) / SAMPLE_RATE, {}))
    return written


def score(name: str, delay_ms: int, where: str, rows: list[Row]) -> dict[str, Any]:
    if failed := [row for row in rows if row.error is not None]:
        raise RuntimeError(f"{name}: {failed[0].id} failed: {failed[0].error}")
    row = {"set": name, "delay_ms": delay_ms, "where": where}
    if not any(row.reference for row in rows):
        return row | {"wer": None, "ci95": None, "words": 0, "inserted": sum(len((r.text or "").split()) for r in rows)}
    wer = metrics.wer(rows)
    return row | {"wer": wer["value"], "ci95": wer["ci95"], "words": wer["words"], "inserted": wer["insertions"]}


def merge(path: Path, rows: list[dict[str, Any]], texts: list[dict[str, str]] | None) -> None:
    old = json.loads(path.read_text()) if path.exists() else {"rows": [], "texts": []}
    key = lambda row: (SETS.index(row["set"]), row["delay_ms"], row["where"])  # noqa: E731
    kept = {key(row): row for row in [*old["rows"], *rows]}
    merged = [kept[k] for k in sorted(kept)]
    results.write_json(path, {"schema_version": 1, "rows": merged, "texts": old["texts"] if texts is None else texts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, default=Path("bench/data"))
    parser.add_argument("--checkpoint", type=Path, default=evaluate.CHECKPOINT)
    parser.add_argument("--url", help="URL of a server, in place of the reference model")
    parser.add_argument(
        "--delay-ms", type=int, nargs="+", default=DELAYS_MS, help="delays for clips; other sets: 480 only"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--samples", type=int, help="number of clips (default: all 500)")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    clips = dataset.select(dataset.load(args.dataset)[0], args.samples, seed=0)
    if args.url:
        client = Client(args.url, TIMEOUT_S)
        client.model = client.get("/v1/models")["data"][0]["id"]
    else:
        net = model.load(args.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = TextTokenizer.from_file(args.checkpoint / "tekken.json")
    for name in args.sets:
        with tempfile.TemporaryDirectory() as folder:
            if name == "live":
                of_set = dataset.load(args.dataset / "live.jsonl")[0]
            else:
                of_set = clips if name == "clips" else recordings_of(name, clips, Path(folder))
            for delay_ms in [ms for ms in args.delay_ms if name == "clips" or ms == DELAY_MS]:
                if args.url:
                    with ThreadPoolExecutor(REQUESTS) as pool:
                        rows = list(pool.map(lambda clip: client.transcribe(clip, part=1), of_set))
                else:
                    rows = evaluate.transcribe(net, tokenizer, of_set, delay_ms // MS_PER_TOKEN)
                scored = score(name, delay_ms, "vllm" if args.url else "reference", rows)
                print(json.dumps(scored), flush=True)
                texts = None
                if name == "live" and not args.url:
                    chosen = sorted(random.Random(0).sample(range(len(rows)), min(TEXTS, len(rows))))
                    texts = [{"id": rows[i].id, "said": rows[i].reference, "text": rows[i].text or ""} for i in chosen]
                merge(args.out, [scored], texts)


if __name__ == "__main__":
    main()
