"""How long do the kernels of a step take, by size? Microseconds on one GPU, for choosing graph sizes and kernels.

    python -m bench gpu kernels --out kernels.json

matrix_products    one layer's, of the encoder and of the language model, by frames or tokens. cuBLAS chooses a kernel
                   for each size, and some sizes get a slow one
encoder_attention  engine/packed_attention.py, one layer, clips of 530 frames behind their left padding, by shape
decode_attention   over the KV cache, one layer, for steps that decode and for those in which two clips begin: vLLM's
                   Triton kernel, engine/paged_attention.py, and FlashAttention where vLLM has it for the GPU, with its
                   plan, which vLLM makes once a step, in each call

Each figure is of CUDA graphs of REPEATS calls, the median of TURNS. Matrix products and decode_attention alternate
between copies of their matrices or caches, COPIED bytes together: no L2 cache holds those of all layers.
"""

import argparse
import functools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import environment, results
from bench.gpu.checkpoint import PARAMS
from bench.gpu.record import LIBRARIES
from voxtral_serve.engine.packed_attention import Shape, packed_attention
from voxtral_serve.engine.paged_attention import paged_attention

REPEATS, TURNS, COPIED = 12, 5, 256 * 2**20
FRAMES_OF_CLIP, LEFT = 530, 124  # LEFT: of the left padding
ENCODER = PARAMS["multimodal"]["whisper_model_args"]["encoder_args"]
SHORT, LONG = (40, 180), (4000, 8000)  # tokens of a context: of clips of the benchmark, and of live sessions
PROMPT, BEGIN = 39, 2  # tokens of a clip's prompt, and clips that begin in a mixed step
BLOCK = 16  # tokens of a block of the KV cache
TOKENS = (*range(8, 128, 8), *range(128, 1025, 16))
FRAMES = (*range(128, 2048, 128), 2048, 2560, 3072, 3972, 4096)
ENCODER_SHAPES = (
    *(Shape(64, 64, 4, stages, registers) for stages in (2, 3) for registers in (None, 128)),
    Shape(64, 32, 4, 3, None),
    Shape(64, 32, 4, 4, 128),
    Shape(128, 32, 8, 3, None),
    Shape(128, 64, 8, 3, None),
    Shape(128, 64, 8, 2, 128),
)
SEGMENTS, SPLIT = 16, 16  # of a context, and the most requests whose contexts vLLM's kernel splits
# requests, tokens of each that decodes, clips that begin, contexts
STEPS = (
    (1, 1, 0, SHORT),
    (1, 6, 0, SHORT),
    (16, 1, 0, SHORT),
    (64, 1, 0, SHORT),
    (64, 1, 2, SHORT),
    (64, 3, 0, SHORT),
    (128, 1, 2, SHORT),
    (256, 1, 0, SHORT),
    (256, 1, 2, SHORT),
    (256, 2, 2, SHORT),
    (150, 1, 0, LONG),
)


def microseconds(call: Callable[[int], Any]) -> float:
    """The median time of one `call(number)`, with numbers from 0 to REPEATS - 1."""
    for number in range(REPEATS):
        call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(REPEATS):
            call(number)
    found = []
    for _ in range(TURNS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / REPEATS)
    return statistics.median(found[1:])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * 0.02


