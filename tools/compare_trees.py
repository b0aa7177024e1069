"""Is one checkout of this repository as fast on a GPU as another? Both serve one row of bench.gpu, on one machine.

    python -m tools.compare_trees --tree 0a7de00=../old --tree 1b2c3d4=. --rows fast --out bench/results/gpu-trees.json

Both servers are resident. The first tree is the baseline, and each round goes first, second, second, first, so that a
drift of the machine falls on both alike. Each tree is served with its own profile. A ratio is the geometric mean over
the pairs of all rounds, with the lowest and the highest of them. Clips come again in each turn, so vLLM's cache of
processed clips is off in both. Weights are random and of full size. Exit status 1 where a request failed or a server
did not start.
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import BenchError, dataset, environment, results
from bench.gpu import checkpoint, rows, servers
from bench.gpu.clock import Clock
from bench.gpu.measure import measure
from bench.gpu.plan import GpuPlan
from bench.gpu.run import LIBRARIES
from bench.gpu.servers import Server
from bench.gpu.tasks import SEED, WARM_UPS, Task, decoded
from bench.measure.gpus import Gpus

CLIPS = {1: 16, 64: 256}  # in flight -> clips of a turn
ROUNDS = 4
NO_CACHE = ":mm_processor_cache_gb=0"
ACCEPTANCE = (0.339, 0.267, 0.198, 0.140, 0.103)  # of drafts, by position, for fast-spec: the first pico's
COMPARED = ("p50_ms", "p90_ms", "rtfx", "joules_per_audio_second")
ORDER = (0, 1, 1, 0)  # of the trees in a round: two pairs


def command(tree: Path, scratch: Path) -> tuple[str, ...]:
    """vLLM's command with the patches and the plugin of a checkout, as if that was what is installed."""
    metadata = scratch / "metadata" / "voxtral_serve-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: voxtral-serve\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nvoxtral_serve = voxtral_serve.plugin:register\n"
    )
    places = (tree, tree / "src", metadata.parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(str(place) for place in places if str(place) != ".")
    return "env", f"PYTHONPATH={path}", sys.executable, "-m", "vllm.entrypoints.cli.main"


def tasks(row: str) -> list[Task]:
    """What is sent in each turn: a task for each number in flight."""
    clips = dataset.load(rows.ROOT / "bench/data").clips
    order = iter(random.Random(SEED).sample(clips, len(clips)))

    def take(count: int) -> list[dataset.Clip]:
        return [next(order) for _ in range(count)]

    return [Task(row, row, flying, take(max(WARM_UPS, flying)), take(count)) for flying, count in CLIPS.items()]


def start(
    row: str, trees: Mapping[str, Path], plan: GpuPlan, model: Path, scratch: Path, up: contextlib.ExitStack
) -> list[Server]:
    """A server of each tree, in their order. Raises BenchError where one does not come up."""
    commands = {name: command(tree.resolve(), scratch / name) for name, tree in trees.items()}
    configs = {name: rows.config(row + NO_CACHE, tree, acceptance=ACCEPTANCE) for name, tree in trees.items()}
    ready, failures = servers.start(configs, plan, model, scratch, up, Clock(), commands)
    if failures:
        raise BenchError("; ".join(f"{name} did not start: {why}" for name, why in failures.items()))
    return [ready[name] for name in trees]


def over_pairs(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, float] | None:
    """Geometric mean, lowest and highest of second / first; None where a figure was not measured."""
    each = [second / first for first, second in pairs if first and second]
    if not each or len(each) < len(pairs):
        return None
    return {"mean": statistics.geometric_mean(each), "lowest": min(each), "highest": max(each)}


def ratios(names: Sequence[str], measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The second tree's figures over the first's, over the pairs of turns."""
    found = []
    for flying in CLIPS:
        own = [each for each in measured if each["concurrency"] == flying]
        pairs = [
            {turn["tree"]: turn for turn in own if turn["pair"] == pair}
            for pair in sorted({turn["pair"] for turn in own})
        ]
        ratio: dict[str, Any] = {"concurrency": flying, "of": names[1], "to": names[0], "pairs": len(pairs)}
        for figure in COMPARED:
            ratio[figure] = over_pairs([(pair[names[0]][figure], pair[names[1]][figure]) for pair in pairs])
        found.append(ratio)
    return found


def compare(
    row: str, trees: Mapping[str, Path], plan: GpuPlan, model: Path, scratch: Path, rounds: int
) -> dict[str, Any]:
    """Serve and measure one row of both trees. Returns what the file says of it."""
    gpus, names = Gpus(), [*trees]
    with contextlib.ExitStack() as up:
        ready = start(row, trees, plan, model, scratch, up)
        version = ready[0].client.get("/version")["version"]
        measured = []
        for task in decoded(tasks(row), scratch / "clips"):
            for turn, which in enumerate(ORDER * rounds):
                figures = measure(ready[which], task, gpus, version)
                measured.append({**figures, "tree": names[which], "pair": turn // 2})
    return {
        **environment.describe(version, LIBRARIES),
        "row": row,
        "vllm": version,
        "trees": names,
        "order": [names[which] for which in ORDER],
        "configs": {name: server.text for name, server in zip(names, ready, strict=True)},
        "rows": measured,
        "ratios": ratios(names, measured),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compare_trees", description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="append", required=True, metavar="NAME=DIR", help="twice: baseline, and other")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="of four turns (default: %(default)s)")
    parser.add_argument("--rows", default="fast", metavar="NAME,...", help="rows of bench.gpu (default: %(default)s)")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="JSON file; comparisons that it has stay"
    )
    flags = parser.parse_args(arguments)
    trees = {name: Path(place) for name, _, place in (word.partition("=") for word in flags.tree)}
    if len(trees) != 2:
        parser.error("--tree: expected two of different names")
    outcome: dict[str, Any] = (
        json.loads(flags.out.read_bytes()) if flags.out.exists() else {"schema_version": 1, "comparisons": []}
    )
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "checkpoint")
        checkpoint.write(model)
        plan = GpuPlan(
            out=flags.out,
            rows=(),
            clips=CLIPS,
            together=True,
            alone=False,
            restart=False,
            cache=None,
            logs=None,
            model=model,
            kv_gib={},
            acceptance=None,
            command=(),
            only_plan=False,
            arguments=(),
        )
        for number, row in enumerate(flags.rows.split(",")):
            scratch = Path(directory, str(number))
            scratch.mkdir()
            try:
                found = compare(row, trees, plan, model, scratch, flags.rounds)
            except BenchError as error:
                print(f"error: {row}: {error}", file=sys.stderr)
                failed = 1
                continue
            found["command"] = shlex.join(["python", "-m", "tools.compare_trees", "--rows", row])
            outcome["comparisons"].append(found)
            results.write_json(flags.out, outcome)
            failed |= any(each["failed"] for each in found["rows"])
            print(json.dumps({"row": row, "vllm": found["vllm"], "ratios": found["ratios"]}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
