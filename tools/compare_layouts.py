"""Serve pico in Mistral's and in Hugging Face's layout and compare what they transcribe, clip by clip.

    python -m tools.compare_layouts --config vllm_config.yaml --out bench/results/layouts/cpu-vllm-0.32.0.json

Exit status 1 when a text differs or a request failed. The two servers run one after the other; where memory and the
config leave room for both, --at-once halves the time.
"""

import argparse
import contextlib
import hashlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from tqdm import tqdm

from bench import dataset, environment, metrics, results
from bench.answers import Row
from bench.client import Client
from bench.measure import engine
from pico import huggingface

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("vllm", "transformers", "mistral-common", "torch")


def transcribe(url: str, clips: list[dataset.Clip]) -> tuple[list[Row], str]:
    """Send every clip, one at a time. Returns the rows and the server's version."""
    client = Client(url, timeout_s=600)
    client.model = client.get("/v1/models")["data"][0]["id"]
    rows = [client.transcribe(clip, part=1) for clip in tqdm(clips, file=sys.stderr)]
    return rows, client.get("/version")["version"]


def compare(config: Path, samples: int | None, at_once: bool, scratch: Path) -> dict[str, Any]:
    """What the JSON file holds; `different` lists the clips whose texts are not the same, character for character."""
    clips = dataset.select(dataset.load(ROOT / "bench/data")[0], samples, seed=0)
    layouts = {"mistral": huggingface.PICO, "hugging_face": scratch / "hugging_face"}
    huggingface.write(layouts["hugging_face"])
    with contextlib.ExitStack() as all_up, ThreadPoolExecutor(len(layouts)) as pool:
        tasks = {}
        for name, directory in layouts.items():
            port, log = engine.free_port(), scratch / f"{name}.log"
            with contextlib.ExitStack() as this_up:
                (all_up if at_once else this_up).enter_context(engine.served(config, directory, port, log))
                tasks[name] = pool.submit(transcribe, f"http://127.0.0.1:{port}", clips)
                if not at_once:
                    tasks[name].result()
        done = {name: task.result() for name, task in tasks.items()}
    pairs = list(zip(*(rows for rows, _ in done.values()), strict=True))
    return {
        "config": yaml.safe_load(config.read_text()),
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
        "environment": environment.describe(done["mistral"][1]) | {"served_by": environment.versions(LIBRARIES)},
        "clips": len(clips),
        "failed": {name: [row.id for row in rows if row.error] for name, (rows, _) in done.items()},
        "wer": {name: metrics.wer(rows)["value"] for name, (rows, _) in done.items()},
        "identical": sum(a.text == b.text and a.text is not None for a, b in pairs),
        "different": [{"id": a.id, "mistral": a.text, "hugging_face": b.text} for a, b in pairs if a.text != b.text],
        "texts_sha256": hashlib.sha256("\n".join(a.text or "" for a, _ in pairs).encode()).hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="the vLLM config that serves both")
    parser.add_argument("--samples", type=int, help="clips, at most and by default all 500")
    parser.add_argument("--at-once", action="store_true", help="run both servers at the same time")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = compare(flags.config, flags.samples, flags.at_once, Path(scratch))
    results.write_json(flags.out, outcome)
    print(f"{outcome['identical']} of {outcome['clips']} texts identical; WER {outcome['wer']}: {flags.out}")
    if outcome["identical"] != outcome["clips"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