def copies(*shape: int) -> list[torch.Tensor]:
    """Random tensors of COPIED bytes together, at most one for each call."""
    return [random(*shape) for _ in range(min(REPEATS, -(-COPIED // (2 * math.prod(shape)))))]


def matrices(part: dict[str, Any]) -> tuple[list[tuple[int, int]], int]:
    """(inputs, outputs) of each product of a layer (query, key and value; output; gate and up; down), and the number of
    layers."""
    dim, heads, kv, hidden = part["dim"], part["n_heads"], part["n_kv_heads"], part["hidden_dim"]
    wide = part["head_dim"]
    products = [(dim, (heads + 2 * kv) * wide), (heads * wide, dim), (dim, 2 * hidden), (hidden, dim)]
    return products, part["n_layers"]


def matrix_products() -> Iterator[dict[str, Any]]:
    for name, part, sizes in (("language model", PARAMS, TOKENS), ("encoder", ENCODER, FRAMES)):
        products, layers = matrices(part)
        for product, (inputs, outputs) in enumerate(products):
            weights = copies(outputs, inputs)
            bias = random(outputs) if part["use_biases"] and product != 2 else None  # gate and up have none
            for size in sizes:
                call = functools.partial(multiply, random(size, inputs), weights, bias)
                row = {"of": name, "inputs": inputs, "outputs": outputs, "rows": size, "layers": layers}
                yield {**row, "us": microseconds(call)}


def multiply(given: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None, number: int) -> None:
    torch.nn.functional.linear(given, weights[number % len(weights)], bias)


def encoder_attention() -> Iterator[dict[str, Any]]:
    heads, dim, window = ENCODER["n_heads"], ENCODER["head_dim"], ENCODER["sliding_window"]
    left = random(2, LEFT, heads, dim)
    for clips in (1, 2, 4, 7):
        frames = clips * FRAMES_OF_CLIP
        q, k, v = random(frames, 3 * heads * dim).unflatten(1, (3, heads, dim)).unbind(1)
        ends = [min(number, clips) * FRAMES_OF_CLIP for number in range(9)]
        starts = torch.tensor(ends, dtype=torch.int32, device="cuda")
        for shape in ENCODER_SHAPES:
            call = functools.partial(packed_attention, q, k, v, starts, starts, window, (left[0], left[1]), shape)
            us = microseconds(lambda _, call=call: call())  # type: ignore[misc]
            yield {"clips": clips, "frames": frames, **shape._asdict(), "us": us}


def decode_attention() -> Iterator[dict[str, Any]]:
    heads, kv_heads, dim = PARAMS["n_heads"], PARAMS["n_kv_heads"], PARAMS["head_dim"]
    generator = torch.Generator().manual_seed(0)
    segments = torch.empty(SPLIT, heads, SEGMENTS, dim + 2, device="cuda")
    for requests, each, begin, contexts in STEPS:
        lengths = torch.randint(*contexts, (requests,), generator=generator)
        lengths[requests - begin :] = PROMPT
        asked = torch.full((requests,), each)
        asked[requests - begin :] = PROMPT
        blocks = -(-int(lengths.max()) // BLOCK)
        caches = copies(requests * blocks, BLOCK, kv_heads, 2 * dim)
        common = {
            "out": torch.empty(int(asked.sum()), heads, dim, dtype=torch.bfloat16, device="cuda"),
            "cu_seqlens_q": torch.cat([torch.zeros(1, dtype=torch.int64), asked.cumsum(0)]).int().cuda(),
            "max_seqlen_q": int(asked.max()),
            "seqused_k": lengths.int().cuda(),
            "max_seqlen_k": int(lengths.max()),
            "softmax_scale": dim**-0.5,
            "causal": True,
            "window_size": (PARAMS["sliding_window"] - 1, 0),
            "block_table": torch.randperm(requests * blocks, generator=generator).view(requests, -1).int().cuda(),
            "softcap": 0,
            "q": random(int(asked.sum()), heads, dim),
            "seq_threshold_3D": SPLIT,
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": segments[..., :dim].contiguous(),
            "softmax_segm_max": segments[..., dim].contiguous(),
            "softmax_segm_expsum": segments[..., dim + 1].contiguous(),
        }
        row = {"requests": requests, "tokens_of_each": each, "begin": begin, "tokens": int(asked.sum())}
        row["longest_context"] = int(lengths.max())
        for kernel, call in calls(caches, common).items():
            yield {**row, "kernel": kernel, "us": microseconds(call)}


def calls(caches: Sequence[torch.Tensor], common: dict[str, Any]) -> dict[str, Callable[[int], Any]]:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    halves = [cache.chunk(2, -1) for cache in caches]
    window = common["window_size"][0] + 1
    names = ("cu_seqlens_q", "seqused_k", "block_table", "max_seqlen_q", "softmax_scale")
    starts, lengths, pages, most, scale = (common[name] for name in names)

    def vllm(number: int) -> None:
        k, v = halves[number % len(halves)]
        unified_attention(k=k, v=v, q_descale=None, k_descale=None, v_descale=None, **common)

    def paged(number: int) -> None:
        k, v = halves[number % len(halves)]
        paged_attention(common["q"], k, v, common["out"], starts, lengths, pages, most, scale, window)

    flash = flash_call(caches, common)
    return {"triton": vllm, "paged": paged, **({"flash": flash} if flash else {})}


def flash_call(caches: Sequence[torch.Tensor], common: dict[str, Any]) -> Callable[[int], Any] | None:
    from vllm.v1.attention.backends import fa_utils

    version = fa_utils.get_flash_attn_version()
    if version is None:
        return None
    known = ("out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal", "q")
    given = {key: common[key] for key in (*known, "window_size", "block_table")}

    def call(number: int) -> None:
        k, v = halves[number % len(halves)]
        fa_utils.flash_attn_varlen_func(k=k, v=v, fa_version=version, num_splits=1, **given)

    halves = [tuple(half.contiguous() for half in cache.chunk(2, -1)) for cache in caches]
    return call


def main(words: Sequence[str]) -> int:
    """Run a command line (without `gpu kernels`) and return the exit status."""
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench gpu kernels", description=summary)
    parts = (matrix_products, encoder_attention, decode_attention)
    names = ", ".join(part.__name__ for part in parts)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--parts", nargs="+", choices=[part.__name__ for part in parts], help=f"of {names}")
    flags = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU: expected one with CUDA", file=sys.stderr)
        return 2
    run = environment.describe(None, LIBRARIES)
    found: dict[str, Any] = {"schema_version": 1, "run": run}
    run["command"] = shlex.join(["python", "-m", "bench", "gpu", "kernels", *words])
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        for part in parts:
            if flags.parts and part.__name__ not in flags.parts:
                continue
            found[part.__name__] = []
            for row in part():
                found[part.__name__].append(row)
                print(part.__name__, json.dumps(row), flush=True)
            results.write_json(flags.out, found)
    return 0
