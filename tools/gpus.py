"""The tables of docs/pages/gpus.md: what fits on a GPU and how fast it can be, computed from the code and the results.

    python -m tools.gpus            write the tables
    python -m tools.gpus --check    exit status 1 if the page is stale

Memory is what `voxtral-serve check` computes, plus what the GPU's own runs measured beside it (`rest_bytes`). Time is
arithmetic: bytes by bandwidth, and operations by dense BF16 arithmetic, whichever takes longer.
"""

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped,unused-ignore]

from bench.gpu.checkpoint import PARAMS
from mistral_layout import tekken
from voxtral_serve import checkpoint
from voxtral_serve.check.clip import audio_config
from voxtral_serve.check.kv_cache import KvCache
from voxtral_serve.check.memory import MemoryNeeds
from voxtral_serve.check.options import read_options
from voxtral_serve.check.plan import Plan
from voxtral_serve.check.report import Report
from voxtral_serve.checkpoint.headers import Tensor
from voxtral_serve.engine.session import SessionShape

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/pages/gpus.md"
RESULTS = ROOT / "bench/results"
BLOCK = re.compile(r"(<!-- gpus (\w+): made by tools/gpus.py -->\n).*?(<!-- /gpus -->)", re.DOTALL)
CLIP_S = 10.6  # mean of the benchmark's clips
GPU_BLOCK = ("--block-size", "16")  # tokens; vLLM's default on NVIDIA GPUs
AGES_S = {"90 s": 90, "11 minutes and more": 660}
GIB, GB = 1 << 30, 1e9


class Gpu(NamedTuple):
    """By the maker's data sheet. Bytes; bytes a second; dense BF16 operations a second with float32 sums."""

    name: str
    memory: float
    bandwidth: float
    arithmetic: float


GPUS = (
    Gpu("L4", 24 * GB, 0.30e12, 121e12),
    Gpu("RTX 4090", 24 * GB, 1.008e12, 165e12),
    Gpu("A100, 40 GB", 40 * GB, 1.555e12, 312e12),
    Gpu("A100, 80 GB", 80 * GB, 2.039e12, 312e12),
    Gpu("H100, 80 GB", 80 * GB, 3.35e12, 989e12),
    Gpu("H200", 141 * GB, 4.8e12, 989e12),
)


@cache
def full_size() -> checkpoint.Checkpoint:
    """The published model's shapes, without files."""
    shapes = checkpoint.expected_shapes(PARAMS)
    tensors = {name: Tensor("BF16", tuple(shape), 2 * math.prod(shape), name) for name, shape in shapes.items()}
    audio = tekken.packaged(PARAMS["vocab_size"])["audio"]
    return checkpoint.Checkpoint(Path(), checkpoint.MISTRAL, PARAMS, audio, tensors)


class Sizes(NamedTuple):
    """What a configuration needs, in bytes."""

    needs: MemoryNeeds
    plan: Plan
    share: float  # gpu_memory_utilization
    token: float  # of the KV cache, for one token

    @classmethod
    def of(cls, config: Path, *words: str) -> "Sizes":
        report = Report()
        options = read_options(report, config, (*words, *GPU_BLOCK))
        if options is None or not options.valid:
            raise ValueError(f"{config}: {'; '.join(report.problems)}")
        held = full_size()
        plan = Plan.of(options.values, held)
        kv = KvCache.of(held.params, plan, True, options.encode_once)
        needs = MemoryNeeds.of(options, held, plan, kv)
        return cls(needs, plan, options.values.gpu_memory_utilization, kv.block_bytes / 16)

    @property
    def session(self) -> float:
        """Of one live session, beside its KV cache: the encoder's ring and the ring of rows."""
        return (self.needs.sessions + self.row * self.ring) / (self.plan.sessions + 1) if self.plan.sessions else 0

    @property
    def row(self) -> float:
        return self.needs.audio_rows / self.plan.audio_rows

    @property
    def ring(self) -> int:
        """Rows of all rings of live sessions."""
        return (self.plan.sessions + 1) * min(self.plan.scheduler.max_num_batched_tokens, self.plan.max_model_len)


def shape() -> SessionShape:
    return SessionShape.of(audio_config(full_size().tekken))


