"""Rows of gpu.json: their configurations, tokens, figures and ratios. This module runs nothing.

stock-eager      vllm_config.yaml, as in the contest
stock-piecewise  the same with piecewise CUDA graphs and 64 sequences
stock-full       the same with full decode graphs, which vLLM 0.20.0 does not support
stock-vram       vllm_config.yaml with the smallest KV cache with which it starts
fast             profiles/fast.yaml
fast-spec        profiles/fast-spec.yaml
fast-spec-0.20.0 profiles/fast-spec-0.20.0.yaml
fast-vram        fast with a context of 512, one sequence, and the smallest KV cache with which it starts
fast-fp8         profiles/fast-fp8.yaml
fast-piecewise   fast, with a graph between each two attentions for the steps that begin a clip
throughput       profiles/throughput.yaml
throughput-spec  profiles/throughput-spec.yaml
NAME-Ns          any of these with clips of N seconds, such as fast-10s, on the server of NAME
long-N           profiles/long.yaml with clips of N minutes, such as long-10; all long rows share one server
NAME:KEY=VALUE   any of these with a change of its config. VALUE is YAML; null means vLLM's default. Separate several
                 changes with colons. With gpu_memory_utilization, the size of the KV cache is not set: add --alone
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError
from bench.answers import Row
from mistral_layout.audio import PROMPT_TOKENS, n_tokens

ROOT = Path(__file__).resolve().parents[2]
CONTEST = "vllm_config.yaml"
SEQUENCES = 64
# The CUDA graphs of fast.yaml that one sequence needs
ONE_SEQUENCE = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1], "compile_sizes": [1]}
# The CUDA graphs of fast.yaml until November 2026
PIECEWISE = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 104, 128, 192, 256, 384, 512],
    "compile_sizes": [1],
}
# Name -> file, GiB of KV cache, changes of the file. Without a fixed size, the KV cache would take all memory that the
# earlier servers left. The stock model needs about 3 MB of KV cache per token, the fast path 0.1 MB.
SERVERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "stock-eager": (CONTEST, 2, {}),
    "stock-piecewise": (CONTEST, 40, {"enforce_eager": False, "max_num_seqs": SEQUENCES}),
    "stock-full": (
        CONTEST,
        40,
        {
            "enforce_eager": False,
            "max_num_seqs": SEQUENCES,
            "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        },
    ),
    "stock-vram": (CONTEST, 2, {}),
    "fast": ("profiles/fast.yaml", 6, {}),
    "fast-spec": ("profiles/fast-spec.yaml", 6, {}),
    "fast-spec-0.20.0": ("profiles/fast-spec-0.20.0.yaml", 6, {}),
    "fast-vram": (
        "profiles/fast.yaml",
        0.0625,
        {"max_model_len": 512, "max_num_seqs": 1, "max_num_batched_tokens": 512, "compilation_config": ONE_SEQUENCE},
    ),
    "fast-fp8": ("profiles/fast-fp8.yaml", 6, {}),
    "fast-piecewise": ("profiles/fast.yaml", 6, {"compilation_config": PIECEWISE}),
    "throughput": ("profiles/throughput.yaml", 10, {}),
    "throughput-spec": ("profiles/throughput-spec.yaml", 10, {}),
    "long": ("profiles/long.yaml", 8, {}),
}
LONG = re.compile(r"long-(\d+)$")
LENGTH = re.compile(r"-(\d+)s$")
SHARE = "gpu_memory_utilization"

# Figures that are compared -> whether higher is better
COMPARED = {"p50_ms": False, "p90_ms": False, "p95_ms": False, "rtfx": True, "joules_per_audio_second": False}


def tokens(samples: int) -> int:
    """Number of tokens that are generated for a clip of `samples` at 16 kHz: N - P + 1.

    N is the number of audio tokens with mistral-common's padding, as vLLM counts them. P is the number of prompt
    positions. Position P - 1 gives the first token.
    """
    return n_tokens(samples) - PROMPT_TOKENS + 1


# ---- Configurations


def length_of(name: str) -> int | None:
    """Seconds of each clip of a row; null if they have the lengths of the dataset, or minutes (`server_of`)."""
    match = LENGTH.search(name.partition(":")[0])
    return int(match[1]) if match else None


def server_of(name: str) -> tuple[str, int | None]:
    """(server of a row, minutes of its clips). The minutes are null for the clips of the dataset. Raises BenchError."""
    base, colon, changes = name.partition(":")
    _changes(name)
    base = LENGTH.sub("", base)
    if match := LONG.match(base):
        return "long" + colon + changes, int(match[1])
    if base not in SERVERS or base == "long":
        known = ", ".join([*(known for known in SERVERS if known != "long"), "long-MINUTES"])
        raise BenchError(f"--rows: {base!r} is not a known row: expected one of {known}, NAME-10s or NAME:KEY=VALUE")
    return base + colon + changes, None


def _changes(name: str) -> dict[str, Any]:
    """The changes of the config in the name of a row. Raises BenchError."""
    changes = {}
    for word in name.split(":")[1:]:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise BenchError(f"--rows: {word!r} in {name!r}: expected KEY=VALUE, such as max_num_seqs=256")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise BenchError(f"--rows: {value!r} in {name!r} is not valid YAML") from None
    return changes


def needs_alone(server: str) -> bool:
    """Whether the server takes a share of the GPU. vLLM subtracts the memory of other servers from this share."""
    return SHARE in _changes(server)


def config(
    server: str,
    directory: Path = ROOT,
    kv_gib: float | None = None,
    acceptance: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The vLLM config of a server: its file with the changes of its name and of this benchmark. Raises BenchError.

    `acceptance` is the share of accepted drafts at each position, for vLLM's synthetic rejection sampling. Random
    weights repeat one token, so all drafts would be accepted.
    """
    file, gib, differences = SERVERS[server.partition(":")[0]]
    try:
        content = yaml.safe_load((directory / file).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {file} ({error.strerror}), the config of the row {server!r}") from None
    content |= differences
    if "speculative_config" in content:
        content["speculative_config"] = drafts = dict(content["speculative_config"])
        if acceptance:
            rates = {"synthetic_acceptance_rates": list(acceptance)}
            drafts |= {"rejection_sample_method": "synthetic", "num_speculative_tokens": len(acceptance), **rates}
    content |= {"model": ".", "served_model_name": "voxtral"}
    # If the size of the cache is given, vLLM only checks that this share of the GPU is free.
    content |= {"kv_cache_memory_bytes": int((gib if kv_gib is None else kv_gib) * 2**30), SHARE: 0.04}
    if needs_alone(server):
        del content["kv_cache_memory_bytes"]
    content |= _changes(server)
    return {key: value for key, value in content.items() if value is not None}


def acceptance_of(content: Mapping[str, Any]) -> list[float] | None:
    """The acceptance rates of drafts in the config, by position; null if the weights decide."""
    return (content.get("speculative_config") or {}).get("synthetic_acceptance_rates")


# ---- Figures


def figures(
    answers: Sequence[Row], clip_tokens: Mapping[str, int], counted: float | None, joules: float | None
) -> dict[str, Any]:
    """The figures of one configuration at one concurrency; null if not measured.

    `p50_ms`, `p90_ms`, `p95_ms`: latency of the completed requests, by linear interpolation.
    `tokens`: generated tokens. `tokens_by` is their source: the server's counter (`counted`), or the length of the
    completed clips if there is no counter or a request failed.
    `ms_per_token`: sum of the latencies of the completed requests / `tokens`. At concurrency 1, this is the time per
    token including upload, encoder and HTTP. Above, it is the time that a request waits for each of its tokens.
    `rtfx`: seconds of completed audio / `wall_s`, the time from the start of the first request to the end of the last.
    `joules_per_audio_second`: energy of the whole GPU in this time, including idle power, / seconds of audio.
    """
    done = [row for row in answers if row.error is None and row.latency_ms is not None]
    latencies = [row.latency_ms for row in done if row.latency_ms is not None]
    p50, p90, p95 = np.percentile(latencies, (50, 90, 95)).tolist() if done else (None, None, None)
    audio_s = sum(row.duration_s for row in done)
    wall_s = max(row.end for row in answers) - min(row.start for row in answers)
    by_server = bool(counted) and len(done) == len(answers)
    made = round(counted or 0) if by_server else sum(clip_tokens[row.id] for row in done)
    return {
        "clips": len(answers),
        "failed": len(answers) - len(done),
        "errors": sorted({row.error[:300] for row in answers if row.error is not None})[:5],
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "ms_per_token": sum(latencies) / made if made else None,
        "rtfx": audio_s / wall_s if audio_s and wall_s else None,
        "joules_per_audio_second": joules / audio_s if joules is not None and audio_s else None,
        "tokens": made,
        "tokens_by": "server" if by_server else "clip length",
        "tokens_expected": sum(clip_tokens[row.id] for row in answers),
        "audio_s": round(audio_s, 3),
        "wall_s": wall_s,
    }


# ---- Files


def key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(row["vllm"]), str(row["name"]), int(row["concurrency"])


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several files and compute the ratios. Of rows with equal name, vLLM and concurrency, the last is kept."""
    runs: list[dict[str, Any]] = []
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for part in parts:
        rows |= {key(row): {**row, "run": row["run"] + len(runs)} for row in part["rows"]}
        runs += part["runs"]
    # Runs without remaining rows are removed, unless they have the reason why a server has no row.
    measured = {(row["vllm"], server_of(row["name"])[0]) for row in rows.values()}
    lacking = {
        n for n, run in enumerate(runs) for server in run["not_measured"] if (run["vllm"], server) not in measured
    }
    used = sorted({row["run"] for row in rows.values()} | lacking)
    kept = [{**row, "run": used.index(row["run"])} for row in rows.values()]
    hashes = {row["config_sha256"] for row in kept}
    configs = {sha: text for part in parts for sha, text in part["configs"].items() if sha in hashes}
    return {
        "schema_version": 1,
        "runs": [runs[number] for number in used],
        "configs": configs,
        "rows": kept,
        "ratios": ratios(kept),
    }


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of each fast row to stock-eager and to the best stock row, for each figure in COMPARED.

    Rows are compared at the same vLLM and concurrency. A ratio above 1 means that the fast row is better, also for
    joules and milliseconds. `best` has the stock row that is best in each figure. Rows with failures are left out, and
    rows with changes or a length of clips in their names, because they may serve other weights or other clips.
    """
    whole = [
        row
        for row in rows
        if row["failed"] == 0
        and "-vram" not in row["name"]
        and ":" not in row["name"]
        and length_of(row["name"]) is None
    ]
    found = []
    for row in whole:
        peers = [other for other in whole if key(other)[::2] == key(row)[::2] and other["name"].startswith("stock-")]
        if not row["name"].startswith("fast") or not peers:
            continue
        eager = [other for other in peers if other["name"] == "stock-eager"]
        for against, stock in (("stock-eager", eager), ("best stock", peers)):
            if stock:
                ratio: dict[str, Any] = {name: row[name] for name in ("name", "vllm", "concurrency", "acceptance")}
                ratio |= {"against": against, "best": {}}
                for figure, more in COMPARED.items():
                    ratio[figure], ratio["best"][figure] = _ratio(row, stock, figure, more)
                found.append(ratio)
    return found


def _ratio(
    row: Mapping[str, Any], stock: Sequence[Mapping[str, Any]], figure: str, more: bool
) -> tuple[float | None, str | None]:
    known = [other for other in stock if other[figure]]
    if not known or not row[figure]:
        return None, None
    best = (max if more else min)(known, key=lambda other: other[figure])
    return (row[figure] / best[figure] if more else best[figure] / row[figure]), best["name"]


def table(outcome: Mapping[str, Any]) -> str:
    """Rows and ratios as text tables."""

    def line(cells: Sequence[Any], widths: Sequence[int]) -> str:
        shown = (f"{cell:.2f}" if isinstance(cell, float) else "-" if cell is None else str(cell) for cell in cells)
        return "  ".join(f"{cell:>{width}}" for cell, width in zip(shown, widths, strict=True))

    wide = (8, max(24, *(len(row["name"]) for row in outcome["rows"]), 0), 4, 5, 6, 10, 10, 10, 8, 8, 8, 8, 7)
    heads = ("p50_ms", "p90_ms", "p95_ms", "ms_per_token", "rtfx", "joules_per_audio_second")
    titles = ("vllm", "name", "conc", "clips", "failed", *heads[:3], "ms/token", "rtfx", "J/s", "GB", "start s")
    lines = [line(titles, wide)]
    for row in outcome["rows"]:
        memory = row["peak_vram_bytes"] and row["peak_vram_bytes"] / 1e9
        cells = [row[name] for name in ("vllm", "name", "concurrency", "clips", "failed", *heads)]
        lines.append(line([*cells, memory, row["start_s"]], wide))
    narrow = (8, 24, 4, 12, 8, 8, 8, 8, 8)
    lines += ["", line(("vllm", "times better", "conc", "than", "p50", "p90", "p95", "rtfx", "J/s"), narrow)]
    for ratio in outcome["ratios"]:
        lines.append(line([ratio[name] for name in ("vllm", "name", "concurrency", "against", *COMPARED)], narrow))
    return "\n".join(lines)
