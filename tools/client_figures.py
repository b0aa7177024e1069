"""Serve pico on profiles/fast.yaml and measure published live clients: their words, and how late their final text is.

    python -m tools.client_figures --out bench/results/live-clients-cpu.json

Each program of tests/clients/programs transcribes the same clips at the pace of speech, one after the other, and each
clip is uploaded as well. `final_s` is the time from a clip's last sample to its last turn's text. The turn detection of
a client is in it: what finds the end of speech waits for silence first. Needs .venv-clients (`make test-clients`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import soundfile

from bench import dataset, environment, results, serve
from bench.measure import scoring, spread
from pico import huggingface
from tools import inputs
from tools.compare_layouts import LIBRARIES, ROOT
from tools.soak import CONFIG
from tools.speech_figures import FLAGS, RATE, ask, samples_of

PROGRAMS = ROOT / "tests/clients/programs"
PYTHON = ROOT / ".venv-clients/bin/python"
LIVE = ("--additional-config", json.dumps({"max_live_sessions": 4}))
MODEL, REALTIME_MODEL = "voxtral", "voxtral-mini-transcribe-realtime-2602"  # some clients need `realtime` in the name
CLIPS = 50
TIMEOUT_S = 30  # for a clip


def measure(url: str, program: Path, paths: Sequence[Path], uploads: Sequence[str]) -> dict[str, Any]:
    """Raises subprocess.CalledProcessError where the program fails."""
    model = REALTIME_MODEL if program.stem == "livekit_mistral" else MODEL
    command = [str(PYTHON), str(program), url, model, *map(str, paths)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S * len(paths),
        check=True,
        env={**os.environ, "OPENAI_API_KEY": inputs.KEY},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    edits = [scoring.word_errors(text, line["text"]) for text, line in zip(uploads, lines, strict=True)]
    return {
        "clips": len(lines),
        "turns": sum(line["turns"] for line in lines),
        "other_than_the_upload": sum(each.total > 0 for each in edits),
        "words": sum(each.words for each in edits),
        "other_words": sum(each.total for each in edits),
        "first_s": spread.percentiles([line["first_s"] for line in lines if line["first_s"] is not None]),
        "final_s": spread.percentiles([line["final_s"] for line in lines]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--clips", type=int, default=CLIPS, metavar="N", help="for each client (default: %(default)s)")
    flags = parser.parse_args()
    clips = dataset.select(dataset.load(ROOT / "bench/data").clips, flags.clips, seed=0)
    programs = [path for path in sorted(PROGRAMS.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
    with tempfile.TemporaryDirectory() as folder:
        scratch, port = Path(folder), serve.free_port()
        paths = [scratch / f"{clip.id}.wav" for clip in clips]
        for path, clip in zip(paths, clips, strict=True):
            soundfile.write(path, samples_of(clip), RATE, subtype="PCM_16")
        with serve.server(CONFIG, huggingface.PICO, port, scratch / "server.log", *FLAGS, *LIVE):
            url = f"http://127.0.0.1:{port}"
            version = serve.get(f"{url}/version", timeout_s=10).json()["version"]
            uploads = [ask(url, samples_of(clip)) for clip in clips]
            found = {}
            for program in programs:
                found[program.stem] = each = measure(url, program, paths, uploads)
                print(f"{program.stem}: {json.dumps(each)}", file=sys.stderr, flush=True)
    outcome = {
        "command": "python -m tools.client_figures",
        "flags": [*FLAGS, *LIVE],
        "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
        "results": found,
    }
    results.write_json(flags.out, outcome)


if __name__ == "__main__":
    main()