def encoder_bytes() -> int:
    """Of the weights of the encoder and its projection."""
    own = ("whisper_encoder", "audio_language_projection")
    return sum(each.nbytes for name, each in full_size().tensors.items() if any(part in name for part in own))


def text_bytes() -> int:
    return sum(each.nbytes for each in full_size().tensors.values()) - encoder_bytes()


def encoder_window_bytes() -> int:
    """Keys and values that a step of a live session reads, of all layers of the encoder."""
    encoder = PARAMS["multimodal"]["whisper_model_args"]["encoder_args"]
    heads: int = encoder["n_layers"] * encoder["n_heads"] * encoder["head_dim"]
    return 2 * 2 * heads * (encoder["sliding_window"] - 1)


def tokens_at(age_s: float) -> int:
    """Tokens in the KV cache of a live session of this age, at most the language model's window."""
    positions = shape().prompt + math.ceil(age_s * shape().rate_hz / shape().samples)
    return min(positions, PARAMS["sliding_window"])


def clip_tokens() -> tuple[int, int]:
    """(prompt, generated tokens) of a clip of CLIP_S."""
    rows = shape().total_rows(round(CLIP_S * shape().rate_hz))
    return shape().prompt, rows - shape().prompt + 1


@cache
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))
    return found


def measured(name: str, requests: int) -> dict[str, Any]:
    """The row of bench/results/gpu.json of vLLM 0.32.0."""
    rows = [
        row for row in results()["rows"] if (row["vllm"], row["name"], row["concurrency"]) == ("0.32.0", name, requests)
    ]
    return dict(rows[-1])


@cache
def rest_bytes() -> float:
    """Activations, CUDA graphs and CUDA itself, with 64 requests: the peak of a run less what is computed of it."""
    row = measured("fast", 64)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(results()["configs"][row["config_sha256"]], encoding="utf-8")
        text = config.read_text(encoding="utf-8")
        pool = int(re.search(r"kv_cache_memory_bytes: (\d+)", text)[1])  # type: ignore[index]
        sizes = Sizes.of(config)
    return float(row["peak_vram_bytes"] - sizes.needs.beside_kv - pool)


def room(gpu: Gpu, sizes: Sizes) -> float:
    """Bytes for the KV cache."""
    return gpu.memory * sizes.share - sizes.needs.beside_kv - rest_bytes()


def sessions_by_memory(gpu: Gpu, sizes: Sizes, age_s: float) -> int:
    """Live sessions of this age, where max_num_seqs has a place for each and 64 at least."""
    positions = sizes.plan.clip_positions
    fixed = sizes.needs.weights + sizes.needs.encoder_cache + rest_bytes() + sizes.session
    fixed += sizes.row * sizes.plan.scheduler.max_num_batched_tokens
    most = 0
    while True:
        sequences = max(64, most + 1)
        needed = fixed + sequences * positions * sizes.row
        needed += (most + 1) * (sizes.session + tokens_at(age_s) * sizes.token)
        if needed > gpu.memory * sizes.share:
            return most
        most += 1


