"""Serve pico on the encode-once model and compare its texts with those of vLLM's own model, clip by clip.

    python -m tools.compare_models --out bench/results/encode-once/cpu-vllm-0.32.0.json

The texts of vLLM's own model are the committed ones of bench/results/pico-cpu. The two models sum in different orders,
in bfloat16. So a text may differ where two tokens' logits are equal but for rounding, and each difference is traced to
that place: both models generate the clip again, and where their tokens first part, after the same tokens and the same
audio, the gap between the two tokens' logits is counted in units in the last place of bfloat16 at the greater's size,
2 ** (floor(log2(|logit|)) - 7). In float32 both, and pico's reference, must generate the same tokens.

Exit status 1 when a request failed, more than 3 texts differ, or one differs in another way.
"""

import argparse
import gc
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError, dataset, environment, metrics, results
from bench.measure import engine
from mistral_layout.tekken import CONTROL_TOKENS
from pico import evaluate, huggingface, model
from pico.tokenizer import TextTokenizer
from tools.compare_layouts import LIBRARIES, ROOT, transcribe

STOCK_ROWS = ROOT / "bench/results/pico-cpu" / results.ROWS
MODELS = {"stock": "VoxtralRealtimeGeneration", "encode_once": "VoxtralRealtimeEncodeOnce"}
MOST_DIFFERENT = 3
NEAR_UNITS = 2
TOP = 5  # logits kept of each step


class Generated(NamedTuple):
    tokens: list[int]
    logits: list[dict[int, float]]  # of each step, its TOP by token


def generate(options: dict[str, Any], clips: list[dataset.Clip]) -> list[Generated]:
    """Greedily, one clip at a time, by an LLM of its own; the audio as the server takes it."""
    from vllm import LLM, SamplingParams
    from vllm.config.speech_to_text import SpeechToTextParams
    from vllm.model_executor.models.voxtral_realtime import VoxtralRealtimeGeneration as Stock

    llm: Any = LLM(**options, logprobs_mode="raw_logits", disable_log_stats=True)
    config = llm.llm_engine.model_config
    generated = []
    for clip in clips:
        prompt = Stock.get_generation_prompt(
            SpeechToTextParams(
                audio=evaluate.read_audio(clip.path),
                stt_config=Stock.get_speech_to_text_config(config, "transcribe"),
                model_config=config,
            )
        )
        sampling = SamplingParams(temperature=0, max_tokens=config.max_model_len, logprobs=TOP)
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        (output,) = answer.outputs
        steps = [{token: found.logprob for token, found in step.items()} for step in output.logprobs]
        generated.append(Generated([*output.token_ids], steps))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    return generated


def unit_in_last_place(logit: float) -> float:
    """Of bfloat16, which has 8 significant bits."""
    return float(2.0 ** (math.floor(math.log2(abs(logit))) - 7))


def shown(token: int, tokenizer: TextTokenizer) -> str:
    return CONTROL_TOKENS[token] if token < len(CONTROL_TOKENS) else tokenizer.decode([token])


