"""The configurations that `bench gpu` serves, the rows of its report, and the figures of uploads. It runs nothing.

contest     vllm_config.yaml: stock vLLM, eager, one request at a time
stock-full  the same with full CUDA graphs and 64 sequences, which vLLM 0.20.0 does not support
fast        profiles/fast.yaml
drafts      profiles/throughput.yaml with the speculative decoding that stands at its end
throughput  profiles/throughput.yaml
realtime    profiles/realtime.yaml
long        profiles/long.yaml
FILE.yaml   any other config file, whose server is up alone
NAME:KEY=VALUE  any of these with a change of its config. VALUE is YAML; null means vLLM's default. Separate several
            changes with colons. With gpu_memory_utilization, the size of the KV cache is not set
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError
from bench.answers import Row
from bench.gpu.plan import Item, Sessions, Start, Uploads
from bench.measure import spread
from mistral_layout.audio import PROMPT_TOKENS, n_tokens

ROOT = Path(__file__).resolve().parents[2]
CONTEST = "vllm_config.yaml"
GRAPHS = {
    "enforce_eager": False,
    "max_num_seqs": 64,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
}
DRAFTS = {
    "speculative_config": {
        "method": "ngram_gpu",
        "model": "voxtral_serve.drafter.PadDrafter",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 32, 5], [33, 128, 2], [129, 256, 1]],
    }
}
# Name -> file, GiB of KV cache, changes of the file. Without a fixed size, the KV cache would take all memory that the
# earlier servers left. The stock model needs about 3 MB of KV cache per token, the fast path 0.1 MB.
SERVERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "contest": (CONTEST, 2, {}),
    "stock-full": (CONTEST, 40, GRAPHS),
    "fast": ("profiles/fast.yaml", 4, {}),
    "drafts": ("profiles/throughput.yaml", 7, DRAFTS),
    "throughput": ("profiles/throughput.yaml", 7, {}),
    "realtime": ("profiles/realtime.yaml", 24, {}),
    "long": ("profiles/long.yaml", 8, {}),
}
ACCEPTANCE = (0.339, 0.269, 0.201, 0.144, 0.104)  # of pico's drafts, by position: bench/results/drafts-cpu.json
SHARE = "gpu_memory_utilization"
WEIGHTS_BYTES = 8_900_000_000
OTHER_BYTES = {True: 2_000_000_000, False: 4_500_000_000}  # eager or not: activations, CUDA graphs, the CUDA context
SESSION_BYTES = 208 * 2**20  # of each of max_live_sessions: profiles/realtime.yaml
# What `bench gpu report` measures. P95 of 20 clips is the slowest but one; contest's clips take 2.8 s each.
REPORT: tuple[Item, ...] = (
    Uploads("contest", 1, 8, 45),
    *(Uploads("stock-full", 1, 20, 30), Uploads("stock-full", 64, 320, 40)),
    *(Uploads("fast", 1, 20, 20), Uploads("fast", 16, 192, 20), Uploads("fast", 64, 768, 30)),
    *(Uploads("drafts", 1, 20, 20), Uploads("drafts", 16, 192, 20), Uploads("drafts", 64, 768, 30)),
    *(Uploads("drafts", 128, 1536, 40), Uploads("drafts", 256, 2560, 50)),
    *(Uploads("throughput", 128, 1536, 40), Uploads("throughput", 256, 2560, 50)),
    *(Sessions("realtime", 16), Sessions("realtime", 150)),
    Start("fast"),
)


def tokens(samples: int) -> int:
    """Number of tokens that are generated for a clip of `samples` at 16 kHz: N - P + 1.

    N is the number of audio tokens with mistral-common's padding, as vLLM counts them. P is the number of prompt
    positions. Position P - 1 gives the first token.
    """
    return n_tokens(samples) - PROMPT_TOKENS + 1


# ---- Configurations


def _changes(name: str) -> dict[str, Any]:
    """The changes of the config in the name of a server. Raises BenchError."""
    changes = {}
    for word in name.split(":")[1:]:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise BenchError(f"{word!r} in {name!r}: expected KEY=VALUE, such as max_num_seqs=256")
        try:
            changes[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise BenchError(f"{value!r} in {name!r} is not valid YAML") from None
    return changes


def _source(server: str) -> tuple[Path, float | None, dict[str, Any]]:
    """(file, GiB of KV cache or null, changes of the file) of a server. Raises BenchError."""
    base = server.partition(":")[0]
    if base.endswith((".yaml", ".yml")):
        return Path(base), None, {}
    if base not in SERVERS:
        raise BenchError(f"{base!r} is not a known server: expected one of {', '.join(SERVERS)}, or a YAML file")
    file, gib, changes = SERVERS[base]
    return ROOT / file, gib, changes


def _profile(server: str) -> dict[str, Any]:
    file, _, _ = _source(server)
    try:
        content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {file} ({error.strerror}), the config of the server {server!r}") from None
    return content


def config(
    server: str,
    kv_gib: float | None = None,
    acceptance: Sequence[float] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The vLLM config of a server: its file with the changes of its name and of this benchmark. Raises BenchError.

    `acceptance` is the share of accepted drafts at each position, for vLLM's synthetic rejection sampling. Random
    weights repeat one token, so all drafts would be accepted. `changes` come last.
    """
    _, gib, differences = _source(server)
    content = _profile(server) | differences
    if "speculative_config" in content:
        content["speculative_config"] = drafts = dict(content["speculative_config"])
        if acceptance:
            rates = {"synthetic_acceptance_rates": list(acceptance)}
            drafts |= {"rejection_sample_method": "synthetic", "num_speculative_tokens": len(acceptance), **rates}
    content |= {"model": ".", "served_model_name": "voxtral"}
    own = _changes(server) | dict(changes or {})
    gib = gib if kv_gib is None else kv_gib
    if gib is not None and SHARE not in own:
        # If the size of the cache is given, vLLM only checks that this share of the GPU is free.
        content |= {"kv_cache_memory_bytes": int(gib * 2**30), SHARE: 0.04}
    return {key: value for key, value in (content | own).items() if value is not None}


