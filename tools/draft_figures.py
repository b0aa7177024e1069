"""Serve pico with drafted pads (profiles/fast-spec.yaml), transcribe its 500 clips, and count accepted drafts.

    python -m tools.draft_figures --out bench/results/drafts-cpu.json

vLLM counts drafts. On a CPU the drafter is vLLM's `custom_class` in place of `ngram_gpu`; the drafts are the same pads,
five in each step. Texts are compared with the reference model's. Exit status 1 where a request failed.
"""

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from bench import dataset, environment, prometheus, results, serve
from bench.measure import scoring
from pico import huggingface
from tools import speech_figures
from tools.compare_layouts import LIBRARIES, ROOT

CONFIG = ROOT / "profiles/fast-spec.yaml"
DRAFTS = 5
DRAFTER = {
    "method": "custom_class",
    "model": "voxtral_serve.drafter.PadDrafter",
    "num_speculative_tokens": DRAFTS,
}
FLAGS = (*speech_figures.FLAGS, "--speculative-config", json.dumps(DRAFTER))
REFERENCE = ROOT / "bench/results/pico-reference" / results.ROWS
COUNTED = "vllm:spec_decode_num_"


def accepted(page: str) -> dict[str, Any]:
    """Shares of accepted drafts, from the text of /metrics. Every step with drafts makes one token more."""
    steps = prometheus.total(page, f"{COUNTED}drafts_total")
    taken = prometheus.total(page, f"{COUNTED}accepted_tokens_total")
    assert steps and taken is not None, f"/metrics has no {COUNTED}drafts_total"
    at = {
        int(s.labels["position"]): s.value for s in prometheus.samples(page, f"{COUNTED}accepted_tokens_per_pos_total")
    }
    return {
        "steps": int(steps),
        "drafts": int(prometheus.total(page, f"{COUNTED}draft_tokens_total") or 0),
        "accepted": int(taken),
        "by_position": [at[i] / steps for i in range(DRAFTS)],
        "tokens_per_step": 1 + taken / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    clips = list(dataset.load(ROOT / "bench/data").clips)
    reference = {row["id"]: row["text"] for row in map(json.loads, REFERENCE.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as scratch:
        port = serve.free_port()
        with serve.server(CONFIG, huggingface.PICO, port, Path(scratch) / "server.log", *FLAGS):
            url = f"http://127.0.0.1:{port}"
            version = serve.get(f"{url}/version", timeout_s=10).json()["version"]
            with ThreadPoolExecutor(speech_figures.AT_ONCE) as pool:
                texts = list(pool.map(lambda clip: speech_figures.ask(url, speech_figures.samples_of(clip)), clips))
            counted = accepted(requests.get(f"{url}/metrics", timeout=10).text)
    edits = [scoring.word_errors(clip.text, text) for clip, text in zip(clips, texts, strict=True)]
    found = counted | {
        "clips": len(clips),
        "wer": sum(each.total for each in edits) / sum(each.words for each in edits),
        "differ_from_reference": sorted(
            clip.id for clip, text in zip(clips, texts, strict=True) if text.strip() != reference[clip.id].strip()
        ),
    }
    results.write_json(
        flags.out,
        {
            "command": "python -m tools.draft_figures",
            "flags": list(FLAGS),
            "environment": environment.describe(version) | {"served_by": environment.versions(LIBRARIES)},
            "results": found,
        },
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