def sessions_by_bandwidth(gpu: Gpu, sizes: Sizes, age_s: float) -> int:
    """That a step of 80 ms can read: the weights once, keys and values of each session."""
    step = gpu.bandwidth * shape().position_ms / 1000
    each = encoder_window_bytes() + tokens_at(age_s) * sizes.token
    return int((step - text_bytes() - encoder_bytes()) // each)


class Speed(NamedTuple):
    token_ms: float
    tokens_s: float
    rtfx: float


def speed(gpu: Gpu, sizes: Sizes, requests: int) -> Speed:
    """At most, for clips of CLIP_S. Every step begins `requests / tokens` clips on average."""
    prompt, tokens = clip_tokens()
    frames = (shape().total_rows(round(CLIP_S * shape().rate_hz)) - (shape().left - 1)) * 4
    encode_s = max(encoder_bytes() * frames / gpu.arithmetic, encoder_bytes() / gpu.bandwidth)
    held = requests * (prompt + tokens / 2) * sizes.token if requests > 1 else 0
    step_s = max((text_bytes() + held) / gpu.bandwidth, requests * text_bytes() / gpu.arithmetic)
    whole_s = step_s + requests / tokens * encode_s
    return Speed(1000 * step_s, requests / whole_s, requests * CLIP_S / tokens / whole_s)


def reached(requests: int) -> float:
    """The part of `speed` that an H200 reached."""
    return float(measured("fast", requests)["rtfx"]) / speed(GPUS[-1], fast(), requests).rtfx


@cache
def fast() -> Sizes:
    return Sizes.of(ROOT / "profiles/fast.yaml")


@cache
def contest() -> Sizes:
    return Sizes.of(ROOT / "vllm_config.yaml")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gb(size: float) -> str:
    return f"{size / GB:.2f} GB"


def parts() -> str:
    """What each part of the memory is."""
    one, both = fast(), contest()
    rows = [
        ("weights", gb(one.needs.weights), gb(both.needs.weights), "computed"),
        (
            "KV cache, one token",
            f"{one.token / 1024:.0f} KiB",
            f"{both.needs.kv.bytes_of(1) / GB:.2f} GB for 512",
            "computed",
        ),
        ("encoder cache", gb(one.needs.encoder_cache), gb(both.needs.encoder_cache), "computed"),
        ("audio rows of 64 clips, and of steps", gb(one.needs.audio_rows - one.row * one.ring), "-", "computed"),
        ("one live session, beside its KV cache", f"{one.session / 2**20:.0f} MiB", "-", "computed"),
        ("its KV cache after 90 s", f"{tokens_at(90) * one.token / 2**20:.0f} MiB", "-", "computed"),
        ("its KV cache after 11 minutes", f"{tokens_at(660) * one.token / 2**20:.0f} MiB", "-", "computed"),
        (
            "activations, CUDA graphs, CUDA",
            gb(rest_bytes()),
            "not known",
            "measured: H200, vLLM 0.32.0, `fast`, 64 requests",
        ),
    ]
    return table(("", "`profiles/fast.yaml`", "`vllm_config.yaml`", ""), rows)


def memory() -> str:
    prompt, tokens = clip_tokens()
    rows = []
    for gpu in GPUS:
        sizes = fast()
        left = room(gpu, sizes)
        clips = int(left // ((prompt + tokens) * sizes.token))
        age = left / sizes.plan.sessions / sizes.token - shape().prompt
        minutes = age * shape().position_ms / 60e3
        of_contest = gpu.memory * contest().share - contest().needs.beside_kv
        rows.append(
            (
                gpu.name,
                gb(gpu.memory * sizes.share),
                gb(left),
                f"{left / sizes.token:,.0f}",
                f"{clips:,}",
                f"{minutes:.1f} minutes" if tokens_at(60 * minutes) < PARAMS["sliding_window"] else "any",
                f"{of_contest / contest().needs.kv.bytes_of(1):.0f}",
            )
        )
    heads = (
        *("GPU", f"{fast().share:.0%} of the memory", "of it KV cache", "tokens", f"clips of {CLIP_S} s that it holds"),
        f"age that {fast().plan.sessions} live sessions can have",
        "contest: sequences of 512 tokens at most",
    )
    return table(heads, rows)


def sessions() -> str:
    rows = []
    for gpu in GPUS:
        cells = [gpu.name]
        for age in AGES_S.values():
            by_memory, by_bandwidth = (each(gpu, fast(), age) for each in (sessions_by_memory, sessions_by_bandwidth))
            cells += [f"{by_memory}", f"{by_bandwidth}"]
        rows.append([*cells, str(recommended(gpu)), live_measured(gpu)])
    heads = ["GPU"] + [f"{age}: by {what}" for age in AGES_S for what in ("memory", "bandwidth")]
    return table([*heads, "`max_live_sessions` to start with", "measured"], rows)


def recommended(gpu: Gpu) -> int:
    """The smaller number for long sessions, with a tenth of both left for what is not counted."""
    age = AGES_S["11 minutes and more"]
    return int(0.9 * min(sessions_by_memory(gpu, fast(), age), sessions_by_bandwidth(gpu, fast(), age)))


def live_measured(gpu: Gpu) -> str:
    content = json.loads((RESULTS / "live.json").read_text(encoding="utf-8"))
    rows = [row for row in content["rows"] if content["runs"][row["run"]]["gpu"] == [f"NVIDIA {gpu.name}"]]
    if not rows:
        return "no"
    most = max(rows, key=lambda row: (row["sessions"], row["run"]))
    return f"{most['sessions']} of {most['seconds_each']:.0f} s, {most['fell_behind']} fell behind"


def uploads() -> str:
    rows = []
    for gpu in GPUS:
        alone, many = (speed(gpu, fast(), requests) for requests in (1, 64))
        found = "no"
        if gpu is GPUS[-1]:
            found = f"{measured('fast', 1)['rtfx']:.1f} alone, {measured('fast', 64)['rtfx']:.0f} at 64"
        rows.append(
            (
                f"{gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.arithmetic / 1e12:.0f} TFLOP/s",
                f"{alone.token_ms:.1f}",
                f"{alone.tokens_s:.0f}, {alone.rtfx:.1f}",
                f"{many.tokens_s:,.0f}, {many.rtfx:,.0f}",
                f"{reached(1) * alone.rtfx:.1f}, {reached(64) * many.rtfx:,.0f}",
                found,
            )
        )
    heads = (
        *("GPU", "ms a token at least", "alone: tokens/s, RTFx at most", "64 in flight: tokens/s, RTFx at most"),
        *(f"RTFx at the H200's part of it ({reached(1):.0%}, {reached(64):.0%})", "measured RTFx"),
    )
    return table(heads, rows)


def settings() -> str:
    """The lines to change of profiles/fast.yaml, for each GPU."""
    rows = []
    for gpu in GPUS:
        most = recommended(gpu)
        sequences = max(64, math.ceil((most + 16) / 16) * 16)
        option = f"{{max_live_sessions: {most}, max_clip_positions: {fast().plan.clip_positions}}}"
        rows.append((gpu.name, f"`additional_config: {option}`", f"`max_num_seqs: {sequences}`"))
    return table(("GPU", "live sessions", "sequences"), rows)


def contest_flags() -> str:
    """The command line of vllm_config.yaml."""
    content = yaml.safe_load((ROOT / "vllm_config.yaml").read_text(encoding="utf-8"))
    flags = []
    for name, value in content.items():
        flag = "--" + name.replace("_", "-")
        if name == "model":
            continue
        shown = "" if value is True else json.dumps(value) if isinstance(value, dict) else str(value)
        flags.append(f"{flag} '{shown}'" if isinstance(value, dict) else f"{flag} {shown}".strip())
    lines = " \\\n    ".join([f"vllm serve {content['model']}", *flags])
    return f"```\n{lines}\n```"


def contest_speed() -> str:
    """A token of vLLM's own model reads all weights, and keys and values of both parts."""
    rows = []
    for gpu in GPUS:
        least_s = (text_bytes() + encoder_bytes()) / gpu.bandwidth
        rows.append((gpu.name, f"{1000 * least_s:.1f}", f"{1 / least_s:.0f}", "no"))
    row = measured("stock-eager", 1)
    rows[-1] = (
        *rows[-1][:3],
        f"{row['ms_per_token']:.1f} ms a token, P50 {row['p50_ms']:.0f} ms, RTFx {row['rtfx']:.1f}",
    )
    return table(("GPU", "ms a token at least", "tokens/s at most", "measured"), rows)


TABLES = {each.__name__: each for each in (parts, memory, contest_flags, contest_speed, sessions, settings, uploads)}


def updated(text: str, tables: Mapping[str, Any]) -> str:
    """`text` with each table anew. Raises ValueError unless each has its place once."""
    if sorted(found[1] for found in BLOCK.findall(text)) != sorted(tables):
        raise ValueError(f"expected one place for each of {', '.join(tables)}")
    return BLOCK.sub(lambda match: f"{match[1]}\n{tables[match[2]]()}\n\n{match[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when the page is stale")
    check = parser.parse_args(arguments).check
    old = PAGE.read_text(encoding="utf-8")
    new = updated(old, TABLES)
    if check and new != old:
        print(f"{PAGE.name} is stale: run `python -m tools.gpus`", file=sys.stderr)
        return 1
    if new != old:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