def parting(stock: Generated, encode_once: Generated, tokenizer: TextTokenizer) -> dict[str, Any] | None:
    """Where the tokens of two paths first differ, and both paths' logits of the two there; None where none differs."""
    both = {"stock": stock, "encode_once": encode_once}
    pairs = enumerate(zip(stock.tokens, encode_once.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        return None
    chosen = {name: path.tokens[at] for name, path in both.items()}
    logits = {name: {of: path.logits[at][token] for of, token in chosen.items()} for name, path in both.items()}
    unit = unit_in_last_place(max(abs(value) for path in logits.values() for value in path.values()))
    return {
        "token": at,
        "chosen": {name: {"id": token, "text": shown(token, tokenizer)} for name, token in chosen.items()},
        "logits": logits,
        "unit": unit,
        "gap_in_units": {name: abs(path["stock"] - path["encode_once"]) / unit for name, path in logits.items()},
    }


def trace(options: dict[str, Any], clips: list[dataset.Clip]) -> dict[str, dict[str, Any]]:
    """By clip, where its two texts part in bfloat16, and whether float32 knows the difference."""
    tokenizer = TextTokenizer.from_file(huggingface.PICO / "tekken.json")
    done = {
        (dtype, name): generate(options | {"dtype": dtype, "hf_overrides": {"architectures": [architecture]}}, clips)
        for dtype in ("bfloat16", "float32")
        for name, architecture in MODELS.items()
    }
    reference = model.load(huggingface.PICO).transcribe([evaluate.read_audio(clip.path) for clip in clips])
    traced = {}
    for i, clip in enumerate(clips):
        exact = {name: [t for t in done["float32", name][i].tokens if t != model.EOS] for name in MODELS}
        here = parting(done["bfloat16", "stock"][i], done["bfloat16", "encode_once"][i], tokenizer)
        if here is None:
            raise BenchError(
                f"clip {clip.id}: both models generate the same tokens on this machine, but its text is not the "
                f"committed one of vLLM's own model. Expected {STOCK_ROWS.relative_to(ROOT)} to be of such a CPU: "
                "run `make bench-full` here first"
            )
        pair = [found["id"] for found in here["chosen"].values()]
        steps = {name: done["float32", name][i].logits[here["token"]] for name in MODELS}
        traced[clip.id] = {
            "generated": {name: tokenizer.decode(done["bfloat16", name][i].tokens) for name in MODELS},
            **here,
            "float32": {
                "text": tokenizer.decode(reference[i]),
                "same_tokens_as_the_reference": {name: tokens == reference[i] for name, tokens in exact.items()},
                # null where the token is none of the TOP, as float32 has another text from an earlier place on
                "gap": {
                    name: abs(step[pair[0]] - step[pair[1]]) if step.keys() >= {*pair} else None
                    for name, step in steps.items()
                },
            },
        }
    return traced


def near_tie(different: dict[str, Any]) -> bool:
    """Whether a clip's two texts come from one near-tie, and the texts are those that were served."""
    return (
        min(different["gap_in_units"].values()) <= NEAR_UNITS
        and all(different["float32"]["same_tokens_as_the_reference"].values())
        and all(different[name].strip() == different["generated"][name].strip() for name in MODELS)
    )


def compare(config: Path, samples: int | None, scratch: Path) -> dict[str, Any]:
    """What the JSON file holds; `different` lists the clips whose texts are not the same, character for character."""
    clips = dataset.select(dataset.load(ROOT / "bench/data")[0], samples, seed=0)
    options = yaml.safe_load(config.read_text()) | {"hf_overrides": {"architectures": [MODELS["encode_once"]]}}
    own, port = scratch / "encode_once.yaml", engine.free_port()
    own.write_text(yaml.safe_dump(options))
    with engine.served(own, huggingface.PICO, port, scratch / "server.log"):
        rows, server_version = transcribe(f"http://127.0.0.1:{port}", clips)
    stock = {row.id: row.text for row in results.read_rows(STOCK_ROWS)}
    parted = [row for row in rows if row.text is not None and row.text != stock[row.id]]
    # The share of RAM that has to be free at the start; the server that was there may not have given it back yet.
    named = options | {"model": str(huggingface.PICO), "gpu_memory_utilization": 0.3}
    traced = trace(named, [clip for clip in clips if clip.id in {row.id for row in parted}]) if parted else {}
    different = [{"id": row.id, "stock": stock[row.id], "encode_once": row.text, **traced[row.id]} for row in parted]
    return {
        "config": options,
        "environment": environment.describe(server_version) | {"served_by": environment.versions(LIBRARIES)},
        "clips": len(clips),
        "failed": [row.id for row in rows if row.error],
        "wer": metrics.wer(rows)["value"],
        "identical": sum(row.text == stock[row.id] for row in rows),
        "different": [each | {"near_tie": near_tie(each)} for each in different],
        "texts": {row.id: row.text for row in rows},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "vllm_config.yaml", help="the vLLM config of both")
    parser.add_argument("--samples", type=int, help="clips, at most and by default all 500")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    flags = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            outcome = compare(flags.config, flags.samples, Path(scratch))
        except BenchError as error:
            sys.exit(f"error: {error}")
    results.write_json(flags.out, outcome)
    print(f"{outcome['identical']} of {outcome['clips']} texts identical: {flags.out}")
    for each in outcome["different"]:
        print(f"{each['id']}: token {each['token']}, gap in bfloat16 units {each['gap_in_units']}: {each['near_tie']}")
    ties = [each["near_tie"] for each in outcome["different"]]
    if outcome["failed"] or len(ties) > MOST_DIFFERENT or not all(ties):
        sys.exit(1)


if __name__ == "__main__":
    main()
