"""How fast is the engine without its server? The clips of bench.gpu through vLLM's engine, in one process.

    python -m tools.engine_alone --row fast --out results/engine-alone.json

All clips are in the engine before the clock starts: read, resampled and with their features. As many run at a time as
the row's config allows (max_num_seqs), so the figures are those of that many requests in flight at a server, without
HTTP, the guard and the API processes. The engine's own output processing is in them. The file keeps the other rows that
it has.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import BenchError, environment, results
from bench.dataset import Clip
from bench.gpu import checkpoint, rows, servers
from bench.gpu.run import LIBRARIES
from bench.gpu.tasks import decoded, tasks_of

# Options of the server, not of the engine
OF_SERVER = {"api_server_count", "disable_uvicorn_access_log", "middleware", "served_model_name", "shutdown_timeout"}


def prompt_of(instruct: Any, clip: Clip) -> dict[str, Any]:
    """The prompt that the server makes of an uploaded clip."""
    import soundfile
    from mistral_common.tokens.tokenizers.audio import Audio

    samples, rate = soundfile.read(clip.path, dtype="float32")
    encoded = instruct.audio_encoder.encode_audio(Audio(samples, rate, format="wav"))
    audio = {"audio": (encoded.audio.audio_array, rate)}
    return {"prompt_token_ids": [*instruct.start(), *encoded.tokens], "multi_modal_data": audio}


def run_all(engine: Any, prompts: Sequence[dict[str, Any]], lengths: Sequence[int], prefix: str) -> tuple[float, int]:
    """Run all prompts to their lengths. Returns (seconds, tokens). The time of adding them is not in it."""
    from vllm import SamplingParams

    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add_request(f"{prefix}{number}", prompt, SamplingParams(temperature=0, max_tokens=length))
    tokens, begun = 0, time.monotonic()
    while engine.has_unfinished_requests():
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
    return time.monotonic() - begun, tokens


def measure(row: str, count: int, model: Path, scratch: Path) -> dict[str, Any]:
    """The figures of one row, without its version and its run. Raises BenchError for a row that does not exist."""
    from vllm import LLM

    config = rows.config(row)
    most = config["max_num_seqs"]
    (task,) = decoded(tasks_of([row], {most: count}, {row: config}), scratch / "clips")
    options = {key: value for key, value in config.items() if key not in OF_SERVER}
    llm = LLM(**(options | {"model": str(model)}))
    tokenizer: Any = llm.get_tokenizer()
    engine = llm.llm_engine
    for clips, prefix in ((task.warm_up, "warm-up-"), (task.clips, "")):
        prompts = [prompt_of(tokenizer.instruct, clip) for clip in clips]
        seconds, tokens = run_all(engine, prompts, [clip.extra["tokens"] for clip in clips], prefix)
    audio_s = sum(clip.duration_s for clip in task.clips)
    return {
        "name": row,
        "concurrency": most,
        "clips": len(task.clips),
        "rtfx": audio_s / seconds,
        "tokens": tokens,
        "tokens_expected": sum(clip.extra["tokens"] for clip in task.clips),
        "audio_s": round(audio_s, 3),
        "wall_s": seconds,
        "config": json.dumps(config, sort_keys=True),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.engine_alone", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--row", required=True, help="row of bench.gpu")
    add("--clips", type=int, default=384, metavar="N", help="clips to measure (default: %(default)s)")
    add("--model", type=Path, metavar="DIR", help="checkpoint (default: random weights of full size)")
    add("--out", type=Path, required=True, metavar="FILE", help="JSON file to write; existing rows are kept")
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = parser.parse_args(words)
    os.environ.update(servers.variables() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = flags.model
            if model is None:
                checkpoint.write(model := Path(directory, "checkpoint"))
            row = measure(flags.row, flags.clips, model, Path(directory))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    run = environment.describe(None, LIBRARIES)
    row |= {"vllm": run["libraries"]["vllm"], "run": run}
    run["command"] = shlex.join(["python", "-m", "tools.engine_alone", *words])
    kept: dict[str, Any] = (
        json.loads(flags.out.read_bytes()) if flags.out.exists() else {"schema_version": 1, "rows": []}
    )
    kept["rows"] = [each for each in kept["rows"] if rows.key(each) != rows.key(row)] + [row]
    results.write_json(flags.out, kept)
    print(f"{row['name']} alone with {row['concurrency']} at a time: {row['rtfx']:.0f} RTFx")
    return int(row["tokens"] != row["tokens_expected"])


if __name__ == "__main__":
    sys.exit(main())
