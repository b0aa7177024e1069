"""The configurations that `bench gpu` serves, the rows of its report, and the figures of uploads. It runs nothing.

contest     vllm_config.yaml: stock vLLM, eager, one request at a time
stock-full  the same with full CUDA graphs and 64 sequences, which vLLM 0.20.0 does not support
fast        profiles/fast.yaml, whose drafts are accepted at the rates of pico's drafter
fast-plain  the same without drafts
throughput, throughput-plain  the same of profiles/throughput.yaml
useless     profiles/throughput.yaml, whose weights decide on the drafts: those of a random drafter are all wrong
realtime    profiles/realtime.yaml
long        profiles/long.yaml
pico        profiles/fast.yaml with pico, the tiny trained model, and its own drafter: its weights decide on the drafts
FILE.yaml   any other config file, whose server is up alone
NAME:KEY=VALUE  any of these with a change of its config. VALUE is YAML; null means vLLM's default. Separate several
            changes with colons. With gpu_memory_utilization, the size of the KV cache is not set
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench import BenchError
from bench.answers import Row
from bench.gpu.plan import Item, Sessions, Uploads
from bench.measure import spread
from bench.metrics import server_ms
from mistral_layout.audio import PROMPT_TOKENS, n_tokens

ROOT = Path(__file__).resolve().parents[2]
CONTEST = "vllm_config.yaml"
PICO = "pico/checkpoint"
HEAD = ROOT / PICO / "draft/head.safetensors"  # pico's drafter (pico/README.md)
RANDOM = "random weights"  # the checkpoint that bench/gpu/report.py makes
GRAPHS = {
    "enforce_eager": False,
    "max_num_seqs": 64,
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
}
PLAIN: dict[str, Any] = {"speculative_config": None}


# vLLM's counters: steps of a request with drafts, their drafts, and those that were accepted
GENERATED = "generation_tokens"
DRAFTED, DRAFTS, ACCEPTED = (f"spec_decode_num_{what}" for what in ("drafts", "draft_tokens", "accepted_tokens"))


@dataclass(frozen=True)
class Served:
    """What a name of a server stands for.

    file        its config
    gib         size of its KV cache; null for the config's share of the GPU. Without a fixed size, it would take all
                memory that the earlier servers left. The stock model needs about 3 MB per token, the fast path 0.1 MB
    changes     what differs from the config
    real        its weights decide which drafts are accepted
    cache       the server whose compiled code is its own, too; empty for none
    checkpoint  RANDOM or PICO
    """

    file: str
    gib: float | None
    changes: Mapping[str, Any] = field(default_factory=dict)
    real: bool = False
    cache: str = ""
    checkpoint: str = RANDOM


FAST, THROUGHPUT, REALTIME = (f"profiles/{name}.yaml" for name in ("fast", "throughput", "realtime"))
SERVERS = {
    "contest": Served(CONTEST, 2),
    "stock-full": Served(CONTEST, 40, GRAPHS),
    "fast": Served(FAST, 4),
    "fast-plain": Served(FAST, 4, PLAIN),
    "throughput": Served(THROUGHPUT, 7),
    "throughput-plain": Served(THROUGHPUT, 7, PLAIN),
    "useless": Served(THROUGHPUT, 7, real=True, cache="throughput"),
    "realtime": Served(REALTIME, 60),
    "long": Served("profiles/long.yaml", 8),
    "pico": Served(FAST, 1, real=True, checkpoint=PICO),
}
# As tables call the servers
TITLES = {
    "contest": "the contest's `vllm_config.yaml` (stock, eager)",
    "stock-full": "stock, full CUDA graphs",
    "fast": "`profiles/fast.yaml`",
    "fast-plain": "`profiles/fast.yaml` without drafts",
    "throughput": "`profiles/throughput.yaml`",
    "throughput-plain": "`profiles/throughput.yaml` without drafts",
    "useless": "`profiles/throughput.yaml` with a random drafter",
    "realtime": "`profiles/realtime.yaml`",
    "pico": "pico with its drafter",
}
SHARE = "gpu_memory_utilization"
FILL_GIB = 2  # of KV cache, for a start that only fills the caches: vLLM compiles the same code for any size
WEIGHTS_BYTES = {RANDOM: 8_900_000_000, PICO: 20_000_000}
OTHER_BYTES = {True: 2_000_000_000, False: 4_500_000_000}  # eager or not: activations, CUDA graphs, the CUDA context
SESSION_BYTES = 197 * 2**20  # of each of max_live_sessions: profiles/realtime.yaml
# What `bench gpu report` measures, in this order; the seconds are what a row took on an H200 or may take. P95 of 20
# clips is the slowest but one. The contest's row is the last: the least that the other figures need, and slow.
REPORT: tuple[Item, ...] = (
    *(Uploads("fast-plain", 1, 20, 15), Uploads("fast-plain", 16, 192, 12), Uploads("fast-plain", 64, 768, 18)),
    *(Uploads("fast", 1, 60, 12), Uploads("fast", 16, 384, 12), Uploads("fast", 64, 768, 15)),
    *(Uploads("throughput-plain", 1, 20, 15), Uploads("throughput-plain", 16, 192, 12)),
    *(Uploads("throughput-plain", 64, 768, 18), Uploads("throughput-plain", 128, 1536, 25)),
    Uploads("throughput-plain", 256, 2560, 35),
    *(Uploads("throughput", 128, 1536, 20), Uploads("throughput", 256, 2560, 30)),
    *(Uploads("useless", 1, 20, 15), Uploads("useless", 16, 192, 12), Uploads("useless", 64, 768, 18)),
    Uploads("useless", 256, 2560, 35),
    *(Sessions("realtime", 64, 20, 30), Sessions("realtime", 150)),
    *(Uploads("pico", 1, 60, 10), Uploads("pico", 64, 768, 12)),
    *(Uploads("stock-full", 1, 20, 25), Uploads("stock-full", 64, 320, 30)),
    Uploads("contest", 1, 4, 50),
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


def served(server: str) -> Served:
    """What the name of a server stands for, without the changes in it. Raises BenchError."""
    base = server.partition(":")[0]
    if base.endswith((".yaml", ".yml")):
        return Served(base, None)
    if base not in SERVERS:
        raise BenchError(f"{base!r} is not a known server: expected one of {', '.join(SERVERS)}, or a YAML file")
    return SERVERS[base]


def cache_of(server: str) -> str:
    """The name of the server whose caches this one uses: its own name, or that of one with the same compiled code."""
    return server if ":" in server else served(server).cache or server


def _file(server: str) -> Path:
    file = served(server).file
    return Path(file) if server.partition(":")[0] == file else ROOT / file


def _profile(server: str) -> dict[str, Any]:
    file = _file(server)
    try:
        content: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {file} ({error.strerror}), the config of the server {server!r}") from None
    return content


def head_rates(path: Path, drafts: int) -> list[float]:
    """The share of the steps in which the drafts 1 to j of the drafter at `path` were right, for j from 1 to `drafts`.

    Only the header of the file is read (https://huggingface.co/docs/safetensors). Raises BenchError.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
        survival = json.loads(header["__metadata__"]["facts"])["survival"]
    except OSError as error:
        raise BenchError(f"cannot read {path} ({error.strerror}): make it with `voxtral-serve draft train`") from None
    except (KeyError, TypeError, ValueError):
        raise BenchError(f"{path} is not a drafter: make it with `voxtral-serve draft train`") from None
    if len(survival) < drafts:
        raise BenchError(f"{path} has rates of {len(survival)} drafts: expected {drafts} or more")
    return [float(rate) for rate in survival[:drafts]]


def _synthetic(server: str, speculative: Mapping[str, Any], acceptance: Sequence[float] | None) -> dict[str, Any]:
    """The drafts of a config, with the rates at which vLLM's rejection sampling accepts them.

    Random weights repeat one token, so all drafts or none would be accepted. vLLM takes the rates of the first drafts
    where it drafts fewer of them. `acceptance` is null for the rates of the server, empty for the weights' own.
    """
    rates = list(acceptance or ())
    if acceptance is None and not served(server).real:
        rates = head_rates(HEAD, int(speculative["num_speculative_tokens"]))
    if not rates:
        return dict(speculative)
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {**speculative, "num_speculative_tokens": len(rates), **synthetic}


def config(
    server: str,
    kv_gib: float | None = None,
    acceptance: Sequence[float] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The vLLM config of a server: its file with the changes of its name and of this benchmark. Raises BenchError.

    `acceptance` is the share of the steps in which the drafts up to each position are accepted: null for that of the
    server's drafter, empty if the weights decide. `changes` come last.
    """
    source = served(server)
    content = _profile(server) | dict(source.changes) | {"model": ".", "served_model_name": "voxtral"}
    own = _changes(server) | dict(changes or {})
    gib = source.gib if kv_gib is None else kv_gib
    if gib is not None and SHARE not in own:
        # If the size of the cache is given, vLLM only checks that this share of the GPU is free.
        content |= {"kv_cache_memory_bytes": int(gib * 2**30), SHARE: 0.04}
    content |= own
    if content.get("speculative_config"):
        content["speculative_config"] = _synthetic(server, content["speculative_config"], acceptance)
    return {key: value for key, value in content.items() if value is not None}


def filling(content: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a start that only fills the caches: with less KV cache, so that more servers start at a time."""
    size = content.get("kv_cache_memory_bytes", 0)
    return {**content, "kv_cache_memory_bytes": min(size, FILL_GIB * 2**30)} if size else dict(content)


def described(server: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says of a configuration: its checkpoint and profile, what differs, and the whole config."""
    profile = _profile(server)
    differing = [key for key in profile | dict(content) if profile.get(key) != content.get(key)]
    name = _file(server)
    return {
        "checkpoint": served(server).checkpoint,
        "profile": str(name.relative_to(ROOT)) if name.is_relative_to(ROOT) else name.name,
        "changes": {key: content.get(key) for key in differing},
        "config": dict(content),
    }


def memory_of(server: str, content: Mapping[str, Any]) -> int | None:
    """Bytes of GPU memory that a server takes, about; null if its config has a share of the GPU instead of a size."""
    if "kv_cache_memory_bytes" not in content:
        return None
    sessions = (content.get("additional_config") or {}).get("max_live_sessions", 0)
    eager = bool(content.get("enforce_eager"))
    weights = WEIGHTS_BYTES[served(server).checkpoint]
    return int(weights + OTHER_BYTES[eager] + content["kv_cache_memory_bytes"] + sessions * SESSION_BYTES)


def acceptance_of(content: Mapping[str, Any]) -> list[float] | None:
    """The acceptance rates of drafts in the config, by position; null if the weights decide."""
    return (content.get("speculative_config") or {}).get("synthetic_acceptance_rates")


# ---- Figures


def drafts(counted: Mapping[str, float]) -> dict[str, Any]:
    """The figures of drafts, of what vLLM's counters have gained; null without drafts.

    `draft_steps`: steps with drafts, of all requests. `accepted_drafts`: accepted ones / drafts. `tokens_per_step`: of
    a request, in a step with drafts. `survival`: share of these steps that accepted the drafts up to each position.
    The drafts after a clip's last token count, too.
    """
    steps = counted.get(DRAFTED)
    if not steps:
        return {**dict.fromkeys(("accepted_drafts", "tokens_per_step", "survival")), "draft_steps": steps}
    places = itertools.takewhile(counted.__contains__, (f"{ACCEPTED} {place}" for place in itertools.count()))
    accepted = counted.get(ACCEPTED, 0.0)
    return {
        "accepted_drafts": accepted / counted[DRAFTS] if counted.get(DRAFTS) else None,
        "tokens_per_step": 1 + accepted / steps,
        "survival": [counted[place] / steps for place in places],
        "draft_steps": steps,
    }


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
    `server_ms`: P50 of each stage of the server, if it says them (Server-Timing).
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
        "server_ms": server_ms(done),
    }
