"""Uploads at several delays, to a server that is up: `python -m bench delays`.

    python -m bench delays --url http://127.0.0.1:8000 --out delays.json

Each clip is sent once at each delay (`target_streaming_delay_ms`), one after the other, the delays in turn: what drifts
does so for all. Latency is the client's, as in `bench run`; tokens are vLLM's counts of prompts and of texts.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import BenchError, dataset, environment, metrics, results
from bench.answers import Row
from bench.client import Client, clean_url
from bench.dataset import Clip
from bench.plan import OWN_DATA
from bench.prometheus import total

OUT = "bench/results/pico-delays.json"
DELAYS_MS = (480, 960, 2400)
TIMEOUT_S = 600
COUNTS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def main(words: Sequence[str]) -> int:
    """Run a command line (without `delays`) and return the exit status: 0, or 2 for an error."""
    flags = parse(words)
    try:
        clips = dataset.select(dataset.load(flags.dataset).clips, flags.samples, seed=0)
        content = measure(Client(clean_url(flags.url), TIMEOUT_S), clips, flags.delays)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results.write_json(flags.out, content)
    print(table(content))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench delays", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="base URL of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--dataset", default=OWN_DATA, help="clips, as `bench run` takes them")
    parser.add_argument("--samples", type=int, help="number of clips (default: all)")
    parser.add_argument("--delays", type=int, nargs="+", default=DELAYS_MS, metavar="MS", help="in milliseconds")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the figures")
    return parser.parse_args(words)


def measure(client: Client, clips: Sequence[Clip], delays_ms: Sequence[int]) -> dict[str, Any]:
    """A row of figures for each delay. Raises BenchError for a request that fails, and for a server that does not count
    its tokens or has one delay for all."""
    client.model = client.get("/v1/models")["data"][0]["id"]
    rows: dict[int, list[Row]] = {delay_ms: [] for delay_ms in delays_ms}
    tokens = dict.fromkeys(delays_ms, 0.0)
    for delay_ms in delays_ms:  # not measured
        client.transcribe(clips[0], 1, target_streaming_delay_ms=str(delay_ms))
    for clip in clips:
        for delay_ms in delays_ms:
            before = _counted(client)
            row = client.transcribe(clip, 1, target_streaming_delay_ms=str(delay_ms))
            if row.error is not None:
                raise BenchError(f"{clip.id} at {delay_ms} ms: {row.error}")
            rows[delay_ms].append(row)
            tokens[delay_ms] += _counted(client) - before
    if len({*tokens.values()}) < len(delays_ms):
        raise BenchError(f"the delays take {tokens} tokens: expected more for a longer one. The server has one delay")
    return {
        "schema_version": 1,
        "machine": environment.describe((client.get("/version") or {}).get("version")),
        "clips": len(clips),
        "audio_s": sum(clip.duration_s for clip in clips),
        "rows": [_figures(delay_ms, rows[delay_ms], tokens[delay_ms]) for delay_ms in delays_ms],
    }


def _counted(client: Client) -> float:
    found = total(client.get_text("/metrics") or "", *COUNTS)
    if found is None:
        raise BenchError(f"{client.url}/metrics has no {COUNTS[0]}")
    return found


def _figures(delay_ms: int, rows: Sequence[Row], tokens: float) -> dict[str, Any]:
    wer, latency = metrics.wer(rows), metrics.latency(rows)
    names = ("p50", "p95", "mean")
    return {
        "delay_ms": delay_ms,
        **{"wer": wer["value"], "ci95": wer["ci95"], "words": wer["words"], "tokens": tokens / len(rows)},
        "latency_ms": {name: latency[name] for name in names},
    }


def table(content: dict[str, Any]) -> str:
    """The figures as a table of Markdown."""
    lines = ["| delay | WER | 95 % interval | tokens a clip | P50 ms | P95 ms |", "|---|---|---|---|---|---|"]
    for row in content["rows"]:
        low, high = row["ci95"]
        cells = (f"{row['delay_ms']:,} ms", f"{row['wer']:.2%}", f"{low:.2%} to {high:.2%}", f"{row['tokens']:.0f}")
        times = (f"{row['latency_ms'][name]:.0f}" for name in ("p50", "p95"))
        lines.append(f"| {' | '.join((*cells, *times))} |")
    machine = content["machine"]
    where = ", ".join(machine["gpu"] or [f"{machine['cores']} cores of {machine['cpu']}"])
    audio = f"{content['clips']} clips of {content['audio_s'] / content['clips']:.1f} s on average, one at a time"
    return "\n".join(lines) + f"\n\n{audio}; {where}, vLLM {machine['server_version']} (`{OUT}`)."