def described(server: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of a configuration: its profile, what differs from it, and the whole config."""
    profile = _profile(server)
    differing = [key for key in profile | dict(content) if profile.get(key) != content.get(key)]
    name = _source(server)[0]
    return {
        "profile": str(name.relative_to(ROOT)) if name.is_relative_to(ROOT) else name.name,
        "changes": {key: content.get(key) for key in differing},
        "config": dict(content),
    }


def memory_of(content: Mapping[str, Any]) -> int | None:
    """Bytes of GPU memory that a server takes, about; null if its config has a share of the GPU instead of a size."""
    if "kv_cache_memory_bytes" not in content:
        return None
    sessions = (content.get("additional_config") or {}).get("max_live_sessions", 0)
    eager = bool(content.get("enforce_eager"))
    return int(WEIGHTS_BYTES + OTHER_BYTES[eager] + content["kv_cache_memory_bytes"] + sessions * SESSION_BYTES)


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
    percentiles = spread.percentiles(latencies, (50, 90, 95)) or {}
    audio_s = sum(row.duration_s for row in done)
    wall_s = max(row.end for row in answers) - min(row.start for row in answers)
    by_server = bool(counted) and len(done) == len(answers)
    made = round(counted or 0) if by_server else sum(clip_tokens[row.id] for row in done)
    return {
        "clips": len(answers),
        "failed": len(answers) - len(done),
        "errors": sorted({row.error[:300] for row in answers if row.error is not None})[:5],
        "p50_ms": percentiles.get("p50"),
        "p90_ms": percentiles.get("p90"),
        "p95_ms": percentiles.get("p95"),
        "ms_per_token": sum(latencies) / made if made else None,
        "rtfx": audio_s / wall_s if audio_s and wall_s else None,
        "joules_per_audio_second": joules / audio_s if joules is not None and audio_s else None,
        "tokens": made,
        "tokens_by": "server" if by_server else "clip length",
        "tokens_expected": sum(clip_tokens[row.id] for row in answers),
        "audio_s": round(audio_s, 3),
        "wall_s": wall_s,
    }
